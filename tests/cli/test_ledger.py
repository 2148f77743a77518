"""``history``, ``diff``, ``rollback``, ``promote``, ``checkout``, ``gc``."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from slimctl.pipeline.artifact import read_artifact
from tests.store.results import artifact, step
from tests.store.servers import s3_server

RECIPE = """\
version: 1
name: net
model: model.onnx
data:
  calibration: {source: calib.npz}
steps:
  - fuse
  - quantize-static: {calibration: minmax, min_sqnr: 0}
gates:
  sqnr: {min_db: 1}
output: {store: artifacts}
"""


@pytest.fixture
def versions(inputs: Path, slimctl) -> Path:
    """Three versions: minmax; percentile and another seed; one that its gate rejected."""
    (inputs / "recipe.yaml").write_text(RECIPE)
    assert slimctl("run", "recipe.yaml", "-q").code == 0
    change = ["--set", "steps.1.calibration=percentile", "--set", "seed=1"]
    assert slimctl("run", "recipe.yaml", "-q", *change).code == 0
    assert slimctl("run", "recipe.yaml", "-q", "--set", "gates.sqnr.min_db=190").code == 1
    return inputs


def parsed(ended) -> dict:
    return json.loads(ended.stdout)


def test_run_says_which_version_it_made(inputs: Path, slimctl) -> None:
    (inputs / "recipe.yaml").write_text(RECIPE)
    ended = slimctl("run", "recipe.yaml", "-q")
    assert "net@1, current" in ended.stdout
    assert "net@1, as before" in slimctl("run", "recipe.yaml", "-q").stdout
    document = parsed(slimctl("run", "recipe.yaml", "-q", "--json"))
    assert document["version"]["reference"] == "net@1"
    assert document["version"]["new"] is False
    rejected = slimctl("run", "recipe.yaml", "-q", "--set", "gates.sqnr.min_db=190")
    assert rejected.code == 1
    assert "net@2, rejected by its gates" in rejected.stdout


def test_history(versions: Path, slimctl) -> None:
    ended = slimctl("history", "net")
    assert ended.code == 0, ended.stderr
    lines = ended.stdout.splitlines()
    assert "accepted" in lines[1] and "accepted" in lines[2]
    assert lines[2].startswith("*")
    assert "seed 0 -> 1" in lines[2]
    assert "rejected: sqnr" in lines[3] and "no files" in lines[3]
    document = parsed(slimctl("history", "net", "--json"))
    assert document["current"] == 2
    assert [item["accepted"] for item in document["versions"]] == [True, True, False]
    assert [item["has_files"] for item in document["versions"]] == [True, True, False]
    names = parsed(slimctl("history", "--json"))["names"]
    assert [(item["name"], item["versions"], item["current"]) for item in names] == [("net", 3, 2)]


def test_the_store_comes_from_the_environment(
    versions: Path, slimctl, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SLIMCTL_STORE", str(versions / "artifacts"))
    monkeypatch.chdir(tmp_path)
    assert parsed(slimctl("history", "net", "--json"))["current"] == 2
    ended = slimctl("history", "net", "--store", "elsewhere")
    assert ended.code == 2
    assert "no versions of that name" in ended.stderr


def test_rollback_puts_the_files_there(versions: Path, slimctl) -> None:
    before = read_artifact(versions / "artifacts" / "net").manifest
    ended = slimctl("rollback", "net", "1")
    assert (ended.code, ended.stdout.split(";")[0]) == (0, "net@1 is the current version")
    after = read_artifact(versions / "artifacts" / "net").manifest
    assert after.manifest_hash != before.manifest_hash
    assert parsed(slimctl("rollback", "net", "2", "--json"))["before"] == 1
    assert read_artifact(versions / "artifacts" / "net").manifest == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rollback", "net", "3"], "Its gates rejected it: sqnr"),
        (["rollback", "net", "9"], "there are 1 to 3, current, latest"),
        (["rollback", "nat", "1"], "names: net"),
        (["promote", "net", "2", "--label", "current"], "cannot be a label"),
        (["promote", "net", "3", "--label", "production"], "rejected"),
        (["checkout", "net@3", "-o", "out"], "--keep-failed"),
        (["checkout", "net@1", "-o", "out.onnx"], "A version is a folder"),
        (["checkout", "net@1", "-o", "taken"], "exists already"),
        (["diff", "net@1", "net@9"], "no such version"),
        (["diff", "net@1", "taken/nothing.json"], "Cannot read the manifest"),
        (["history", "../net"], "Not the name of a result"),
    ],
)
def test_what_cannot_be_done(arguments: list[str], message: str, versions: Path, slimctl) -> None:
    (versions / "taken").mkdir()
    (versions / "taken" / "file").write_text("mine")
    ended = slimctl(*arguments)
    assert (ended.code, ended.stdout) == (2, "")
    assert message in ended.stderr


def test_rollback_leaves_a_folder_changed_by_hand(versions: Path, slimctl) -> None:
    report = versions / "artifacts" / "net" / "report.html"
    report.write_text("mine")
    assert "changed by hand" in slimctl("history", "net").stdout
    ended = slimctl("rollback", "net", "1")
    assert ended.code == 2
    assert report.read_text() == "mine"
    assert parsed(slimctl("history", "net", "--json"))["current"] == 2
    assert slimctl("rollback", "net", "1", "--force").code == 0
    assert report.read_text() != "mine"


def test_promote_and_gc(versions: Path, slimctl) -> None:
    assert slimctl("promote", "net", "1", "--label", "production").stdout == (
        "net@1 is production\n"
    )
    for number in range(4):
        changed = ["--set", f"seed={number + 5}"]
        assert slimctl("run", "recipe.yaml", "-q", *changed).code == 0
    plan = parsed(slimctl("gc", "--keep", "2", "--grace", "0", "--dry-run", "--json"))
    assert plan["versions"] == ["net@2", "net@4", "net@5"]
    assert plan["objects"] > 0
    done = parsed(slimctl("gc", "--keep", "2", "--grace", "0", "--json"))
    assert {**done, "dry_run": True} == plan
    assert "whole: net" in slimctl("history", "--check").stdout
    assert slimctl("rollback", "net", "production").code == 0
    ended = slimctl("rollback", "net", "2")
    assert ended.code == 2
    assert "given up" in ended.stderr
    assert "0 objects" in slimctl("gc", "--keep", "2", "--grace", "0").stdout


def test_gc_leaves_what_is_young(versions: Path, slimctl) -> None:
    ended = slimctl("gc", "--keep", "0")
    assert ended.code == 0
    assert "net@1 gave up their files" in ended.stdout
    assert "0 objects" in ended.stdout
    assert "younger than 60 minutes" in ended.stdout


def test_checkout(versions: Path, slimctl) -> None:
    assert slimctl("checkout", "net@1", "-o", "out").code == 0
    assert read_artifact(versions / "out").manifest.seed == 0
    assert slimctl("checkout", "net", "-o", "out", "--force").code == 0
    assert read_artifact(versions / "out").manifest.seed == 1


def test_check_finds_damage(versions: Path, slimctl) -> None:
    assert slimctl("history", "net", "--check").code == 0
    for file in (versions / "artifacts" / ".slimctl" / "objects").rglob("*"):
        if file.is_file():
            file.write_bytes(b"other")
    ended = slimctl("history", "--check")
    assert ended.code == 1
    assert "net@1" in ended.stdout and "bytes are not those of its hash" in ended.stdout
    assert "3 versions cannot be read" in ended.stderr


def test_diff_warns_when_several_things_changed(versions: Path, slimctl) -> None:
    ended = slimctl("diff", "net@1", "net@2")
    assert ended.code == 0, ended.stderr
    assert "WARNING: 2 things changed at once (steps.1.calibration, seed)" in ended.stdout
    assert "minmax" in ended.stdout and "percentile" in ended.stdout
    document = parsed(slimctl("diff", "net@1", "net@2", "--json"))
    assert document["things"] == ["steps.1.calibration", "seed"]
    assert [row["name"] for row in document["steps"]][:1] == ["fuse"]
    assert {row["what"] for row in document["measured"]} >= {"size_bytes", "sqnr_db"}


def test_diff_of_one_change_does_not_warn(tmp_path: Path, slimctl) -> None:
    before, after = tmp_path / "a" / "net", tmp_path / "b" / "net"
    steps = (step("fuse", {}, metric=0.9), step("prune", {"sparsity": 0.4}, metric=0.7))
    artifact(before)
    artifact(after, steps=steps)
    for sides in ((before, after), (before / "manifest.json", after / "manifest.json")):
        ended = slimctl("diff", *sides)
        assert ended.code == 0, ended.stderr
        assert "WARNING" not in ended.stdout
        assert "steps.1.sparsity" in ended.stdout
        assert "0.8 (-0.1)" in ended.stdout and "0.7 (-0.2)" in ended.stdout


def test_diff_of_the_same(tmp_path: Path, slimctl) -> None:
    artifact(tmp_path / "net")
    ended = slimctl("diff", tmp_path / "net", tmp_path / "net")
    assert "nothing that went in differs; the models are the same bytes" in ended.stdout


def test_a_killed_run_damages_nothing(versions: Path, slimctl) -> None:
    moments = random.Random(3)  # the same every time, the machine adds its own
    command = [sys.executable, "-m", "slimctl", "run", "recipe.yaml", "-q"]
    for number in range(8):
        process = subprocess.Popen(
            [*command, "--set", f"seed={number + 10}"], stdout=subprocess.DEVNULL
        )
        time.sleep(moments.uniform(0.5, 2.5))
        process.kill()
        process.wait()
        read_artifact(versions / "artifacts" / "net")
        assert "whole: net" in slimctl("history", "--check").stdout
    assert slimctl("run", "recipe.yaml", "-q", "--set", "seed=99").code == 0
    assert read_artifact(versions / "artifacts" / "net").manifest.seed == 99


def test_everything_on_object_storage(
    inputs: Path, slimctl, monkeypatch: pytest.MonkeyPatch
) -> None:
    with s3_server() as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        import boto3

        boto3.client("s3").create_bucket(Bucket="bucket")
        monkeypatch.setenv("SLIMCTL_STORE", "s3://bucket/models")
        (inputs / "recipe.yaml").write_text(RECIPE.replace("artifacts", "s3://bucket/models"))
        first = slimctl("run", "recipe.yaml", "-q")
        assert first.code == 0, first.stderr
        assert "net@1, current" in first.stdout
        assert "slimctl checkout net@1" in first.stdout
        assert "net@1, as before" in slimctl("run", "recipe.yaml", "-q").stdout
        assert slimctl("run", "recipe.yaml", "-q", "--set", "seed=1").code == 0
        failing = ["--set", "gates.sqnr.min_db=190", "--keep-failed"]
        assert slimctl("run", "recipe.yaml", "-q", *failing).code == 1
        assert "accepted" in slimctl("history", "net").stdout
        assert slimctl("rollback", "net", "1").stdout == "net@1 is the current version\n"
        assert slimctl("checkout", "net", "-o", "out").code == 0
        assert read_artifact(inputs / "out").manifest.seed == 0
        assert slimctl("diff", "net@1", "net@2").code == 0
        swept = parsed(slimctl("gc", "--keep", "0", "--grace", "0", "--json"))
        assert swept["versions"] == ["net@2", "net@3"]
        assert slimctl("history", "--check").code == 0
