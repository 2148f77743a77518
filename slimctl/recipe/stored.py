"""Between a run and the ledger: its result becomes a version, and earlier ones are looked up."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from slimctl.core.files import output_error
from slimctl.pipeline.artifact import (
    MANIFEST_NAME,
    MODEL_NAME,
    REPORT_NAME,
    Artifact,
    check_artifact_output,
    with_page,
    write_artifact,
)
from slimctl.pipeline.manifest import Manifest
from slimctl.recipe.resolve import Job, lock
from slimctl.report.html import stored_page
from slimctl.store.ledger import Ledger, open_ledger
from slimctl.store.state import State, Version
from slimctl.store.summary import history_document

VERSIONS_DRAWN = 100
"""Versions on a stored page, this one last: every version keeps a page, and with all versions on
each of them pages would grow with the square of their number."""


class Stored(NamedTuple):
    """What became of a result in the ledger.

    Attributes:
        store: The ledger.
        version: The result's version.
        new: It was added; else the current version is the same already.
        written_bytes: Bytes of objects that were not there before.
        manifest: The result's.
    """

    store: str
    version: Version
    new: bool
    written_bytes: int
    manifest: Manifest


@dataclass(frozen=True)
class Baseline:
    """The accepted version in use: what a new result is measured against.

    Attributes:
        ledger: Where it is.
        version: Which it is.
        manifest: What was measured when it was made.
    """

    ledger: Ledger
    version: Version
    manifest: Manifest

    def model(self, folder: Path) -> Path:
        """Its model file, taken out of the ledger.

        Args:
            folder: A folder for it, which does not exist yet and has a parent that does.

        Raises:
            DamagedError: An object is missing or damaged.
            OutputError: The folder cannot be written.
        """
        self.ledger.checkout(self.version, folder)
        return folder / MODEL_NAME


def last_accepted(job: Job) -> Baseline | None:
    """The current version of a job's name; None without a ledger, or when it has none.

    After a rollback this is the version that was rolled back to: what is in use is the standard.

    Raises:
        DamagedError: The log or the manifest is damaged.
        StoreError: The ledger does not answer.
    """
    if job.store is None:
        return None
    ledger = open_ledger(job.store)
    current = ledger.state(job.name).current
    if current is None:
        return None
    manifest = Manifest.model_validate_json(json.dumps(ledger.document(current)))
    return Baseline(ledger, current, manifest)


def check_store(job: Job, *, force: bool) -> None:
    """Sees to it that a result can be stored, before any work is done.

    Raises:
        OutputError: The store's folder, or the folder of the current version, cannot be written.
        StoreError: The ledger does not answer, or is damaged.
    """
    if job.store is None:
        return
    if job.output is not None:
        try:
            Path(job.store).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise output_error(Path(job.store), error) from error
    ledger = open_ledger(job.store)
    ledger.state(job.name)
    check_folder(ledger, job.name, force=force)


def check_folder(ledger: Ledger, name: str, *, force: bool) -> None:
    """Refuses to replace the folder of the current version where it is not the ledger's own.

    Raises:
        OutputError: With the remedy.
    """
    folder = ledger.folder(name)
    if folder is not None and not ledger.owns_folder(name):
        check_artifact_output(folder, force=force)


def store_result(
    job: Job,
    files: Sequence[Path],
    manifest: Manifest,
    staging: Path,
    *,
    accepted: bool,
    keep_failed: bool,
    force: bool,
) -> tuple[Stored, Artifact | None]:
    """Makes a result a version.

    Args:
        job: What ran; it has a store.
        files: The model, and its weights if they are apart; moved.
        manifest: Of the result, without its files.
        staging: A folder for the work, removed by the caller.
        accepted: All gates passed.
        keep_failed: The files of a rejected result are kept.
        force: A folder that is not the ledger's own may be replaced.

    Returns:
        What became of it, and the folder with its files, where there is one.

    Raises:
        OutputError: A file or folder cannot be written.
        StoreError: The ledger cannot be written.
    """
    assert job.store is not None, "the caller has looked"
    ledger = open_ledger(job.store)
    text = lock(job, job.output or job.home or Path.cwd())
    made = write_artifact(files, manifest, staging / "result", staging, lock=text)

    def finish(state: State) -> list[Path]:
        nonlocal made
        history = history_document(ledger.place, state)
        history["versions"] = history["versions"][-VERSIONS_DRAWN:]
        made = with_page(made, stored_page(made.manifest.document(), history))
        return [file for file in made.files if file.name in (MANIFEST_NAME, REPORT_NAME)]

    added = ledger.add(
        job.name,
        [file for file in made.files if file.name != REPORT_NAME],
        accepted=accepted,
        keep_files=accepted or keep_failed,
        finish=finish,
    )
    stored = Stored(ledger.place, *added, made.manifest)
    if accepted:
        folder = ledger.publish(job.name, force=force)
    elif keep_failed:
        folder = ledger.lay_out(added.version)
    else:
        folder = None
    return stored, _moved(made, folder)


def _moved(made: Artifact, folder: Path | None) -> Artifact | None:
    """The same artifact in another folder; None when it is in none, but only in the ledger."""
    if folder is None:
        return None
    files = tuple(folder / file.name for file in made.files)
    return Artifact(folder, folder / MODEL_NAME, made.manifest, files)
