"""Computes at once what does not depend on the inputs.

All constant nodes of a model run together in one onnxruntime session, so that the constants have
the very values that the model would have computed. What is left for run time:

* random numbers, and control flow, which may hold them;
* operators that ONNX does not define;
* Quantize/DequantizeLinear: folding them would undo the quantization of weights;
* a Cast of a large tensor to a wider type, since that is how weights are stored small;
* results above the limit, unless they replace constants that are as large.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import onnx
import onnx_ir as ir

from slimctl.core.errors import ModelExecutionError
from slimctl.graph.edit import add_initializer, attribute_graphs, const_array, const_tensor
from slimctl.graph.session import Level, open_session, run
from slimctl.graph.shapes import infer_shapes
from slimctl.passes._fuse_graph import (
    Array,
    Workbench,
    describe,
    integers,
    is_constant,
    is_op,
    mark,
    remove,
)

_KEPT = frozenset({"QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear", "Constant"})

RANDOM = frozenset(
    {
        "Bernoulli",
        "Dropout",
        "Multinomial",
        "RandomNormal",
        "RandomNormalLike",
        "RandomUniform",
        "RandomUniformLike",
    }
)
"""Operators that give other results in each run. Older onnx packages do not say which do."""

_BOUNDED_BY_INPUT = frozenset({"NonZero", "Unique", "Compress"})
"""Operators whose result has a size that depends on values, but not far above the input's."""

_WIDE_CAST_BYTES = 4096
"""A Cast to a wider type is folded up to here: constants such as shapes, not weights."""

_NATIVE = frozenset(
    {
        ir.DataType.BOOL,
        ir.DataType.DOUBLE,
        ir.DataType.FLOAT,
        ir.DataType.FLOAT16,
        ir.DataType.INT8,
        ir.DataType.INT16,
        ir.DataType.INT32,
        ir.DataType.INT64,
        ir.DataType.UINT8,
        ir.DataType.UINT16,
        ir.DataType.UINT32,
        ir.DataType.UINT64,
    }
)
"""Types that onnxruntime hands over as plain arrays."""


def fold_constants(bench: Workbench) -> None:
    """Replaces nodes with constant results by initializers."""
    _fold_shapes(bench)
    while _fold_wave(bench):
        pass  # what was folded may tell the size of what comes next


# Shapes


def _fold_shapes(bench: Workbench) -> None:
    for node in bench.nodes():
        array = _shape_result(bench, node)
        if array is not None and bench.may_touch(node):
            _replace(bench, node, [array])


def _shape_result(bench: Workbench, node: ir.Node) -> Array | None:
    """What a node answers about a shape, as far as that is fixed: int64 of any shape."""
    if is_op(node, "Shape"):
        dims = _shape_entries(bench, node)
    elif is_op(node, "Size"):
        sizes = bench.static_shape(node.inputs[0])
        return None if sizes is None else np.array(np.prod(sizes, dtype=np.int64))
    elif is_op(node, "Gather", "Slice") and _reads_shape(node):
        dims = _selected_entries(bench, node)
    else:
        return None
    known = dims is not None and all(isinstance(entry, int) for entry in dims.reshape(-1))
    return dims.astype(np.int64) if known and dims is not None else None


def _reads_shape(node: ir.Node) -> bool:
    value = node.inputs[0]
    return value is not None and is_op(value.producer(), "Shape")


def _shape_entries(bench: Workbench, node: ir.Node) -> Array | None:
    """Sizes and symbols that a Shape node gives, an object array [axes]."""
    dims = bench.shape(node.inputs[0])
    if dims is None:
        return None
    start = node.attributes.get_int("start", 0)
    end = node.attributes.get_int("end", len(dims))
    return np.array(dims, dtype=object)[start:end]


def _selected_entries(bench: Workbench, node: ir.Node) -> Array | None:
    """What a Gather or a Slice takes out of a shape, where only that part may be known."""
    value = node.inputs[0]
    shape = value.producer() if value is not None else None
    entries = _shape_entries(bench, shape) if shape is not None else None
    if entries is None:
        return None
    if is_op(node, "Slice"):
        part = _slice_of(node)
        return None if part is None else entries[part]
    indices = const_array(node.inputs[1])
    if indices is None or not ((-entries.size <= indices) & (indices < entries.size)).all():
        return None
    return np.asarray(entries[indices], dtype=object).reshape(indices.shape)


def _slice_of(node: ir.Node) -> slice | None:
    """A Slice of a vector."""
    starts, ends = integers(node, 1, "starts"), integers(node, 2, "ends")
    steps = integers(node, 4, "steps", (1,))
    if starts is None or ends is None or steps is None or len(starts) != 1:
        return None
    return slice(starts[0], ends[0], steps[0]) if steps[0] > 0 else None


# Everything else


def _fold_wave(bench: Workbench) -> bool:
    """Folds what is constant now, as far as the size of the results is known beforehand."""
    region = _Region(bench)
    for node in bench.nodes():
        region.consider(node)
    if not region.nodes:
        return False
    results = _evaluate(bench, region)
    for node in reversed(region.nodes):
        _replace(bench, node, [results.get(value) for value in node.outputs])
    return bool(region.nodes)


@dataclass
class _Region:
    """Nodes that are folded together, in topological order."""

    bench: Workbench
    nodes: list[ir.Node] = field(default_factory=list)
    values: dict[ir.Value, int] = field(default_factory=dict)
    """Results inside the region and their sizes in bytes."""

    def consider(self, node: ir.Node) -> None:
        """Takes a node in if it is constant and may be folded."""
        given = [value for value in node.inputs if value is not None]
        if not given or not all(value in self.values or is_constant(value) for value in given):
            return
        if node.op_type in _KEPT or (is_op(node, "Identity") and _gives_output(node)):
            return
        sizes = self._result_sizes(node)
        reason = sizes if isinstance(sizes, str) else self._reason_against(node, sum(sizes))
        if reason is not None:
            self.bench.skip(node, reason)
        elif not isinstance(sizes, str) and self.bench.may_touch(node):
            self.nodes.append(node)
            self.values.update(zip(node.outputs, sizes, strict=True))

    def _result_sizes(self, node: ir.Node) -> list[int] | str:
        """Bytes of each result, or why the node cannot be folded whatever they are."""
        if node.op_type in RANDOM or any(attribute_graphs(node)):
            return f"{node.op_type} may give another result in each run"
        if node.domain or not onnx.defs.has(node.op_type):
            return f"{node.domain}.{node.op_type} is not an operator of ONNX"
        sizes = [_byte_size(value) for value in node.outputs]
        if None in sizes and all(value not in self.values for value in node.inputs if value):
            sizes = self._infer_sizes(node)
        if None in sizes:
            return "the size of its result is not known before it runs"
        return [size for size in sizes if size is not None]

    def _infer_sizes(self, node: ir.Node) -> list[int | None]:
        if node.op_type in _BOUNDED_BY_INPUT:
            shapes = (value.shape for value in node.inputs if value is not None and value.shape)
            rank = max((len(shape) for shape in shapes), default=0) + 1
            return [8 * rank * sum(map(self._size, node.inputs))] * len(node.outputs)
        model, clones = _model_of(self.bench, [node], ())
        infer_shapes(model)
        return [_byte_size(clones[value]) for value in node.outputs]

    def _size(self, value: ir.Value | None) -> int:
        if value is None:
            return 0
        tensor = const_tensor(value)
        return self.values[value] if tensor is None else tensor.nbytes

    def _reason_against(self, node: ir.Node, size: int) -> str | None:
        limit = self.bench.fold_limit_bytes
        freed = sum(self._size(value) for value in node.inputs if _is_read_once(value))
        if is_op(node, "Cast", "CastLike") and size > max(_WIDE_CAST_BYTES, freed):
            return "it widens a constant that is stored small"
        if size > max(limit, freed):
            return f"its result of {size} bytes exceeds fold_limit_bytes"
        return None


def _gives_output(node: ir.Node) -> bool:
    return any(value.is_graph_output() for value in node.outputs)


def _is_read_once(value: ir.Value | None) -> bool:
    return value is not None and len(value.uses()) == 1 and not value.is_graph_output()


def _byte_size(value: ir.Value) -> int | None:
    """Bytes of a tensor of a native type, as far as its shape is known; 0 for one left out."""
    if not value.name:
        return 0
    if not isinstance(value.type, ir.TensorType) or value.dtype not in _NATIVE:
        return None
    if value.shape is None or not value.shape.is_static():
        return None
    return int(np.prod(value.shape.numpy(), dtype=np.int64)) * int(value.type.dtype.itemsize)


def _model_of(
    bench: Workbench, nodes: Iterable[ir.Node], wanted: Iterable[ir.Value]
) -> tuple[ir.Model, dict[ir.Value, ir.Value]]:
    """A model without inputs that computes some constants, and the stand-ins of all values."""
    stand_ins: dict[ir.Value, ir.Value] = {}
    constants: list[ir.Value] = []
    clones: list[ir.Node] = []
    for node in nodes:
        for value in node.inputs:
            if value is not None and value not in stand_ins:
                stand_ins[value] = _constant_stand_in(value, f"c{len(stand_ins)}")
                constants.append(stand_ins[value])
        outputs = [
            ir.Value(name=value.name and f"r{len(stand_ins)}_{index}")
            for index, value in enumerate(node.outputs)
        ]
        stand_ins.update(zip(node.outputs, outputs, strict=True))
        inputs = [None if value is None else stand_ins[value] for value in node.inputs]
        attributes = list(node.attributes.values())
        clones.append(
            ir.Node("", node.op_type, inputs, attributes, outputs=outputs, name=node.name)
        )
    graph = ir.Graph(
        [],
        [stand_ins[value] for value in wanted],
        nodes=clones,
        initializers=constants,
        opset_imports={"": bench.opset},
        name="constants",
    )
    return ir.Model(graph, ir_version=bench.model.ir_version), stand_ins


def _constant_stand_in(value: ir.Value, name: str) -> ir.Value:
    tensor, array = const_tensor(value), const_array(value)
    assert tensor is not None and array is not None, "only constants feed a region"
    copy = ir.Tensor(array, dtype=tensor.dtype, name=name)  # shares the values
    return ir.Value(name=name, type=ir.TensorType(copy.dtype), shape=copy.shape, const_value=copy)


def _evaluate(bench: Workbench, region: _Region) -> Mapping[ir.Value, Array]:
    """Results of a region that are needed outside. Nodes that fail are taken out of the region."""
    while True:
        try:
            return _run(bench, region.nodes)
        except ModelExecutionError as error:
            failing = region.nodes[_first_failing(bench, region.nodes)]
            bench.skip(failing, f"it cannot be computed: {error.what}")
            region.nodes = _independent(region.nodes, failing)


def _first_failing(bench: Workbench, nodes: list[ir.Node]) -> int:
    """Place of the first node that onnxruntime cannot compute, by halving."""

    def fails(count: int) -> bool:
        try:
            _run(bench, nodes[:count])
        except ModelExecutionError:
            return True
        return False

    return bisect_left(range(1, len(nodes)), True, key=fails)


def _independent(nodes: list[ir.Node], failing: ir.Node) -> list[ir.Node]:
    """The nodes that need no result of one of them."""
    lost = set(failing.outputs)
    kept: list[ir.Node] = []
    for node in nodes:
        if node is failing:
            continue
        if lost.isdisjoint(value for value in node.inputs if value is not None):
            kept.append(node)
        else:
            lost.update(node.outputs)
    return kept


def _run(bench: Workbench, nodes: list[ir.Node]) -> Mapping[ir.Value, Array]:
    inside = set(nodes)
    wanted = [value for node in nodes for value in node.outputs if _is_read_outside(value, inside)]
    if not wanted:
        return {}
    model, stand_ins = _model_of(bench, nodes, wanted)
    results = run(open_session(model, level=Level.DISABLED, threads=1), {})
    return {value: results[stand_ins[value].name or ""] for value in wanted}


def _is_read_outside(value: ir.Value, inside: set[ir.Node]) -> bool:
    return value.is_graph_output() or any(use.node not in inside for use in value.uses())


def _replace(bench: Workbench, node: ir.Node, results: list[Array | None]) -> None:
    """Puts initializers in the place of a node's outputs; None for one that nobody reads."""
    for value, array in zip(node.outputs, results, strict=True):
        if array is not None:
            _replace_value(bench, node, value, array)
    remove(node)
    bench.count(f"{node.op_type} folded to a constant")


def _replace_value(bench: Workbench, node: ir.Node, value: ir.Value, array: Array) -> None:
    graph = node.graph
    assert graph is not None, "only nodes of a graph are rewritten"
    name = value.name or ""
    if not value.is_graph_output():
        value.name = None  # the initializer takes the name over
        value.replace_all_uses_with(add_initializer(graph, name, array))
        return
    # An output of a graph stays the output of a node: not every runtime takes an initializer.
    constant = add_initializer(graph, bench.names.fresh(f"{name}_constant"), array)
    identity = ir.Node(
        "", "Identity", [constant], name=bench.names.fresh_node(f"{node.name}_constant")
    )
    output = identity.outputs[0]
    describe(output, constant)
    describe(output, value)
    mark(identity)
    graph.insert_before(node, identity)
    value.replace_all_uses_with(output, replace_graph_outputs=True)
    output.name, value.name = name, None
