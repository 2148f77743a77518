"""Smaller weights for processors without VNNI: how much smaller, and in which layers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from numpy.typing import NDArray
from onnx import numpy_helper
from pydantic import ValidationError

from slimctl.core.contract import Feeds, PassReport
from slimctl.core.errors import UnsupportedModelError
from slimctl.core.target import ReducedRange
from slimctl.graph.edit import const_array
from slimctl.graph.load import load_model
from slimctl.graph.save import content_hash
from slimctl.graph.session import Products, open_session, run
from slimctl.passes import _saturation
from slimctl.passes.quantize import Quantize
from slimctl.passes.quantize_static import QuantizeStatic
from slimctl.recipe.run import run_passes
from slimctl.recipe.schema import DataSpec
from slimctl.runtime.device import find_device
from slimctl.runtime.session import Runtime
from slimctl.targets import load_target

Arrays = dict[str, NDArray[Any]]

TWO_LAYERS = """(float[N,4,3,3] p, float[N,4,3,3] q) => (float[N,4,3,3] a, float[N,4,3,3] b) {
    a = Conv(p, w)
    b = Conv(q, v)
}"""
"""All weights are near 1, so that any two of them could saturate. What ``a`` reads is near 1
everywhere; of what ``b`` reads one channel alone is not 0 at each place: no pair adds up."""


def _weights() -> Arrays:
    rng = np.random.default_rng(0)
    shape = (4, 4, 1, 1)
    return {name: rng.uniform(0.9, 1.0, shape).astype(np.float32) for name in ("w", "v")}


def _two_feeds(count: int = 6) -> list[Feeds]:
    rng = np.random.default_rng(1)
    chosen = rng.integers(0, 4, (count, 1, 3, 3))
    single = (np.arange(4).reshape(1, 4, 1, 1) == chosen).astype(np.float32)
    full = rng.uniform(0.8, 1.0, (count, 4, 3, 3)).astype(np.float32)
    return [{"p": full[i : i + 1], "q": single[i : i + 1]} for i in range(count)]


def _proto(text: str, arrays: Arrays) -> onnx.ModelProto:
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]> g {text}')
    for node in model.graph.node:
        node.name = f"n_{node.output[0]}"
    for name, array in arrays.items():
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    return model


@pytest.fixture
def quantize(plain_context: Callable[..., Any]) -> Callable[..., tuple[ir.Model, PassReport, Any]]:
    def apply(
        reduce_range: ReducedRange | None,
        model: ir.Model | None = None,
        feeds: list[Feeds] | None = None,
        **context: Any,
    ) -> tuple[ir.Model, PassReport, Any]:
        original = model or ir.from_proto(_proto(TWO_LAYERS, _weights()))
        result = original.clone()
        target = load_target("cpu-avx2")
        found = plain_context(feeds or _two_feeds(), original, target, **context)
        report = QuantizeStatic(reduce_range=reduce_range, min_sqnr=0.0).apply(result, found)
        return result, report, found

    return apply


def _codes(model: ir.Model, name: str) -> NDArray[Any]:
    array = const_array(model.graph.initializers[f"{name}_quantized"])
    assert array is not None
    return array


def _differing(model: ir.Model, feeds: list[Feeds]) -> dict[str, int]:
    """Codes that a processor without VNNI computes differently, by layer."""
    runtime = Runtime(model, device=find_device("x86-avx2"), counting=True)
    for one in feeds:
        runtime.run(one)
    return {name: counts.device_differs for name, counts in runtime.counts().items()}


def test_only_the_layer_that_saturates_gets_smaller_weights(quantize: Callable[..., Any]) -> None:
    found = {mode: quantize(mode)[0] for mode in ("none", "learned", "all")}
    w = {mode: _codes(model, "w") for mode, model in found.items()}
    v = {mode: _codes(model, "v") for mode, model in found.items()}
    assert np.array_equal(w["learned"], w["all"])
    assert np.array_equal(v["learned"], v["none"])
    for codes in (w, v):
        assert np.abs(codes["none"]).max() == 127
        assert np.abs(codes["all"]).max() < 70


def test_afterwards_nothing_differs_on_processors_without_vnni(
    quantize: Callable[..., Any],
) -> None:
    feeds = _two_feeds()
    before = _differing(quantize("none")[0], feeds)
    assert before["n_a"] > 0
    assert before["n_b"] == 0
    learned = quantize("learned")[0]
    assert _differing(learned, feeds) == {"n_a": 0, "n_b": 0}
    exact = open_session(learned, products=Products.EXACT)
    native = open_session(learned, products=Products.NATIVE)
    for one in feeds:
        for a, b in zip(run(exact, one).values(), run(native, one).values(), strict=True):
            assert np.array_equal(a, b)


def test_the_report_says_how_many_and_why(quantize: Callable[..., Any]) -> None:
    _, report, _ = quantize("learned")
    (note,) = [note for note in report.notes if "VNNI" in note]
    assert note.startswith("1 of 2 layers that could saturate without VNNI do so on 4 samples")
    assert note.endswith("and have smaller weights; 1 keep 8 bits")
    assert report.facts["reduced_channels"] == {"n_a": 4}


def test_the_target_decides_for_learning(quantize: Callable[..., Any]) -> None:
    assert content_hash(quantize(None)[0]) == content_hash(quantize("learned")[0])
    assert QuantizeStatic().resolve(load_target("cpu")).reduce_range == "none"


def test_learning_is_deterministic_and_calibrates_once(quantize: Callable[..., Any]) -> None:
    first, _, context = quantize("learned")
    second, _, _ = quantize("learned")
    assert content_hash(first) == content_hash(second)
    assert context.requests == quantize("all")[2].requests


def test_without_data_all_layers_are_reduced(quantize: Callable[..., Any]) -> None:
    model, report, _ = quantize("learned", has_data=False)
    assert content_hash(model) == content_hash(quantize("all")[0])
    assert any("there are no calibration data" in note for note in report.notes)


def test_an_operator_that_the_runtime_lacks_is_told(
    quantize: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def lacks(*_: Any, **__: Any) -> None:
        raise UnsupportedModelError("there is no function for Quux", where="node 'n_q'")

    monkeypatch.setattr(_saturation, "Runtime", lacks)
    model, report, _ = quantize("learned")
    assert content_hash(model) == content_hash(quantize("all")[0])
    (note,) = [note for note in report.notes if "VNNI" in note]
    assert note.endswith("there is no function for Quux (node 'n_q')")


def test_a_layer_that_writes_float_is_reduced(quantize: Callable[..., Any]) -> None:
    """It makes no codes that could be compared, and its float result would be off all the same."""
    w = np.random.default_rng(0).uniform(0.9, 1.0, (8, 4)).astype(np.float32)
    model = ir.from_proto(_proto("(float[N,8] x) => (float[N,4] y) { y = MatMul(x, w) }", {"w": w}))
    x = np.random.default_rng(1).uniform(0.0, 1.0, (6, 1, 8)).astype(np.float32)
    result, report, _ = quantize("learned", model, [{"x": one} for one in x])
    assert np.abs(_codes(result, "w")).max() < 70
    assert any("make no codes to compare" in note for note in report.notes)


LAYERS: dict[str, tuple[str, tuple[int, ...], tuple[int, ...]]] = {
    "Conv 3x3, odd channels": (
        "(float[N,3,5,5] x) => (float[N,8,3,3] y) { y = Conv(x, w) }",
        (8, 3, 3, 3),
        (1, 3, 5, 5),
    ),
    "Conv 1x1": (
        "(float[N,6,4,4] x) => (float[N,8,4,4] y) { y = Conv(x, w) }",
        (8, 6, 1, 1),
        (1, 6, 4, 4),
    ),
    "Conv, groups": (
        "(float[N,8,5,5] x) => (float[N,8,3,3] y) { y = Conv<group=2>(x, w) }",
        (8, 4, 3, 3),
        (1, 8, 5, 5),
    ),
    "Conv 1d": (
        "(float[N,6,9] x) => (float[N,8,7] y) { y = Conv(x, w) }",
        (8, 6, 3),
        (1, 6, 9),
    ),
    "Gemm": (
        "(float[N,9] x) => (float[N,8] y) { y = Gemm(x, w) }",
        (9, 8),
        (4, 9),
    ),
    "Gemm, transposed": (
        "(float[N,9] x) => (float[N,8] y) { y = Gemm<transB=1>(x, w) }",
        (8, 9),
        (4, 9),
    ),
    "MatMul": (
        "(float[N,5,10] x) => (float[N,5,8] y) { y = MatMul(x, w) }",
        (10, 8),
        (1, 5, 10),
    ),
}


@pytest.mark.parametrize("per_channel", [True, False])
@pytest.mark.parametrize("name", LAYERS)
def test_no_input_saturates_reduced_weights(
    name: str, per_channel: bool, plain_context: Callable[..., Any]
) -> None:
    """Inputs at both ends of their range: what onnxruntime computes natively is what is exact."""
    text, weight_shape, shape = LAYERS[name]
    rng = np.random.default_rng(0)
    w = rng.choice([-1.0, 1.0], weight_shape) * rng.uniform(0.5, 1.0, weight_shape)
    original = ir.from_proto(_proto(text, {"w": w.astype(np.float32)}))
    feeds = [{"x": rng.integers(0, 2, shape).astype(np.float32)} for _ in range(8)]
    results = {}
    for mode in ("none", "all"):
        result = original.clone()
        context = plain_context(feeds, original, load_target("cpu-avx2"))
        QuantizeStatic(reduce_range=mode, min_sqnr=0.0, per_channel=per_channel).apply(
            result, context
        )
        results[mode] = result
    device = find_device("x86-avx2")

    def is_exact(model: ir.Model) -> bool:
        exact, native = Runtime(model), Runtime(model, device=device)
        return all(np.array_equal(exact.run(f)["y"], native.run(f)["y"]) for f in feeds)

    assert not is_exact(results["none"])
    assert is_exact(results["all"])
    sessions = [open_session(results["all"], products=products) for products in Products]
    for one in feeds:
        first, second = (run(session, one)["y"] for session in sessions)
        assert np.array_equal(first, second)


@pytest.mark.parametrize(
    ("row", "codes"),
    [
        ([1.0, -1.0, 1.0, -1.0], [127, -127, 127, -127]),  # unlike signs do not add up
        ([1.0, 0.0, 0.0, 1.0], [127, 0, 0, 127]),  # in two pairs
        ([1.0, 0.25, 0.0, 0.0], [102, 25, 0, 0]),  # 1.25 in 127 steps
        ([-1.0, -1.0, 0.5, 0.0], [-64, -64, 32, 0]),  # 2 in 127 steps
    ],
)
def test_weights_are_as_large_as_their_pairs_allow(
    row: list[float], codes: list[int], quantize: Callable[..., Any]
) -> None:
    w = np.array(row, np.float32).reshape(1, 4, 1, 1)
    text = "(float[N,4,2,2] x) => (float[N,1,2,2] y) { y = Conv(x, w) }"
    model = ir.from_proto(_proto(text, {"w": w}))
    x = np.random.default_rng(0).uniform(0, 1, (4, 1, 4, 2, 2)).astype(np.float32)
    result, _, _ = quantize("all", model, [{"x": one} for one in x])
    assert _codes(result, "w").reshape(-1).tolist() == codes


def test_weights_that_are_computed_in_float_keep_8_bits(quantize: Callable[..., Any]) -> None:
    w = np.random.default_rng(0).uniform(0.9, 1.0, (4, 4, 2, 2)).astype(np.float32)
    text = "(float[N,4,3,3] x) => (float[N,4,4,4] y) { y = ConvTranspose(x, w) }"
    model = ir.from_proto(_proto(text, {"w": w}))
    x = np.random.default_rng(0).uniform(0, 1, (4, 1, 4, 3, 3)).astype(np.float32)
    result, _, _ = quantize("all", model, [{"x": one} for one in x])
    assert np.abs(_codes(result, "w")).max() == 127


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, DataSpec]:
    onnx.save(_proto(TWO_LAYERS, _weights()), tmp_path / "m.onnx")
    feeds = _two_feeds(16)
    arrays = {name: np.concatenate([one[name] for one in feeds]) for name in ("p", "q")}
    np.savez(tmp_path / "c.npz", allow_pickle=False, **arrays)
    return tmp_path / "m.onnx", DataSpec(source=str(tmp_path / "c.npz"))


@pytest.mark.parametrize("options", [{"format": "qoperator"}, {"rounding": "second-order"}, {}])
def test_the_whole_chain_ends_in_a_model_that_is_exact(
    options: dict[str, Any], files: tuple[Path, DataSpec], tmp_path: Path
) -> None:
    model, data = files
    run_passes(
        model,
        [Quantize.model_validate({"calibration": "minmax", **options})],
        output=tmp_path / "o.onnx",
        target="cpu-avx2",
        calibration=data,
        use_cache=False,
    )
    counts = _differing(load_model(tmp_path / "o.onnx"), _two_feeds(16))
    assert set(counts) == {"n_a", "n_b"}
    assert not any(counts.values())


def test_layers_left_in_float_are_looked_at_again(
    plain_context: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bound that no int8 layer keeps: whatever is still quantized is exact."""
    seen: list[list[str]] = []
    whole = _saturation.check_full_range

    def watched(work: Any, built: Any, outcome: Any) -> Any:
        result = whole(work, built, outcome)
        seen.append(result.layers())
        return result

    monkeypatch.setattr("slimctl.passes.quantize_static.check_full_range", watched)
    rng = np.random.default_rng(0)
    arrays = {n: rng.normal(0, 0.3, (4, 4, 1, 1)).astype(np.float32) for n in ("w", "v")}
    text = """(float[N,4,6,6] x) => (float[N,4,6,6] y) {
        a = Conv(x, w) r = Relu(a) y = Conv(r, v)
    }"""
    original = ir.from_proto(_proto(text, arrays))
    feeds = [{"x": rng.normal(0, 1, (1, 4, 6, 6)).astype(np.float32)} for _ in range(6)]
    result = original.clone()
    context = plain_context(feeds, original, load_target("cpu-avx2"))
    QuantizeStatic(min_sqnr=42.0).apply(result, context)
    assert seen
    assert len(seen[0]) < 2
    assert not any(_differing(result, feeds).values())


def test_dynamic_cannot_learn() -> None:
    with pytest.raises(ValidationError, match="reduce_range"):
        Quantize(mode="dynamic", reduce_range="learned")
    assert Quantize(mode="dynamic", reduce_range="all").expand()
