"""Findings on disk, written one by one: what an interrupted scan found is there for the next."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from slimctl import __version__
from slimctl.core.cache import cache_folder, cache_key
from slimctl.graph.session import onnxruntime_version
from slimctl.sensitivity.scan import Finding, Scanner
from slimctl.sensitivity.setup import Task


class Journal:
    """Findings of one setup.

    A line that was cut off by a kill is left out when the journal is read, and its probe runs
    again.

    Args:
        path: A file; it need not exist.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> dict[Task, Finding]:
        """What is known already."""
        return {found.task: found for found in self._lines()}

    def _lines(self) -> Iterator[Finding]:
        try:
            text = self.path.read_text("utf-8", errors="replace")
        except FileNotFoundError:
            return
        for line in text.splitlines():
            try:
                yield Finding.from_dict(json.loads(line))
            except (ValueError, KeyError, TypeError):
                continue  # cut off, or of another version

    def add(self, found: Finding) -> None:
        """Keeps one finding."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            # The line break in front: a line that was cut off must not swallow this one.
            file.write("\n" + json.dumps(found.to_dict()))

    def forget(self) -> None:
        """Begins anew."""
        self.path.unlink(missing_ok=True)


def journal_of(scanner: Scanner) -> Journal:
    """The journal of all scans that find the same by the same probe."""
    facts = scanner.setup.facts()
    # Which probes are run does not change what they find, and paths do not change what lies there.
    for name in ("model", "data", "calibration", "changes", "directions", "include", "exclude"):
        del facts[name]
    key = cache_key(
        scanner.content_hash(),
        json.dumps(facts, sort_keys=True),
        __version__,
        onnxruntime_version(),
    )
    return Journal(cache_folder() / "sensitivity" / f"{key}.jsonl")
