"""Removes what no kept version needs, and checks that what is needed is there.

Garbage is an object that no kept version needs and that is older than the grace period: a writer
puts its objects first and its log entry last, and objects that it uses again are made young. In a
folder, a lock keeps sweeping and writing apart as well.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from slimctl.core.errors import DamagedError
from slimctl.store.backend import Stat
from slimctl.store.ledger import Ledger
from slimctl.store.local import TEMPORARY
from slimctl.store.objects import PREFIX, digest_of
from slimctl.store.state import State, Version

GRACE = 3600.0
"""Seconds that an object without a version is left alone: longer than anybody writes one."""


@dataclass(frozen=True)
class Swept:
    """What was removed, or would be.

    Attributes:
        versions: Whose files were given up, such as ``net@3``.
        objects: How many objects.
        size_bytes: Their bytes.
        kept_objects: How many objects are left.
        young_objects: How many of these are needed by no version and are too young to remove.
    """

    versions: tuple[str, ...]
    objects: int
    size_bytes: int
    kept_objects: int
    young_objects: int


class Damage(NamedTuple):
    """A version that cannot be read as a whole.

    Attributes:
        version: Such as ``net@3``; only the name when its log is damaged.
        problem: Which object or entry, of which file, and what is wrong.
    """

    version: str
    problem: str


def sweep(ledger: Ledger, *, keep: int, grace: float = GRACE, dry_run: bool = False) -> Swept:
    """Gives up old versions and removes the objects that nobody needs any more.

    Args:
        ledger: Which.
        keep: Newest versions of each name that keep their files, besides the current one and those
            with labels.
        grace: Seconds for which an object without a version is left alone.
        dry_run: Nothing is changed.

    Raises:
        DamagedError: A log is damaged: then nobody knows what is needed.
        StoreError: The place does not answer.
    """
    with ledger.backend.sweeping():
        given_up: dict[str, tuple[int, ...]] = {}
        states = []
        for name in ledger.names():
            state, given_up[name] = _give_up(ledger, name, keep, dry_run=dry_run)
            states.append(state)
        garbage, young, kept = _sorted_out(ledger, states, given_up, grace)
        removed = garbage if dry_run else _remove(ledger, garbage, grace)
    return Swept(
        versions=tuple(
            f"{name}@{number}" for name, all_of in given_up.items() for number in all_of
        ),
        objects=len(removed),
        size_bytes=sum(stat.size for stat in removed),
        kept_objects=kept,
        young_objects=young,
    )


def _give_up(
    ledger: Ledger, name: str, keep: int, *, dry_run: bool
) -> tuple[State, tuple[int, ...]]:
    """The state of a name, and the versions whose files are given up."""
    if dry_run:
        state = ledger.state(name)
        return state, _outdated(state, keep)
    return ledger.drop(name, lambda state: _outdated(state, keep))


def _outdated(state: State, keep: int) -> tuple[int, ...]:
    having = [version for version in state.versions if version.has_files]
    newest = having[len(having) - keep :] if keep else []
    return tuple(
        version.number
        for version in having
        if not (version.current or version.labels or version in newest)
    )


def needed_objects(version: Version, *, files: bool) -> Iterator[str]:
    """Hashes of all objects of a version; manifest and lock file are kept for good."""
    entry = version.entry
    for file in (entry.manifest, entry.lock, *(entry.files if files else ())):
        yield from file.objects()


def _sorted_out(
    ledger: Ledger,
    states: Sequence[State],
    given_up: Mapping[str, Sequence[int]],
    grace: float,
) -> tuple[list[Stat], int, int]:
    needed = {
        digest
        for state in states
        for version in state.versions
        for digest in needed_objects(
            version, files=version.has_files and version.number not in given_up[state.name]
        )
    }
    listed = ledger.backend.listing(PREFIX)
    unneeded = [stat for stat in listed if digest_of(stat.name) not in needed]
    garbage = [stat for stat in unneeded if _is_old(stat, grace)]
    left_behind = [stat for stat in ledger.backend.listing(TEMPORARY) if _is_old(stat, grace)]
    young = len(unneeded) - len(garbage)
    return [*garbage, *left_behind], young, len(listed) - len(garbage)


def _is_old(stat: Stat, grace: float) -> bool:
    return time.time() - stat.modified >= grace


def _remove(ledger: Ledger, garbage: Sequence[Stat], grace: float) -> list[Stat]:
    removed = []
    for stat in garbage:
        # Looked at once more: a writer may have made it young since it was listed.
        now = ledger.backend.stat(stat.name)
        if now is not None and _is_old(now, grace):
            ledger.backend.remove(stat.name)
            removed.append(stat)
    return removed


def check_ledger(ledger: Ledger, names: Sequence[str] = ()) -> list[Damage]:
    """Reads every object of every version.

    Args:
        ledger: Which.
        names: Of results; all when empty.
    """
    found: list[Damage] = []
    for name in names or ledger.names():
        try:
            state = ledger.state(name)
        except DamagedError as error:
            found.append(Damage(name, f"{error.problem} ({error.place})"))
            continue
        found += [damage for version in state.versions if (damage := _damage(ledger, version))]
    return found


def _damage(ledger: Ledger, version: Version) -> Damage | None:
    try:
        ledger.check(version)
    except DamagedError as error:
        return Damage(version.reference, f"'{error.file}' {error.problem} ({error.place})")
    return None
