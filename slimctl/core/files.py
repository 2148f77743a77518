"""Atomic writes: a reader sees the old file or the new one, never a part."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from slimctl.core.errors import OutputError

_RENAME_EXCHANGE = 2  # linux/fs.h

_REMEDIES = {
    errno.ENOSPC: "free some space, or choose another place with -o",
    errno.EDQUOT: "free some of your quota, or choose another place with -o",
    errno.EACCES: "choose a folder you may write to with -o",
    errno.EPERM: "choose a folder you may write to with -o",
    errno.EROFS: "choose a writable place with -o",
    errno.ENOENT: "create the folder first",
    errno.ENOTDIR: "a part of the path is a file: choose another with -o",
}


def output_error(path: Path, error: OSError) -> OutputError:
    """An operating-system error while writing, in our words."""
    reason = error.strerror or str(error)
    fix = _REMEDIES.get(error.errno or 0, "choose another place with -o")
    return OutputError(path, f"Cannot write the output: {reason}", fix=fix)


def check_output(path: Path, *, force: bool) -> None:
    """Refuses an output that exists, or whose folder does not, before any work is done.

    Raises:
        OutputError: With the remedy.
    """
    if path.exists() and not force:
        raise OutputError(
            path, "The output exists already", fix="choose another -o, or add --force"
        )
    parent = path.absolute().parent
    if not parent.is_dir():
        raise OutputError(path, f"The folder '{parent}' does not exist", fix="create it first")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise OutputError(
            path, f"The folder '{parent}' is not writable", fix="choose another place with -o"
        )


@contextmanager
def staging_folder(target: Path) -> Iterator[Path]:
    """A temporary folder beside the target, on the same file system, removed at the end.

    Raises:
        OutputError: The folder cannot be made, or a write inside the block failed.
    """
    try:
        with tempfile.TemporaryDirectory(dir=target.absolute().parent, prefix=".slimctl-") as name:
            yield Path(name)
    except OSError as error:
        raise output_error(target, error) from error


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def publish(staged: Path, target: Path) -> None:
    """Moves a staged file or folder to its place: flush, then rename.

    A folder that exists is exchanged with the staged one in one step where the system can do so.
    Elsewhere it is moved aside first, and a kill between the two renames leaves the old one beside
    the target under its staging name.

    Raises:
        OutputError: The target cannot be written.
    """
    try:
        for file in [staged] if staged.is_file() else [*staged.rglob("*"), staged]:
            _sync(file)
        if staged.is_dir() and target.is_dir():
            _replace_folder(staged, target)
        else:
            os.replace(staged, target)
        _sync(target.absolute().parent)
    except OSError as error:
        raise output_error(target, error) from error


def _replace_folder(staged: Path, target: Path) -> None:
    if _exchange(staged, target):
        shutil.rmtree(staged)
        return
    aside = Path(tempfile.mkdtemp(dir=target.absolute().parent, prefix=".slimctl-old-"))
    os.rename(target, aside / target.name)
    os.rename(staged, target)
    shutil.rmtree(aside)


def _exchange(first: Path, second: Path) -> bool:
    """Swaps two paths in one step (Linux's renameat2); False where that is not offered."""
    library = ctypes.CDLL(None, use_errno=True)
    if not hasattr(library, "renameat2"):
        return False
    names = os.fsencode(first.absolute()), os.fsencode(second.absolute())
    return bool(library.renameat2(0, names[0], 0, names[1], _RENAME_EXCHANGE) == 0)


def write_atomic(path: Path, data: bytes) -> None:
    """Writes bytes to a file through a temporary name.

    Raises:
        OutputError: The file cannot be written.
    """
    with staging_folder(path) as folder:
        staged = folder / path.name
        staged.write_bytes(data)
        publish(staged, path)


def sha256_of_file(path: Path) -> str:
    """Hexadecimal SHA-256 of a file, read in blocks."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
