"""Models of one node, computed by the built-in runtime and by onnxruntime."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from slimctl.graph._normalize import normalize
from slimctl.runtime.session import Runtime

Array: TypeAlias = NDArray[Any]
Inputs: TypeAlias = Sequence[Array | None]


def one_node(
    op_type: str,
    inputs: Inputs,
    *,
    opset: int,
    domain: str = "",
    outputs: int | Sequence[str] = 1,
    **attributes: Any,
) -> onnx.ModelProto:
    """A model of one node; an input that is None is left out.

    Inputs of types that onnxruntime cannot be fed with are initializers.
    """
    names = [f"x{i}" if value is not None else "" for i, value in enumerate(inputs)]
    results = [f"y{i}" for i in range(outputs)] if isinstance(outputs, int) else list(outputs)
    node = helper.make_node(op_type, names, results, domain=domain, **attributes)
    graph = helper.make_graph(
        [node],
        "one node",
        [
            helper.make_tensor_value_info(
                name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape
            )
            for name, value in zip(names, inputs, strict=True)
            if value is not None and _can_be_fed(value)
        ],
        [onnx.ValueInfoProto(name=name) for name in results if name],
        [
            numpy_helper.from_array(value, name)
            for name, value in zip(names, inputs, strict=True)
            if value is not None and not _can_be_fed(value)
        ],
    )
    opsets = [helper.make_opsetid("", opset)]
    if domain:
        opsets.append(helper.make_opsetid(domain, 1))
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def _can_be_fed(value: Array) -> bool:
    return value.dtype.kind != "V" and value.dtype.isbuiltin == 1


def feeds(inputs: Inputs) -> dict[str, Array]:
    present = {f"x{i}": value for i, value in enumerate(inputs) if value is not None}
    return {name: value for name, value in present.items() if _can_be_fed(value)}


def ours(op_type: str, inputs: Inputs, **node: Any) -> list[Array]:
    """What the built-in runtime computes."""
    model = ir.serde.deserialize_model(one_node(op_type, inputs, **node))
    normalize(model)
    before = [None if value is None else value.copy() for value in inputs]
    names = (value.name or "" for value in model.graph.inputs)
    values = dict(zip(names, feeds(inputs).values(), strict=True))
    found = list(Runtime(model).run(values).values())
    for value, copy in zip(inputs, before, strict=True):
        np.testing.assert_array_equal(value, copy, "the kernel wrote into its input")
    return found


def theirs(op_type: str, inputs: Inputs, **node: Any) -> list[Array]:
    """What onnxruntime computes, without optimizations."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    model = one_node(op_type, inputs, **node).SerializeToString()
    session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    return list(session.run(None, feeds(inputs)))


def assert_agrees(
    op_type: str, inputs: Inputs, *, rtol: float = 1e-5, terms: float = 0.0, **node: Any
) -> None:
    """Types, shapes and values of all outputs; the tolerance is relative to the largest value.

    Sums of float32 in another order differ by a few units in the last place of their largest terms,
    not of the result: where all of a result may cancel, ``terms`` is the size of what is summed.
    """
    found, expected = ours(op_type, inputs, **node), theirs(op_type, inputs, **node)
    assert len(found) == len(expected)
    for mine, other in zip(found, expected, strict=True):
        assert_close(mine, other, rtol=rtol, terms=terms)


def assert_close(found: Array, expected: Array, *, rtol: float = 1e-5, terms: float = 0.0) -> None:
    """The same type and shape, and values that differ by ``rtol`` of the largest at most.

    ``terms`` counts as the largest where no value is as large.
    """
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    if expected.dtype.kind in "iub":
        np.testing.assert_array_equal(found, expected)
        return
    wide = expected.astype(np.float64)
    scale = np.abs(wide[np.isfinite(wide)]).max(initial=terms)
    np.testing.assert_allclose(found.astype(np.float64), wide, rtol=0, atol=rtol * scale)
