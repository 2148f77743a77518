"""Strong channels in float, the others in integers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import numpy_helper

from slimctl.core.contract import PassReport
from slimctl.evaluate.metrics import sqnr_db
from slimctl.graph.session import Level, open_session, run
from slimctl.passes.quantize import Quantize
from slimctl.passes.split_outliers import SplitOutliers
from slimctl.recipe.run import run_passes
from slimctl.recipe.schema import DataSpec

_WIDTH, _STRONG = 32, (3, 17)
_RANDOM = np.random.default_rng(0)
_STRENGTH = np.ones(_WIDTH, np.float32)
_STRENGTH[list(_STRONG)] = 60.0


def _weight(*shape: int) -> np.ndarray:
    return _RANDOM.standard_normal(shape, dtype=np.float32)


_CONSTANTS = {
    "two": np.full(_WIDTH, 2.0, np.float32),
    "w": _weight(_WIDTH, 24),
    "v": _weight(24, _WIDTH),
    "u": _weight(_WIDTH, 24),
    "b": _weight(24),
    "k": _weight(4, _WIDTH, 1, 1),
}


def _model(body: str, io: str) -> ir.Model:
    proto = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 17]> g {io} {{ h = Mul (x, two) {body} }}'
    )
    for name, array in _CONSTANTS.items():
        if any(name in node.input for node in proto.graph.node):
            proto.graph.initializer.append(numpy_helper.from_array(array, name))
    for node in proto.graph.node:
        node.name = f"{node.op_type}_{node.output[0]}"
    return ir.from_proto(proto)


def _samples(*shape: int, count: int = 8) -> list[dict[str, np.ndarray]]:
    random = np.random.default_rng(1)
    drawn = random.standard_normal((count, *shape), dtype=np.float32)
    return [{"x": (one * _STRENGTH)[None]} for one in drawn]


def _applied(
    model: ir.Model,
    feeds: list[dict[str, np.ndarray]],
    plain_context: Callable[..., Any],
    **options: Any,
) -> tuple[ir.Model, PassReport]:
    result = model.clone()
    return result, SplitOutliers(**options).apply(result, plain_context(feeds, model))


_LAYERS = {
    "MatMul of three axes": (
        "y = MatMul (h, w)",
        "(float[N, 5, 32] x) => (float[N, 5, 24] y)",
        (5, _WIDTH),
    ),
    "Gemm": (
        "y = Gemm <transB = 1, alpha = 0.5, beta = 2.0> (h, v, b)",
        "(float[N, 32] x) => (float[N, 24] y)",
        (_WIDTH,),
    ),
    "two readers": (
        "p = MatMul (h, w) q = MatMul (h, u) y = Mul (p, q)",
        "(float[N, 5, 32] x) => (float[N, 5, 24] y, float[N, 5, 24] p)",
        (5, _WIDTH),
    ),
}


@pytest.mark.parametrize("case", sorted(_LAYERS))
def test_the_same_is_computed(case: str, plain_context: Callable[..., Any]) -> None:
    body, io, shape = _LAYERS[case]
    model, feeds = _model(body, io), _samples(*shape)
    result, report = _applied(model, feeds, plain_context, channels=2)
    layers = body.count("MatMul") + body.count("Gemm")
    assert sum(report.changed.values()) == layers
    assert sum(node.op_type == "Gather" for node in result.graph) == 1
    (taken,) = (v for n, v in result.graph.initializers.items() if "outlier_channels" in n)
    assert tuple(taken.const_value.numpy()) == _STRONG  # type: ignore[union-attr]
    for level in Level:
        expected = run(open_session(model, level=level), feeds[0])
        found = run(open_session(result, level=level), feeds[0])
        assert list(found) == list(expected)
        for name, array in expected.items():
            np.testing.assert_allclose(found[name], array, atol=1e-5 * np.abs(array).max())


def test_the_fact_is_how_much_the_range_shrinks(plain_context: Callable[..., Any]) -> None:
    body, io, shape = _LAYERS["Gemm"]
    feeds = _samples(*shape)
    _, report = _applied(_model(body, io), feeds, plain_context, channels=2)
    peaks = np.abs(np.concatenate([one["x"] for one in feeds])).max(axis=0)
    rest = np.delete(peaks, _STRONG).max()
    assert report.facts["range_shrinks"]["h"] == pytest.approx(peaks.max() / rest, rel=1e-3)


def test_even_channels_are_left_alone(plain_context: Callable[..., Any]) -> None:
    body, io, shape = _LAYERS["Gemm"]
    feeds = [{"x": one["x"] / _STRENGTH} for one in _samples(*shape)]
    result, report = _applied(_model(body, io), feeds, plain_context, channels=2)
    assert not report.changed
    assert "times only" in report.skipped[0].reason
    assert len(result.graph) == 2


def test_convolutions_are_left_alone(plain_context: Callable[..., Any]) -> None:
    model = _model(
        "c = Reshape (h, s) y = Conv (c, k)",
        "(float[N, 32] x) => (float[N, 4, 1, 1] y) <int64[4] s = {0, 32, 1, 1}>",
    )
    _, report = _applied(model, _samples(_WIDTH), plain_context)
    assert [skipped.reason for skipped in report.skipped] == ["convolutions stay as they are"]


def _dynamic(tmp_path: Path, **options: Any) -> tuple[ir.Model, float]:
    body, io, shape = _LAYERS["two readers"]
    source, data, output = (tmp_path / name for name in ("m.onnx", "x.npz", "q.onnx"))
    model, feeds = _model(body, io), _samples(*shape, count=16)
    ir.save(model, source)
    np.savez(data, x=np.concatenate([one["x"] for one in feeds]))
    steps = [Quantize(mode="dynamic", min_sqnr=0.0, **options)]
    run_passes(source, steps, output=output, calibration=DataSpec(source=str(data)), force=True)
    expected, found = (run(open_session(path), feeds[0])["p"] for path in (source, output))
    return ir.load(output), sqnr_db(expected, found)


def test_what_is_left_has_more_levels(tmp_path: Path) -> None:
    _, plain = _dynamic(tmp_path)
    result, split = _dynamic(tmp_path, split_outliers=2)
    # Outputs hold the strong channels, which lose nothing any more: more than the rest gains.
    assert split > plain + 6.0
    kinds = [node.op_type for node in result.graph]
    assert kinds.count("MatMul") == 2  # the outliers, in float
    assert kinds.count("MatMulInteger") == 2


def test_only_for_ranges_of_run_time() -> None:
    with pytest.raises(ValueError, match="split_outliers has no meaning for mode static"):
        Quantize(mode="static", split_outliers=4)
