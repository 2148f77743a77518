"""Several writers at once, and writers that are killed: nothing is damaged, nothing is lost."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path

import pytest

from slimctl.core.files import sha256_of_file
from slimctl.pipeline.artifact import read_artifact
from slimctl.store import folder
from slimctl.store.ledger import Ledger, open_ledger
from slimctl.store.sweep import check_ledger, sweep

Made = Callable[..., list[Path]]
ROOT = Path(__file__).parents[2]

# Adds artifacts in turns, publishes them, and rolls back now and then. With a third argument other
# than 0 each artifact has that many bytes of its own, so that there is always something to write.
WRITER = """
import itertools, os, sys
from pathlib import Path
from slimctl.core.errors import OptionError
from slimctl.store.ledger import open_ledger

ledger = open_ledger(sys.argv[1])
rounds, fresh = int(sys.argv[2]), int(sys.argv[3])
folders = [sorted(Path(name).iterdir()) for name in sys.argv[4:]]
print("ready", flush=True)
sys.stdin.readline()
for number, files in zip(range(rounds), itertools.cycle(folders)):
    if fresh:
        extra = files[0].with_name(f"extra{os.getpid()}.bin")
        extra.write_bytes(os.urandom(fresh))
        files = [*(file for file in files if not file.name.startswith("extra")), extra]
    added = ledger.add("net", files, accepted=True)
    if added.new:
        print("added", added.version.number, flush=True)
    ledger.publish("net")
    if number % 3 == 2:
        try:
            ledger.rollback("net", "1")
        except OptionError:
            pass  # a sweep has given its files up
        ledger.publish("net")
        ledger.promote("net", "latest", "production")
"""


def start(
    store: str, rounds: int, folders: Sequence[Path], *, fresh: int = 0
) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, store, str(rounds), str(fresh), *map(str, folders)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def go(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()


def numbers(output: str) -> list[int]:
    return [int(line.split()[1]) for line in output.splitlines() if line.startswith("added")]


@pytest.mark.parametrize("place", ["folder", "s3"])
def test_two_writers_at_once(
    place: str, request: pytest.FixtureRequest, store: Path, made: Made
) -> None:
    where = str(store) if place == "folder" else request.getfixturevalue("bucket")()
    folders = [made((seed, 5))[0].parent for seed in (1, 2, 3, 4)]
    rounds = 12 if place == "folder" else 4
    writers = [start(where, rounds, folders[:2]), start(where, rounds, folders[2:])]
    for writer in writers:
        go(writer)
    outputs = [writer.communicate(timeout=120)[0] for writer in writers]
    assert [writer.returncode for writer in writers] == [0, 0]
    found = [number for output in outputs for number in numbers(output)]
    assert len(found) > rounds
    assert sorted(found) == list(range(1, len(found) + 1)), "numbers are distinct, none is lost"
    ledger = open_ledger(where)
    assert len(ledger.known("net").versions) == len(found)
    assert check_ledger(ledger) == []
    if place == "folder":
        ledger.publish("net")
        current = ledger.find("net")
        assert read_artifact(store / "net").manifest.manifest_hash == current.entry.manifest_hash


def test_the_folder_ends_as_the_log_does(store: Path, ledger: Ledger, made: Made) -> None:
    folders = [made((seed,))[0].parent for seed in (1, 2, 3, 4)]
    writers = [start(str(store), 8, folders[:2]), start(str(store), 8, folders[2:])]
    for writer in writers:
        go(writer)
    for writer in writers:
        writer.communicate(timeout=120)
    assert ledger.owns_folder("net")
    manifest = read_artifact(store / "net").manifest
    assert manifest.files[0].sha256 == ledger.find("net").entry.files[1].sha256


def test_the_later_writer_leaves_its_folder(
    ledger: Ledger, store: Path, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first writer is slow, and the second is done while the first writes the folder."""
    first, second = made((1,)), made((2,))
    writing, go_on = threading.Event(), threading.Event()
    real = folder.write_folder

    def slow(backend, version, target):
        if version.number == 1:
            writing.set()
            go_on.wait(2)  # in vain where the second writer has to wait for the folder
        real(backend, version, target)

    monkeypatch.setattr(folder, "write_folder", slow)
    ledger.add("net", first, accepted=True)
    threads = [threading.Thread(target=ledger.publish, args=("net",))]
    threads[0].start()
    assert writing.wait(30)
    other = open_ledger(str(store))
    other.add("net", second, accepted=True)
    threads.append(threading.Thread(target=lambda: (other.publish("net"), go_on.set())))
    threads[1].start()
    for thread in threads:
        thread.join()
    assert contents(store / "net") == contents(second[0].parent)


KILLS = 25
SLOWER = 2.0
"""How much longer the next writer may run on a machine on which none got to write a version yet."""


def test_a_killed_writer_damages_nothing(store: Path, ledger: Ledger, made: Made) -> None:
    folders = [made((seed, 9), external=seed == 2)[0].parent for seed in (1, 2, 3)]
    moments = random.Random(7)  # the same every time, the machine adds its own
    known, patience = 0, 1.0
    for _ in range(KILLS):
        process = start(str(store), 1000, folders, fresh=4_000_000)
        go(process)
        time.sleep(patience * moments.uniform(0.0, 0.15))
        process.send_signal(signal.SIGKILL)
        output, _ = process.communicate()
        state = ledger.state("net")
        assert len(state.versions) >= max([known, *numbers(output)]), "a version was lost"
        known = len(state.versions)
        patience *= 1.0 if known else SLOWER
        if (store / "net").exists():
            read_artifact(store / "net")  # some version, whole
            assert ledger.owns_folder("net")
    assert known > 0
    assert check_ledger(ledger) == []
    objects = store / ".slimctl" / "objects"
    for file in objects.glob("*/*"):  # those that no version names, too
        assert sha256_of_file(file) == file.parent.name + file.name
    files = made((42,))
    assert ledger.add("net", files, accepted=True).new
    assert ledger.publish("net") is not None
    assert contents(store / "net") == contents(files[0].parent)
    sweep(ledger, keep=2, grace=0)
    assert check_ledger(ledger) == []
    assert list((store / ".slimctl" / "tmp").iterdir()) == [], "left behind by the kills"


def test_a_writer_killed_on_object_storage(bucket: Callable[[], str], made: Made) -> None:
    url = bucket()
    ledger = open_ledger(url)
    folders = [made((seed, 9))[0].parent for seed in (1, 2, 3)]
    moments = random.Random(7)
    known, patience = 0, 1.0
    for _ in range(6):
        process = start(url, 1000, folders)
        go(process)
        time.sleep(patience * moments.uniform(0.2, 1.5))
        process.send_signal(signal.SIGKILL)
        output, _ = process.communicate()
        versions = ledger.state("net").versions
        assert len(versions) >= max([known, *numbers(output)]), "a version was lost"
        known = len(versions)
        patience *= 1.0 if known else SLOWER
    assert known > 0
    assert check_ledger(ledger) == []
    assert ledger.add("net", made((42,)), accepted=True).new


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_sweeping_while_others_write(store: Path, ledger: Ledger, made: Made) -> None:
    folders = [made((seed, 5))[0].parent for seed in (1, 2, 3, 4)]
    writers = [start(str(store), 15, folders[:2]), start(str(store), 15, folders[2:])]
    for writer in writers:
        go(writer)
    sweeps = 0
    while any(writer.poll() is None for writer in writers):
        sweep(ledger, keep=1, grace=0)  # without any grace: the lock alone must do
        sweeps += 1
        time.sleep(0.01)
    outputs = [writer.communicate()[0] for writer in writers]
    assert [writer.returncode for writer in writers] == [0, 0], outputs
    assert sweeps > 1
    assert check_ledger(ledger) == []


def test_a_version_that_is_written_while_gc_decides_is_kept(
    ledger: Ledger, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On object storage there is no lock: a label that comes in between must be seen."""
    for seed in (1, 2, 3):
        ledger.add("net", made((seed,)), accepted=True)
    from slimctl.store import log

    real, calls = log.append, []

    def slow(backend, name, number, entry):
        if entry.kind == "drop" and not calls:
            calls.append(number)
            ledger.promote("net", "1", "production")
        return real(backend, name, number, entry)

    monkeypatch.setattr("slimctl.store.log.append", slow)
    monkeypatch.setattr(ledger.backend, "working", nullcontext)
    assert sweep(ledger, keep=1, grace=0).versions == ("net@2",)
    assert ledger.find("net@production").has_files
    assert check_ledger(ledger) == []


def test_an_object_that_is_used_again_meanwhile_is_kept(
    bucket: Callable[[], str], made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Object storage: a writer uses an old object again between the listing and the removal."""
    ledger = open_ledger(bucket())
    files = made((1, 2))
    ledger.add("other", files, accepted=False)
    backend = ledger.backend
    stat, removed = backend.stat, []

    def stat_after_refresh(name: str):
        if not removed and name.startswith("objects/"):
            removed.append(name)
            backend.refresh(name)
        return stat(name)

    monkeypatch.setattr(backend, "stat", stat_after_refresh)
    time.sleep(2.1)
    sweep(ledger, keep=0, grace=2.0)
    assert backend.read(removed[0]) is not None


def test_grace_protects_a_writer_on_object_storage(bucket: Callable[[], str], made: Made) -> None:
    url = bucket()
    ledger = open_ledger(url)
    files = made((1, 2))
    between = threading.Event()
    go_on = threading.Event()
    commit = ledger._commit

    class Slow(Ledger):
        def _commit(self, name, decide):
            between.set()
            assert go_on.wait(30)
            return commit(name, decide)

    writer = threading.Thread(target=lambda: Slow(ledger.backend).add("net", files, accepted=True))
    writer.start()
    assert between.wait(30)
    assert open_ledger(url).backend.listing("objects/")
    swept = sweep(open_ledger(url), keep=0)
    go_on.set()
    writer.join()
    assert (swept.objects, swept.young_objects > 0) == (0, True)
    assert check_ledger(ledger) == []
    assert len(ledger.known("net").versions) == 1
