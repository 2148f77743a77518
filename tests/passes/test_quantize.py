"""The quantize pass: where Q/DQ goes, what is stored, what onnxruntime makes of it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import numpy_helper

from slimctl.core.contract import PassReport
from slimctl.core.errors import OptionError, PassFailedError, UnsupportedModelError
from slimctl.graph.edit import const_array, interface
from slimctl.graph.load import load_model
from slimctl.graph.session import Level
from slimctl.passes.bias_correction import BiasCorrection
from slimctl.passes.equalize import Equalize
from slimctl.passes.fuse import Fuse
from slimctl.passes.quantize import Quantize
from slimctl.passes.quantize_embeddings import QuantizeEmbeddings
from slimctl.passes.quantize_static import QuantizeStatic
from slimctl.targets import load_target

GOLDEN = Path(__file__).parent / "golden"

# Small graphs in ONNX text; every initializer is random by its declared shape.
GRAPHS: dict[str, tuple[str, dict[str, tuple[int, ...]]]] = {
    "conv_relu_conv": (
        "(float[N,3,8,8] x) => (float[N,4,8,8] y)",
        {"w1": (8, 3, 3, 3), "b1": (8,), "w2": (4, 8, 1, 1)},
    ),
    "residual": (
        "(float[N,4,8,8] x) => (float[N,4,8,8] y)",
        {"w1": (4, 4, 3, 3), "w2": (4, 4, 3, 3)},
    ),
    "squeeze_excitation": (
        "(float[N,8,8,8] x) => (float[N,4,8,8] y)",
        {"w1": (8, 8, 1, 1), "w2": (8, 8, 1, 1), "w3": (4, 8, 1, 1)},
    ),
    "mlp": (
        "(float[N,16] x) => (float[N,4] y)",
        {"w1": (16, 32), "b1": (32,), "w2": (4, 32), "b2": (4,)},
    ),
    "attention": (
        "(float[N,6,16] x) => (float[N,6,16] y)",
        {"wq": (16, 16), "wk": (16, 16), "wv": (16, 16)},
    ),
    "hard_swish": (
        "(float[N,4,8,8] x) => (float[N,4,8,8] y)",
        {"w1": (4, 4, 3, 3), "w2": (4, 4, 1, 1)},
    ),
    "pool_concat": (
        "(float[N,4,8,8] x) => (float[N,2,4,4] y)",
        {"w1": (4, 4, 1, 1), "w2": (4, 4, 1, 1), "w3": (2, 8, 1, 1)},
    ),
    "head_reads_float": (
        "(float[N,4,8,8] x) => (float[N,4,8,8] y, float[N,4] scores)",
        {"w1": (4, 4, 3, 3)},
    ),
}
BODIES = {
    "conv_relu_conv": """
        a = Conv<pads=[1,1,1,1]>(x, w1, b1)
        r = Relu(a)
        y = Conv(r, w2)""",
    "residual": """
        a = Conv<pads=[1,1,1,1]>(x, w1)
        c = Clip(a, lo, hi)
        b = Conv<pads=[1,1,1,1]>(c, w2)
        s = Add(b, c)
        r = Relu(s)
        y = Conv<pads=[1,1,1,1]>(r, w1)""",
    "squeeze_excitation": """
        a = Conv(x, w1)
        p = GlobalAveragePool(a)
        e = Conv(p, w2)
        g = HardSigmoid(e)
        m = Mul(a, g)
        y = Conv(m, w3)""",
    "mlp": """
        a = Gemm(x, w1, b1)
        r = Relu(a)
        y = Gemm<transB=1>(r, w2, b2)""",
    "attention": """
        q = MatMul(x, wq)
        k = MatMul(x, wk)
        v = MatMul(x, wv)
        t = Transpose<perm=[0,2,1]>(k)
        s = MatMul(q, t)
        p = Softmax(s)
        y = MatMul(p, v)""",
    "hard_swish": """
        a = Conv<pads=[1,1,1,1]>(x, w1)
        h = HardSwish(a)
        y = Conv(h, w2)""",
    "pool_concat": """
        a = Conv(x, w1)
        p = MaxPool<kernel_shape=[2,2],strides=[2,2]>(a)
        b = Conv<strides=[2,2]>(x, w2)
        c = Concat<axis=1>(p, b)
        y = Conv(c, w3)""",
    "head_reads_float": """
        y = Conv<pads=[1,1,1,1]>(x, w1)
        g = GlobalAveragePool(y)
        scores = Flatten(g)""",
}


def _graph(name: str) -> ir.Model:
    signature, weights = GRAPHS[name]
    rng = np.random.default_rng(0)
    text = f'<ir_version: 8, opset_import: ["": 17]>\n{name} {signature} {{{BODIES[name]}\n}}'
    model = onnx.parser.parse_model(text)
    for node in model.graph.node:
        node.name = f"{node.op_type}_{node.output[0]}"
    arrays = {key: rng.normal(0, 0.5, shape).astype(np.float32) for key, shape in weights.items()}
    if " lo" in BODIES[name]:
        arrays |= {"lo": np.asarray(0, np.float32), "hi": np.asarray(6, np.float32)}
    for key, array in arrays.items():
        model.graph.initializer.append(numpy_helper.from_array(array, key))
    onnx.checker.check_model(model)
    return ir.from_proto(model)


def _feeds(model: ir.Model, count: int = 8) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(1)
    return [
        {
            v.name or "": rng.normal(
                0, 1, [d if isinstance(d, int) else 1 for d in v.shape or ()]
            ).astype(v.dtype.numpy() if v.dtype else np.float32)
            for v in model.graph.inputs
        }
        for _ in range(count)
    ]


@pytest.fixture
def quantized(plain_context: Callable[..., Any]) -> Callable[..., tuple[ir.Model, PassReport]]:
    def apply(
        model: ir.Model,
        options: QuantizeStatic | None = None,
        target: Any = "cpu",
        feeds: Any = None,
    ) -> tuple[ir.Model, PassReport]:
        result = model.clone()
        profile = load_target(target) if isinstance(target, str) else target
        context = plain_context(feeds or _feeds(model), model, profile)
        report = (options or QuantizeStatic()).apply(result, context)
        assert interface(result) == interface(model)
        return result, report

    return apply


def _as_text(model: ir.Model) -> str:
    """One line per node: enough to see where pairs land, stable under changes of numbers."""
    lines = []
    for node in model.graph:
        inputs = ", ".join(value.name or "" if value else "" for value in node.inputs)
        outputs = ", ".join(value.name or "" for value in node.outputs)
        lines.append(f"{outputs} = {node.op_type}({inputs})")
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("name", GRAPHS)
def test_golden_graph(name: str, quantized: Callable[..., Any]) -> None:
    """Where the pairs land. ``SLIMCTL_GOLDEN=1`` writes the files; review them as a diff."""
    found = _as_text(quantized(_graph(name))[0])
    file = GOLDEN / f"quantize_{name}.txt"
    if os.environ.get("SLIMCTL_GOLDEN"):
        file.parent.mkdir(exist_ok=True)
        file.write_text(found, encoding="utf-8")
    assert found == file.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("target", ["cpu", "cpu-avx2", "cpu-arm64"])
def test_every_layer_fuses_and_stays_close(
    name: str, target: str, quantized: Callable[..., Any], outputs_of: Callable[..., Any]
) -> None:
    model = _graph(name)
    result, report = quantized(model, target=target)
    assert report.facts["fusion"]["unfused"] == []
    linear = sum(node.op_type in ("Conv", "Gemm", "MatMul") for node in model.graph)
    kernels = report.facts["fusion"]["kernels"]
    fused = sum(
        kernels.get(k, 0) for k in ("QLinearConv", "QGemm", "QLinearMatMul", "MatMulIntegerToFloat")
    )
    assert fused == linear
    feeds = _feeds(model)
    for level in (Level.DISABLED, Level.ALL):
        for ours, theirs in zip(
            outputs_of(model, feeds), outputs_of(result, feeds, level), strict=True
        ):
            noise = np.mean((ours - theirs) ** 2)
            # Each quantized tensor adds a noise of step^2 / 12; 20 dB leaves room for five of them.
            assert 10 * np.log10(np.mean(ours**2) / noise) > 20


def test_same_model_gives_the_same_bytes(quantized: Callable[..., Any]) -> None:
    first, second = (
        ir.to_proto(quantized(_graph("residual"))[0]).SerializeToString(deterministic=True)
        for _ in range(2)
    )
    assert first == second


def test_clamps_that_saturation_replaces_are_removed(quantized: Callable[..., Any]) -> None:
    result, report = quantized(_graph("residual"))
    assert report.facts["removed_clamps"] == {"Clip": 1, "Relu": 1}
    assert not any(node.op_type in ("Relu", "Clip") for node in result.graph)


def test_relu_that_saturation_does_not_replace_is_kept(quantized: Callable[..., Any]) -> None:
    # A range symmetric about zero does not stop at zero.
    target = load_target("cpu").model_copy(update={"activation_symmetric": True})
    result, report = quantized(_graph("conv_relu_conv"), target=target)
    assert report.facts["removed_clamps"] == {}
    assert any(node.op_type == "Relu" for node in result.graph)


def _initializer(model: ir.Model, prefix: str) -> np.ndarray:
    found = [v for name, v in model.graph.initializers.items() if name.startswith(prefix)]
    assert len(found) == 1, [v.name for v in found]
    array = const_array(found[0])
    assert array is not None
    return array


def _model(text: str, arrays: dict[str, np.ndarray], opset: int = 17) -> ir.Model:
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": {opset}]>\ng {text}')
    for index, node in enumerate(model.graph.node):
        node.name = f"n{index}"
    for key, array in arrays.items():
        model.graph.initializer.append(numpy_helper.from_array(array, key))
    return ir.from_proto(model)


def _random(*shape: int) -> np.ndarray:
    return np.random.default_rng(5).normal(0, 0.5, shape).astype(np.float32)


def test_weights_per_channel_by_hand(quantized: Callable[..., Any]) -> None:
    w = _random(4, 3, 1, 1)
    result, _ = quantized(
        _model("(float[1,3,5,5] x) => (float[1,4,5,5] y) { y = Conv(x, w) }", {"w": w})
    )
    scale = np.abs(w).max(axis=(1, 2, 3)) / 127
    np.testing.assert_allclose(_initializer(result, "w_scale"), scale, rtol=1e-6)
    np.testing.assert_array_equal(
        _initializer(result, "w_quantized"), np.rint(w / scale.reshape(4, 1, 1, 1)).astype(np.int8)
    )


def test_per_tensor(quantized: Callable[..., Any]) -> None:
    model = _model(
        "(float[1,3,5,5] x) => (float[1,4,5,5] y) { y = Conv(x, w) }", {"w": _random(4, 3, 1, 1)}
    )
    result, _ = quantized(model, QuantizeStatic(per_channel=False))
    assert _initializer(result, "w_scale").shape == ()


def test_bias_is_int32_on_the_product_of_scales(quantized: Callable[..., Any]) -> None:
    b = _random(4)
    model = _model(
        "(float[1,3,5,5] x) => (float[1,4,5,5] y) { y = Conv(x, w, b) }",
        {"w": _random(4, 3, 1, 1), "b": b},
    )
    result, _ = quantized(model)
    scale = _initializer(result, "x_scale") * _initializer(result, "w_scale")
    np.testing.assert_array_equal(_initializer(result, "b_scale"), scale)
    np.testing.assert_array_equal(
        _initializer(result, "b_quantized"), np.rint(b / scale).astype(np.int32)
    )


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_conv_transpose_keeps_its_own_axis(
    groups: int, quantized: Callable[..., Any], outputs_of: Callable[..., Any]
) -> None:
    model = _model(
        f"(float[1,8,5,5] x) => (float[1,{3 * groups},7,7] y) "
        f"{{ y = ConvTranspose<group={groups}>(x, w, b) }}",
        {"w": _random(8, 3, 3, 3), "b": _random(3 * groups)},
    )
    result, report = quantized(model)
    assert _initializer(result, "w_scale").shape == (3,)
    ours, theirs = (outputs_of(m, _feeds(model))[0] for m in (model, result))
    assert 10 * np.log10(np.mean(ours**2) / np.mean((ours - theirs) ** 2)) > 40
    assert any("computed in float" in note for note in report.notes)


@pytest.mark.parametrize("bias_shape", [(6,), (1, 6), (1,), (1, 1)])
@pytest.mark.parametrize("transposed", [0, 1])
def test_gemm_factors_and_bias_shapes(
    bias_shape: tuple[int, ...],
    transposed: int,
    quantized: Callable[..., Any],
    outputs_of: Callable[..., Any],
) -> None:
    shape = (6, 16) if transposed else (16, 6)
    model = _model(
        "(float[2,16] x) => (float[2,6] y) "
        f"{{ y = Gemm<transB={transposed}, alpha=0.5, beta=2.0>(x, w, b) }}",
        {"w": _random(*shape), "b": _random(*bias_shape)},
    )
    result, report = quantized(model)
    assert report.facts["fusion"]["kernels"] == {"QGemm": 1}
    assert _initializer(result, "w_scale").shape == (6,)
    feeds = _feeds(model)
    ours, theirs = outputs_of(model, feeds)[0], outputs_of(result, feeds)[0]
    assert 10 * np.log10(np.mean(ours**2) / np.mean((ours - theirs) ** 2)) > 30


def test_bias_that_would_overflow_raises_its_weight_scale(
    quantized: Callable[..., Any], outputs_of: Callable[..., Any]
) -> None:
    w, b = _random(4, 3, 1, 1), np.float32([0.1, 5.0, -0.2, -4.5])
    w[[1, 3]] *= 1e-10
    model = _model(
        "(float[1,3,5,5] x) => (float[1,4,5,5] y) { y = Conv(x, w, b) }", {"w": w, "b": b}
    )
    result, report = quantized(model)
    assert report.facts["raised_channels"] == {"n0": 2}
    assert np.abs(_initializer(result, "b_quantized")).max() <= 2**30
    y = outputs_of(result, _feeds(model))[0].reshape(-1, 4, 25)
    step = float(_initializer(result, "y_scale"))
    assert np.abs(y[:, 1] - 5.0).max() <= step / 2 * 1.001
    assert np.abs(y[:, 3] + 4.5).max() <= step / 2 * 1.001


def test_all_zero_channel(quantized: Callable[..., Any]) -> None:
    w = _random(4, 3, 1, 1)
    w[2] = 0
    model = _model(
        "(float[1,3,5,5] x) => (float[1,4,5,5] y) { y = Conv(x, w, b) }", {"w": w, "b": _random(4)}
    )
    scale = _initializer(quantized(model)[0], "w_scale")
    assert np.isfinite(scale).all() and (scale > 0).all()


def _worst_pair(codes: np.ndarray) -> np.ndarray:
    """The largest sum of two uint8 x int8 products that a kernel adds, per output of a Conv."""
    rows = codes.astype(int).transpose(0, 2, 3, 1).reshape(len(codes), -1)  # taps, then channels
    pairs = [
        (row[i : i + 2].clip(0).sum(), -row[i : i + 2].clip(None, 0).sum())
        for row in rows
        for i in range(0, len(row), 2)
    ]
    return 255 * np.array(pairs).reshape(len(rows), -1).max(axis=1)


def test_reduced_range_only_where_16_bits_could_saturate(quantized: Callable[..., Any]) -> None:
    w = _random(4, 8, 3, 3)
    w[1] = 0
    w[1, 0, 0, 0] = 1.0  # a single weight: no pair can saturate
    model = _model("(float[1,8,6,6] x) => (float[1,4,4,4] y) { y = Conv(x, w) }", {"w": w})
    full = _initializer(quantized(model)[0], "w_quantized")
    every = QuantizeStatic(reduce_range="all")
    reduced = _initializer(quantized(model, every, target="cpu-avx2")[0], "w_quantized")
    limit = np.iinfo(np.int16).max
    assert (_worst_pair(full)[[0, 2, 3]] > limit).all()
    assert (_worst_pair(reduced) <= limit).all()
    assert np.abs(reduced[1]).max() == 127


def test_float_weights_are_gone(quantized: Callable[..., Any]) -> None:
    result, _ = quantized(_graph("conv_relu_conv"))
    assert not {"w1", "w2", "b1"} & set(result.graph.initializers)


def test_shared_weight_is_stored_once(quantized: Callable[..., Any]) -> None:
    result, _ = quantized(_graph("residual"))
    assert sum(name.startswith("w1_quantized") for name in result.graph.initializers) == 1


@pytest.mark.parametrize("name", GRAPHS)
def test_equal_zero_points_are_stored_once_and_scales_for_each(
    name: str, quantized: Callable[..., Any]
) -> None:
    result, _ = quantized(_graph(name))
    restores = [node for node in result.graph if node.op_type == "DequantizeLinear"]
    arrays = [const_array(value) for value in {n.inputs[2] for n in restores if len(n.inputs) > 2}]
    assert len({(a.dtype, a.shape, a.tobytes()) for a in arrays if a is not None}) == len(arrays)
    # Training changes each scale by itself: those of different codes are apart, equal or not.
    codes_of = {(node.inputs[1], node.inputs[0]) for node in restores}
    assert len({scale for scale, _ in codes_of}) == len(codes_of)


def test_names_of_new_nodes_and_tensors_are_short(quantized: Callable[..., Any]) -> None:
    result, _ = quantized(_graph("residual"))
    made = {node.name: node.outputs[0].name for node in result.graph if node.name}
    names = {"x_q": "x_q", "w1_dq": "w1_dq", "w1_dq_1": "w1_dq_1", "y_dq": "y"}
    assert names.items() <= made.items()


def test_outputs_keep_float_and_their_names(quantized: Callable[..., Any]) -> None:
    result, _ = quantized(_graph("head_reads_float"))
    assert [v.dtype for v in result.graph.outputs] == [ir.DataType.FLOAT, ir.DataType.FLOAT]
    assert result.graph.outputs[0].producer().op_type == "DequantizeLinear"


def test_float_reader_of_a_float_tensor_keeps_the_exact_value(
    quantized: Callable[..., Any],
) -> None:
    model = _model(
        "(float[2,16] x) => (float[2,16] y) { h = Tanh(x) m = MatMul(h, w) y = Add(m, h) }",
        {"w": _random(16, 16)},
    )
    result, _ = quantized(model)
    add = next(node for node in result.graph if node.op_type == "Sum")
    assert add.inputs[1].producer().op_type == "Tanh"


@pytest.mark.parametrize(
    ("exclude", "left"),
    [("n1", {"n1"}), ("op:Conv", {"n0", "n1"}), ("re:^n0$", {"n0"}), ("y", {"n1"})],
)
def test_exclude(exclude: str, left: set[str], quantized: Callable[..., Any]) -> None:
    model = _model(
        "(float[1,3,5,5] x) => (float[1,2] g) "
        "{ a = Conv(x, w) y = Conv(a, v) p = GlobalAveragePool(y) f = Flatten(p) "
        "g = MatMul(f, u) }",
        {"w": _random(4, 3, 1, 1), "v": _random(2, 4, 1, 1), "u": _random(2, 2)},
    )
    _, report = quantized(model, QuantizeStatic(exclude=(exclude,)))
    assert {item.node for item in report.skipped} == left
    assert all("excluded" in item.reason for item in report.skipped)


@pytest.mark.parametrize("relu", ["", "r = Relu(a1)"])
def test_layer_left_in_float_is_not_quantized_by_onnxruntime(
    relu: str, quantized: Callable[..., Any], outputs_of: Callable[..., Any]
) -> None:
    last = "r" if relu else "a1"
    model = _model(
        "(float[1,3,5,5] x) => (float[1,2,5,5] y) "
        f"{{ a0 = Conv(x, w) a1 = Conv(a0, v) {relu} y = Conv({last}, u) }}",
        {"w": _random(4, 3, 1, 1), "v": _random(4, 4, 1, 1), "u": _random(2, 4, 1, 1)},
    )
    result, report = quantized(model, QuantizeStatic(exclude=("n1",)))
    assert report.facts["shielded"] == ["n1"]
    feeds = _feeds(model)
    plain, optimized = (
        outputs_of(result, feeds, level)[0] for level in (Level.DISABLED, Level.ALL)
    )
    step = float(_initializer(result, "y_scale"))
    # Rounding ties may fall either way; a second quantization of the weights would move far more.
    assert np.abs(plain - optimized).max() <= step * 1.001
    assert np.mean(plain != optimized) < 0.05


def test_include_only(quantized: Callable[..., Any]) -> None:
    _, report = quantized(_graph("conv_relu_conv"), QuantizeStatic(include=("Conv_y",)))
    assert report.changed["Conv"] == 1
    assert [item.node for item in report.skipped] == ["Conv_a"]


def test_pattern_that_matches_nothing_is_said(quantized: Callable[..., Any]) -> None:
    _, report = quantized(_graph("conv_relu_conv"), QuantizeStatic(exclude=("Softmax*",)))
    assert any("Softmax*" in note for note in report.notes)


def test_pattern_that_does_not_compile_is_an_error() -> None:
    with pytest.raises(OptionError, match="regular expression"):
        QuantizeStatic(exclude=("re:(",))


def test_nothing_to_quantize(quantized: Callable[..., Any]) -> None:
    with pytest.raises(PassFailedError, match="no Conv"):
        quantized(_model("(float[2] x) => (float[2] y) { y = Tanh(x) }", {}))


def test_quantized_model_is_refused(quantized: Callable[..., Any]) -> None:
    result, _ = quantized(_graph("mlp"))
    with pytest.raises(UnsupportedModelError, match="already"):
        QuantizeStatic().requires(result)


@pytest.mark.parametrize(
    ("text", "arrays", "reason"),
    [
        ("(float[2,4] x, float[4,3] w) => (float[2,3] y) "
         "{ z = Neg(w) y = Gemm(x, z) m = MatMul(x, k) }",
         {"k": (4, 3)}, "computed at run time"),
        ("(float[4,2] x) => (float[3,2] y) { y = MatMul(k, x) m = MatMul(x, u) }",
         {"k": (3, 4), "u": (2, 2)}, "on the right"),
        ("(float[2,4] x) => (float[2] y) { y = MatMul(x, k) m = MatMul(x, u) }",
         {"k": (4,), "u": (4, 2)}, "no channel axis"),
        ("(float[2,4] x) => (float[2,3] y) { y = Gemm(x, k, c) m = MatMul(x, k) }",
         {"k": (4, 3), "c": (2, 3)}, "not one value per output channel"),
    ],
)  # fmt: skip
def test_reasons_for_leaving_a_layer_alone(
    text: str, arrays: dict[str, tuple[int, ...]], reason: str, quantized: Callable[..., Any]
) -> None:
    model = _model(text, {key: _random(*shape) for key, shape in arrays.items()})
    _, report = quantized(model)
    assert any(reason in item.reason for item in report.skipped)


def test_float16_model_is_computed_in_float32(
    quantized: Callable[..., Any], outputs_of: Callable[..., Any]
) -> None:
    model = _model(
        "(float16[2,16] x) => (float16[2,4] y) "
        "{ m = MatMul(x, w) c = Cast<to=10>(m) y = MatMul(c, v) }",
        {"w": _random(16, 8).astype(np.float16), "v": _random(8, 4).astype(np.float16)},
    )
    result, report = quantized(model)
    assert report.facts["fusion"]["unfused"] == []
    assert Counter(v.dtype for v in result.graph.initializers.values())[ir.DataType.FLOAT16] == 0
    feeds = _feeds(model)
    ours, theirs = (outputs_of(m, feeds)[0].astype(np.float64) for m in (model, result))
    assert 10 * np.log10(np.mean(ours**2) / np.mean((ours - theirs) ** 2)) > 30


def test_stack_of_matrices_gets_one_scale(quantized: Callable[..., Any]) -> None:
    model = _model(
        "(float[2,4,8] x) => (float[2,4,3] y) { y = MatMul(x, w) }", {"w": _random(2, 8, 3)}
    )
    result, report = quantized(model)
    assert _initializer(result, "w_scale").shape == ()
    assert report.facts["fusion"]["unfused"] == []


def test_fixed_ranges_need_no_calibration(quantized: Callable[..., Any]) -> None:
    result, _ = quantized(_graph("attention"))
    assert _initializer(result, "p_scale") == pytest.approx(1 / 255)
    (quantizer,) = (node for node in result.graph if node.name == "p_q")
    assert const_array(quantizer.inputs[2]) == 0


IF_MODEL = """
    (float[1,4,6,6] x, bool flag) => (float[1,4,6,6] y)
    {
        a = Conv(x, w0)
        y = If(flag) <
            then_branch = then_graph () => (float[1,4,6,6] t)
                { u = Conv(a, w1) v = Relu(u) t = Conv(v, w2) },
            else_branch = else_graph () => (float[1,4,6,6] e) { e = Conv(a, w3) }
        >
    }"""


def _if_model() -> ir.Model:
    model = _model(IF_MODEL, {f"w{i}": _random(4, 4, 1, 1) for i in range(4)})
    for index, node in enumerate(model.graph.all_nodes()):
        node.name = f"n{index}"
    return model


def _if_feeds(flags: list[bool]) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(1)
    x = [rng.normal(0, 1, (1, 4, 6, 6)).astype(np.float32) for _ in flags]
    return [{"x": array, "flag": np.array(flag)} for array, flag in zip(x, flags, strict=True)]


def test_branches_of_if_are_quantized(
    quantized: Callable[..., Any], outputs_of: Callable[..., Any]
) -> None:
    model, feeds = _if_model(), _if_feeds([True, False] * 4)
    result, report = quantized(model, feeds=feeds)
    assert report.changed["Conv"] == 4 and not report.skipped
    assert report.facts["fusion"]["kernels"] == {"QLinearConv": 4}
    for flag in (True, False):
        some = [feed for feed in feeds if feed["flag"] == flag]
        ours, theirs = outputs_of(model, some)[0], outputs_of(result, some)[0]
        assert 10 * np.log10(np.mean(ours**2) / np.mean((ours - theirs) ** 2)) > 30


def test_branch_without_calibration_data_stays_float(
    quantized: Callable[..., Any], outputs_of: Callable[..., Any]
) -> None:
    model = _if_model()
    result, report = quantized(model, feeds=_if_feeds([True] * 4))
    assert report.changed["Conv"] == 3
    (skipped,) = report.skipped
    assert "no usable range" in skipped.reason
    # The branch that nothing was measured for sees the quantized input and is otherwise exact.
    feeds = _if_feeds([False])
    ours, theirs = outputs_of(model, feeds)[0], outputs_of(result, feeds)[0]
    assert 10 * np.log10(np.mean(ours**2) / np.mean((ours - theirs) ** 2)) > 30


def test_body_of_a_loop_is_left_alone_and_named(quantized: Callable[..., Any]) -> None:
    model = _model(
        """(float[1,4,6,6] x) => (float[1,4,6,6] y)
        {
            a = Conv(x, w)
            y = Loop(trips, go, a) <body = body (int64 i, bool more, float[1,4,6,6] s)
                => (bool again, float[1,4,6,6] t) { again = Identity(more) t = Conv(s, w) }>
        }""",
        {"w": _random(4, 4, 1, 1) / 4, "trips": np.array(2, np.int64), "go": np.array(True)},
    )
    _, report = quantized(model)
    assert report.changed["Conv"] == 1
    assert any("Loop" in item.reason for item in report.skipped)


def test_options_resolve_from_the_target() -> None:
    resolved = QuantizeStatic().resolve(load_target("cpu-arm64"))
    assert (resolved.activation_type, resolved.per_channel, resolved.reduce_range) == (
        "int8",
        True,
        "none",
    )
    explicit = QuantizeStatic(activation_type="uint8").resolve(load_target("cpu-arm64"))
    assert explicit.activation_type == "uint8"


def test_expands_to_a_chain_of_single_passes() -> None:
    chain = Quantize(calibration="kl", equalize=True).expand()
    kinds = [Fuse, Equalize, QuantizeStatic, BiasCorrection, QuantizeEmbeddings]
    assert [type(step) for step in chain] == kinds
    assert chain[2].expand() == (chain[2],)
    assert chain[2].calibration == "kl"


def test_entropy_is_another_name_for_kl() -> None:
    assert QuantizeStatic.model_validate({"calibration": "entropy"}).calibration == "kl"


def test_loads_from_a_file(tmp_path: Path, quantized: Callable[..., Any]) -> None:
    file = tmp_path / "model.onnx"
    ir.save(_graph("mlp"), file)
    _, report = quantized(load_model(file))
    assert report.changed["Gemm"] == 2
