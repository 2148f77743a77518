"""The log of one name: numbered entries, made once and never changed.

What a name's state is follows from its entries in order, so that the log is the one thing that two
writers must agree on. Entry N+1 is created only where there is none; who comes second reads the log
again, and decides again.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from slimctl.core.errors import DamagedError, StoreError
from slimctl.store.backend import Backend
from slimctl.store.objects import sha256_of

PREFIX = "log/"
HASH_PATTERN = r"^[0-9a-f]{64}$"
FILE_PATTERN = r"^[A-Za-z0-9_][^/\\]*$"
"""A file's name and no path: a log that somebody else wrote must not lead out of a folder."""

_ENTRY_NAME = re.compile(r"\d{6,}\.json")


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


class Part(BaseModel):
    """Base of everything in an entry: immutable, and nothing unknown is accepted."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Piece(Part):
    """A part of a file that is an object of its own.

    Attributes:
        offset: Its place in the file.
        size: Its bytes.
        sha256: Its hash.
    """

    offset: int = Field(ge=0)
    size: int = Field(ge=0)
    sha256: str = Field(pattern=HASH_PATTERN)


class StoredFile(Part):
    """A file of a version.

    Attributes:
        name: Of the file.
        size_bytes: Its size.
        sha256: Hash of the whole.
        frame: Hash of what is left when the pieces are taken out.
        pieces: What was taken out, in order.
    """

    name: str = Field(pattern=FILE_PATTERN)
    size_bytes: int = Field(ge=0)
    sha256: str = Field(pattern=HASH_PATTERN)
    frame: str = Field(pattern=HASH_PATTERN)
    pieces: tuple[Piece, ...] = ()

    def objects(self) -> Iterator[str]:
        """Hashes of everything that the file is joined from."""
        yield self.frame
        yield from (piece.sha256 for piece in self.pieces)


class Summary(Part):
    """What the history shows of a version.

    Attributes:
        size_bytes: Of the model's files.
        sqnr_db: Distance to the original; None when it was not measured.
        metric: Name of the metric; None when none was measured.
        metric_result: Its value.
        failed_gates: Gates that were broken.
        changes: What differs from the version before, in a few words; None when that could not be
            read.
    """

    size_bytes: int
    sqnr_db: float | None = None
    metric: str | None = None
    metric_result: float | None = None
    failed_gates: tuple[str, ...] = ()
    changes: tuple[str, ...] | None = ()


class EntryBase(Part):
    """What every entry has.

    Attributes:
        id: Random, so that a writer recognizes its own entry.
        at: When, UTC, ISO 8601.
    """

    id: str = Field(default_factory=lambda: secrets.token_hex(8))
    at: str = Field(default_factory=_now)


class VersionEntry(EntryBase):
    """A run's result.

    Attributes:
        accepted: All gates passed; the version is the current one from here on.
        manifest_hash: Hash of everything that its inputs decide.
        manifest: The manifest, a file of its own.
        lock: The resolved recipe, a file of its own.
        files: The artifact; nothing when a rejected result was not kept.
        summary: What the history shows.
    """

    kind: Literal["version"] = "version"
    accepted: bool
    manifest_hash: str
    manifest: StoredFile
    lock: StoredFile
    files: tuple[StoredFile, ...]
    summary: Summary


class RollbackEntry(EntryBase):
    """An earlier version is the current one from here on.

    Attributes:
        version: Which.
    """

    kind: Literal["rollback"] = "rollback"
    version: int


class PromoteEntry(EntryBase):
    """A label moves to a version.

    Attributes:
        version: Which.
        label: The label.
    """

    kind: Literal["promote"] = "promote"
    version: int
    label: str


class DropEntry(EntryBase):
    """The files of some versions are given up; manifests and recipes stay.

    Attributes:
        versions: Which.
    """

    kind: Literal["drop"] = "drop"
    versions: tuple[int, ...]


Entry: TypeAlias = Annotated[
    VersionEntry | RollbackEntry | PromoteEntry | DropEntry, Field(discriminator="kind")
]
_ENTRY: TypeAdapter[Entry] = TypeAdapter(Entry)


def names(backend: Backend) -> list[str]:
    """Every name that has a log."""
    parts = [stat.name.split("/") for stat in backend.listing(PREFIX)]
    return sorted({part[1] for part in parts if len(part) == 3})


def read_log(backend: Backend, name: str) -> list[Entry]:
    """All entries of a name, in order; none when the name is unknown.

    Raises:
        DamagedError: An entry is missing or was changed.
        StoreError: A newer slimctl wrote it.
    """
    folder = f"{PREFIX}{name}/"
    listed = [
        stat.name
        for stat in backend.listing(folder)
        if _ENTRY_NAME.fullmatch(stat.name.removeprefix(folder))
    ]
    wanted = [_entry_name(name, number) for number in range(1, len(listed) + 1)]
    gaps = sorted(set(wanted) - set(listed))
    if gaps:
        raise _damaged(backend, name, gaps[0], "has lost an entry of its log")
    contents = backend.read_many(wanted)
    return [
        _parsed(backend, name, place, content)
        for place, content in zip(wanted, contents, strict=True)
    ]


def append(backend: Backend, name: str, number: int, entry: Entry) -> bool:
    """Writes an entry; False when another one has that number already."""
    document = entry.model_dump(mode="json")
    text = json.dumps({"sha256": _hash(document), "entry": document}, indent=1, ensure_ascii=False)
    return backend.create(_entry_name(name, number), text.encode())


def _entry_name(name: str, number: int) -> str:
    return f"{PREFIX}{name}/{number:06d}.json"


def _hash(document: Any) -> str:
    canonical = json.dumps(document, sort_keys=True, ensure_ascii=False, allow_nan=False)
    return sha256_of(canonical.encode())


def _parsed(backend: Backend, name: str, place: str, content: bytes | None) -> Entry:
    try:
        document = json.loads(content or b"")
        sound = _hash(document["entry"]) == document["sha256"]
    except (ValueError, LookupError, TypeError):
        sound = False
    if not sound:
        raise _damaged(backend, name, place, "has an entry of its log that was changed")
    try:
        return _ENTRY.validate_python(document["entry"])
    except ValidationError as error:
        raise StoreError(
            f"{backend.place}, {place}",
            "This entry of the ledger is nothing that this slimctl writes",
            fix="update slimctl: a newer one may have written it",
        ) from error


def _damaged(backend: Backend, name: str, place: str, problem: str) -> DamagedError:
    return DamagedError(
        f"{backend.place}, {place}",
        f"'{name}'",
        "",
        problem,
        fix="restore the file from a copy of the store",
    )
