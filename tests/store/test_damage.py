"""Damage of every kind is found by a hash, and named: object, version and file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from slimctl.core.errors import DamagedError, StoreError
from slimctl.store.ledger import Ledger, open_ledger
from slimctl.store.objects import FRESH
from slimctl.store.sweep import check_ledger, sweep

Made = Callable[..., list[Path]]
Damage = Callable[[Path], object]


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


DAMAGES: dict[str, Damage] = {
    "a bit": flip,
    "the end": lambda file: file.write_bytes(file.read_bytes()[:-1]),
    "more at the end": lambda file: file.write_bytes(file.read_bytes() + b"\0"),
    "all of it": lambda file: file.write_bytes(b""),
    "the file": lambda file: file.unlink(),
}


def object_path(store: Path, digest: str) -> Path:
    return store / ".slimctl" / "objects" / digest[:2] / digest[2:]


@pytest.fixture
def whole(ledger: Ledger, made: Made) -> Ledger:
    """Two versions: the second shares one weight of the first."""
    ledger.add("net", made((1, 2)), accepted=True)
    ledger.add("net", made((2, 3)), accepted=True)
    assert check_ledger(ledger) == []
    return ledger


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
@pytest.mark.parametrize("part", ["piece", "frame", "manifest", "lock"])
def test_a_damaged_object_is_named(
    part: str, damage: Damage, whole: Ledger, store: Path, tmp_path: Path
) -> None:
    entry = whole.find("net@1").entry
    model = next(file for file in entry.files if file.name == "model.onnx")
    digest, file = {
        "piece": (model.pieces[0].sha256, "model.onnx"),
        "frame": (model.frame, "model.onnx"),
        "manifest": (entry.manifest.frame, "manifest.json"),
        "lock": (entry.lock.frame, "recipe.lock.yaml"),
    }[part]
    damage(object_path(store, digest))
    found = check_ledger(whole)
    assert found[0].version == "net@1"
    assert digest in found[0].problem
    assert f"'{file}'" in found[0].problem
    with pytest.raises(DamagedError) as caught:
        whole.checkout(whole.find("net@1"), tmp_path / "out")
    assert (caught.value.version, caught.value.file) == ("net@1", file)
    assert digest in caught.value.place
    assert not (tmp_path / "out").exists()


def test_shared_damage_is_found_in_both(whole: Ledger, store: Path) -> None:
    models = [
        next(file for file in whole.find(f"net@{number}").entry.files if file.pieces)
        for number in (1, 2)
    ]
    (shared,) = {p.sha256 for p in models[0].pieces} & {p.sha256 for p in models[1].pieces}
    flip(object_path(store, shared))
    assert [damage.version for damage in check_ledger(whole)] == ["net@1", "net@2"]


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_entry_of_the_log_is_named(
    damage: Damage, whole: Ledger, store: Path, made: Made
) -> None:
    file = store / ".slimctl" / "log" / "net" / "000001.json"
    damage(file)
    found = check_ledger(whole)
    assert [item.version for item in found] == ["net"]
    assert "000001.json" in found[0].problem
    with pytest.raises(DamagedError, match="log"):
        whole.add("net", made((5,)), accepted=True)
    with pytest.raises(DamagedError, match="log"):
        sweep(whole, keep=0, grace=0)


def test_a_changed_entry_is_noticed(whole: Ledger, store: Path) -> None:
    file = store / ".slimctl" / "log" / "net" / "000002.json"
    document = json.loads(file.read_text())
    document["entry"]["accepted"] = False
    file.write_text(json.dumps(document))
    with pytest.raises(DamagedError, match="was changed"):
        whole.state("net")


def test_an_entry_of_a_newer_slimctl(whole: Ledger, store: Path) -> None:
    from slimctl.store.log import _hash

    entry = {"kind": "archive", "id": "1", "at": "later"}
    text = json.dumps({"sha256": _hash(entry), "entry": entry})
    (store / ".slimctl" / "log" / "net" / "000003.json").write_text(text)
    with pytest.raises(StoreError, match="nothing that this slimctl writes"):
        whole.state("net")


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_the_same_bytes_repair_it(
    damage: Damage, whole: Ledger, store: Path, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = next(file for file in whole.find("net@1").entry.files if file.pieces)
    damage(object_path(store, model.pieces[0].sha256))
    assert check_ledger(whole)
    monkeypatch.setattr("slimctl.store.objects.FRESH", 0.0)
    whole.add("net", made((1, 2)), accepted=True)
    assert check_ledger(whole) == []
    assert FRESH > 0


def test_damage_on_object_storage(bucket: Callable[[], str], made: Made) -> None:
    ledger = open_ledger(bucket())
    ledger.add("net", made((1, 2)), accepted=True)
    model = next(file for file in ledger.find("net").entry.files if file.pieces)
    for number, data in enumerate((b"other", None)):
        name = f"objects/{(digest := model.pieces[number].sha256)[:2]}/{digest[2:]}"
        if data is None:
            ledger.backend.remove(name)
        else:
            ledger.backend.write(name, memoryview(data))
        (found,) = check_ledger(ledger)
        assert "'model.onnx'" in found.problem
    assert "bytes are not those" in found.problem  # the first one that is read


def test_an_old_version_that_cannot_be_read_keeps_no_new_one_out(
    whole: Ledger, store: Path, made: Made
) -> None:
    flip(object_path(store, whole.find("net@2").entry.manifest.frame))
    added = whole.add("net", made((7,)), accepted=True)
    assert added.version.entry.summary.changes is None


@pytest.mark.parametrize("name", ["../out", "/out", "a/b", "..", ""])
def test_a_log_leads_nowhere_else(name: str, whole: Ledger, store: Path) -> None:
    from slimctl.store.log import _hash

    file = store / ".slimctl" / "log" / "net" / "000002.json"
    entry = json.loads(file.read_text())["entry"]
    entry["files"][0]["name"] = name
    file.write_text(json.dumps({"sha256": _hash(entry), "entry": entry}))
    with pytest.raises(StoreError, match="nothing that this slimctl writes"):
        whole.find("net")


def test_files_of_others_beside_the_log_are_left(whole: Ledger, store: Path) -> None:
    (store / ".slimctl" / "log" / "net" / ".nfs0001").write_text("")
    (store / ".slimctl" / "log" / "notes.txt").write_text("")
    assert whole.find("net").number == 2
    assert check_ledger(whole) == []


def test_a_lost_entry_is_named(whole: Ledger, store: Path) -> None:
    (store / ".slimctl" / "log" / "net" / "000001.json").unlink()
    with pytest.raises(DamagedError, match="lost an entry") as caught:
        whole.find("net")
    assert "000001.json" in caught.value.place
