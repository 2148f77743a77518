"""Single quantized nodes in both runtimes."""

from __future__ import annotations

import tomllib
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from hypothesis import strategies as st
from onnx import helper

from slimctl.graph._normalize import normalize
from slimctl.graph.session import Level, Products, open_session, run
from slimctl.runtime.device import host_device
from slimctl.runtime.session import Runtime

KNOWN = tomllib.loads((Path(__file__).parent / "known_differences.toml").read_text("utf-8"))
"""By operator: how many steps results may differ, how near to a tie that must be, and why."""


def draw_codes(draw: Any, kind: str, shape: tuple[int, ...]) -> np.ndarray:
    """Codes; sometimes only the ends of the type, where saturation and overflow show."""
    limits = np.iinfo(kind)
    random = np.random.default_rng(draw(st.integers(0, 2**31)))
    if draw(st.integers(0, 3)) == 0:
        return random.choice([limits.min, limits.max], shape).astype(kind)
    return random.integers(limits.min, limits.max, shape, endpoint=True).astype(kind)


def draw_scale(draw: Any, size: int = 0) -> np.ndarray:
    """Powers of two, which make ties, or any numbers; one, or several."""
    if draw(st.booleans()):
        values = [2.0 ** draw(st.integers(-8, 2)) for _ in range(size or 1)]
    else:
        values = [draw(st.floats(2**-9, 2.0, width=32)) for _ in range(size or 1)]
    return np.array(values if size else values[0], np.float32)


def draw_zero(draw: Any, kind: str, size: int = 0) -> np.ndarray:
    """Zero points; one, or several."""
    limits = np.iinfo(kind)
    codes = st.integers(int(limits.min), int(limits.max))
    values = [draw(codes) for _ in range(size or 1)]
    return np.array(values if size else values[0], kind)


def compare(op_type: str, inputs: list[np.ndarray | None], kinds: list[str], **how: Any) -> None:
    """Runs one node in both runtimes; results must be the same, or a known difference.

    Args:
        op_type: The operator.
        inputs: Its inputs; None for those left out.
        kinds: Types of its outputs.
        how: As for :func:`both`.
    """
    found, expected, exact = both(op_type, inputs, kinds, **how)
    for one, other in zip(found, expected, strict=True):
        _check(op_type, one, other, exact)


def both(
    op_type: str,
    inputs: list[np.ndarray | None],
    kinds: list[str],
    *,
    domain: str = "",
    opset: int = 17,
    constants: Collection[int] = (),
    attributes: dict[str, Any] | None = None,
    **more: Any,
) -> tuple[list[Any], list[Any], Any]:
    """What one node makes in the built-in runtime and in onnxruntime, and what was rounded.

    onnxruntime has one thread: some operators give each thread a range of its own.

    Args:
        op_type: The operator.
        inputs: Its inputs; None for those left out.
        kinds: Types of its outputs.
        domain: Of the operator.
        opset: Version of ONNX's operator set.
        constants: Inputs that are initializers.
        attributes: Of the node.
        more: Attributes, too.
    """
    attributes = {**(attributes or {}), **more}
    names = ["" if array is None else f"in{i}" for i, array in enumerate(inputs)]
    outputs = [f"out{i}" for i in range(len(kinds))]
    node = helper.make_node(op_type, names, outputs, "node", domain=domain)
    node.attribute.extend(helper.make_attribute(n, v) for n, v in attributes.items())
    given = {f"in{i}": array for i, array in enumerate(inputs) if array is not None}
    weights = {name: given.pop(name) for name in [f"in{i}" for i in constants]}
    model = _model(node, given, weights, dict(zip(outputs, kinds, strict=True)), opset)
    session = open_session(model, level=Level.DISABLED, threads=1, products=Products.NATIVE)
    expected = run(session, given)
    ours = Runtime(model, device=host_device(), tracing=True)
    found = ours.run(given)
    exact = ours.plan.steps[-1].engine.exact
    return [found[name] for name in outputs], [expected[name] for name in outputs], exact


def _check(op_type: str, found: Any, expected: Any, exact: Any) -> None:
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    if expected.dtype.kind == "f":
        largest = np.abs(expected).max(initial=0.0)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6 * largest)
        return
    steps = np.abs(found.astype(np.int64) - expected.astype(np.int64))
    if not steps.any():
        return
    rule = KNOWN.get(op_type)
    place = np.unravel_index(steps.argmax(), steps.shape)
    assert rule is not None, (
        f"{np.count_nonzero(steps)} codes differ, most at {place}: {found[place]} and not"
        f" {expected[place]}"
    )
    assert steps.max() <= rule["steps"]
    values = np.broadcast_to(exact, steps.shape)[steps > 0]
    distance = np.abs(values - np.floor(values) - 0.5)
    assert distance.max() <= rule["tie"]


def _model(
    node: onnx.NodeProto,
    feeds: dict[str, np.ndarray],
    weights: dict[str, np.ndarray],
    outputs: dict[str, str],
    opset: int,
) -> ir.Model:
    graph = helper.make_graph(
        [node],
        "g",
        [_info(name, array.dtype, array.shape) for name, array in feeds.items()],
        [_info(name, np.dtype(kind), None) for name, kind in outputs.items()],
        [onnx.numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    model = ir.serde.deserialize_model(
        helper.make_model(graph, opset_imports=imports, ir_version=9)
    )
    normalize(model)
    return model


def region(
    op_type: str,
    x: list[np.ndarray],
    weights: list[list[np.ndarray]],
    output: list[np.ndarray],
    *,
    axis: int = 0,
    **attributes: Any,
) -> ir.Model:
    """An operator between Q/DQ nodes; its input is ``codes``, its output ``y``.

    Args:
        op_type: The operator.
        x: Codes, scale and zero point of what it reads.
        weights: The same for each of its constants.
        output: Scale and zero point.
        axis: Of the weights' scales; that of the first axis for a bias.
        attributes: Of the node.
    """
    arrays = {"xs": x[1], "xz": x[2], "ys": output[0], "yz": output[1]}
    nodes = [helper.make_node("DequantizeLinear", ["codes", "xs", "xz"], ["x"], "dq x")]
    names = ["x"]
    for i, triple in enumerate(weights):
        inputs = [f"{part}{i}" for part in ("w", "s", "z")]
        arrays |= dict(zip(inputs, triple, strict=True))
        along = axis if triple[0].ndim > 1 else 0
        nodes.append(
            helper.make_node("DequantizeLinear", inputs, [f"w{i}f"], f"dq {i}", axis=along)
        )
        names.append(f"w{i}f")
    nodes.append(helper.make_node(op_type, names, ["float"], "core", **attributes))
    nodes.append(helper.make_node("QuantizeLinear", ["float", "ys", "yz"], ["q"], "q"))
    nodes.append(helper.make_node("DequantizeLinear", ["q", "ys", "yz"], ["y"], "dq y"))
    graph = helper.make_graph(
        nodes,
        "g",
        [_info("codes", x[0].dtype, x[0].shape)],
        [_info("y", np.dtype("float32"), None)],
        [onnx.numpy_helper.from_array(array, name) for name, array in arrays.items()],
    )
    imports = [helper.make_opsetid("", 17)]
    model = ir.serde.deserialize_model(
        helper.make_model(graph, opset_imports=imports, ir_version=9)
    )
    normalize(model)
    return model


def _info(name: str, kind: np.dtype[Any], shape: Any) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(kind), shape)
