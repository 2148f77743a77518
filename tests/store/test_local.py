"""A folder as a place for objects."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from slimctl.core.errors import StoreError
from slimctl.store.ledger import open_ledger
from slimctl.store.local import LocalBackend
from slimctl.store.sweep import sweep

SIZE = 64_000_000


@pytest.mark.parametrize("replaced", [False, True])
def test_an_object_appears_whole(store: Path, replaced: bool) -> None:
    backend = LocalBackend(store)
    before = bytes(5)
    if replaced:
        backend.write("objects/aa/b", memoryview(before))
    seen: set[int | None] = set()
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            stat = backend.stat("objects/aa/b")
            seen.add(stat.size if stat else None)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        for _ in range(3):
            backend.write("objects/aa/b", memoryview(bytes(SIZE)))
    finally:
        done.set()
        watcher.join()
    assert seen <= {len(before) if replaced else None, SIZE}


def test_of_many_creations_one_wins(store: Path) -> None:
    barrier = threading.Barrier(8)
    won: list[int] = []

    def create(number: int) -> None:
        backend = LocalBackend(store)
        barrier.wait()
        if backend.create("log/net/000001.json", b"%d" % number):
            won.append(number)

    threads = [threading.Thread(target=create, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert LocalBackend(store).read("log/net/000001.json") == b"%d" % won[0]


def test_reading_makes_nothing(store: Path) -> None:
    backend = LocalBackend(store)
    assert backend.read("objects/aa/b") is None
    assert backend.stat("objects/aa/b") is None
    assert not backend.refresh("objects/aa/b")
    assert backend.listing("objects/") == []
    assert not store.exists()


def test_a_store_that_is_a_file(store: Path) -> None:
    store.write_text("mine")
    with pytest.raises(StoreError, match="cannot be used") as caught:
        LocalBackend(store).write("objects/aa/b", memoryview(b"1"))
    assert "--store" in caught.value.fix
    assert store.read_text() == "mine"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written(store: Path) -> None:
    store.mkdir(mode=0o500)
    with pytest.raises(StoreError, match="Permission denied"):
        LocalBackend(store).write("objects/aa/b", memoryview(b"1"))


def test_what_is_refreshed_is_young(store: Path) -> None:
    backend = LocalBackend(store)
    backend.write("objects/aa/b", memoryview(b"1"))
    os.utime(store / ".slimctl" / "objects" / "aa" / "b", (0, 0))
    before = backend.stat("objects/aa/b")
    assert before is not None and before.modified == 0
    assert backend.refresh("objects/aa/b")
    after = backend.stat("objects/aa/b")
    assert after is not None and after.modified > 1e9


def test_sweeping_nothing_makes_nothing(store: Path) -> None:
    swept = sweep(open_ledger(str(store)), keep=0, grace=0)
    assert (swept.versions, swept.objects, swept.kept_objects) == ((), 0, 0)
    assert not store.exists()
