"""Objects: bytes under the name of their SHA-256. The same bytes are kept once."""

from __future__ import annotations

import hashlib
import time

from slimctl.core.errors import DamagedError
from slimctl.store.backend import Backend, Stat

PREFIX = "objects/"

FRESH = 600.0
"""Seconds for which an object counts as young. An older one that is used again is made young, so
that ``gc`` does not take it for garbage before the new version is in the log."""


def object_name(digest: str) -> str:
    """Where an object lies."""
    return f"{PREFIX}{digest[:2]}/{digest[2:]}"


def digest_of(name: str) -> str:
    """The hash that an object's name stands for."""
    return name.removeprefix(PREFIX).replace("/", "")


def sha256_of(data: bytes | memoryview) -> str:
    """Hexadecimal SHA-256."""
    return hashlib.sha256(data).hexdigest()


class ObjectWriter:
    """Puts objects; what is there already is not written again.

    Args:
        backend: Where.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._known = {stat.name: stat for stat in backend.listing(PREFIX)}
        self.written_bytes = 0

    def put(self, data: bytes | memoryview) -> str:
        """Makes sure that an object is there; its hash."""
        digest = sha256_of(data)
        name = object_name(digest)
        if not self._usable(self._known.get(name), data):
            self._backend.write(name, memoryview(data))
            self._known[name] = Stat(name, len(data), time.time())
            self.written_bytes += len(data)
        return digest

    def _usable(self, found: Stat | None, data: bytes | memoryview) -> bool:
        """Whether an object is there, whole and safe from ``gc``."""
        if found is None or found.size != len(data):
            return False
        if time.time() - found.modified < FRESH:
            return True
        # Reading a folder is cheap, so that damage heals when the same bytes come again.
        if self._backend.folder is not None and self._backend.read(found.name) != data:
            return False
        return self._backend.refresh(found.name)


def get_object(backend: Backend, digest: str, *, version: str, file: str) -> bytes:
    """The bytes of an object.

    Args:
        backend: Where it lies.
        digest: Its hash.
        version: Whose it is, for the message.
        file: What it is a part of, for the message.

    Raises:
        DamagedError: It is missing, or it is not what its hash says.
    """
    data = backend.read(object_name(digest))
    if data is None:
        raise damaged(backend, digest, version, file, "has lost an object: it is missing")
    if sha256_of(data) != digest:
        raise damaged(
            backend, digest, version, file, "has an object whose bytes are not those of its hash"
        )
    return data


def damaged(backend: Backend, digest: str, version: str, file: str, problem: str) -> DamagedError:
    """The error of an object that cannot be used."""
    return DamagedError(
        f"{backend.place}, object {digest}",
        version,
        file,
        problem,
        fix="restore the object from a copy of the store, or run the recipe again: the same bytes "
        "repair it",
    )
