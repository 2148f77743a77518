"""Decides where quantization goes: which nodes compute in integers, which tensors get a Q/DQ pair.

Nothing is changed here. The rules follow what onnxruntime fuses (docs/architecture.md): an integer
kernel appears only when every input of a node has its own DQ and, for most operators, its output a
Q. A pair that does not fuse costs more than it saves, so a tensor is quantized only when
an integer kernel wants it.

    1. layers        Conv, Gemm, MatMul with constant weights, and MatMul of two activations,
                     want their inputs quantized
    2. backwards     an operator that only moves values hands the wish to its input
    3. forwards      Add, Concat, pooling ... after an integer kernel may compute in integers too
    4. prune         ... unless nobody behind them wants an integer
    5. groups        tensors that must share one range
    6. types         tensors of 16 bits where some layers have them and others 8
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from types import MappingProxyType
from typing import Final

import onnx_ir as ir

from slimctl.core.contract import Skipped
from slimctl.core.target import Target
from slimctl.graph.bodies import branches
from slimctl.graph.edit import attribute_graphs, const_array, const_tensor
from slimctl.graph.select import Selection
from slimctl.passes._layers import Layer, is_linear, recognize
from slimctl.passes._mixed_words import carrier_in

_FLOAT: Final = ir.DataType.FLOAT
_CLAMPS: Final = ("Relu", "Clip")
_SMALL_PART: Final = 8
"""A float operand is quantized for an integer kernel's sake only when it is at most this part of
the other operand (a squeeze-and-excitation gate, a per-channel factor): a second pass over a full
tensor would cost what the kernel saves."""


@dataclass
class Placement:
    """Where quantization goes in one graph.

    Attributes:
        graph: The main graph or a branch of an If.
        layers: Nodes whose weights become integers, in graph order.
        integer: Nodes that compute in integers, layers included.
        tensors: Activations that get a Q/DQ pair, in graph order.
        clamps: Relu and Clip nodes whose producer may write the integer directly, by their output:
            since saturation does the same, or since its kernel computes them along.
        sources: For each tensor the tensors whose ranges make up its range.
        skipped: Candidates that stay float, with the reason.
        wide: Nodes with activations of 16 bits where those of others have 8.
        wide_tensors: Activations of 16 bits: what these nodes read and write, and what has to have
            the type of it.
    """

    graph: ir.Graph
    layers: list[Layer] = field(default_factory=list)
    integer: set[ir.Node] = field(default_factory=set)
    tensors: dict[ir.Value, None] = field(default_factory=dict)
    clamps: dict[ir.Value, ir.Node] = field(default_factory=dict)
    sources: dict[ir.Value, tuple[ir.Value, ...]] = field(default_factory=dict)
    skipped: list[Skipped] = field(default_factory=list)
    wide: set[ir.Node] = field(default_factory=set)
    wide_tensors: set[ir.Value] = field(default_factory=set)

    def written_by_integer_kernel(self, value: ir.Value) -> bool:
        """Whether the value's producer, seen through a clamp, computes in integers."""
        return origin(value, self.clamps) in self.integer

    def is_narrow_layer(self, node: ir.Node | None) -> bool:
        """Whether it is a layer that reads and writes 8 bits, whatever is around it."""
        return node in self.integer and node not in self.wide and is_linear(node)


def origin(value: ir.Value, clamps: dict[ir.Value, ir.Node]) -> ir.Node | None:
    """The node that writes a value, seen through a Relu or Clip that quantization absorbs."""
    clamp = clamps.get(value)
    source = value if clamp is None else clamp.inputs[0]
    return None if source is None else source.producer()


def place(
    graph: ir.Graph,
    target: Target,
    selection: Selection,
    unusable: frozenset[str] = frozenset(),
    excluded: Mapping[ir.Node, str] = MappingProxyType({}),
) -> Placement:
    """Decides for one graph; bodies inside it are graphs of their own.

    Args:
        graph: Float graph with inferred types and shapes.
        target: What the execution provider runs in integers.
        selection: Which nodes the user wants touched.
        unusable: Names of tensors that never held a finite value and so have no range.
        excluded: Nodes that stay in float by default, with the reason.
    """
    return _Placer(graph, target, selection, unusable, excluded).place()


class _Placer:
    def __init__(
        self,
        graph: ir.Graph,
        target: Target,
        selection: Selection,
        unusable: frozenset[str],
        excluded: Mapping[ir.Node, str],
    ) -> None:
        self.graph = graph
        self.target = target
        self.selection = selection
        self.unusable = unusable
        self.excluded = excluded
        self.result = Placement(graph)
        self.wanted: set[ir.Value] = set()  # tensors that an integer kernel reads

    def place(self) -> Placement:
        nodes = list(self.graph)
        self._find_clamps(nodes)
        for node in nodes:
            self._take_layer(node)
        for node in [layer.node for layer in self.result.layers]:
            if node in self.result.integer and node.op_type not in self.target.float_output:
                self._add(self._written(node))
        for node in reversed(nodes):
            self._pull_through_movement(node)
        for node in nodes:
            self._extend_forwards(node)
        for node in reversed(nodes):
            self._prune(node)
        self._order_tensors(nodes)
        self._group(nodes)
        self._widen(nodes)
        return self.result

    # 1. layers

    def _take_layer(self, node: ir.Node) -> None:
        if not branches(node):
            for body in attribute_graphs(node):
                self._skip_body(node, body)
        if not is_linear(node):
            if node in self.excluded:
                self.result.skipped.append(Skipped(node.name or "", self.excluded[node]))
            return
        reason = self._reason_against(node) or self._reason_against_operator(node)
        found = reason or self._recognize(node)
        if isinstance(found, str):
            self.result.skipped.append(Skipped(node.name or "", found))

    def _reason_against(self, node: ir.Node) -> str | None:
        return self.selection.reason_against(node) or self.excluded.get(node)

    def _reason_against_operator(self, node: ir.Node) -> str | None:
        known = (*self.target.weighted, *self.target.storage_only)
        if node.op_type not in known:
            return f"{node.op_type} has no integer kernel on target {self.target.name}"
        unusable = [v.name for v in activations(node) if v.name in self.unusable]
        if unusable:
            return _no_value(unusable[0])
        if self._written_name(node) in self.unusable:
            return _no_value(self._written_name(node))
        return None

    def _recognize(self, node: ir.Node) -> str | None:
        """Takes the node, or says why not."""
        if node.op_type == "MatMul" and not any(const_tensor(v) for v in node.inputs):
            if node.op_type not in self.target.weighted:
                return f"MatMul has no integer kernel on target {self.target.name}"
            if any(v is None or v.dtype != _FLOAT for v in node.inputs):
                return "its inputs are not known to be float"
            self._want(node)
            return None
        layer = recognize(node)
        if isinstance(layer, str):
            return layer
        self.result.layers.append(layer)
        stored = carrier_in(self.selection, node) == "real"
        if node.op_type not in self.target.storage_only and not stored:
            self._want(node)
        return None

    def _want(self, node: ir.Node) -> None:
        self.result.integer.add(node)
        for value in activations(node):
            self.wanted.add(value)
            self._add(value)

    def _skip_body(self, node: ir.Node, graph: ir.Graph) -> None:
        for inner in graph.all_nodes():
            if is_linear(inner):
                reason = f"inside the body of {node.op_type} '{node.name}', which runs many times"
                self.result.skipped.append(Skipped(inner.name or "", reason))

    # 2. to 4. other operators

    def _find_clamps(self, nodes: list[ir.Node]) -> None:
        heirs = {
            *self.target.weighted,
            *self.target.elementwise,
            *self.target.unary,
        } - set(self.target.fixed_ranges)
        for node in nodes:
            if node.op_type not in _CLAMPS or node.domain or node.inputs[0] is None:
                continue
            producer = node.inputs[0].producer()
            sole = len(node.inputs[0].uses()) == 1 and not node.inputs[0].is_graph_output()
            if producer is None or producer.op_type not in heirs or not sole:
                continue
            absorbed = producer.op_type in self.target.absorbing_integers
            if absorbed or self._saturation_can_replace(node):
                self.result.clamps[node.outputs[0]] = node

    def _saturation_can_replace(self, clamp: ir.Node) -> bool:
        """Whether some range makes the clamp redundant: every range holds zero."""
        if not _fixed_bounds(clamp) or self.target.activation_symmetric:
            return False
        low, high = clamp_bounds(clamp)
        return low <= 0.0 <= high and low < high

    def _written(self, node: ir.Node) -> ir.Value:
        """What a node writes, seen through the clamp behind it."""
        output = node.outputs[0]
        for user in output.consumers():
            if user.outputs and self.result.clamps.get(user.outputs[0]) is user:
                return user.outputs[0]
        return output

    def _written_name(self, node: ir.Node) -> str | None:
        return self._written(node).name

    def _pull_through_movement(self, node: ir.Node) -> None:
        source = self._movement_source(node)
        if source is None or not any(v in self.wanted for v in node.outputs):
            return
        # Other readers of a float tensor keep the float, so pulling costs no accuracy; but a part
        # taken out of a larger tensor (Gather, Slice, ReduceMax) is cheaper to quantize itself.
        producer = source.producer()
        grows = node.op_type in ("Gather", "Slice", "ReduceMax", "ReduceMin", "Split")
        if grows and (producer is None or producer not in self.result.integer):
            return
        self._make_integer(node, [source])

    def _extend_forwards(self, node: ir.Node) -> None:
        if node in self.result.integer or node.domain:
            return
        inputs = self._elementwise_inputs(node)
        if inputs is None:
            source = self._movement_source(node) or self._unary_source(node)
            inputs = [source] if source is not None and self._may_be_integer(source) else None
        if inputs is not None and self._reason_against(node) is None:
            self._make_integer(node, inputs)

    def _make_integer(self, node: ir.Node, inputs: list[ir.Value]) -> None:
        written = [self._written(node)] if len(node.outputs) == 1 else list(node.outputs)
        if any(v.name in self.unusable for v in (*inputs, *written)):
            return
        self.result.integer.add(node)
        for value in inputs:
            self.wanted.add(value)
            self._add(value)
        for value in written:
            self._add(value)

    def _may_be_integer(self, value: ir.Value) -> bool:
        return self._integer_at_hand(value) or (self.target.whole_graph and value.dtype == _FLOAT)

    def _integer_at_hand(self, value: ir.Value) -> bool:
        if value not in self.result.tensors:
            return False
        return value.is_graph_input() or self.result.written_by_integer_kernel(value)

    def _elementwise_inputs(self, node: ir.Node) -> list[ir.Value] | None:
        """All inputs of an Add, Mul or Concat that is worth computing in integers, else None."""
        if node.op_type not in self.target.elementwise or len(node.inputs) < 2:
            return None
        inputs = [value for value in node.inputs if value is not None]
        ready = [value for value in inputs if self._integer_at_hand(value)]
        others = [v for v in inputs if v not in ready]
        if any(v.dtype != _FLOAT for v in others) or not any(
            const_tensor(v) is None for v in inputs
        ):
            return None
        if self.target.whole_graph:
            usable = all(const_tensor(v) is None or _is_finite_constant(v) for v in others)
            return inputs if usable else None
        if not ready:
            return None
        if node.op_type == "Concat":
            cheap = sum(map(_size, others)) <= sum(map(_size, ready))
        else:
            largest = max(map(_size, ready))
            cheap = all(_is_finite_constant(v) or _size(v) * _SMALL_PART <= largest for v in others)
        return inputs if cheap else None

    def _unary_source(self, node: ir.Node) -> ir.Value | None:
        if node.op_type not in self.target.unary or not _has_integer_kernel(node):
            return None
        return node.inputs[0]

    def _movement_source(self, node: ir.Node) -> ir.Value | None:
        if node.op_type not in self.target.data_movement or node.domain or not node.inputs:
            return None
        mode = node.attributes.get("mode")
        known = mode is None or mode.as_string() in self.target.resize_modes
        if node.op_type == "Resize" and not known:
            return None
        # MaxPool's indices have no integer kernel.
        if node.op_type == "MaxPool" and len(node.outputs) > 1:
            return None
        source = node.inputs[0]
        if source is None or const_tensor(source) is not None:
            return None
        return None if self._reason_against(node) else source

    def _prune(self, node: ir.Node) -> None:
        if node not in self.result.integer or node.op_type in self.target.weighted:
            return
        if self.target.whole_graph:
            return
        written = [self._written(node)] if len(node.outputs) == 1 else list(node.outputs)
        if any(self._is_wanted(value) or self._is_moved_into_a_body(value) for value in written):
            return
        self.result.integer.discard(node)
        for value in written:
            self.result.tensors.pop(value, None)
        for source in node.inputs:
            if source is not None and not self._must_stay(source):
                self.result.tensors.pop(source, None)

    def _is_wanted(self, value: ir.Value) -> bool:
        return any(user in self.result.integer for user in value.consumers())

    def _is_moved_into_a_body(self, value: ir.Value) -> bool:
        """Whether a body reads what an operator that only moves values has written.

        Behind the DQ in front of it onnxruntime 1.32 adds a pair of its own there, takes the index
        of the captured input for that of an explicit one, and aborts the process
        (QDQPropagationTransformer).
        """
        producer = value.producer()
        if producer is None or producer.op_type not in self.target.data_movement:
            return False
        return any(use.node.graph is not self.graph for use in value.uses())

    def _must_stay(self, value: ir.Value) -> bool:
        writer = origin(value, self.result.clamps)
        optional = writer is None or writer.op_type in self.target.float_output
        integer = writer in self.result.integer
        return self._is_wanted(value) or (integer and not optional)

    def _add(self, value: ir.Value) -> None:
        self.result.tensors[value] = None

    # 5. order and groups

    def _order_tensors(self, nodes: list[ir.Node]) -> None:
        chosen = self.result.tensors
        constants = {v for v in chosen if const_tensor(v) is not None}
        own = [*self.graph.inputs, *(v for node in nodes for v in node.outputs)]
        # A branch may read tensors of the graphs around it; those come first.
        captured = [v for v in chosen if v not in set(own) and v not in constants]
        in_order = [value for value in (*captured, *own) if value in chosen]
        by_name = sorted(constants, key=lambda value: value.name or "")
        self.result.tensors = dict.fromkeys([*in_order, *by_name])

    def _group(self, nodes: list[ir.Node]) -> None:
        """Tensors that share a range: one class each, its range the union of its sources."""
        parent: dict[ir.Value, ir.Value] = {value: value for value in self.result.tensors}

        def root(value: ir.Value) -> ir.Value:
            return _root(value, parent)

        derived: set[ir.Value] = set()
        integer = [node for node in nodes if node in self.result.integer]
        for first, second in (pair for node in integer for pair in self._moved(node)):
            if first in parent and second in parent and root(first) is not root(second):
                parent[root(second)] = root(first)
                derived.add(second)
        # A Relu in the group must stay redundant, and a wider range would not start at zero.
        clamped = {root(value) for value in self.result.clamps if value in parent}
        for node in integer:
            bound = self._has_one_scale(node)
            for first, second in self._joined(node):
                if first in parent and second in parent and (bound or root(second) not in clamped):
                    parent[root(second)] = root(first)
        members: dict[ir.Value, list[ir.Value]] = {}
        for value in self.result.tensors:
            members.setdefault(root(value), []).append(value)
        for group in members.values():
            sources = tuple(v for v in group if v not in derived) or (group[0],)
            self.result.sources.update(dict.fromkeys(group, sources))

    def _moved(self, node: ir.Node) -> Iterator[tuple[ir.Value, ir.Value]]:
        """Input and outputs of an operator that hands values on unchanged."""
        if node.op_type in self.target.data_movement and node.inputs[0] is not None:
            yield from ((node.inputs[0], output) for output in node.outputs)

    def _joined(self, node: ir.Node) -> Iterator[tuple[ir.Value, ir.Value]]:
        """Output and inputs of a Concat that may share a range.

        An input that only the Concat reads loses nothing by taking the result's range: its values
        are rounded to that grid anyway, and the kernel becomes a copy.
        """
        if node.op_type != "Concat":
            return
        output = self._written(node)
        if self._has_one_scale(node):
            yield from ((output, value) for value in node.inputs if value is not None)
            return
        for value in node.inputs:
            if value is None or value.is_graph_output() or const_tensor(value) is not None:
                continue
            if len(value.uses()) == 1:
                yield output, value

    def _has_one_scale(self, node: ir.Node) -> bool:
        """Whether the target wants one scale for all that an operator reads and writes.

        A Relu in front keeps its place there: the kernel before it computes it along.
        """
        return not node.domain and self.target.asks("same_scales", node.op_type)

    # 6. two types of activations

    def _widen(self, nodes: list[ir.Node]) -> None:
        """Finds what has 16 bits: an integer kernel that is no layer has one type throughout."""
        integer = [node for node in nodes if node in self.result.integer]
        self.result.wide = {n for n in integer if carrier_in(self.selection, n) == "wide"}
        if not self.result.wide:
            return
        parent: dict[ir.Value, ir.Value] = {value: value for value in self.result.tensors}
        for node in integer:
            joined = [] if is_linear(node) else self._around(node)
            for first, second in pairwise(joined):
                parent[_root(second, parent)] = _root(first, parent)
        roots = {_root(v, parent) for node in self.result.wide for v in self._around(node)}
        self.result.wide_tensors = {v for v in parent if _root(v, parent) in roots}

    def _around(self, node: ir.Node) -> list[ir.Value]:
        """The quantized activations that an integer kernel reads and writes."""
        read = activations(node) if is_linear(node) else [v for v in node.inputs if v is not None]
        written = [self._written(node)] if len(node.outputs) == 1 else list(node.outputs)
        return [value for value in (*read, *written) if value in self.result.tensors]


def _root(value: ir.Value, parent: Mapping[ir.Value, ir.Value]) -> ir.Value:
    while parent[value] is not value:
        value = parent[value]
    return value


def activations(node: ir.Node) -> list[ir.Value]:
    """The inputs that carry activations: those of a layer or of a MatMul of two activations."""
    wanted: Iterable[ir.Value | None] = node.inputs[:1]
    if node.op_type == "MatMul" and const_tensor(node.inputs[1]) is None:
        wanted = node.inputs[:2]
    return [value for value in wanted if value is not None]


def _no_value(name: str | None) -> str:
    return (
        f"'{name}' has no usable range: never computed on the calibration data, never finite, "
        "mask values, or too small"
    )


def _fixed_bounds(node: ir.Node) -> bool:
    return all(value is None or const_array(value) is not None for value in node.inputs[1:])


def clamp_bounds(clamp: ir.Node) -> tuple[float, float]:
    """Lower and upper bound of a Relu or Clip; a missing bound is infinite."""
    if clamp.op_type == "Relu":
        return 0.0, float("inf")
    bounds = []
    for index, missing in ((1, -float("inf")), (2, float("inf"))):
        value = clamp.inputs[index] if len(clamp.inputs) > index else None
        array = const_array(value)
        bounds.append(missing if array is None else float(array.reshape(-1)[0]))
    return bounds[0], bounds[1]


def _has_integer_kernel(node: ir.Node) -> bool:
    """Whether onnxruntime's integer kernel knows this form of the operator.

    QLinearAveragePool has no dilations, and with ``ceil_mode`` it counts padding differently.
    """
    if node.op_type != "AveragePool":
        return True
    dilations = node.attributes.get("dilations")
    ceil, include = (node.attributes.get(name) for name in ("ceil_mode", "count_include_pad"))
    rounds_up = ceil is not None and ceil.as_int() == 1
    counts_padding = include is not None and include.as_int() == 1
    dilated = dilations is not None and any(size != 1 for size in dilations.as_ints())
    return not dilated and not (rounds_up and counts_padding)


def _is_finite_constant(value: ir.Value) -> bool:
    array = const_array(value)
    # numpy only where it is needed: most operands are no constants.
    return array is not None and array.size > 0 and bool(abs(array).max() < float("inf"))


def _size(value: ir.Value) -> float:
    """Number of elements with symbolic axes counted as one; infinite when the rank is unknown."""
    if value.shape is None:
        return float("inf")
    size = 1
    for dimension in value.shape:
        size *= dimension if isinstance(dimension, int) else 1
    return size
