"""Every quantized operator against onnxruntime, drawn at random, with ties forced.

Where a difference is known, ``known_differences.toml`` says why, and it must be one step at a place
where the exact value lies at a tie.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from slimctl.evaluate.replay import replay
from slimctl.graph.session import Level
from slimctl.runtime.session import Arithmetic
from tests.runtime.quantized_nodes import (
    both,
    compare,
    draw_codes,
    draw_scale,
    draw_zero,
    region,
)

MICROSOFT = "com.microsoft"
_EXAMPLES = settings(
    max_examples=40, deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate]
)

_KINDS = st.sampled_from(["uint8", "int8"])
_SIZES = st.integers(1, 6)


@given(st.data())
@_EXAMPLES
def test_qlinear_conv(data: Any) -> None:
    draw = data.draw
    kind = draw(_KINDS)
    weight_kind = "int8" if kind == "int8" else draw(_KINDS)
    rank, group = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    channels, outputs = group * draw(st.integers(1, 3)), group * draw(st.integers(1, 3))
    if draw(st.booleans()):
        channels = group  # depthwise
    kernel = tuple(draw(st.integers(1, 3)) for _ in range(rank))
    dilations = tuple(draw(st.integers(1, 2)) for _ in range(rank))
    pads = tuple(draw(st.integers(0, 1)) for _ in range(2 * rank))
    sizes = tuple((k - 1) * d + 1 + draw(_SIZES) for k, d in zip(kernel, dilations, strict=True))
    per_channel = draw(st.booleans())
    zero = np.zeros(outputs if per_channel else (), weight_kind)
    if weight_kind == "uint8":
        zero = zero + np.uint8(draw(st.integers(0, 255)))
    inputs = [
        draw_codes(draw, kind, (draw(st.integers(1, 2)), channels, *sizes)),
        draw_scale(draw),
        draw_zero(draw, kind),
        draw_codes(draw, weight_kind, (outputs, channels // group, *kernel)),
        draw_scale(draw, outputs if per_channel else 0),
        zero,
        draw_scale(draw),
        draw_zero(draw, kind),
    ]
    if draw(st.booleans()):
        random = np.random.default_rng(draw(st.integers(0, 99)))
        inputs.append(random.integers(-(2**20), 2**20, outputs).astype(np.int32))
    constants = [*range(3, len(inputs))] if draw(st.booleans()) else [4, 5]
    compare(
        "QLinearConv",
        inputs,
        [kind],
        constants=sorted({1, 2, 6, 7, *constants}),
        group=group,
        kernel_shape=kernel,
        dilations=dilations,
        pads=pads,
        strides=tuple(draw(st.integers(1, 2)) for _ in range(rank)),
    )


@pytest.mark.parametrize("channels_last", [0, 1])
@pytest.mark.parametrize("group", [1, 2, 4])
def test_qlinear_conv_of_onnxruntime(channels_last: int, group: int) -> None:
    random = np.random.default_rng(group)
    x = random.integers(0, 256, (2, 7, 6, 4) if channels_last else (2, 4, 7, 6)).astype(np.uint8)
    inputs = [
        x,
        np.float32(0.5),
        np.uint8(120),
        random.integers(-60, 61, (8, 4 // group, 3, 3)).astype(np.int8),
        random.uniform(0.01, 0.02, 8).astype(np.float32),
        np.zeros(8, np.int8),
        np.float32(1.7),
        np.uint8(100),
        random.integers(-999, 999, 8).astype(np.int32),
    ]
    compare(
        "QLinearConv",
        [np.asarray(array) for array in inputs],
        ["uint8"],
        domain=MICROSOFT,
        constants=range(1, 9),
        channels_last=channels_last,
        group=group,
        pads=(1, 0, 1, 1),
        strides=(2, 1),
    )


def test_max_pool_of_onnxruntime() -> None:
    x = np.random.default_rng(3).integers(0, 256, (2, 7, 6, 4)).astype(np.uint8)
    pads = (1, 0, 1, 1)
    compare("NhwcMaxPool", [x], ["uint8"], domain=MICROSOFT, kernel_shape=(3, 2), pads=pads)


@given(st.data())
@_EXAMPLES
def test_conv_integer(data: Any) -> None:
    draw = data.draw
    group = draw(st.integers(1, 2))
    kind = draw(_KINDS)
    x = draw_codes(draw, "uint8", (1, 2 * group, draw(_SIZES) + 2, draw(_SIZES) + 2))
    w = draw_codes(draw, kind, (group * draw(st.integers(1, 3)), 2, 3, 3))
    zeros = [draw_zero(draw, "uint8"), draw_zero(draw, kind)]
    compare("ConvInteger", [x, w, *zeros], ["int32"], group=group, pads=(1, 1, 1, 1))


@pytest.mark.parametrize(
    ("channels", "outputs", "group"),
    [
        (1, 1, 1),  # one channel makes one: onnxruntime takes it for depthwise
        (3, 3, 3),
        (3, 6, 3),  # several outputs of a channel pass through the matrix kernel
        (1, 4, 1),
        (4, 4, 2),
    ],
)
@pytest.mark.parametrize("rank", [1, 2])
def test_sums_that_saturate_in_groups(channels: int, outputs: int, group: int, rank: int) -> None:
    """Codes at the ends of their types: pairs of products do not fit into 16 bits."""
    random = np.random.default_rng(rank)
    inputs = [
        random.choice([0, 255], (1, channels, *[9] * rank)).astype(np.uint8),
        np.float32(1),
        np.uint8(0),
        random.choice([-127, 127], (outputs, channels // group, *[3] * rank)).astype(np.int8),
        np.full(outputs, 1, np.float32),
        np.zeros(outputs, np.int8),
        np.float32(1000),
        np.uint8(128),
    ]
    arrays = [np.asarray(array) for array in inputs]
    compare("QLinearConv", arrays, ["uint8"], constants=range(1, 8), group=group)


@given(st.data())
@_EXAMPLES
def test_transposed_convolution_between_pairs(data: Any) -> None:
    """onnxruntime computes it in float; the exact sums are the same but for ties."""
    draw = data.draw
    kind, rank, group = draw(_KINDS), draw(st.integers(1, 2)), draw(st.integers(1, 2))
    channels, outputs = group * draw(st.integers(1, 2)), group * draw(st.integers(1, 2))
    strides = tuple(draw(st.integers(1, 3)) for _ in range(rank))
    dilations = tuple(draw(st.integers(1, 2)) for _ in range(rank))
    kernel = tuple(draw(st.integers(1, 3)) for _ in range(rank))
    sizes = tuple(draw(_SIZES) + 2 for _ in range(rank))
    scale = draw_scale(draw, outputs // group if draw(st.booleans()) else 0)
    x = quantized(draw, kind, (draw(st.integers(1, 2)), channels, *sizes))
    w = draw_codes(draw, "int8", (channels, outputs // group, *kernel))
    weights = [[w, scale, np.zeros(scale.shape, np.int8)]]
    if draw(st.booleans()):
        steps = np.random.default_rng(outputs).integers(-500, 500, outputs).astype(np.int32)
        # [outputs]: every group has the scales of its channels
        bias_scale = x[1] * np.tile(np.broadcast_to(scale, outputs // group), group)
        weights.append([steps, bias_scale, np.zeros(outputs, np.int32)])
    model = region(
        "ConvTranspose",
        x,
        weights,
        [np.asarray(x[1] * np.float32(16)), draw_zero(draw, kind)],
        axis=1,
        group=group,
        strides=strides,
        dilations=dilations,
        kernel_shape=kernel,
        pads=tuple(draw(st.integers(0, 2)) for _ in range(2 * rank)),
        output_padding=tuple(draw(st.integers(0, stride - 1)) for stride in strides),
    )
    samples = [{"codes": x[0]}]
    found = replay(model, samples, level=Level.DISABLED, arithmetic=Arithmetic.INTEGER)
    assert [node.op_type for node in found.nodes if node.is_codes] == ["QLinearConvTranspose"]
    assert all(node.only_ties for node in found.nodes if node.is_codes), found.nodes


def matrices(draw: Any, kind: str, other: str) -> tuple[np.ndarray, np.ndarray, bool]:
    """Two matrices, or a stack of them and one; whether the right one is a plain matrix."""
    m, k, n = draw(_SIZES), draw(st.sampled_from([1, 2, 3, 8, 33, 70])), draw(_SIZES)
    stack = (draw(st.integers(1, 3)),) if draw(st.booleans()) else ()
    plain = not stack or draw(st.booleans())
    left = draw_codes(draw, kind, (*stack, m, k))
    return left, draw_codes(draw, other, (k, n) if plain else (*stack, k, n)), plain


@given(st.data())
@_EXAMPLES
def test_qlinear_matmul(data: Any) -> None:
    draw = data.draw
    kind = draw(_KINDS)
    other = "int8" if kind == "int8" else draw(_KINDS)
    a, b, plain = matrices(draw, kind, other)
    columns = b.shape[-1] if plain and draw(st.booleans()) else 0
    inputs = [
        a,
        draw_scale(draw),
        draw_zero(draw, kind),
        b,
        draw_scale(draw, columns),
        draw_zero(draw, other, columns),
        draw_scale(draw),
        draw_zero(draw, kind),
    ]
    constants = [1, 2, 4, 5, 6, 7, *([3] if draw(st.booleans()) else [])]
    compare("QLinearMatMul", inputs, [kind], constants=sorted(constants))


@given(st.data())
@_EXAMPLES
def test_matmul_integer(data: Any) -> None:
    draw = data.draw
    other = draw(_KINDS)
    a, b, plain = matrices(draw, "uint8", other)
    columns = b.shape[-1] if plain and draw(st.booleans()) else 0
    zeros = [draw_zero(draw, "uint8"), draw_zero(draw, other, columns)]
    compare("MatMulInteger", [a, b, *zeros], ["int32"])


@given(st.data())
@_EXAMPLES
def test_matmul_integer_to_float(data: Any) -> None:
    draw = data.draw
    other = draw(_KINDS)
    a, b, plain = matrices(draw, "uint8", other)
    columns = b.shape[-1] if plain and draw(st.booleans()) else 0
    bias = np.arange(b.shape[-1], dtype=np.float32) if draw(st.booleans()) else None
    inputs = [
        a,
        b,
        draw_scale(draw),
        draw_scale(draw, columns),
        draw_zero(draw, "uint8"),
        draw_zero(draw, other, columns),
        bias,
    ]
    compare("MatMulIntegerToFloat", inputs, ["float32"], domain=MICROSOFT)


@given(st.data())
@_EXAMPLES
def test_dynamic_quantize_matmul(data: Any) -> None:
    draw = data.draw
    _, b, plain = matrices(draw, "uint8", "int8")
    columns = b.shape[-1] if plain and draw(st.booleans()) else 0
    random = np.random.default_rng(draw(st.integers(0, 99)))
    a = random.normal(size=(*b.shape[:-2], 3, b.shape[-2])).astype(np.float32)
    inputs = [a, b, draw_scale(draw, columns), draw_zero(draw, "int8", columns)]
    compare("DynamicQuantizeMatMul", inputs, ["float32"], domain=MICROSOFT)


@given(st.data())
@_EXAMPLES
def test_qgemm(data: Any) -> None:
    draw = data.draw
    kind = draw(_KINDS)
    other = "int8" if kind == "int8" else draw(_KINDS)
    m, k, n = draw(_SIZES), draw(st.sampled_from([1, 3, 8, 40])), draw(_SIZES)
    transposed = [draw(st.booleans()), draw(st.booleans())]
    columns = n if draw(st.booleans()) else 0
    bias = np.random.default_rng(n).integers(-999, 999, n).astype(np.int32)
    inputs: list[np.ndarray | None] = [
        draw_codes(draw, kind, (k, m) if transposed[0] else (m, k)),
        draw_scale(draw),
        draw_zero(draw, kind),
        draw_codes(draw, other, (n, k) if transposed[1] else (k, n)),
        draw_scale(draw, columns),
        draw_zero(draw, other, columns),
        bias if draw(st.booleans()) else None,
    ]
    real = draw(st.booleans())
    if not real:
        inputs += [draw_scale(draw), draw_zero(draw, kind)]
    compare(
        "QGemm",
        inputs,
        ["float32" if real else kind],
        domain=MICROSOFT,
        constants=[3, 4, 5],
        transA=int(transposed[0]),
        transB=int(transposed[1]),
        alpha=draw(st.sampled_from([1.0, 0.5])),
    )


def quantized(draw: Any, kind: str, shape: tuple[int, ...]) -> list[np.ndarray]:
    """Codes, their scale and their zero point."""
    return [draw_codes(draw, kind, shape), draw_scale(draw), draw_zero(draw, kind)]


_SHAPES = st.sampled_from([((2, 3, 4, 5), (2, 3, 4, 5)), ((1, 7), (1, 7)), ((2, 3, 5), (5,))])


@pytest.mark.parametrize("op_type", ["QLinearAdd", "QLinearMul"])
@given(st.data())
@_EXAMPLES
def test_qlinear_pairwise(op_type: str, data: Any) -> None:
    draw = data.draw
    kind = draw(_KINDS)
    shapes = draw(_SHAPES)
    inputs = [*quantized(draw, kind, shapes[0]), *quantized(draw, kind, shapes[1])]
    inputs += [draw_scale(draw), draw_zero(draw, kind)]
    compare(op_type, inputs, [kind], domain=MICROSOFT)


@given(st.data())
@_EXAMPLES
def test_qlinear_concat(data: Any) -> None:
    draw = data.draw
    kind = draw(_KINDS)
    parts = [quantized(draw, kind, (2, draw(_SIZES), 3)) for _ in range(draw(st.integers(1, 3)))]
    inputs = [draw_scale(draw), draw_zero(draw, kind), *(array for part in parts for array in part)]
    compare("QLinearConcat", inputs, [kind], domain=MICROSOFT, axis=1)


@given(st.data())
@_EXAMPLES
def test_qlinear_where(data: Any) -> None:
    draw = data.draw
    kind = draw(_KINDS)
    condition = np.random.default_rng(draw(st.integers(0, 99))).random((2, 3, 4)) > 0.5
    inputs = [condition, *quantized(draw, kind, (2, 3, 4)), *quantized(draw, kind, (2, 3, 4))]
    inputs += [draw_scale(draw), draw_zero(draw, kind)]
    constants = [2, 3, 5, 6, 7, 8]
    compare("QLinearWhere", inputs, [kind], domain=MICROSOFT, constants=constants)


@pytest.mark.parametrize("op_type", ["QLinearSigmoid", "QLinearLeakyRelu"])
@given(st.data())
@_EXAMPLES
def test_qlinear_by_table(op_type: str, data: Any) -> None:
    draw = data.draw
    kind = draw(_KINDS)
    inputs = [*quantized(draw, kind, (2, 3, 17)), draw_scale(draw), draw_zero(draw, kind)]
    constants = [1, 2, 3, 4] if draw(st.booleans()) else []
    compare(op_type, inputs, [kind], domain=MICROSOFT, constants=constants)


@given(st.data())
@_EXAMPLES
def test_qlinear_softmax(data: Any) -> None:
    draw = data.draw
    kind = draw(_KINDS)
    inputs = [*quantized(draw, kind, (2, 3, 4)), np.float32(1 / 256), draw_zero(draw, kind)]
    attributes = {
        "axis": draw(st.sampled_from([-1, 1, 2])),
        "opset": draw(st.sampled_from([12, 13])),
    }
    compare(
        "QLinearSoftmax",
        inputs,
        [kind],
        domain=MICROSOFT,
        constants=[1, 2, 3, 4],
        attributes=attributes,
    )


@given(st.data())
@_EXAMPLES
def test_qlinear_global_average_pool(data: Any) -> None:
    draw = data.draw
    kind = draw(_KINDS)
    x = quantized(draw, kind, (2, 3, draw(_SIZES), draw(_SIZES)))
    inputs = [*x, draw_scale(draw), draw_zero(draw, kind)]
    compare("QLinearGlobalAveragePool", inputs, [kind], domain=MICROSOFT)


@given(st.data())
@_EXAMPLES
def test_qlinear_average_pool(data: Any) -> None:
    draw = data.draw
    kind = draw(_KINDS)
    x = quantized(draw, kind, (1, 2, draw(_SIZES) + 3, draw(_SIZES) + 3))
    compare(
        "QLinearAveragePool",
        [*x, draw_scale(draw), draw_zero(draw, kind)],
        [kind],
        domain=MICROSOFT,
        constants=[1, 2, 3, 4],
        kernel_shape=(draw(st.integers(1, 3)), 3),
        pads=tuple(draw(st.integers(0, 0 if i % 2 == 0 else 1)) for i in range(4)),
        strides=(draw(st.integers(1, 2)), draw(st.integers(1, 2))),
        count_include_pad=draw(st.integers(0, 1)),
    )


@given(st.data())
@_EXAMPLES
def test_quantize_linear(data: Any) -> None:
    draw = data.draw
    kind, size = draw(st.sampled_from(["uint8", "int8", "uint16", "int16"])), draw(_SIZES)
    random = np.random.default_rng(draw(st.integers(0, 999)))
    channels = size if draw(st.booleans()) else 0
    scale = draw_scale(draw, channels)
    steps = random.integers(-300, 600, (2, size, 5)) / 2  # every other one is a tie
    x = (steps * scale.reshape(-1, 1)).astype(np.float32)
    inputs = [x, scale, draw_zero(draw, kind, channels)]
    compare("QuantizeLinear", inputs, [kind], opset=21)


@given(st.data())
@_EXAMPLES
def test_dequantize_linear(data: Any) -> None:
    draw = data.draw
    kind, size = draw(st.sampled_from(["uint8", "int8", "uint16", "int16"])), draw(_SIZES)
    channels = size if draw(st.booleans()) else 0
    x = draw_codes(draw, kind, (2, size, 5))
    zero = draw_zero(draw, kind, channels) if draw(st.booleans()) else None
    compare("DequantizeLinear", [x, draw_scale(draw, channels), zero], ["float32"], opset=21)


@given(st.data())
@_EXAMPLES
def test_blocks(data: Any) -> None:
    draw = data.draw
    scale = np.stack([draw_scale(draw, 3) for _ in range(2)])  # [2, 3]
    x = draw_codes(draw, "int8", (2, 12))
    inputs = [x, scale, np.zeros((2, 3), np.int8)]
    compare("DequantizeLinear", inputs, ["float32"], opset=21, axis=1, block_size=4)


@given(st.data())
@_EXAMPLES
def test_dynamic_quantize_linear(data: Any) -> None:
    draw = data.draw
    random = np.random.default_rng(draw(st.integers(0, 9999)))
    x = (random.normal(size=(3, 5)) * draw(st.sampled_from([0.0, 1e-3, 1.0, 50.0]))).astype("f4")
    x += np.float32(draw(st.sampled_from([0.0, 0.5, -3.0, 200.0])))
    compare("DynamicQuantizeLinear", [x], ["uint8", "float32", "uint8"])


def lstm_inputs(
    random: np.random.Generator, directions: int, length: int, kind: str, *, per_channel: bool
) -> list[np.ndarray | None]:
    """Inputs of a DynamicQuantizeLSTM; some of those that may be left out are."""
    batch, size, hidden = random.integers(1, 4), random.integers(1, 7), random.integers(1, 7)

    def floats(*shape: int) -> np.ndarray:
        return random.normal(size=shape).astype(np.float32)

    def maybe(array: np.ndarray) -> np.ndarray | None:
        return array if random.random() < 0.5 else None

    def weights(rows: int) -> list[np.ndarray]:
        shape = (directions, 4 * hidden) if per_channel else (directions,)
        zero = 0 if kind == "int8" else random.integers(0, 256)
        limits = np.iinfo(kind)
        codes = random.integers(limits.min, limits.max + 1, (directions, rows, 4 * hidden))
        scale = random.uniform(1e-3, 1e-2, shape).astype(np.float32)
        return [codes.astype(kind), scale, np.full(shape, zero, kind)]

    w, r = weights(size), weights(hidden)
    return [
        floats(length, batch, size),
        w[0],
        r[0],
        maybe(floats(directions, 8 * hidden)),
        maybe(random.integers(1, length + 1, batch).astype(np.int32)),
        maybe(floats(directions, batch, hidden)),
        maybe(floats(directions, batch, hidden)),
        maybe(floats(directions, 3 * hidden)),
        *w[1:],
        *r[1:],
    ]


_DIRECTIONS = {"forward": 1, "reverse": 1, "bidirectional": 2}


@given(st.data())
@_EXAMPLES
def test_dynamic_quantize_lstm(data: Any) -> None:
    """One step: all that is quantized is given, so that nothing decides ties in another way."""
    draw = data.draw
    direction = draw(st.sampled_from(list(_DIRECTIONS)))
    random = np.random.default_rng(draw(st.integers(0, 9999)))
    inputs = lstm_inputs(
        random, _DIRECTIONS[direction], 1, draw(_KINDS), per_channel=draw(st.booleans())
    )
    assert inputs[2] is not None
    compare(
        "DynamicQuantizeLSTM",
        inputs,
        ["float32"] * 3,
        domain=MICROSOFT,
        constants=[1, 2] if draw(st.booleans()) else [],
        direction=direction,
        hidden_size=inputs[2].shape[1],
        input_forget=draw(st.integers(0, 1)),
        **({"clip": 0.5} if draw(st.booleans()) else {}),
    )


@pytest.mark.parametrize("direction", _DIRECTIONS)
def test_dynamic_quantize_lstm_step_by_step(direction: str) -> None:
    """States that differ in their last bit may be quantized differently, at a tie.

    That is one step of 255, about once in a thousand runs.
    """
    apart: list[float] = []
    for seed in range(16):
        random = np.random.default_rng(seed)
        inputs = lstm_inputs(random, _DIRECTIONS[direction], 6, "int8", per_channel=True)
        assert inputs[2] is not None
        hidden = inputs[2].shape[1]
        found, expected, _ = both(
            "DynamicQuantizeLSTM",
            inputs,
            ["float32"] * 3,
            domain=MICROSOFT,
            constants=[1, 2],
            direction=direction,
            hidden_size=hidden,
        )
        pairs = zip(found, expected, strict=True)
        apart.append(max(float(np.abs(one - other).max()) for one, other in pairs))
    apart.sort()
    assert apart[-2] < 1e-5
    assert apart[-1] < 2e-2


@given(st.data())
@_EXAMPLES
def test_quantized_attention(data: Any) -> None:
    draw = data.draw
    kind, heads, size = draw(_KINDS), draw(st.integers(1, 3)), draw(st.integers(1, 4))
    batch, sequence, width, past = draw(st.integers(1, 2)), draw(_SIZES), draw(_SIZES), draw(_SIZES)
    random = np.random.default_rng(draw(st.integers(0, 999)))
    columns = 3 * heads * size
    per_channel = columns if draw(st.booleans()) else 0
    has_past = draw(st.booleans())
    keys = sequence + past if has_past else sequence
    masks = [
        None,
        random.integers(0, 2, (batch, keys)).astype(np.int32),
        random.integers(1, keys, batch, endpoint=True).astype(np.int32),
    ]
    weight_zero = 0 if kind == "int8" else draw(st.integers(0, 255))
    shape = (per_channel,) if per_channel else ()
    inputs = [
        draw_codes(draw, "uint8", (batch, sequence, width)),
        draw_codes(draw, kind, (width, columns)),
        random.normal(size=columns).astype(np.float32),
        np.float32(0.02),
        random.uniform(1e-3, 1e-2, shape).astype(np.float32),
        draw(st.sampled_from(masks)),
        draw_zero(draw, "uint8"),
        np.full(shape, weight_zero, kind),
        random.normal(size=(2, batch, heads, past, size)).astype(np.float32) if has_past else None,
    ]
    compare(
        "QAttention",
        [None if array is None else np.asarray(array) for array in inputs],
        ["float32", "float32"] if has_past else ["float32"],
        domain=MICROSOFT,
        constants=[1] if draw(st.booleans()) else [],
        num_heads=heads,
        unidirectional=draw(st.integers(0, 1)),
    )
