"""Q and DQ in torch: the codes of slimctl.numerics and onnxruntime, the gradients of LSQ."""

# ruff: noqa: E402 # the check for torch comes before what needs it
from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
from numpy.typing import NDArray

torch = pytest.importorskip("torch", reason="torch is an extra")

from slimctl.core.errors import UnsupportedModelError
from slimctl.graph.edit import add_initializer
from slimctl.graph.session import Level, open_session, run
from slimctl.numerics.affine import QuantizedType, dequantize, quantize
from slimctl.training.code_ranges import CODES, RANGE, RESTORED
from slimctl.training.graph import TorchGraph

TYPES = [np.uint8, np.int8, np.uint16, np.int16, ml_dtypes.int4, ml_dtypes.uint4]


def pair(
    scale: NDArray[Any], zero_point: NDArray[Any], axis: int, codes: tuple[int, int] | None = None
) -> ir.Model:
    """x -> Q -> q -> DQ -> y"""
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["N", 4, 5]))
    graph = ir.Graph([x], [], nodes=[], opset_imports={"": 21}, name="pair")
    parameters = [add_initializer(graph, "s", scale), add_initializer(graph, "z", zero_point)]
    where = [ir.AttrInt64("axis", axis)]
    limits = [] if codes is None else [ir.AttrInt64s(RANGE, codes)]
    q = ir.Node("", "QuantizeLinear", [x, *parameters], [*where, *limits], name="Q")
    q.outputs[0].name = "q"
    dq = ir.Node("", "DequantizeLinear", [q.outputs[0], *parameters], where, name="DQ")
    dq.outputs[0].name, dq.outputs[0].type = "y", ir.TensorType(ir.DataType.FLOAT)
    graph.extend([q, dq])
    graph.outputs.append(dq.outputs[0])
    return ir.Model(graph, ir_version=10)


def values(scale: NDArray[Any], low: int, high: int) -> NDArray[np.float32]:
    """Numbers all over the range and beyond it; a third of them in the middle between codes."""
    rng = np.random.default_rng(0)
    steps = rng.uniform(low - 20, high + 20, (6, 4, 5))
    steps[:2] = np.floor(steps[:2]) + 0.5
    return (steps * scale.reshape(-1, 1)).astype(np.float32)


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: np.dtype(kind).name)
@pytest.mark.parametrize("channels", [0, 4])
def test_codes_are_those_of_numerics_and_of_onnxruntime(kind: Any, channels: int) -> None:
    low, high = CODES[ir.DataType.from_numpy(np.dtype(kind))]
    zero = np.full((channels,) if channels else (), (low + high) // 2 + 1, kind)
    scale = np.asarray(np.geomspace(0.125, 0.5, channels) if channels else 0.25, np.float32)
    middle = int((low + high) // 2 + 1)
    x = values(scale, low - middle, high - middle)
    model = pair(scale, zero, 1)
    found = TorchGraph(model).run({"x": x}, ["q", "y"])
    whole = QuantizedType(np.dtype(np.int32), low, high)
    axis = 1 if channels else None
    wanted = quantize(x, scale, zero.astype(np.int32), whole, axis)
    np.testing.assert_array_equal(found["q"].detach().numpy(), wanted)
    restored = dequantize(wanted, scale, zero.astype(np.int32), axis)
    np.testing.assert_array_equal(found["y"].detach().numpy(), restored)
    theirs = run(open_session(model, level=Level.DISABLED, threads=1), {"x": x})["y"]
    np.testing.assert_array_equal(found["y"].detach().numpy(), theirs)


@pytest.mark.parametrize(
    ("steps", "by_x", "by_scale"),
    [
        (0.3, 1.0, -0.3),  # rint(v) - v
        (1.7, 1.0, 0.3),
        (-2.4, 1.0, 0.4),
        (6.9, 1.0, 0.1),
        (7.0, 0.0, 7.0),  # at the border it saturates already: -Q_N < v < Q_P
        (9.2, 0.0, 7.0),
        (-30.0, 0.0, -7.0),
    ],
)
def test_gradients_are_those_of_the_paper(steps: float, by_x: float, by_scale: float) -> None:
    """Esser et al. 2020, equations 3 and 5, with Q_N = Q_P = 7."""
    scale = np.float32(0.5)
    model = pair(np.asarray(scale), np.zeros((), np.int8), 1, (-7, 7))
    x = np.full((1, 4, 5), steps * 0.5, np.float32)
    graph = TorchGraph(model)
    found = graph.run({"x": x}, ["x", "s", "y"])
    gradients = torch.autograd.grad(found["y"].sum(), [found["x"], found["s"]])
    np.testing.assert_allclose(gradients[0].numpy(), by_x)
    np.testing.assert_allclose(gradients[1].numpy(), by_scale * x.size, rtol=1e-5)


def test_gradients_know_zero_points_and_channels() -> None:
    scale = np.array([0.5, 1.0, 2.0, 4.0], np.float32)
    model = pair(scale, np.full(4, 100, np.uint8), 1)
    steps = np.array([-100.5, 155.5, 3.25, -7.75], np.float32)  # below, above, inside, inside
    x = np.broadcast_to((steps * scale)[None, :, None], (2, 4, 5)).copy()
    found = TorchGraph(model).run({"x": x}, ["x", "s", "y"])
    by_x, by_scale = torch.autograd.grad(found["y"].sum(), [found["x"], found["s"]])
    np.testing.assert_array_equal(by_x[0, :, 0].numpy(), [0, 0, 1, 1])
    np.testing.assert_allclose(by_scale.numpy(), 10 * np.array([-100, 155, -0.25, -0.25]))


def test_zero_points_may_differ_between_channels() -> None:
    scale = np.array([0.5, 1.0, 2.0, 4.0], np.float32)
    model = pair(scale, np.array([0, 100, 128, 255], np.uint8), 1)
    steps = np.array([-0.5, 155.5, 126.25, -7.75], np.float32)  # below, above, inside, inside
    x = np.broadcast_to((steps * scale)[None, :, None], (2, 4, 5)).copy()
    found = TorchGraph(model).run({"x": x}, ["x", "s", "q", "y"])
    np.testing.assert_array_equal(found["q"][0, :, 0].detach().numpy(), [0, 255, 254, 247])
    by_x, by_scale = torch.autograd.grad(found["y"].sum(), [found["x"], found["s"]])
    np.testing.assert_array_equal(by_x[0, :, 0].numpy(), [0, 0, 1, 1])
    np.testing.assert_allclose(by_scale.numpy(), 10 * np.array([0, 155, -0.25, -0.25]))


@pytest.mark.parametrize("zero", [0, 100, 255])
def test_both_nodes_in_one_compute_and_learn_the_same(zero: int) -> None:
    scale = np.asarray(0.25, np.float32)
    apart = pair(scale, np.asarray(zero, np.uint8), 1)
    joined = pair(scale, np.asarray(zero, np.uint8), 1)
    quantizer, restorer = joined.graph
    quantizer.attributes.add(ir.AttrInt64s(RESTORED, (-zero, 255 - zero)))
    joined.graph.outputs[0] = quantizer.outputs[0]
    joined.graph.remove(restorer, safe=True)
    x = values(scale, -zero, 255 - zero)
    upstream = torch.from_numpy(np.random.default_rng(1).normal(size=x.shape).astype(np.float32))
    found = []
    for model, name in ((apart, "y"), (joined, "q")):
        held = TorchGraph(model).run({"x": x}, ["x", "s", name])
        found.append(
            (held[name], *torch.autograd.grad(held[name], [held["x"], held["s"]], upstream))
        )
    assert torch.equal(found[0][0], found[1][0])
    for one, other in zip(found[0][1:], found[1][1:], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_codes_are_read_by_dequantizers_only() -> None:
    model = pair(np.asarray(0.5, np.float32), np.zeros((), np.int8), 1)
    codes = model.graph[0].outputs[0]
    model.graph.append(ir.Node("", "Flatten", [codes], name="moves"))
    with pytest.raises(UnsupportedModelError, match="Flatten 'moves' reads its codes") as caught:
        TorchGraph(model)
    assert "'Q'" in str(caught.value.where)


def test_codes_as_outputs_and_floats_as_codes_are_refused() -> None:
    model = pair(np.asarray(0.5, np.float32), np.zeros((), np.int8), 1)
    model.graph.outputs.append(model.graph[0].outputs[0])
    with pytest.raises(UnsupportedModelError, match="output of the graph"):
        TorchGraph(model)
    eight = pair(np.asarray(0.5, np.float32), np.zeros((), ml_dtypes.float8_e4m3fn), 1)
    with pytest.raises(UnsupportedModelError, match="FLOAT8"):
        TorchGraph(eight)


@pytest.mark.parametrize("index", [0, 1])
def test_scales_of_blocks_are_refused(index: int) -> None:
    model = pair(np.asarray(0.5, np.float32), np.zeros((), np.int8), 1)
    model.graph[index].attributes.add(ir.AttrInt64("block_size", 16))
    with pytest.raises(UnsupportedModelError, match="per block"):
        TorchGraph(model)


def test_constants_of_four_bits_are_unpacked() -> None:
    y = ir.Value(name="y", type=ir.TensorType(ir.DataType.FLOAT))
    graph = ir.Graph([], [y], nodes=[], opset_imports={"": 21}, name="weights")
    codes = np.array([[-7, 7, 3], [1, 0, -8]], ml_dtypes.int4)
    stored = add_initializer(graph, "w", codes)
    cast = ir.Node("", "Cast", [stored], [ir.AttrInt64("to", ir.DataType.INT8)], name="cast")
    cast.outputs[0].name = "wide"
    scale = add_initializer(graph, "s", np.array([0.5, 2.0], np.float32))
    axis = [ir.AttrInt64("axis", 0)]
    graph.extend(
        [cast, ir.Node("", "DequantizeLinear", [cast.outputs[0], scale], axis, outputs=[y])]
    )
    found = TorchGraph(ir.Model(graph, ir_version=10)).run({}, ["y"])["y"]
    np.testing.assert_array_equal(found.detach().numpy(), [[-3.5, 3.5, 1.5], [2, 0, -16]])
