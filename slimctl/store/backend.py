"""Where a ledger's bytes lie: what the rest needs of a place, and the choice between places.

Names are relative, with ``/`` between their parts. Two operations carry everything: ``write`` puts
a whole object in its place, and ``create`` does so only if nothing is there, so that of two writers
one is told that it lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple, Protocol

FOLDER = ".slimctl"
"""Folder of the ledger in a store; artifacts of people lie beside it."""


class Stat(NamedTuple):
    """One object as a listing shows it.

    Attributes:
        name: Relative to the ledger.
        size: In bytes.
        modified: When it was written or refreshed, in seconds since 1970.
    """

    name: str
    size: int
    modified: float


class Backend(Protocol):
    """A place for objects. Every method raises StoreError where the place does not answer."""

    @property
    def place(self) -> str:
        """The store, as the user wrote it."""

    @property
    def folder(self) -> Path | None:
        """The store's folder; None where there are no folders."""

    def read(self, name: str) -> bytes | None:
        """The bytes of an object; None when there is none."""

    def read_many(self, names: Sequence[str]) -> list[bytes | None]:
        """Several objects, in one go where the place can do so."""

    def write(self, name: str, data: memoryview) -> None:
        """Puts an object in its place, whole or not at all; what was there is replaced."""

    def create(self, name: str, data: bytes) -> bool:
        """The same, only if nothing is there; False means that another writer was first."""

    def refresh(self, name: str) -> bool:
        """Makes an object young, so that ``gc`` leaves it; False when it is not there."""

    def stat(self, name: str) -> Stat | None:
        """Size and age of an object; None when there is none."""

    def listing(self, prefix: str) -> list[Stat]:
        """All objects whose names begin with a folder, ``objects/`` for instance."""

    def remove(self, name: str) -> None:
        """Removes an object, if it is there."""

    def working(self) -> AbstractContextManager[None]:
        """Held while objects and entries are written; a sweep waits."""

    def sweeping(self) -> AbstractContextManager[None]:
        """Held while objects are removed; nobody works meanwhile, where the place can see to it."""


def is_url(store: str) -> bool:
    """Whether a store is somewhere else than in a folder."""
    return "://" in store


def open_backend(store: str) -> Backend:
    """The place of a store.

    Args:
        store: A folder, or a URL such as ``s3://bucket/models``.

    Raises:
        MissingExtraError: A URL needs packages that are not installed.
        StoreError: The URL cannot be used.
    """
    if is_url(store):
        from slimctl.store.remote import RemoteBackend

        return RemoteBackend(store)
    from slimctl.store.local import LocalBackend

    return LocalBackend(Path(store))
