"""A ledger in a folder."""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from slimctl.core.errors import StoreError
from slimctl.store.backend import FOLDER, Stat

TEMPORARY = "tmp/"
"""Where objects are written before they are renamed into place; a kill leaves them there."""


class LocalBackend:
    """Objects as files: written aside, flushed, renamed.

    Args:
        folder: The store; made when something is written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder: Path | None = folder
        self.place = str(folder)
        self._root = folder / FOLDER

    def read(self, name: str) -> bytes | None:
        """The bytes of an object; None when there is none."""
        with self._translated():
            try:
                return (self._root / name).read_bytes()
            except FileNotFoundError:
                return None

    def read_many(self, names: Sequence[str]) -> list[bytes | None]:
        """Several objects."""
        return [self.read(name) for name in names]

    def write(self, name: str, data: memoryview) -> None:
        """Puts an object in its place, whole or not at all."""
        with self._translated(), self._staged(name, data) as staged:
            os.replace(staged, self._root / name)
            _sync_folder((self._root / name).parent)

    def create(self, name: str, data: bytes) -> bool:
        """The same, only if nothing is there: a link fails where a rename would replace."""
        with self._translated(), self._staged(name, memoryview(data)) as staged:
            try:
                os.link(staged, self._root / name)
            except FileExistsError:
                return False
            _sync_folder((self._root / name).parent)
            return True

    @contextmanager
    def _staged(self, name: str, data: memoryview) -> Iterator[Path]:
        folder = self._root / TEMPORARY
        folder.mkdir(parents=True, exist_ok=True)
        (self._root / name).parent.mkdir(parents=True, exist_ok=True)
        staged = folder / secrets.token_hex(16)
        try:
            with staged.open("xb") as stream:
                stream.write(data)
                stream.flush()
                os.fsync(stream.fileno())
            yield staged
        finally:
            staged.unlink(missing_ok=True)

    def refresh(self, name: str) -> bool:
        """Makes an object young."""
        with self._translated():
            try:
                os.utime(self._root / name)
            except FileNotFoundError:
                return False
            return True

    def stat(self, name: str) -> Stat | None:
        """Size and age of an object; None when there is none."""
        with self._translated():
            try:
                found = (self._root / name).stat()
            except FileNotFoundError:
                return None
            return Stat(name, found.st_size, found.st_mtime)

    def listing(self, prefix: str) -> list[Stat]:
        """All objects in a folder and in the folders within."""
        with self._translated():
            files = (
                Path(folder, name) for folder, _, names in self._walk(prefix) for name in names
            )
            found = [self.stat(file.relative_to(self._root).as_posix()) for file in files]
        return sorted(stat for stat in found if stat is not None)

    def _walk(self, prefix: str) -> Iterator[tuple[str, list[str], list[str]]]:
        def fail(error: OSError) -> None:
            if not isinstance(error, FileNotFoundError):
                raise error

        return os.walk(self._root / prefix, onerror=fail)

    def remove(self, name: str) -> None:
        """Removes an object, if it is there."""
        with self._translated():
            (self._root / name).unlink(missing_ok=True)

    @contextmanager
    def working(self) -> Iterator[None]:
        """Many may work at a time."""
        with self._locked("lock", fcntl.LOCK_SH):
            yield

    @contextmanager
    def sweeping(self) -> Iterator[None]:
        """One alone, when nobody works."""
        if not self._root.is_dir():  # nothing to sweep, and nothing to make a lock in
            yield
            return
        with self._locked("lock", fcntl.LOCK_EX):
            yield

    @contextmanager
    def publishing(self, name: str) -> Iterator[None]:
        """Held while the folder of a name is replaced."""
        with self._locked(f"locks/{name}", fcntl.LOCK_EX):
            yield

    @contextmanager
    def _locked(self, name: str, how: int) -> Iterator[None]:
        """Holds a lock of the system's; it ends with the process, however that ends."""
        with self._translated():
            file = self._root / name
            file.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            with self._translated():
                fcntl.flock(descriptor, how)
            yield
        finally:
            os.close(descriptor)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            place = error.filename or self.place
            raise StoreError(
                str(place),
                f"The ledger cannot be used: {error.strerror or error}",
                fix="look at the folder's permissions and free space, or choose another --store",
            ) from error


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
