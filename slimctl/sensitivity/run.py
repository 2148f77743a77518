"""A whole scan: what is known from before, the rest by an executor, and everything ranked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slimctl.core.contract import Progress, SilentProgress, Skipped
from slimctl.core.files import sha256_of_file
from slimctl.sensitivity.executors import Executor, Local
from slimctl.sensitivity.journal import Journal, journal_of
from slimctl.sensitivity.scan import Finding, Scanner, ranked
from slimctl.sensitivity.setup import Setup


@dataclass(frozen=True)
class Scan:
    """What a scan found.

    Attributes:
        setup: What was scanned.
        findings: Those that cost most first.
        skipped: Layers that could not be changed, by change.
        kept: How many findings were known from an earlier scan.
        samples: How many there are.
    """

    setup: Setup
    findings: tuple[Finding, ...]
    skipped: Mapping[str, Sequence[Skipped]]
    kept: int
    samples: int

    def to_dict(self) -> dict[str, Any]:
        """JSON types only."""
        return {
            "setup": self.setup.facts(),
            "sha256": sha256_of_file(self.setup.model),
            "samples": self.samples,
            "findings": [found.to_dict() for found in self.findings],
            "skipped": {
                change: [item._asdict() for item in items] for change, items in self.skipped.items()
            },
        }


def scan(
    setup: Setup,
    *,
    executor: Executor | None = None,
    resume: bool = True,
    progress: Progress | None = None,
    journal: Callable[[Scanner], Journal] = journal_of,
) -> Scan:
    """Scans a model.

    Every finding is written down at once. An exception, Ctrl-C included, loses only the probe that
    was running; the next scan of the same setup goes on from there.

    Args:
        setup: What is scanned.
        executor: Where probes run; in this process by default.
        resume: Findings of earlier scans may be used.
        progress: Where to say how far the work is.
        journal: Where findings are kept.

    Raises:
        SlimctlError: Whatever the model, the data or an option are at fault for.
    """
    told = progress or SilentProgress()
    scanner = Scanner(setup, told)
    tasks = scanner.tasks()
    kept = journal(scanner)
    if not resume:
        kept.forget()
    known = {task: found for task, found in kept.read().items() if task in set(tasks)}
    missing = [task for task in tasks if task not in known]
    earlier = len(known)
    found = (executor or Local()).run(scanner, missing)
    for finding in told.track(iter(found), total=len(missing), label="probing"):
        kept.add(finding)
        known[finding.task] = finding
    return Scan(
        setup,
        tuple(ranked([known[task] for task in tasks])),
        scanner.skipped(),
        earlier,
        scanner.samples,
    )
