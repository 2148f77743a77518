"""Takes channels out of a model, and out of everything that depends on how many there are."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from slimctl.graph.channels.coupling import Channels, Member, Role
from slimctl.graph.channels.units import FIXED, Ids
from slimctl.graph.edit import NameScope, add_initializer, const_array, remove_dead
from slimctl.graph.shapes import infer_shapes
from slimctl.graph.sizes import shape_entries

_SIZES = ir.DataType.INT64
_FULL = np.iinfo(np.int64).max


def remove_channels(model: ir.Model, channels: Channels, gone: Ids, *, made_by: str = "") -> None:
    """Removes units from the model, in place.

    Weights lose the slices that computed or read them; attributes, sizes and shapes follow. The
    result computes what :func:`silence_channels` makes of the original.

    Args:
        model: The model that was analyzed.
        channels: Its analysis; of no use afterwards.
        gone: Units, none of them blocked; of every axis some must stay.
        made_by: Provenance of nodes that are added.
    """
    removal = Removal(model, channels, gone, made_by)
    for prepare in channels.preparations:
        prepare(removal)
    for value, members in _by_value(channels.members).items():
        removal.shrink(value, members)
    for adjust in channels.adjustments:
        adjust(removal)
    remove_dead(model)
    for value in _computed(model):
        value.shape = None
    infer_shapes(model)


def silence_channels(channels: Channels, gone: Ids) -> None:
    """Sets to zero whatever computes these units, in place: what their removal amounts to."""
    removed = _mask(channels, gone)
    by_value = _by_value([m for m in channels.members if m.role is Role.PRODUCE])
    for value, members in by_value.items():
        array = const_array(value)
        assert array is not None, "members are constants"
        changed = array.copy()
        for member in members:
            ids = channels.units.find(member.ids)
            zero = np.where(ids == FIXED, False, removed[ids])
            view = np.moveaxis(changed, member.axis, 0)
            view[zero] = 0
        if value.is_initializer():
            value.const_value = ir.Tensor(changed, name=value.name)
        else:
            _set_constant(value, changed)


def _set_constant(value: ir.Value, array: NDArray[Any]) -> None:
    node = value.producer()
    assert node is not None, "a constant without an initializer comes from a node"
    node.attributes.clear()  # of value, value_floats and their like, one must be there
    node.attributes["value"] = ir.AttrTensor("value", ir.Tensor(array))


def _by_value(members: Sequence[Member]) -> dict[ir.Value, list[Member]]:
    found: dict[ir.Value, list[Member]] = defaultdict(list)
    for member in members:
        found[member.value].append(member)
    return found


def _mask(channels: Channels, gone: Ids) -> NDArray[np.bool_]:
    removed = np.zeros(max(len(channels.units), 1), bool)
    removed[channels.units.find(gone)] = True
    return removed


def _computed(model: ir.Model) -> list[ir.Value]:
    return [
        value
        for node in model.graph.all_nodes()
        for value in node.outputs
        if not value.is_graph_output()
    ]


class Removal:
    """A removal in progress: knows what goes, and rewrites what depends on it."""

    def __init__(self, model: ir.Model, channels: Channels, gone: Ids, made_by: str) -> None:
        self._channels = channels
        self._removed = _mask(channels, gone)
        self._names = NameScope(model)
        self._made_by = made_by

    # what stays

    def kept(self, ids: Ids) -> NDArray[np.bool_]:
        """Which indices stay."""
        roots = self._channels.units.find(ids.reshape(-1))
        gone = np.where(roots == FIXED, False, self._removed[roots])
        return np.asarray(~gone.reshape(ids.shape))

    def count(self, ids: Ids) -> int:
        """How many indices stay."""
        return int(np.count_nonzero(self.kept(ids)))

    def loses(self, ids: Ids) -> bool:
        """Whether any index goes."""
        return self.count(ids) < ids.size

    def positions(self, ids: Ids, chosen: NDArray[Any]) -> NDArray[np.int64]:
        """New positions, on a shortened axis, of those chosen indices that stay.

        Args:
            ids: Labels of the axis.
            chosen: Old positions; one number or a vector.
        """
        kept = self.kept(ids)
        new = np.cumsum(kept) - 1
        if chosen.ndim == 0:
            return np.asarray(new[chosen], np.int64)
        return np.asarray(new[chosen[kept[chosen]]], np.int64)

    # constants and attributes

    def shrink(self, value: ir.Value, members: Sequence[Member]) -> None:
        """Cuts the slices of one constant."""
        array = const_array(value)
        assert array is not None, "members are constants"
        before = array.shape
        for axis in sorted({member.axis for member in members}):
            ids = next(member.ids for member in members if member.axis == axis)
            array = np.compress(self.kept(ids), array, axis=axis)
        if array.shape == before:
            return
        if value.is_initializer():
            tensor = ir.Tensor(np.ascontiguousarray(array), name=value.name)
            value.const_value, value.shape = tensor, tensor.shape
            return
        _set_constant(value, np.ascontiguousarray(array))
        value.shape = ir.Shape(array.shape)

    def set_int(self, node: ir.Node, name: str, number: int) -> None:
        """Sets an attribute."""
        node.attributes[name] = ir.AttrInt64(name, number)

    def set_ints(self, node: ir.Node, name: str, numbers: Sequence[int]) -> None:
        """Sets an attribute."""
        node.attributes[name] = ir.AttrInt64s(name, [int(number) for number in numbers])

    def set_input(self, node: ir.Node, index: int, array: NDArray[Any]) -> None:
        """Gives a node a constant of its own."""
        value = self._constant(node, array)
        if len(node.inputs) <= index:
            node.resize_inputs(index + 1)
        node.replace_input_with(index, value)

    def set_sizes(self, node: ir.Node, index: int, sizes: Mapping[int, Ids | int]) -> None:
        """Overrides entries of a shape that a node reads.

        Args:
            node: Reshape, Expand, Resize.
            index: The input that holds the shape, int64.
            sizes: By axis: the labels whose count is the size, or the size.
        """
        listed = node.attributes.get("axes")
        source = node.inputs[index]
        array = const_array(source)
        known = node.outputs[0].shape or (node.inputs[0].shape if node.inputs[0] else None)
        entries = shape_entries(source)
        rank = len(known or entries or ())
        length = rank if entries is None else len(entries)
        if listed is None:  # sizes of an Expand begin at a later axis than those of its output
            places = list(range(rank - length, rank))
        else:
            places = [int(axis) % rank for axis in listed.as_ints()]
        new = {
            places.index(axis): size if isinstance(size, int) else self.count(size)
            for axis, size in sizes.items()
            if axis in places and (isinstance(size, int) or self.loses(size))
        }
        if not new or source is None:
            return
        if array is not None:
            changed = array.copy()
            for place, size in new.items():
                changed[place] = size
            self.set_input(node, index, changed)
            return
        node.replace_input_with(index, self._patched(node, source, new, length))

    def set_slice(self, node: ir.Node, axis: int, rank: int, where: NDArray[np.int64]) -> None:
        """Makes a Slice take these positions of an axis, at least one."""
        steps = np.unique(np.diff(where)) if where.size > 1 else np.array([1])
        regular = steps.size == 1
        step = int(steps[0]) if regular else 1
        start = int(where[0]) if regular else 0
        end = int(where[-1]) + (1 if step > 0 else -1) if regular else _FULL
        if step < 0 and end < 0:
            end = -_FULL
        self._write_slice(node, axis, rank, (start, end, step))
        if not regular:
            self._behind(
                node, "Gather", [self._constant(node, where)], [ir.AttrInt64("axis", axis)]
            )

    def _write_slice(self, node: ir.Node, axis: int, rank: int, cut: tuple[int, int, int]) -> None:
        if "starts" in node.attributes:  # before opset 10
            starts = list(node.attributes["starts"].as_ints())
            ends = list(node.attributes["ends"].as_ints())
            listed = node.attributes.get("axes")
            axes = list(range(len(starts))) if listed is None else list(listed.as_ints())
            place = [entry % rank for entry in axes].index(axis)
            starts[place], ends[place] = cut[0], cut[1]
            self.set_ints(node, "starts", starts)
            self.set_ints(node, "ends", ends)
            return
        arrays = [const_array(value) for value in node.inputs[1:]]
        assert arrays[0] is not None and arrays[1] is not None, "the rule read them"
        count = arrays[0].size
        axes_array = arrays[2] if len(arrays) > 2 and arrays[2] is not None else np.arange(count)
        steps = arrays[3] if len(arrays) > 3 and arrays[3] is not None else np.ones(count, np.int64)
        place = [int(entry) % rank for entry in axes_array].index(axis)
        columns = (arrays[0], arrays[1], axes_array, steps)
        changed = [np.array(column, np.int64) for column in columns]
        for column, number in zip((0, 1, 3), cut, strict=True):
            changed[column][place] = number
        for index, column_values in enumerate(changed, start=1):
            self.set_input(node, index, column_values)

    # nodes

    def patch_output(self, node: ir.Node, sizes: Mapping[int, int], length: int) -> None:
        """Makes a Shape node say what it said before.

        Args:
            node: The node; output int64 [length].
            sizes: The old sizes by place.
            length: Number of entries.
        """
        if not sizes:
            return
        output = node.outputs[0]
        users = [(use.node, use.idx) for use in output.uses()]
        if not users and not output.is_graph_output():
            return
        self._behind_with(node, lambda source: self._replaced(node, source, sizes, length))

    def scale_output(self, node: ir.Node, factor: float) -> None:
        """Multiplies what a node gives."""
        dtype = node.outputs[0].dtype or ir.DataType.FLOAT
        constant = self._constant(node, np.array(factor, dtype.numpy()))
        self._behind(node, "Mul", [constant], [])

    def add_bias(self, node: ir.Node, addend: NDArray[Any]) -> None:
        """Adds a constant to each output channel of a linear layer.

        Args:
            node: Conv, Gemm, or MatMul. An Add is put behind one that has no constant bias.
            addend: [output channels that stay]
        """
        weight = const_array(node.inputs[1])
        dtype = np.dtype(np.float32) if weight is None else weight.dtype
        attribute = node.attributes.get("beta")
        beta = 1.0 if attribute is None else attribute.as_float()
        source = node.inputs[2] if len(node.inputs) > 2 else None
        bias = const_array(source)
        computed = source is not None and bias is None
        if node.op_type in ("FusedMatMul", "MatMul") or computed or beta == 0.0:
            self._behind(node, "Add", [self._constant(node, addend.astype(dtype))], [])
            return
        scaled = addend / beta
        total = scaled if bias is None else bias.astype(np.float64) + scaled
        self.set_input(node, 2, total.astype(dtype))

    def shrink_rms(self, node: ir.Node, share: float) -> None:
        """Lets an RMS normalization over fewer channels give what it gave over all."""
        epsilon = node.attributes.get("epsilon")
        value = 1e-5 if epsilon is None else epsilon.as_float()
        node.attributes["epsilon"] = ir.AttrFloat32("epsilon", value / share)
        scale = const_array(node.inputs[1])
        assert scale is not None, "the rule read it"
        self.set_input(node, 1, (scale / np.sqrt(share)).astype(scale.dtype))

    def _constant(self, node: ir.Node, array: NDArray[Any]) -> ir.Value:
        assert isinstance(node.graph, ir.Graph), "a node of a model"
        return add_initializer(
            node.graph, self._names.fresh(f"{node.name or node.op_type}_pruned"), array
        )

    def _node(
        self, near: ir.Node, op_type: str, inputs: Sequence[ir.Value], attributes: Sequence[ir.Attr]
    ) -> ir.Node:
        made = ir.Node(
            "",
            op_type,
            inputs,
            list(attributes),
            name=self._names.fresh_node(f"{near.name or near.op_type}_{op_type}"),
        )
        made.outputs[0].name = self._names.fresh(f"{made.name}_output")
        if self._made_by:
            made.metadata_props["slimctl.pass"] = self._made_by
        return made

    def _replaced(
        self, near: ir.Node, source: ir.Value, sizes: Mapping[int, int], length: int
    ) -> list[ir.Node]:
        """Other numbers at some places of a vector of sizes; the last node gives the result.

        The vector is put together from pieces because shape inference follows that.
        """
        made: list[ir.Node] = []
        pieces: list[ir.Value] = []
        for replaced, run in groupby(range(length), key=sizes.__contains__):
            places = list(run)
            numbers = [sizes[place] for place in places] if replaced else places
            piece = self._constant(near, np.array(numbers, np.int64))
            if not replaced:
                made.append(self._node(near, "Gather", [source, piece], [ir.AttrInt64("axis", 0)]))
                piece = made[-1].outputs[0]
            pieces.append(piece)
        made.append(self._node(near, "Concat", pieces, [ir.AttrInt64("axis", 0)]))
        for node in made:
            node.outputs[0].type = ir.TensorType(_SIZES)
        return made

    def _patched(
        self, node: ir.Node, source: ir.Value, sizes: Mapping[int, int], length: int
    ) -> ir.Value:
        made = self._replaced(node, source, sizes, length)
        assert isinstance(node.graph, ir.Graph), "a node of a model"
        node.graph.insert_before(node, made)
        return made[-1].outputs[0]

    def _behind(
        self,
        node: ir.Node,
        op_type: str,
        others: Sequence[ir.Value],
        attributes: Sequence[ir.Attr],
    ) -> None:
        self._behind_with(
            node, lambda source: [self._node(node, op_type, [source, *others], attributes)]
        )

    def _behind_with(self, node: ir.Node, build: Callable[[ir.Value], list[ir.Node]]) -> None:
        """Puts nodes behind another; whoever read the old output reads that of the last."""
        assert isinstance(node.graph, ir.Graph), "a node of a model"
        output = node.outputs[0]
        users = [(use.node, use.idx) for use in output.uses()]
        made = build(output)
        new = made[-1].outputs[0]
        new.type, new.shape = output.type, output.shape
        node.graph.insert_after(node, made)
        for user, index in users:
            user.replace_input_with(index, new)
        for place, value in enumerate(node.graph.outputs):
            if value is output:
                output.name, new.name = new.name, output.name
                node.graph.outputs[place] = new
