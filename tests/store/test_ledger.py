"""The life of versions, in a folder and on S3 alike."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from slimctl.core.errors import DamagedError, OptionError, OutputError
from slimctl.pipeline.artifact import read_artifact
from slimctl.store.ledger import Ledger, open_ledger
from slimctl.store.log import VersionEntry, read_log
from slimctl.store.objects import PREFIX
from slimctl.store.state import State, Version, fold
from slimctl.store.sweep import check_ledger, sweep
from tests.store.results import WIDTH, step

Made = Callable[..., list[Path]]


@pytest.fixture(params=["folder", "s3"])
def anywhere(request: pytest.FixtureRequest, store: Path) -> Ledger:
    """A ledger in each kind of place."""
    if request.param == "folder":
        return open_ledger(str(store))
    return open_ledger(request.getfixturevalue("bucket")())


def stored_bytes(ledger: Ledger) -> int:
    return sum(stat.size for stat in ledger.backend.listing(PREFIX))


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_a_life(anywhere: Ledger, made: Made, tmp_path: Path) -> None:
    first, second = made((1, 2)), made((1, 3), target="cuda")
    assert anywhere.add("net", first, accepted=True).version.reference == "net@1"
    assert anywhere.add("net", second, accepted=True).version.current
    rejected = anywhere.add("net", made((4,), passed=False), accepted=False).version
    assert (rejected.number, rejected.current) == (3, False)
    assert rejected.entry.summary.failed_gates == ("size",)

    state = anywhere.known("net")
    assert state.current is not None and state.current.number == 2
    assert state.versions[1].entry.summary.changes == ("target cpu -> cuda",)

    assert anywhere.promote("net", "1", "production").labels == ("production",)
    assert anywhere.rollback("net", "production").number == 1
    assert anywhere.find("net").number == 1
    assert anywhere.find("net@latest").number == 3
    for version, files in ((1, first), (2, second)):
        target = tmp_path / f"out{version}"
        anywhere.checkout(anywhere.find(f"net@{version}"), target)
        assert contents(target) == {file.name: file.read_bytes() for file in files}
        read_artifact(target)

    assert check_ledger(anywhere) == []
    swept = sweep(anywhere, keep=0, grace=0)
    assert swept.versions == ("net@2", "net@3")
    assert check_ledger(anywhere) == []
    with pytest.raises(OptionError, match="given up"):
        anywhere.rollback("net", "2")
    assert anywhere.document(anywhere.find("net@2"))["target"] == "cuda"
    assert anywhere.names() == ["net"]


def test_the_same_again_adds_nothing(anywhere: Ledger, made: Made) -> None:
    files = made()
    assert anywhere.add("net", files, accepted=True).new
    again = anywhere.add("net", files, accepted=True)
    assert (again.new, again.version.number, again.written_bytes) == (False, 1, 0)
    assert len(anywhere.known("net").versions) == 1
    assert anywhere.add("net", made(lock="version: 1\nseed: 1\n"), accepted=True).new


def test_what_tells_of_the_versions_is_written_last(
    anywhere: Ledger, made: Made, tmp_path: Path
) -> None:
    """A writer that is faster makes another number; what was written for the first is not kept."""
    files, rivals = made((1,)), [made((2,))]
    page = files[0].parent / "report.html"
    seen: list[list[tuple[int, bool]]] = []

    def finish(state: State) -> list[Path]:
        seen.append([(version.number, version.current) for version in state.versions])
        page.write_text(f"version {state.versions[-1].number}")
        while rivals:
            open_ledger(anywhere.place).add("net", rivals.pop(), accepted=True)
        return [page, files[0].parent / "manifest.json"]

    others = [file for file in files if file.name != "report.html"]
    version = anywhere.add("net", others, accepted=True, finish=finish).version
    assert seen == [[(1, True)], [(1, False), (2, True)]]
    assert version.reference == "net@2"
    assert sorted(file.name for file in version.entry.files) == sorted(file.name for file in files)
    anywhere.checkout(version, tmp_path / "out")
    assert (tmp_path / "out" / "report.html").read_text() == "version 2"
    assert anywhere.known("net").versions == seen_as(anywhere, version.entry)


def seen_as(ledger: Ledger, entry: VersionEntry) -> tuple[Version, ...]:
    """The versions as a writer foresees them: the log before its own entry, and that entry."""
    entries = read_log(ledger.backend, "net")
    return fold("net", entries[:-1]).followed_by(entry).versions


def test_the_same_as_an_earlier_version_is_a_new_one(ledger: Ledger, made: Made) -> None:
    first, second = made((1,)), made((2,))
    for files in (first, second, first):
        assert ledger.add("net", files, accepted=True).new
    assert ledger.find("net").number == 3


@pytest.mark.parametrize("external", [False, True])
def test_shared_weights_cost_once(anywhere: Ledger, made: Made, external: bool) -> None:
    anywhere.add("net", made((1, 2, 3), external=external), accepted=True)
    before = stored_bytes(anywhere)
    assert before > 3 * 4 * WIDTH
    # One weight of three is another one, and one of the old ones is in another place.
    added = anywhere.add("net", made((2, 9, 1), external=external, seed=1), accepted=True)
    grown = stored_bytes(anywhere) - before
    assert grown == added.written_bytes
    texts = sum(
        file.size_bytes for file in added.version.entry.files if not file.name.startswith("model.")
    )
    assert 4 * WIDTH <= grown <= 4 * WIDTH + texts + 2000
    # Only the graph differs: no weights at all.
    before = stored_bytes(anywhere)
    anywhere.add("net", made((2, 9, 1), external=external, note="other", seed=2), accepted=True)
    assert stored_bytes(anywhere) - before <= texts + 2000


def test_names_share_weights(ledger: Ledger, made: Made) -> None:
    ledger.add("net", made((1, 2)), accepted=True)
    assert ledger.add("other", made((1, 2)), accepted=True).written_bytes < 4 * WIDTH
    assert ledger.names() == ["net", "other"]


def test_a_rejected_result_leaves_manifest_and_recipe(ledger: Ledger, made: Made) -> None:
    version = ledger.add("net", made(), accepted=False, keep_files=False).version
    assert not version.has_files
    assert stored_bytes(ledger) < 4 * WIDTH
    assert ledger.document(version)["name"] == "net"
    with pytest.raises(OptionError, match="rejected it: "):
        ledger.add("net", made(passed=False), accepted=False)
        ledger.rollback("net", "2")
    with pytest.raises(OptionError, match="not kept"):
        ledger.checkout(version, Path("nowhere"))


def test_a_rejected_result_leaves_the_current_one(ledger: Ledger, made: Made) -> None:
    ledger.add("net", made((1,)), accepted=True)
    ledger.add("net", made((2,), passed=False), accepted=False)
    assert ledger.find("net").number == 1
    with pytest.raises(OptionError, match="rejected"):
        ledger.promote("net", "latest", "production")


@pytest.mark.parametrize(
    ("reference", "fix"),
    [
        ("net@7", "there are 1 to 1, current, production, latest"),
        ("net@staging", "there are 1 to 1"),
        ("nat", "names: net"),
        ("net@", "such as net@1"),
        ("../net", "letters, digits"),
    ],
)
def test_a_version_that_is_not_there(reference: str, fix: str, ledger: Ledger, made: Made) -> None:
    ledger.add("net", made(), accepted=True)
    ledger.promote("net", "1", "production")
    with pytest.raises(OptionError) as caught:
        ledger.find(reference)
    assert fix in caught.value.fix


@pytest.mark.parametrize("label", ["current", "latest", "3", "a b", ""])
def test_labels_are_words(label: str, ledger: Ledger, made: Made) -> None:
    ledger.add("net", made(), accepted=True)
    with pytest.raises(OptionError, match="cannot be a label"):
        ledger.promote("net", "1", label)


def test_a_label_moves(ledger: Ledger, made: Made) -> None:
    for seed in (1, 2):
        ledger.add("net", made((seed,)), accepted=True)
    for version in ("1", "2"):
        ledger.promote("net", version, "production")
    assert [version.labels for version in ledger.known("net").versions] == [(), ("production",)]
    entries = len(ledger.backend.listing("log/net/"))
    ledger.promote("net", "2", "production")
    assert len(ledger.backend.listing("log/net/")) == entries


# The folder of the current version -----------------------------------------------------------


def test_the_folder_follows_the_log(ledger: Ledger, store: Path, made: Made) -> None:
    first, second = made((1,)), made((2,), external=True)
    ledger.add("net", first, accepted=True)
    assert ledger.publish("net") == store / "net"
    ledger.add("net", second, accepted=True)
    ledger.publish("net")
    assert contents(store / "net") == {file.name: file.read_bytes() for file in second}
    ledger.rollback("net", "1")
    ledger.publish("net")
    assert contents(store / "net") == {file.name: file.read_bytes() for file in first}


@pytest.mark.parametrize("change", ["edit", "add", "remove"])
def test_a_folder_changed_by_hand_is_left(
    change: str, ledger: Ledger, store: Path, made: Made
) -> None:
    ledger.add("net", made((1,)), accepted=True)
    ledger.publish("net")
    if change == "edit":
        (store / "net" / "report.html").write_text("mine")
    elif change == "add":
        (store / "net" / "notes.txt").write_text("mine")
    else:
        (store / "net" / "report.html").unlink()
    ledger.add("net", made((2,)), accepted=True)
    assert not ledger.owns_folder("net")
    before = contents(store / "net")
    with pytest.raises(OutputError, match="changed by hand"):
        ledger.publish("net")
    assert contents(store / "net") == before
    ledger.publish("net", force=True)
    assert ledger.owns_folder("net")


def test_a_folder_behind_the_log_is_the_ledgers_own(
    ledger: Ledger, store: Path, made: Made
) -> None:
    """A writer was killed before it published, and the older version is given up by now."""
    ledger.add("net", made((1,)), accepted=True)
    ledger.publish("net")
    second = made((2,))
    ledger.add("net", second, accepted=True)
    assert sweep(ledger, keep=0, grace=0).versions == ("net@1",)
    ledger.publish("net")
    assert contents(store / "net") == {file.name: file.read_bytes() for file in second}


def test_a_damaged_version_is_not_rolled_back_to(ledger: Ledger, store: Path, made: Made) -> None:
    ledger.add("net", made((1,)), accepted=True)
    ledger.add("net", made((2,)), accepted=True)
    ledger.publish("net")
    digest = ledger.find("net@1").entry.files[1].pieces[0].sha256
    (store / ".slimctl" / "objects" / digest[:2] / digest[2:]).unlink()
    before = contents(store / "net")
    with pytest.raises(DamagedError):
        ledger.rollback("net", "1")
    assert ledger.find("net").number == 2
    assert contents(store / "net") == before


def test_an_option_that_is_a_list_or_nothing(ledger: Ledger, made: Made) -> None:
    ledger.add("net", made((1,)), accepted=True)
    steps = (step("prune", {"sparsity": 0.3, "exclude": ["a", "b"]}),)
    changes = ledger.add("net", made((1,), steps=steps), accepted=True).version.entry.summary
    assert changes.changes == ("steps.0 -fuse", "steps.0.exclude - -> a, b")
