"""What a log says: which versions there are, which is the current one, which labels they have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from slimctl.core.errors import OptionError
from slimctl.store.log import DropEntry, Entry, PromoteEntry, RollbackEntry, VersionEntry
from slimctl.store.reference import CURRENT, LATEST


@dataclass(frozen=True)
class Version:
    """One result of a name.

    Attributes:
        name: Of the result.
        number: From 1, in the order of the log.
        entry: What the log holds of it.
        has_files: Its artifact was kept, and ``gc`` has not given it up.
        labels: Its labels, sorted.
        current: It is the one in use.
    """

    name: str
    number: int
    entry: VersionEntry
    has_files: bool
    labels: tuple[str, ...] = ()
    current: bool = False

    @property
    def reference(self) -> str:
        """As users write it: ``net@3``."""
        return f"{self.name}@{self.number}"


@dataclass(frozen=True)
class State:
    """A name after all entries of its log.

    Attributes:
        name: Of the results.
        length: Number of entries.
        versions: In order; the first has number 1.
    """

    name: str
    length: int
    versions: tuple[Version, ...] = ()

    @property
    def current(self) -> Version | None:
        """The version in use: accepted last, or rolled back to."""
        return next((version for version in self.versions if version.current), None)

    def followed_by(self, entry: VersionEntry) -> State:
        """The state once a version was added."""
        older = tuple(
            replace(version, current=version.current and not entry.accepted)
            for version in self.versions
        )
        added = Version(
            self.name,
            len(older) + 1,
            entry,
            has_files=bool(entry.files),
            current=entry.accepted,
        )
        return State(self.name, self.length + 1, (*older, added))

    def find(self, which: str) -> Version:
        """A version by number, label or reserved word.

        Raises:
            OptionError: There is none.
        """
        matching = [version for version in self.versions if _answers(version, which)]
        if which == LATEST:
            matching = list(self.versions[-1:])
        if not matching:
            raise OptionError(
                f"{self.name}@{which}", f"'{self.name}' has no such version", fix=self._offer()
            )
        return matching[0]

    def _offer(self) -> str:
        if not self.versions:
            return "'slimctl history --store STORE' lists the names that there are"
        labels = [label for version in self.versions for label in version.labels]
        if self.current is not None:
            labels.append(CURRENT)
        known = ", ".join([*sorted(labels), LATEST])
        return f"there are 1 to {len(self.versions)}, {known}"


def _answers(version: Version, which: str) -> bool:
    if which == CURRENT:
        return version.current
    return which in (str(version.number), *version.labels)


@dataclass
class _Folded:
    versions: list[VersionEntry] = field(default_factory=list)
    dropped: set[int] = field(default_factory=set)
    labels: dict[str, int] = field(default_factory=dict)
    current: int = 0


def fold(name: str, entries: Sequence[Entry]) -> State:
    """The state after some entries."""
    folded = _Folded()
    for entry in entries:
        _apply(folded, entry)
    versions = tuple(
        Version(
            name,
            number,
            entry,
            has_files=bool(entry.files) and number not in folded.dropped,
            labels=tuple(sorted(key for key, at in folded.labels.items() if at == number)),
            current=number == folded.current,
        )
        for number, entry in enumerate(folded.versions, start=1)
    )
    return State(name, len(entries), versions)


def _apply(folded: _Folded, entry: Entry) -> None:
    match entry:
        case VersionEntry():
            folded.versions.append(entry)
            if entry.accepted:
                folded.current = len(folded.versions)
        case RollbackEntry():
            folded.current = entry.version
        case PromoteEntry():
            folded.labels[entry.label] = entry.version
        case DropEntry():
            folded.dropped.update(entry.versions)
