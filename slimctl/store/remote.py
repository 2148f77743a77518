"""A ledger on object storage, through fsspec.

What the ledger needs there is a conditional put: ``If-None-Match: *`` on S3. Whether a storage
honors it is tried out once per writer, because one that does not would lose versions in silence.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from slimctl.core.errors import MissingExtraError, StoreError
from slimctl.store.backend import FOLDER, Stat

_MARKER = "conditional-put"
_LOST_CODES = frozenset({"PreconditionFailed", "ConditionalRequestConflict"})


class RemoteBackend:
    """Objects of an fsspec file system.

    Args:
        url: Of the store, such as ``s3://bucket/models``.

    Raises:
        MissingExtraError: fsspec, or what it needs for this kind of URL, is not installed.
        StoreError: There is no such kind of URL.
    """

    folder: Path | None = None

    def __init__(self, url: str) -> None:
        self.place = url.rstrip("/")
        self._system, root = _open(self.place)
        self._root = f"{root.rstrip('/')}/{FOLDER}"
        self._tried = False

    def read(self, name: str) -> bytes | None:
        """The bytes of an object; None when there is none."""
        return self.read_many([name])[0]

    def read_many(self, names: Sequence[str]) -> list[bytes | None]:
        """Several objects at a time."""
        paths = [self._path(name) for name in names]
        with self._translated():
            found = self._system.cat(paths, on_error="return") if paths else {}
            return [_bytes_or_none(found[path]) for path in paths]

    def write(self, name: str, data: memoryview) -> None:
        """Puts an object in its place; object storage shows it when it is whole."""
        with self._translated():
            self._system.pipe_file(self._path(name), bytes(data))

    def create(self, name: str, data: bytes) -> bool:
        """The same, only if nothing is there."""
        self._try_conditional_put()
        return self._create(name, data)

    def _create(self, name: str, data: bytes) -> bool:
        with self._translated():
            try:
                self._system.pipe_file(self._path(name), data, mode="create")
            except OSError as error:
                if not _lost(error):
                    raise
                # A put that was repeated after a lost answer meets itself.
                return self.read(name) == data
            return True

    def _try_conditional_put(self) -> None:
        if self._tried:
            return
        self._create(_MARKER, b"once")
        if self._create(_MARKER, b"twice"):
            raise StoreError(
                self.place,
                "This storage does not support conditional puts, so two writers could overwrite "
                "each other's versions",
                fix="use a storage that honors 'If-None-Match: *', as S3 does, or a folder",
            )
        self._tried = True

    def refresh(self, name: str) -> bool:
        """Makes an object young by copying it onto itself, within the storage."""
        with self._translated():
            try:
                if hasattr(self._system, "setxattr"):
                    self._system.setxattr(self._path(name), refreshed=str(int(time.time())))
                else:
                    self._system.pipe_file(
                        self._path(name), self._system.cat_file(self._path(name))
                    )
            except FileNotFoundError:
                return False
            return True

    def stat(self, name: str) -> Stat | None:
        """Size and age of an object; None when there is none."""
        with self._translated():
            try:
                return self._as_stat(self._system.info(self._path(name), refresh=True))
            except FileNotFoundError:
                return None

    def listing(self, prefix: str) -> list[Stat]:
        """All objects whose names begin with a folder."""
        with self._translated():
            try:
                found = self._system.find(self._path(prefix), detail=True)
            except FileNotFoundError:
                return []
            return sorted(self._as_stat(facts) for facts in found.values())

    def _as_stat(self, facts: dict[str, Any]) -> Stat:
        name = str(facts["name"]).partition(f"{FOLDER}/")[2]
        modified = facts.get("LastModified") or facts.get("mtime") or facts.get("created")
        # Of an object without a known age nobody can say that it is old.
        seconds = time.time() if modified is None else modified
        return Stat(name, int(facts["size"] or 0), getattr(seconds, "timestamp", lambda: seconds)())

    def remove(self, name: str) -> None:
        """Removes an object, if it is there."""
        with self._translated():
            try:
                self._system.rm_file(self._path(name))
            except FileNotFoundError:
                return

    @contextmanager
    def working(self) -> Iterator[None]:
        """Object storage has no locks; the age of objects protects them."""
        yield

    @contextmanager
    def sweeping(self) -> Iterator[None]:
        """Object storage has no locks; the age of objects protects them."""
        yield

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except StoreError:
            raise
        except _errors() as error:
            raise StoreError(
                self.place,
                f"The storage does not answer as it should: {error}",
                fix="look at the address, the credentials and the permissions; S3 is set up by "
                "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_ENDPOINT_URL",
            ) from error


def _open(url: str) -> tuple[Any, str]:
    """The file system of a URL, without caches of its own, and the path in it."""
    purpose = f"A ledger at {url}"
    try:
        import fsspec
    except ImportError as error:
        raise MissingExtraError("store", purpose) from error
    try:
        system, root = fsspec.core.url_to_fs(
            url, use_listings_cache=False, skip_instance_cache=True
        )
    except ImportError as error:
        raise MissingExtraError("store", purpose) from error
    except ValueError as error:
        raise StoreError(url, f"Not a store: {error}", fix="such as s3://bucket/models") from error
    return system, str(root)


def _errors() -> tuple[type[Exception], ...]:
    """What storages raise; botocore's errors are no OSErrors."""
    try:
        from botocore.exceptions import BotoCoreError, ClientError
    except ImportError:
        return (OSError,)
    return (OSError, BotoCoreError, ClientError)


def _lost(error: OSError) -> bool:
    """Whether a conditional put failed because another writer's came first, or at the same time."""
    response = getattr(error.__cause__, "response", None) or {}
    code = response.get("Error", {}).get("Code")
    return isinstance(error, FileExistsError) or code in _LOST_CODES


def _bytes_or_none(found: bytes | Exception) -> bytes | None:
    if isinstance(found, FileNotFoundError):
        return None
    if isinstance(found, Exception):
        raise found
    return found
