"""Commands on a small model: what they print, what they write, how they end."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import yaml
from onnx import numpy_helper

from slimctl.cli import words
from slimctl.cli.doctor_command import EXTRAS, suggested_target
from slimctl.core.cpu import cpu_features
from tests.cli.models import CHANNELS, CLASSES, classifier, images
from tests.exact import exact_session

ROOT = Path(__file__).parents[2]


def outputs(path: Path, data: np.ndarray) -> np.ndarray:
    return exact_session(path).run(None, {"image": data})[0]


def parsed(ended) -> dict:
    return json.loads(ended.stdout)


# inspect ---------------------------------------------------------------------------------------


def test_inspect_counts(inputs: Path, slimctl) -> None:
    document = parsed(slimctl("inspect", "model.onnx", "--dim", "N=2", "--json"))
    convolution = 2 * CHANNELS * 64 * 3 * 9
    gemm = 2 * CHANNELS * CLASSES
    assert document["macs"] == convolution + gemm
    assert document["parameters"] == CHANNELS * 27 + CHANNELS + CHANNELS * CLASSES + CLASSES
    assert document["weight_bytes"] == 4 * document["parameters"]
    assert document["inputs"] == [{"name": "image", "dtype": "float", "shape": ["N", 3, 8, 8]}]
    assert [node["name"] for node in document["node_costs"]] == [
        *("conv", "relu", "pool", "flatten", "fc")
    ]
    assert document["node_costs"][0]["output_shapes"] == [[2, CHANNELS, 8, 8]]
    assert document["operators"]["Conv"]["macs"] == convolution


def test_inspect_says_what_it_does_not_know(inputs: Path, slimctl) -> None:
    model = classifier()
    for axis, name in ((2, "height"), (3, "width")):
        model.graph.input[0].type.tensor_type.shape.dim[axis].dim_param = name
    onnx.save(model, inputs / "open.onnx")
    ended = slimctl("inspect", "open.onnx")
    assert ended.code == 0
    assert "at least 32" in ended.stdout  # the Gemm, whose input is pooled to 1 x 8
    assert "--dim 'height=N' --dim 'width=N'" in ended.stdout
    sized = slimctl("inspect", "open.onnx", "--dim", "height=8", "--dim", "width=8")
    assert "at least" not in sized.stdout


def test_inspect_counts_one_sample_unless_told_otherwise(inputs: Path, slimctl) -> None:
    one, two = (
        parsed(slimctl("inspect", "model.onnx", "--json", *sizes))
        for sizes in ((), ("--dim", "N=2"))
    )
    assert (one["sizes"], two["sizes"]) == ({"N": 1}, {"N": 2})
    assert two["macs"] == 2 * one["macs"]


@pytest.mark.parametrize("text", ["N", "N=", "=1", "N=x", "N=0", "N=-1"])
def test_inspect_wants_sizes(text: str, inputs: Path, slimctl) -> None:
    ended = slimctl("inspect", "model.onnx", "--dim", text)
    assert (ended.code, ended.stdout) == (2, "")
    assert f"'{text}' is not of the form NAME=N" in ended.stderr


# fuse ------------------------------------------------------------------------------------------


def test_fuse_keeps_the_function(inputs: Path, slimctl) -> None:
    ended = slimctl("fuse", "model.onnx", "-o", "fused.onnx")
    assert ended.code == 0, ended.stderr
    data = images(4)
    expected = outputs(inputs / "model.onnx", data)
    np.testing.assert_allclose(outputs(inputs / "fused.onnx", data), expected, atol=1e-5)
    assert (inputs / "fused.manifest.json").is_file()


def test_fuse_writes_a_whole_artifact(inputs: Path, slimctl) -> None:
    assert slimctl("fuse", "model.onnx", "-o", "artifact/").code == 0
    names = {file.name for file in (inputs / "artifact").iterdir()}
    assert {"model.onnx", "manifest.json", "report.html"} <= names


# quantize --------------------------------------------------------------------------------------


def test_quantize_says_what_it_did(inputs: Path, slimctl) -> None:
    ended = slimctl("quantize", "model.onnx", "--calib", "calib.npz", "-o", "small.onnx")
    assert ended.code == 0, ended.stderr
    for part in ("1 Conv", "target:", "calibration auto", "16 samples of calib.npz", "size:", "dB"):
        assert part in ended.stdout
    assert "small.onnx, small.manifest.json" in ended.stdout
    assert "WARNING" not in ended.stdout + ended.stderr
    onnx.checker.check_model(onnx.load(inputs / "small.onnx"))


def test_quantize_json_is_one_document(inputs: Path, slimctl) -> None:
    ended = slimctl(
        *("quantize", "model.onnx", "--calib", "calib.npz", "-o", "small.onnx"),
        *("--calibration", "entropy", "--per-tensor", "--samples", "8", "--json", "-q"),
    )
    document = parsed(ended)
    assert (ended.code, ended.stderr) == (0, "")
    assert document["files"] == ["small.onnx", "small.manifest.json"]
    steps = {step["name"]: step for step in document["manifest"]["steps"]}
    assert steps["quantize-static"]["options"]["calibration"] == "kl"
    assert steps["quantize-static"]["options"]["per_channel"] is False
    assert document["manifest"]["calibration"]["samples"] == 8
    on_disk = json.loads((inputs / "small.manifest.json").read_text())
    assert on_disk["manifest_hash"] == document["manifest"]["manifest_hash"]


@pytest.mark.parametrize("data", [(), ("--calib", "calib.npz")], ids=["random", "data"])
def test_measured_time_is_shown_and_not_hashed(
    inputs: Path, slimctl, data: tuple[str, ...]
) -> None:
    arguments = ("prune", "model.onnx", "--sparsity", "0.5", "--round-to", "1", *data)
    arguments += ("--min-channels", "1", "-o", "small.onnx", "--force")
    ended = slimctl(*arguments)
    assert "prune: P50 " in ended.stdout, ended.stderr
    assert ("random inputs" in ended.stdout) == (data == ())
    hashes = {parsed(slimctl(*arguments, "--json"))["manifest"]["manifest_hash"] for _ in range(2)}
    assert len(hashes) == 1


def test_quantize_with_random_data_warns(inputs: Path, slimctl) -> None:
    arguments = ("quantize", "model.onnx", "--calib", "random", "-o", "small.onnx", "--force")
    ended = slimctl(*arguments)
    assert ended.code == 0, ended.stderr
    assert "WARNING: UNCALIBRATED" in ended.stdout
    assert parsed(slimctl(*arguments, "--json"))["manifest"]["uncalibrated"] is True


def test_quantize_names_what_it_left_alone(inputs: Path, slimctl) -> None:
    arguments = ("quantize", "model.onnx", "--calib", "calib.npz", "-o", "small.onnx")
    ended = slimctl(*arguments, "--exclude", "op:Gemm")
    assert ended.code == 0, ended.stderr
    table = ended.stdout[ended.stdout.index("Left alone") :]
    assert "fc" in table
    assert "exclude" in table


def test_quantize_progress_is_on_stderr_and_can_be_silenced(inputs: Path, slimctl) -> None:
    arguments = ("quantize", "model.onnx", "--calib", "calib.npz", "-o", "small.onnx", "--no-cache")
    loud = slimctl(*arguments)
    assert "done, 16 in" in loud.stderr
    quiet = slimctl(*arguments, "--force", "-q")
    assert (quiet.code, quiet.stderr) == (0, "")


# verify ----------------------------------------------------------------------------------------


@pytest.fixture
def other(inputs: Path) -> Path:
    """The model with a bias that is far off."""
    model = classifier()
    bias = next(tensor for tensor in model.graph.initializer if tensor.name == "conv.bias")
    values = np.frombuffer(bias.raw_data, np.float32) + np.float32(0.05)
    bias.raw_data = values.astype(np.float32).tobytes()
    onnx.save(model, inputs / "other.onnx")
    return inputs / "other.onnx"


VERIFY = ("verify", "other.onnx", "--against", "model.onnx", "--data", "calib.npz")


def test_verify_measures(other: Path, slimctl) -> None:
    document = parsed(slimctl(*VERIFY, "--json"))
    data = images(16)
    expected, found = outputs(other.with_name("model.onnx"), data), outputs(other, data)
    error = expected.astype(np.float64) - found
    sqnr = 10 * np.log10(np.sum(expected.astype(np.float64) ** 2) / np.sum(error**2))
    (logits,) = document["outputs"]
    assert logits["sqnr_db"] == pytest.approx(sqnr, abs=0.01)
    assert logits["max_abs_error"] == pytest.approx(np.abs(error).max(), rel=1e-4)
    assert logits["top1_agreement"] == np.mean(expected.argmax(1) == found.argmax(1))
    assert document["samples"] == 16
    assert document["passed"] is True


@pytest.mark.parametrize(
    ("bounds", "code", "message"),
    [
        ((), 0, ""),
        (("--min-sqnr", "-100"), 0, ""),
        (("--min-sqnr", "150"), 1, "--min-sqnr is 150"),
        (("--max-error", "0"), 1, "--max-error is 0"),
        (("--max-error", "1000"), 0, ""),
        (("--min-cosine", "1.1"), 1, "--min-cosine is 1.1"),
        (("--min-agreement", "1.1"), 1, "--min-agreement is 1.1"),
        (("--min-sqnr", "150", "--max-error", "0"), 1, "--max-error is 0"),
        (("--min-sqnr", "much"), 2, "--min-sqnr"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_verify_bounds(bounds, code: int, message: str, other: Path, slimctl) -> None:
    ended = slimctl(*VERIFY, *bounds)
    assert ended.code == code
    assert message in ended.stderr
    if code == 1:
        assert "output 'logits' has" in ended.stderr


def test_verify_failure_is_one_json_document(other: Path, slimctl) -> None:
    ended = slimctl(*VERIFY, "--min-sqnr", "150", "--json")
    document = parsed(ended)
    assert ended.code == 1
    assert document["passed"] is False
    assert len(document["failures"]) == 1


def test_verify_finds_where_models_part(inputs: Path, slimctl) -> None:
    model = classifier()
    bias = next(tensor for tensor in model.graph.initializer if tensor.name == "conv.bias")
    bias.raw_data = (np.frombuffer(bias.raw_data, np.float32) + np.float32(9)).tobytes()
    onnx.save(model, inputs / "other.onnx")
    document = parsed(slimctl(*VERIFY, "--json"))
    assert document["divergence"]["first"]["node"] == "conv"
    assert "(Conv 'conv'" in slimctl(*VERIFY).stdout


def test_verify_of_different_models(inputs: Path, slimctl) -> None:
    model = classifier()
    model.graph.output[0].name = model.graph.node[-1].output[0] = "scores"
    onnx.save(model, inputs / "other.onnx")
    ended = slimctl(*VERIFY)
    assert ended.code == 2
    assert "'logits' is missing" in ended.stderr


# eval and bench --------------------------------------------------------------------------------


@pytest.mark.parametrize(("metric", "k"), [("top1", 1), ("top1:logits", 1)])
def test_eval(metric: str, k: int, inputs: Path, slimctl) -> None:
    arguments = ("eval", "model.onnx", "--data", "val.npz", "--metric", metric)
    data = np.load("val.npz")
    best = outputs(inputs / "model.onnx", data["image"]).argsort(axis=1)[:, -k:]
    expected = np.mean((best == data["labels"][:, None]).any(axis=1))
    assert parsed(slimctl(*arguments, "--json"))["value"] == pytest.approx(expected)
    assert f"{expected:.4f}" in slimctl(*arguments).stdout


def test_eval_gives_an_interval(inputs: Path, slimctl) -> None:
    arguments = ("eval", "model.onnx", "--data", "val.npz", "--metric", "f1?average=micro")
    document = parsed(slimctl(*arguments, "--json"))
    interval = document["interval"]
    assert 0 <= interval["low"] <= document["value"] <= interval["high"] <= 1
    assert (interval["confidence"], interval["unit"], document["difference"]) == (
        0.95,
        "samples",
        None,
    )
    assert interval == parsed(slimctl(*arguments, "--json"))["interval"]
    assert f"95 % interval:     {interval['low']:.4f} to" in slimctl(*arguments).stdout


def noisy(strength: float, folder: Path) -> None:
    """Labels that the model finds, and a model whose scores are moved at random."""
    data = np.load(folder / "val.npz")
    image = np.random.default_rng(3).normal(size=(200, *data["image"].shape[1:]))
    labels = outputs(folder / "model.onnx", image.astype(np.float32)).argmax(axis=1)
    np.savez(folder / "val.npz", image=image.astype(np.float32), labels=labels)
    model = classifier()
    for tensor in model.graph.initializer:
        weight = numpy_helper.to_array(tensor)
        moved = weight + np.random.default_rng(0).normal(0, strength, weight.shape)
        tensor.CopyFrom(numpy_helper.from_array(moved.astype(np.float32), tensor.name))
    onnx.save(model, folder / "other.onnx")


@pytest.mark.parametrize(("strength", "verdict"), [(1.0, "significant"), (1e-7, "within noise")])
def test_eval_of_two_models(strength: float, verdict: str, inputs: Path, slimctl) -> None:
    noisy(strength, inputs)
    arguments = ("eval", "other.onnx", "--against", "model.onnx", "--data", "val.npz")
    document = parsed(slimctl(*arguments, "--json"))
    found = document["difference"]
    assert found["reference"] == 1.0 and found["model"] == document["value"]
    assert found["drop"] == pytest.approx(1 - document["value"])
    assert found["low"] <= found["drop"] <= found["high"]
    assert found["within_noise"] == (found["p_value"] >= 0.05) == (verdict == "within noise")
    assert found["verdict"] == verdict
    text = slimctl(*arguments).stdout
    assert f"the difference is:  {verdict}\n" in text
    assert "Compared with 'model.onnx'" in text and "exact McNemar test" in text


def test_eval_against_a_reference_that_is_the_measure(inputs: Path, slimctl) -> None:
    noisy(0.05, inputs)
    arguments = ("eval", "other.onnx", "--data", "val.npz", "--metric", "cosine")
    document = parsed(slimctl(*arguments, "--against", "model.onnx", "--json"))
    assert 0 < document["interval"]["low"] < document["value"] < 1
    assert document["difference"] is None
    ended = slimctl(*arguments)
    assert (ended.code, "--against" in ended.stderr) == (2, True)


def test_eval_lists_its_metrics(slimctl) -> None:
    ended = slimctl("eval", "--list")
    assert (ended.code, ended.stderr) == (0, "")
    assert "ctc-cer          blank layout" in ended.stdout and "module:function" in ended.stdout


def test_eval_with_a_function(inputs: Path, slimctl, monkeypatch: pytest.MonkeyPatch) -> None:
    (inputs / "own_metric.py").write_text(
        "def score(outputs, labels):\n    return float((outputs['logits'][:, 0] > labels).mean())\n"
    )
    monkeypatch.syspath_prepend(str(inputs))
    data = np.load("val.npz")
    expected = np.mean(outputs(inputs / "model.onnx", data["image"])[:, 0] > data["labels"])
    ended = slimctl(
        *("eval", "model.onnx", "--data", "val.npz", "--metric", "own_metric:score", "--json")
    )
    assert parsed(ended)["value"] == pytest.approx(expected)
    assert parsed(ended)["interval"]["unit"] == "batches"
    arguments = ("eval", "model.onnx", "--data", "val.npz", "--metric", "own_metric:score")
    assert ", over batches\n" in slimctl(*arguments, "--batch-size", "2").stdout
    assert "unknown, there is one batch only" in slimctl(*arguments, "--batch-size", "12").stdout


def test_bench_two_models(inputs: Path, slimctl) -> None:
    onnx.save(classifier(), inputs / "other.onnx")
    arguments = ("bench", "model.onnx", "--against", "other.onnx", "--batch-size", "2")
    fast = ("--rounds", "3", "--warmup", "1", "--max-seconds", "1", "--no-memory", "-q")
    document = parsed(slimctl(*arguments, *fast, "--json"))
    assert [model["model"] for model in document["models"]] == ["model.onnx", "other.onnx"]
    assert document["batch_size"] == 2
    for model in document["models"]:
        assert 0 < model["p50_ms"] <= model["p90_ms"] <= model["p99_ms"]
        assert model["peak_memory"] is None
    speedup = document["speedup"]
    assert speedup["low"] <= speedup["value"] <= speedup["high"]
    ended = slimctl(*arguments, *fast)
    assert "'model.onnx' is" in ended.stdout
    assert ended.stderr == ""


# recipe and run --------------------------------------------------------------------------------

RECIPE = """\
version: 1
name: tiny
model: model.onnx
data:
  calibration: {source: calib.npz}
  evaluation: {source: val.npz, metric: top1}
steps:
  - fuse
  - quantize: {calibration: minmax}
gates:
  size: {max_ratio: 20}
output: {path: tiny.onnx}
"""


@pytest.fixture
def recipe(inputs: Path) -> Path:
    (inputs / "tiny.yaml").write_text(RECIPE)
    return inputs / "tiny.yaml"


def test_run(recipe: Path, slimctl) -> None:
    ended = slimctl("run", "tiny.yaml")
    assert ended.code == 0, ended.stderr
    assert "tiny.onnx" in ended.stdout
    assert "size  passed" in ended.stdout
    assert (recipe.parent / "tiny.onnx").is_file()


def test_run_with_a_broken_gate(recipe: Path, slimctl) -> None:
    arguments = ("run", "tiny.yaml", "--set", "gates.size.max_ratio=0.001")
    ended = slimctl(*arguments)
    assert ended.code == 1
    assert "size  FAILED" in ended.stdout
    assert "1 gate failed" in ended.stderr
    assert "too much" in ended.stderr
    assert not (recipe.parent / "tiny.onnx").exists()
    document = parsed(slimctl(*arguments, "--json"))
    assert document["passed"] is False
    assert document["output"] is None


def test_run_keeps_a_failed_result_if_told_to(recipe: Path, slimctl) -> None:
    ended = slimctl("run", "tiny.yaml", "--set", "gates.size.max_ratio=0.001", "--keep-failed")
    assert ended.code == 1
    assert (recipe.parent / "tiny.onnx").is_file()


def test_run_writes_where_it_is_told(recipe: Path, slimctl) -> None:
    assert slimctl("run", "tiny.yaml", "-o", "elsewhere/").code == 0
    assert (recipe.parent / "elsewhere" / "recipe.lock.yaml").is_file()
    assert not (recipe.parent / "tiny.onnx").exists()


def test_dry_run_resolves_and_writes_nothing(recipe: Path, slimctl) -> None:
    before = sorted(os.listdir())
    arguments = ("run", "tiny.yaml", "--dry-run", "--set", "steps.1.calibration=kl")
    ended = slimctl(*arguments)
    assert ended.code == 0
    planned = yaml.safe_load(ended.stdout)
    options = {next(iter(step)): next(iter(step.values())) for step in planned["steps"]}
    assert options["quantize-static"]["calibration"] == "kl"
    assert options["quantize-static"]["activation_type"] == "uint8"
    assert parsed(slimctl(*arguments, "--json")) == planned
    assert sorted(os.listdir()) == before


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ("  - quantise", ("tiny.yaml:8", "quantise", "'quantize'")),
        ("  - fuse: {rewrite: []}", ("tiny.yaml:8", "'rewrite'", "'rewrites'")),
        ("  - bias-correction", ("tiny.yaml:8", "bias-correction")),
    ],
)
def test_recipe_check_names_the_line(change: str, parts, recipe: Path, slimctl) -> None:
    recipe.write_text(RECIPE.replace("  - fuse", change))
    ended = slimctl("recipe", "check", "tiny.yaml")
    assert (ended.code, ended.stdout) == (2, "")
    for part in parts:
        assert part in ended.stderr


def test_recipe_check(recipe: Path, slimctl) -> None:
    ended = slimctl("recipe", "check", "tiny.yaml")
    assert ended.code == 0
    assert "valid" in ended.stdout
    document = parsed(slimctl("recipe", "check", "tiny.yaml", "--json"))
    assert [next(iter(step)) for step in document["steps"]][:2] == ["fuse", "quantize-static"]


def test_recipe_list_and_show(slimctl) -> None:
    names = [preset["name"] for preset in parsed(slimctl("recipe", "list", "--json"))["presets"]]
    assert {"int8-cpu", "int8-cpu-accurate", "fuse-only"} <= set(names)
    listed = slimctl("recipe", "list").stdout
    for name in names:
        assert name in listed
        shown = slimctl("recipe", "show", name)
        assert yaml.safe_load(shown.stdout)["name"] == name
    assert "did you mean 'int8-cpu'" in slimctl("recipe", "show", "int8-cpus").stderr


def test_recipe_schema_is_the_published_one(slimctl) -> None:
    published = (ROOT / "docs/reference/recipe-schema.json").read_text()
    assert slimctl("recipe", "schema").stdout == published


def test_recipe_init_runs(inputs: Path, slimctl) -> None:
    ended = slimctl("recipe", "init", "int8-cpu", "-o", "new.yaml", "--name", "mine")
    assert ended.code == 0
    assert "slimctl run new.yaml" in ended.stdout
    assert slimctl("recipe", "check", "new.yaml").code == 0
    again = slimctl("recipe", "init", "-o", "new.yaml")
    assert again.code == 2
    assert "--force" in again.stderr
    assert slimctl("run", "new.yaml").code == 0
    assert (inputs / "artifacts" / "mine" / "model.onnx").is_file()


# target and doctor -----------------------------------------------------------------------------


def test_targets(slimctl) -> None:
    listed = parsed(slimctl("target", "list", "--json"))["targets"]
    assert {"cpu", "cpu-avx2", "cpu-arm64"} <= {target["name"] for target in listed}
    for target in listed:
        assert target["title"] in slimctl("target", "show", target["name"]).stdout


def test_doctor(slimctl) -> None:
    document = parsed(slimctl("doctor", "--json"))
    assert document["versions"]["onnxruntime"] == ort.__version__
    assert document["providers"] == ort.get_available_providers()
    assert document["cpu"]["cores"] == os.cpu_count()
    text = slimctl("doctor").stdout
    for extra in EXTRAS:
        assert extra in text


def test_a_run_tells_continuous_integration(
    recipe: Path, slimctl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    arguments = ("run", "tiny.yaml", "--set", "gates.size.max_ratio=0.001", "--json", "-q")
    ended = slimctl(*arguments, "--junit", "junit.xml", "--summary", "summary.md")
    assert ended.code == 1
    json.loads(ended.stdout)
    assert "::error file=tiny.yaml,title=gate size::" in ended.stderr
    assert 'failures="1"' in (recipe.parent / "junit.xml").read_text()
    assert "gates failed" in (recipe.parent / "summary.md").read_text()


def test_annotations_are_for_github_alone(
    recipe: Path, slimctl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GITHUB_ACTIONS", raising=False)
    ended = slimctl("run", "tiny.yaml", "--set", "gates.size.max_ratio=0.001", "-q")
    assert ended.code == 1
    assert "::error" not in ended.stderr


def test_doctor_knows_the_extras_of_the_package() -> None:
    import tomllib

    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = declared["optional-dependencies"]
    without_content = {name for name, packages in optional.items() if not packages}
    assert set(EXTRAS) == set(optional) - {"all", "dev"} - without_content


@pytest.mark.parametrize(
    ("cpuinfo", "machine", "features", "target"),
    [
        ("flags\t\t: fpu avx2 avx512_vnni\n", "x86_64", ["avx2", "avx512_vnni"], "cpu"),
        ("flags : avx2 avx_vnni\n", "x86_64", ["avx2", "avx_vnni"], "cpu"),
        ("flags : sse avx2\n", "x86_64", ["avx2"], "cpu-avx2"),
        ("Features : fp asimd asimddp\n", "aarch64", ["asimd", "asimddp"], "cpu-arm64"),
        ("", "aarch64", None, "cpu-arm64"),
        ("model name : none\n", "x86_64", None, None),
        ("flags : vx\n", "s390x", [], None),
    ],
)
def test_cpu_features(cpuinfo: str, machine: str, features, target) -> None:
    assert cpu_features(cpuinfo) == features
    assert suggested_target(machine, features) == target


# words -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (words.size(0), "0 B"),
        (words.size(999), "999 B"),
        (words.size(18_649_723), "18.6 MB"),
        (words.size(999_999), "1 MB"),
        (words.size(2_000_000_000_000), "2 TB"),
        (words.size(None), "?"),
        (words.number(4_700_000), "4.7 M"),
        (words.decibel(22.349), "22.3 dB"),
        (words.decibel(200.0), "identical"),
        (words.decibel(None), "-"),
        (words.percent(0.2634), "26.3 %"),
        (words.milliseconds(0.01234), "0.012"),
        (words.milliseconds(123.456), "123.5"),
        (words.counts({"Conv": 49, "Gemm": 1}), "49 Conv, 1 Gemm"),
        (words.counts({}), "nothing"),
        (words.first_of(["a", "b", "c", "d"], 2), "a, b and 2 more"),
        (words.first_of(["a"], 2), "a"),
        (words.setting(True), "yes"),
        (words.setting({"a": (1, 2), "b": None}), "a 1, 2; b -"),
    ],
)
def test_words(text: str, expected: str) -> None:
    assert text == expected
