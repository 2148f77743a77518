"""The ledger: versions are added, found, taken out, rolled back to and promoted.

An addition goes objects first, log entry last. Whatever ends it in between leaves objects that no
version names, and ``gc`` removes them once they are old.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from slimctl.core.errors import DamagedError, OptionError, StoreError
from slimctl.store import log
from slimctl.store.backend import FOLDER, Backend, open_backend
from slimctl.store.changes import changes_in_words
from slimctl.store.files import read_parts, store_files
from slimctl.store.folder import is_artifact_of, publish_folder, write_folder
from slimctl.store.log import Entry, PromoteEntry, RollbackEntry, StoredFile, VersionEntry
from slimctl.store.objects import ObjectWriter
from slimctl.store.reference import check_label, check_name, parse_reference
from slimctl.store.state import State, Version, fold
from slimctl.store.summary import summary_of

MANIFEST_NAME = "manifest.json"
LOCK_NAME = "recipe.lock.yaml"

_ATTEMPTS = 1000
"""Writers that may be ahead of one; each attempt lost is a version of somebody else's."""


class Added(NamedTuple):
    """What became of a result.

    Attributes:
        version: Its version.
        new: Whether it was added; else the current version is the same already.
        written_bytes: Bytes of objects that were not there before.
    """

    version: Version
    new: bool
    written_bytes: int


@dataclass(frozen=True)
class Ledger:
    """Versions of results in one store.

    Attributes:
        backend: Where its bytes lie.
    """

    backend: Backend

    @property
    def place(self) -> str:
        """The store, as the user wrote it."""
        return self.backend.place

    def names(self) -> list[str]:
        """All names that have versions."""
        return log.names(self.backend)

    def state(self, name: str) -> State:
        """Versions, current one and labels of a name; empty when there is none of that name.

        Raises:
            OptionError: It cannot be a name.
            DamagedError: An entry of the log is missing or was changed.
        """
        return fold(name, log.read_log(self.backend, check_name(name)))

    def known(self, name: str) -> State:
        """The same of a name that must be known.

        Raises:
            OptionError: It is not.
        """
        state = self.state(name)
        if not state.versions:
            listed = ", ".join(self.names()) or "none yet"
            raise OptionError(
                name,
                f"The ledger in '{self.place}' has no versions of that name",
                fix=f"names: {listed}; another ledger is chosen with --store",
            )
        return state

    def find(self, reference: str) -> Version:
        """A version by ``net@3``, ``net@production`` or ``net``, the current one.

        Raises:
            OptionError: There is none.
        """
        name, which = parse_reference(reference)
        return self.known(name).find(which)

    def document(self, version: Version) -> dict[str, Any]:
        """The manifest of a version; it is kept as long as the ledger."""
        document: dict[str, Any] = json.loads(self._text(version, version.entry.manifest))
        return document

    def _text(self, version: Version, file: StoredFile) -> str:
        return b"".join(read_parts(self.backend, file, version.reference)).decode()

    def add(
        self,
        name: str,
        files: Sequence[Path],
        *,
        accepted: bool,
        keep_files: bool = True,
        finish: Callable[[State], Sequence[Path]] | None = None,
    ) -> Added:
        """Makes a result a version. An accepted one becomes the current version.

        Args:
            name: Of the result.
            files: All files of its artifact, manifest and lock file among them.
            accepted: Its gates passed.
            keep_files: The artifact is kept; manifest and lock file always are.
            finish: Writes what tells of the versions there are, this one last, and the manifest
                again; gives these files. Asked again when another writer was faster.

        Returns:
            The new version; or the current one, when that is the same.

        Raises:
            StoreError: The ledger cannot be written.
        """
        check_name(name)
        texts = {file.name: file for file in files if file.name in (MANIFEST_NAME, LOCK_NAME)}
        manifest = json.loads(texts[MANIFEST_NAME].read_text(encoding="utf-8"))
        kept = list(files if keep_files else texts.values())
        with self.backend.working():
            writer = ObjectWriter(self.backend)
            stored = {file.name: file for file in store_files(writer, kept)}

            def decide(state: State) -> VersionEntry | None:
                entry = VersionEntry(
                    accepted=accepted,
                    manifest_hash=manifest["manifest_hash"],
                    manifest=stored[MANIFEST_NAME],
                    lock=stored[LOCK_NAME],
                    files=tuple(stored.values()) if keep_files else (),
                    summary=summary_of(manifest, self._changes(state, manifest)),
                )
                if _is_current(state, entry):
                    return None
                if finish is None or not keep_files:
                    return entry
                written = store_files(writer, finish(state.followed_by(entry)))
                return _with_files(entry, {**stored, **{file.name: file for file in written}})

            state, new = self._commit(name, decide)
        version = state.versions[-1] if new else state.find("current")
        return Added(version, new, writer.written_bytes)

    def _changes(self, state: State, manifest: dict[str, Any]) -> tuple[str, ...] | None:
        if not state.versions:
            return ()
        try:
            return changes_in_words(self.document(state.versions[-1]), manifest)
        except DamagedError:
            return None  # an old version that cannot be read must not keep a new one out

    def rollback(self, name: str, which: str) -> Version:
        """Makes an earlier version the current one.

        Args:
            name: Of the result.
            which: A number, a label or ``latest``.

        Raises:
            OptionError: There is no such version, or it was rejected, or its files are gone.
            DamagedError: Its files are not what was stored; nothing was changed.
        """
        self.check(self._usable(self.known(name), which))

        def decide(state: State) -> RollbackEntry | None:
            version = self._usable(state, which)
            return None if version.current else RollbackEntry(version=version.number)

        with self.backend.working():
            state, _ = self._commit(name, decide)
        return state.find("current")

    def promote(self, name: str, which: str, label: str) -> Version:
        """Moves a label to a version.

        Args:
            name: Of the result.
            which: A number, another label, ``current`` or ``latest``.
            label: Such as ``production``.

        Raises:
            OptionError: There is no such version, it was rejected, or its files are gone.
        """
        check_label(label)
        self.known(name)

        def decide(state: State) -> PromoteEntry | None:
            version = self._usable(state, which)
            there = label in version.labels
            return None if there else PromoteEntry(version=version.number, label=label)

        with self.backend.working():
            state, _ = self._commit(name, decide)
        return state.find(label)

    def _usable(self, state: State, which: str) -> Version:
        version = state.find(which)
        if not version.entry.accepted:
            raise OptionError(
                version.reference,
                f"Its gates rejected it: {', '.join(version.entry.summary.failed_gates)}",
                fix="choose an accepted version; 'slimctl history' lists them",
            )
        return with_files(version)

    def _commit(self, name: str, decide: Callable[[State], Entry | None]) -> tuple[State, bool]:
        """Adds what is decided on to the log; decides again when somebody was faster.

        The caller holds the backend: a sweep would remove an entry that is being written.

        Returns:
            The state afterwards, and whether anything was added.
        """
        for _ in range(_ATTEMPTS):
            entries = log.read_log(self.backend, name)
            state = fold(name, entries)
            entry = decide(state)
            if entry is None:
                return state, False
            if log.append(self.backend, name, state.length + 1, entry):
                return fold(name, [*entries, entry]), True
        raise StoreError(self.place, "Other writers were faster every time", fix="try again")

    def drop(
        self, name: str, choose: Callable[[State], tuple[int, ...]]
    ) -> tuple[State, tuple[int, ...]]:
        """Gives up the files of versions; ``gc`` decides which.

        Args:
            name: Of the results.
            choose: Numbers of versions, from a state; asked again when somebody was faster.

        Returns:
            The state afterwards, and the versions that were chosen in the end.
        """
        chosen: tuple[int, ...] = ()

        def decide(state: State) -> Entry | None:
            nonlocal chosen
            chosen = choose(state)
            return log.DropEntry(versions=chosen) if chosen else None

        state, _ = self._commit(name, decide)
        return state, chosen

    def checkout(self, version: Version, folder: Path) -> None:
        """Writes the artifact of a version as a folder, in one step; one that exists is replaced.

        Raises:
            OptionError: Its files are gone.
            DamagedError: An object is missing or damaged.
            OutputError: The folder cannot be written.
        """
        write_folder(self.backend, with_files(version), folder)

    def check(self, version: Version) -> None:
        """Reads everything of a version.

        Raises:
            DamagedError: An object is missing or damaged.
        """
        entry = version.entry
        for file in (entry.manifest, entry.lock, *(entry.files if version.has_files else ())):
            for _ in read_parts(self.backend, file, version.reference):
                pass

    def folder(self, name: str) -> Path | None:
        """Where the artifact of a name's current version lies; None where there are no folders."""
        return None if self.backend.folder is None else self.backend.folder / check_name(name)

    def owns_folder(self, name: str) -> bool:
        """Whether that folder is some version's artifact, untouched, or not there."""
        folder = self.folder(name)
        return folder is None or is_artifact_of(folder, self.state(name))

    def publish(self, name: str, *, force: bool = False) -> Path | None:
        """Makes ``STORE/NAME/`` the artifact of the current version, where a store has folders.

        Args:
            name: Of the result.
            force: A folder that is no version's artifact may be replaced all the same.

        Returns:
            The folder; None without folders, or without a current version.

        Raises:
            DamagedError: An object is missing or damaged; the folder stays as it was.
            OutputError: The folder cannot be written, or was changed by hand.
        """
        with self.backend.working():
            return publish_folder(self.backend, lambda: self.state(name), name, force=force)

    def lay_out(self, version: Version) -> Path | None:
        """Writes a version that is not the current one beside it, as ``STORE/NAME@3/``.

        Returns:
            The folder; None where there are no folders.
        """
        if self.backend.folder is None:
            return None
        folder = self.backend.folder / version.reference
        self.checkout(version, folder)
        return folder


def open_ledger(store: str) -> Ledger:
    """The ledger of a store.

    Args:
        store: A folder, or a URL such as ``s3://bucket/models``.

    Raises:
        MissingExtraError: A URL needs packages that are not installed.
        StoreError: The URL cannot be used.
    """
    return Ledger(open_backend(store))


def ledger_around(artifact: Path) -> Ledger | None:
    """The ledger whose folder an artifact lies in; None where it lies in none."""
    store = artifact.absolute().parent
    return open_ledger(str(store)) if (store / FOLDER).is_dir() else None


def _with_files(entry: VersionEntry, files: Mapping[str, StoredFile]) -> VersionEntry:
    kept = tuple(files[name] for name in sorted(files))
    return entry.model_copy(update={"manifest": files[MANIFEST_NAME], "files": kept})


def with_files(version: Version) -> Version:
    """The version itself.

    Raises:
        OptionError: Its files are gone.
    """
    if version.has_files:
        return version
    if version.entry.files:
        raise OptionError(
            version.reference,
            "Its files were given up by 'slimctl gc'",
            fix="choose another version; 'slimctl history' says which have files",
        )
    raise OptionError(
        version.reference,
        "Its gates rejected it, and its files were not kept",
        fix="run the recipe again with --keep-failed",
    )


def _is_current(state: State, entry: VersionEntry) -> bool:
    """Whether a result is the current version once more."""
    current = state.current
    return (
        current is not None
        and entry.accepted
        and current.entry.manifest_hash == entry.manifest_hash
        and current.entry.lock.sha256 == entry.lock.sha256
    )
