"""SmoothQuant: exact in float, factors as in the paper, and a gain where channels are uneven."""

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

from slimctl.core.contract import Outlook
from slimctl.core.errors import ConfigError
from slimctl.evaluate.metrics import sqnr_db
from slimctl.graph.edit import const_array
from slimctl.graph.load import load_model
from slimctl.graph.session import open_session, run
from slimctl.passes.quantize import Quantize
from slimctl.passes.smooth import Smooth
from slimctl.recipe.run import run_passes
from slimctl.recipe.schema import DataSpec

WIDTH = 32
LOUD = (3, 17)
"""Channels a hundred times stronger than the others."""

FORMS = {
    # The residual reads the normalized tensor, too: a multiplication must be added.
    "residual": ("n = LayerNormalization<axis=-1>(x, g, b) h = MatMul(n, w1) y = Add(h, n)", 1),
    "normalization": ("n = LayerNormalization<axis=-1>(x, g, b) y = MatMul(n, w1)", 0),
    "scale and shift": ("n = LayerNormalization<axis=-1>(x, one) s = Mul(n, g) t = Add(s, b) "
                        "y = MatMul(t, w1)", 0),
    "two readers": ("n = LayerNormalization<axis=-1>(x, g, b) p = MatMul(n, w1) q = MatMul(n, w2) "
                    "y = Add(p, q)", 0),
    "scalar factor": ("n = LayerNormalization<axis=-1>(x, g, b) e = Gelu(n) h = Mul(e, half) "
                      "y = MatMul(h, w1)", 0),
    "activation": ("n = LayerNormalization<axis=-1>(x, g, b) e = Gelu(n) y = MatMul(e, w1)", 1),
    "output": ("y = LayerNormalization<axis=-1>(x, g, b) z = MatMul(y, w1)", 1),
    "shared shift": ("n = LayerNormalization<axis=-1>(x, one) s = Mul(n, g) t = Add(s, b) "
                     "u = Add(s, b) h = MatMul(t, w1) y = Add(h, u)", 1),
}  # fmt: skip


def _constants() -> dict[str, NDArray[Any]]:
    rng = np.random.default_rng(0)
    strength = rng.uniform(0.5, 1.5, WIDTH)
    strength[list(LOUD)] *= 100.0
    arrays = {
        "g": strength,
        "b": rng.normal(0, 0.2, WIDTH),
        "one": np.ones(WIDTH),
        "half": np.array(0.5),
        "w1": rng.normal(0, 0.1, (WIDTH, WIDTH)),
        "w2": rng.normal(0, 0.1, (WIDTH, WIDTH)),
    }
    return {name: array.astype(np.float32) for name, array in arrays.items()}


def _model(form: str) -> ir.Model:
    body, _ = FORMS[form]
    outputs = "float[N,S,32] y" + (", float[N,S,32] z" if " z = " in body else "")
    model = onnx.parser.parse_model(
        f'<ir_version: 9, opset_import: ["": 20]> m (float[N,S,32] x) => ({outputs}) {{ {body} }}'
    )
    used = {name for node in model.graph.node for name in node.input}
    for name, array in _constants().items():
        if name in used:
            model.graph.initializer.append(numpy_helper.from_array(array, name))
    for index, node in enumerate(model.graph.node):
        node.name = f"{node.op_type}_{index}"
    onnx.checker.check_model(model)
    return ir.from_proto(model)


def _feeds(count: int = 6) -> list[dict[str, NDArray[Any]]]:
    rng = np.random.default_rng(1)
    return [{"x": rng.normal(0, 1, (2, 9, WIDTH)).astype(np.float32)} for _ in range(count)]


@pytest.fixture
def smoothed(plain_context: Callable[..., Any]) -> Callable[..., Any]:
    def apply(model: ir.Model, **options: Any) -> tuple[ir.Model, Any]:
        result = model.clone()
        context = plain_context(_feeds(), model)
        context.outlook = lambda model, other, changed: Outlook(40.0, 50.0)
        return result, Smooth(**options).apply(result, context)

    return apply


def _outputs(model: ir.Model) -> dict[str, NDArray[Any]]:
    return run(open_session(model), _feeds()[0])


@pytest.mark.parametrize("form", FORMS)
def test_the_function_stays_and_multiplications_are_added_only_where_needed(
    form: str, smoothed: Callable[..., Any]
) -> None:
    model = _model(form)
    result, report = smoothed(model, alpha=0.5)
    assert report.changed.get("Mul added", 0) == FORMS[form][1]
    assert report.changed["MatMul"] >= 1
    before, after = _outputs(model), _outputs(result)
    for name in before:
        assert sqnr_db(before[name], after[name]) > 90
    unchanged = _outputs(model)
    assert all(np.array_equal(before[name], unchanged[name]) for name in before)


@pytest.mark.parametrize("alpha", [0.25, 0.5, 1.0])
def test_factors_are_those_of_the_paper(alpha: float, smoothed: Callable[..., Any]) -> None:
    model = _model("normalization")
    result, report = smoothed(model, alpha=alpha)
    constants = _constants()
    seen = np.concatenate(
        [_normalized(feed["x"], constants).reshape(-1, WIDTH) for feed in _feeds()]
    )
    expected = np.abs(seen).max(axis=0) ** alpha / np.abs(constants["w1"]).max(axis=1) ** (
        1 - alpha
    )
    node = next(node for node in result.graph if node.op_type == "MatMul")
    weight = const_array(node.inputs[1])
    assert weight is not None
    found = weight[:, 0] / constants["w1"][:, 0]
    ratio = found / expected
    assert np.allclose(ratio, ratio[0], rtol=1e-4)
    assert report.facts["alpha"] == {"n": alpha}


def _normalized(x: NDArray[Any], constants: dict[str, NDArray[Any]]) -> NDArray[Any]:
    mean, spread = x.mean(-1, keepdims=True), x.std(-1, keepdims=True)
    return np.asarray((x - mean) / np.sqrt(spread**2 + 1e-5) * constants["g"] + constants["b"])


def test_a_search_finds_a_lower_error_than_any_fixed_alpha(smoothed: Callable[..., Any]) -> None:
    model = _model("two readers")
    _, searched = smoothed(model)
    left = searched.facts["error_left"]["n"]
    assert left < 0.2
    for alpha in (0.3, 0.5, 0.7, 0.9):
        _, fixed = smoothed(model, alpha=alpha)
        assert left <= fixed.facts["error_left"]["n"] + 1e-9


def test_even_channels_are_left_alone(smoothed: Callable[..., Any]) -> None:
    model = _model("normalization")
    model.graph.initializers["g"].const_value = ir.tensor(np.ones(WIDTH, np.float32), name="g")
    result, report = smoothed(model)
    assert not report.changed
    assert ["no alpha lowers" in item.reason for item in report.skipped] == [True]
    assert [node.op_type for node in result.graph] == [node.op_type for node in model.graph]


def test_it_is_dropped_where_the_outputs_gain_nothing(plain_context: Callable[..., Any]) -> None:
    model = _model("normalization")
    for outlook, reason in (
        (Outlook(40.0, 40.1), "a gain of 0.3 dB"),
        (Outlook(3.0, None), "little beside that of the outputs"),
        (None, "no later step can tell"),
    ):
        result, context = model.clone(), plain_context(_feeds(), model, later=("quantize-static",))
        context.outlook = lambda model, other, changed, found=outlook: found
        report = Smooth().apply(result, context)
        assert not report.changed
        assert reason in report.skipped[0].reason
        assert np.array_equal(_outputs(result)["y"], _outputs(model)["y"])


def test_excluded_layers_keep_their_input(smoothed: Callable[..., Any]) -> None:
    model = _model("two readers")
    result, report = smoothed(model, alpha=0.5, exclude=("MatMul_2",))
    assert [item.node for item in report.skipped] == ["MatMul_2"]
    assert report.changed == {"MatMul": 1, "Mul added": 1}
    assert sqnr_db(_outputs(model)["y"], _outputs(result)["y"]) > 90


def test_a_network_with_loud_channels_keeps_far_more(tmp_path: Path) -> None:
    source, data = tmp_path / "m.onnx", tmp_path / "c.npz"
    ir.save(_model("two readers"), source)
    np.savez(data, x=np.concatenate([feed["x"] for feed in _feeds(8)]))
    kept = {}
    for smooth in (0.0, None):
        output = tmp_path / "o.onnx"
        run_passes(
            source,
            [Quantize(min_sqnr=0, smooth=smooth, equalize=False)],
            output=output,
            calibration=DataSpec(source=str(data)),
            use_cache=False,
            force=True,
        )
        kept[smooth] = sqnr_db(_outputs(load_model(source))["y"], _outputs(load_model(output))["y"])
    assert kept[None] > kept[0.0] + 6


def test_it_stands_before_quantization(tmp_path: Path) -> None:
    source = tmp_path / "m.onnx"
    ir.save(_model("normalization"), source)
    with pytest.raises(ConfigError, match="cannot run after 'quantize-static'"):
        run_passes(source, [Quantize(), Smooth()], output=tmp_path / "o.onnx")


CONVOLUTIONS = {
    "factor and shift": ("m = Mul(h, f) a = Add(m, s) y = Conv<pads=[1,1,1,1]>(a, w)", 1),
    "depthwise": ("m = Mul(h, f) y = Conv<group=8, pads=[1,1,1,1]>(m, d)", 1),
    "quotient": ("m = Div(h, f) y = Conv(m, w)", 1),
    "nothing in front": ("y = Conv(h, w)", 0),
    "read elsewhere": ("m = Mul(h, f) c = Conv<pads=[1,1,1,1]>(m, w) y = Add(c, m)", 0),
}


@pytest.mark.parametrize("form", CONVOLUTIONS)
def test_in_front_of_convolutions_only_constants_change(
    form: str, plain_context: Callable[..., Any]
) -> None:
    body, smoothed_layers = CONVOLUTIONS[form]
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> g (float[N,8,7,7] x) => (float[N,8,P,Q] y) '
        f"{{ h = HardSwish(x) {body} }}"
    )
    rng = np.random.default_rng(0)
    arrays = {
        "f": np.array([1.7]),
        "s": np.array([-0.4]),
        "w": rng.normal(size=(8, 8, 3, 3)),
        "d": rng.normal(size=(8, 1, 3, 3)),
    }
    used = {name for node in model.graph.node for name in node.input}
    for name in used & set(arrays):
        tensor = numpy_helper.from_array(arrays[name].astype(np.float32), name)
        model.graph.initializer.append(tensor)
    for node in model.graph.node:
        node.name = node.op_type
    original = ir.from_proto(model)
    loud = np.where(np.arange(8) == 5, 50.0, 1.0).reshape(1, 8, 1, 1)
    feeds = [{"x": (rng.normal(size=(2, 8, 7, 7)) * loud).astype(np.float32)} for _ in range(4)]
    context = plain_context(feeds, original)
    context.outlook = lambda model, other, changed: Outlook(40.0, 50.0)
    result = original.clone()
    report = Smooth(alpha=0.5).apply(result, context)
    assert report.changed.get("Conv", 0) == smoothed_layers
    assert [node.op_type for node in result.graph] == [node.op_type for node in original.graph]
    reasons = [item.reason for item in report.skipped]
    assert [("no factor or shift" in reason) for reason in reasons] == [True] * (
        1 - smoothed_layers
    )
    before, after = (run(open_session(each), feeds[0])["y"] for each in (original, result))
    assert sqnr_db(before, after) > 90
