from __future__ import annotations

import json
from pathlib import Path

import pytest

from slimctl.core.files import sha256_of_file
from tests.report.reader import read

RECIPE = """
version: 1
name: net
model: model.onnx
data:
  calibration: {source: calib.npz}
  evaluation: {source: val.npz, metric: top1}
steps: [fuse, quantize: {calibration: minmax}]
output: {store: artifacts}
"""


@pytest.fixture
def versions(inputs: Path, slimctl) -> Path:
    """Two versions of ``net``."""
    (inputs / "recipe.yaml").write_text(RECIPE)
    for seed in (0, 1):
        assert slimctl("run", "recipe.yaml", "-q", "--set", f"seed={seed}").code == 0
    return inputs


def documents(folder: Path, slimctl) -> list[str]:
    """Documents of the current version, and the options that take them."""
    artifact, data = "artifacts/net", ["--data", "calib.npz"]
    commands = {
        "--verify": ["verify", artifact, "--against", "model.onnx", *data],
        "--sensitivity": ["sensitivity", "model.onnx", *data],
        "--bench": ["bench", f"{artifact}/model.onnx", "--rounds", "2", "--no-memory"],
    }
    options = []
    for option, command in commands.items():
        path = folder / f"{option[2:]}.json"
        path.write_text(slimctl(*command, "--json", "-q").stdout)
        options += [option, path.name]
    return options


def page_of(folder: Path) -> str:
    return read((folder / "report.html").read_text(encoding="utf-8")).text


def test_a_stored_page_has_the_versions_up_to_its_own(versions: Path, slimctl) -> None:
    """Each page of a run ends with its own version; the manifest names the page that is there."""
    current = page_of(versions / "artifacts" / "net")
    assert "2accepted" in current and "this one, current" in current and "1accepted" in current
    assert "Later versions" in current
    assert slimctl("checkout", "net@1", "-o", "first").code == 0
    first = page_of(versions / "first")
    assert "1accepted" in first and "this one, current" in first and "2accepted" not in first
    for folder in (versions / "first", versions / "artifacts" / "net"):
        manifest = json.loads((folder / "manifest.json").read_text())
        named = {entry["name"]: entry["sha256"] for entry in manifest["run"]["files"]}
        assert named["report.html"] == sha256_of_file(folder / "report.html")
        assert set(named) == {"recipe.lock.yaml", "report.html"}
    assert slimctl("history", "--check").code == 0
    assert "as before" in slimctl("run", "recipe.yaml", "-q", "--set", "seed=1").stdout
    assert page_of(versions / "artifacts" / "net") == current


def test_a_rejected_version_that_is_kept_has_them_too(versions: Path, slimctl) -> None:
    failing = ["--set", "gates.sqnr.min_db=190", "--keep-failed"]
    assert slimctl("run", "recipe.yaml", "-q", *failing).code == 1
    text = page_of(versions / "artifacts" / "net@3")
    assert "3rejected" in text and "this one" in text
    assert "this one, current" not in text


def test_gates_bring_layers_and_latencies_to_the_page(inputs: Path, slimctl) -> None:
    (inputs / "recipe.yaml").write_text(RECIPE)
    gates = ["gates.verify.max_faults=9", "gates.latency.min_speedup=0.001"]
    given = [part for gate in gates for part in ("--set", gate)]
    assert slimctl("run", "recipe.yaml", "-q", *given).code == 0
    artifact = inputs / "artifacts" / "net"
    assert slimctl("report", artifact).code == 0
    for text in (page_of(artifact), read((inputs / "net.html").read_text("utf-8")).text):
        assert "SQNR along the graph" in text and "layers against the reference" in text
        assert "% of runs" in text
        assert "Verification: verdicts on nodes, values of the worst layers." in text
        assert "Benchmark: bounds of operators, throughput." in text
    run = json.loads((artifact / "manifest.json").read_text())["run"]
    assert len(run["latency"]["result"]["quantiles_ms"]) == 101
    assert {"conv", "fc"} & {layer["node"] for layer in run["nodes"]["layers"]}


def test_the_ledger_around_an_artifact_is_found(
    versions: Path, slimctl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(versions / "artifacts" / "net")
    assert slimctl("report", ".", "-o", "../../one.html").code == 0
    text = read((versions / "one.html").read_text(encoding="utf-8")).text
    assert "2accepted" in text and "this one" in text


def test_a_page_with_everything(versions: Path, slimctl) -> None:
    options = documents(versions, slimctl)
    before = (versions / "artifacts" / "net" / "report.html").read_bytes()
    ended = slimctl("report", "artifacts/net", "--store", "artifacts", *options, "--json")
    assert json.loads(ended.stdout) == {"artifact": "net", "report": "net.html", "missing": []}
    text = read((versions / "net.html").read_text(encoding="utf-8")).text
    for title in ("What each step did", "Weights by data type", "Versions", "Verification"):
        assert title in text
    for title in ("SQNR along the graph", "Sensitivity of the original", "Benchmark", "% of runs"):
        assert title in text
    assert "Not on this page" not in text
    assert (versions / "artifacts" / "net" / "report.html").read_bytes() == before


def test_a_version_of_the_ledger(versions: Path, slimctl) -> None:
    assert slimctl("report", "net@1", "-o", "one.html").code == 0
    text = read((versions / "one.html").read_text(encoding="utf-8")).text
    assert "this one" in text
    assert text.index("2accepted") < text.index("1accepted") < text.index("Not on this page")


def test_a_single_file(inputs: Path, slimctl) -> None:
    assert slimctl("fuse", "model.onnx", "-o", "small.onnx", "-q").code == 0
    ended = slimctl("report", "small.onnx")
    assert ended.code == 0
    assert "Versions" in ended.stdout  # among what is missing
    assert "float32" in (inputs / "small.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["net@9"], "no such version"),
        (["nat"], "has no versions of that name"),
        (["artifacts/nat"], "Cannot read the manifest"),
        (["model.onnx"], "Cannot read the manifest"),
        (["net", "-o", "taken.html"], "exists already"),
        (["net", "--bench", "none.json"], "Cannot read 'none.json'"),
        (["net", "--bench", "taken.html"], "is no JSON"),
    ],
)
def test_what_cannot_be_done(arguments: list[str], message: str, versions: Path, slimctl) -> None:
    (versions / "taken.html").write_text("mine")
    ended = slimctl("report", *arguments)
    assert (ended.code, ended.stdout) == (2, "")
    assert message in ended.stderr
    assert not (versions / "net.html").exists()
    assert (versions / "taken.html").read_text() == "mine"


def test_another_models_numbers_are_refused(versions: Path, slimctl) -> None:
    bench = slimctl("bench", "model.onnx", "--rounds", "2", "--no-memory", "--json", "-q")
    (versions / "bench.json").write_text(bench.stdout)
    ended = slimctl("report", "net", "--bench", "bench.json")
    assert ended.code == 2
    assert "is about another model than net" in ended.stderr
