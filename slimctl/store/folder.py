"""The plain folder of a name's current version, for people and for tools that know no ledger."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from slimctl.core.errors import OutputError
from slimctl.core.files import publish, sha256_of_file, staging_folder
from slimctl.store.backend import Backend
from slimctl.store.files import write_files
from slimctl.store.local import LocalBackend
from slimctl.store.state import State, Version


def publish_folder(
    backend: Backend, read_state: Callable[[], State], name: str, *, force: bool
) -> Path | None:
    """Makes ``STORE/NAME/`` the artifact of the current version.

    The log decides what is current, and it is read while the folder is held: of two writers the
    later one sees what both did, so the folder ends as the log does.

    Args:
        backend: Where the ledger lies.
        read_state: Reads the log.
        name: Of the result.
        force: A folder that is no version's artifact may be replaced all the same.

    Returns:
        The folder; None where the ledger has no folders, or nothing is current.

    Raises:
        DamagedError: An object is missing or damaged; the folder stays as it was.
        OutputError: The folder cannot be written, or was changed by hand.
    """
    if not isinstance(backend, LocalBackend) or backend.folder is None:
        return None
    target = backend.folder / name
    with backend.publishing(name):
        state = read_state()
        if state.current is None:
            return None
        if not (force or is_artifact_of(target, state)):
            raise OutputError(
                target,
                "The folder was changed by hand, so it was not replaced by "
                f"{state.current.reference}",
                fix="move it away, or add --force",
            )
        if not holds(target, state.current):
            write_folder(backend, state.current, target)
    return target


def is_artifact_of(folder: Path, state: State) -> bool:
    """Whether a folder is the ledger's own: some version's artifact, empty or missing."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return True
    # Also one that gc has given up: a folder may be behind the log when a writer was killed.
    return folder.is_dir() and _is_one_of(folder, [v for v in state.versions if v.entry.files])


def write_folder(backend: Backend, version: Version, target: Path) -> None:
    """Writes a version's artifact as a folder, in one step.

    Raises:
        DamagedError: An object is missing or damaged.
        OutputError: The folder cannot be written.
    """
    with staging_folder(target) as staging:
        made = staging / "artifact"
        made.mkdir()
        write_files(backend, version.entry.files, version.reference, made)
        publish(made, target)


def holds(folder: Path, version: Version) -> bool:
    """Whether a folder is exactly a version's artifact."""
    return folder.is_dir() and _is_one_of(folder, [version])


def _is_one_of(folder: Path, versions: Sequence[Version]) -> bool:
    """Whether a folder's files are those of one of the versions. Hashes come last, and once."""
    if any(not item.is_file() for item in folder.iterdir()):
        return False
    sizes = {item.name: item.stat().st_size for item in folder.iterdir()}
    alike = [
        version.entry.files
        for version in versions
        if {file.name: file.size_bytes for file in version.entry.files} == sizes
    ]
    if not alike:
        return False
    hashes = {name: sha256_of_file(folder / name) for name in sizes}
    return any({file.name: file.sha256 for file in files} == hashes for files in alike)
