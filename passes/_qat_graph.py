"""A Q/DQ graph such that it can be trained, and the way back.

Integer weights become floats in front of a QuantizeLinear of the same scale, int32 biases become
floats, and scales become exponentials of what is learned: positive, and a step is relative.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from slimctl.core.target import Target
from slimctl.graph.edit import NameScope, add_initializer, clone_model, const_array, remove_dead
from slimctl.graph.select import Selection
from slimctl.numerics.affine import QuantizedType
from slimctl.passes._layers import is_linear
from slimctl.passes._qat_scales import DEQUANTIZE, QUANTIZE, activation_scales, are_powers_of_two
from slimctl.passes._qat_weights import latent_floats, read_codes, used_codes, widened_scale
from slimctl.passes._quantized_layers import quantized_layers, weight_dequantizer
from slimctl.training.code_ranges import CODES, RANGE, RESTORED


@dataclass(frozen=True)
class LearnedScale:
    """A scale, or several that stay equal.

    Attributes:
        name: Of the logarithm that is learned.
        members: Names of the scales.
        elements: How many numbers one scale quantizes, in one sample.
        highest: The largest code, Q_P of the paper.
    """

    name: str
    members: tuple[str, ...]
    elements: int
    highest: int


@dataclass(frozen=True)
class LatentWeight:
    """A weight that is learned as floats.

    Attributes:
        name: Of the floats.
        holder: Name of the node whose first input is the codes.
        scale: Name of the scale.
        zero_point: Of the codes.
        kind: Codes that are used.
        axis: Of the channels, None for one scale.
        exact: The floats are those of the original; else they are restored from the codes.
    """

    name: str
    holder: str
    scale: str
    zero_point: NDArray[Any]
    kind: QuantizedType
    axis: int | None
    exact: bool


@dataclass(frozen=True)
class FloatBias:
    """An int32 bias that is learned as floats.

    Attributes:
        name: Of the floats.
        restorer: Name of the DQ node of the codes.
        weight_scale: Name of the scale of its layer's weight.
        data_scale: Name of the scale of what its layer reads.
    """

    name: str
    restorer: str
    weight_scale: str
    data_scale: str


class TrainingCopy:
    """A copy of a Q/DQ graph that learns.

    Attributes:
        model: The copy; torch runs it, onnxruntime does not.
        scales: Those that are learned.
        fixed: Those that are not: what they are, by name.
        weights: Weights of integers, as floats.
        biases: Biases of integers, as floats.
        start: What those weights and biases begin with, by name.
        kept: Names of scales of activations that are not learned, with the reason.

    Args:
        model: The Q/DQ graph; not changed.
        reference: The float graph that it was made from.
        target: The provider.
        selection: Which layers learn.
        paired: Weights stay so small that sums of two products fit 16 bits.
    """

    def __init__(
        self,
        model: ir.Model,
        reference: ir.Model,
        target: Target,
        selection: Selection,
        *,
        paired: bool,
    ) -> None:
        self.model = clone_model(model)
        self._selection, self._paired = selection, paired
        self._names, self._graph = NameScope(self.model), self.model.graph
        layers, _ = quantized_layers(self.model, reference)
        self._originals = {layer.node: layer.original.weight() for layer in layers}
        self._latents: dict[tuple[ir.Value | None, ir.Value], ir.Value] = {}
        self._learned: dict[ir.Value, tuple[int, int]] = {}
        self.scales: list[LearnedScale] = []
        self.weights: list[LatentWeight] = []
        self.biases: list[FloatBias] = []
        self.start: dict[str, NDArray[np.float32]] = {}
        self.kept: dict[str, str] = {}
        groups = activation_scales(self.model, target)
        values = _scales(self.model)
        shifted = are_powers_of_two(map(_array, values))
        for node in list(self._graph):
            if is_linear(node):
                self._free_bias(node)
                self._free_weight(node)
        self.fixed = {value.name or "": _array(value) for value in values}
        if shifted:
            self.kept = {value.name or "": "scales are powers of two" for value in values}
        else:
            for group in groups:
                if group.reason:
                    self.kept |= {member.name or "": group.reason for member in group.members}
                else:
                    self._learn(group.members, group.elements, group.highest)
            for value, (elements, highest) in self._learned.items():
                self._learn((value,), elements, highest)
        remove_dead(self.model)
        for node in list(self._graph):
            if node.op_type == QUANTIZE:
                _join(node)

    def _free_bias(self, node: ir.Node) -> None:
        bias = node.inputs[2] if len(node.inputs) > 2 else None
        restorer = None if bias is None else bias.producer()
        data = None if node.inputs[0] is None else node.inputs[0].producer()
        weight = weight_dequantizer(node)
        if restorer is None or restorer.op_type != DEQUANTIZE or weight is None or data is None:
            return
        codes, scale = (const_array(value) for value in restorer.inputs[:2])
        if codes is None or scale is None or codes.dtype != np.int32:
            return
        name = self._names.fresh(f"{restorer.name}_float")
        floats = (codes.astype(np.float64) * scale).astype(np.float32)
        latent = add_initializer(self._graph, name, floats)
        self.start[name] = floats
        weight_scale, data_scale = weight.inputs[1], data.inputs[1]
        assert weight_scale is not None and data_scale is not None, "DQ nodes have scales"
        per_group = node.op_type == "ConvTranspose" and scale.ndim > 0
        rounds = latent if per_group else self._rounded_bias(node, latent, data_scale, weight_scale)
        node.replace_input_with(2, rounds)
        self.biases.append(
            FloatBias(name, restorer.name or "", weight_scale.name or "", data_scale.name or "")
        )

    def _rounded_bias(
        self, node: ir.Node, latent: ir.Value, data_scale: ir.Value, weight_scale: ir.Value
    ) -> ir.Value:
        """The bias in steps of s_x * s_w: rounding it moves sums by a part of a step of theirs."""
        zero = add_initializer(
            self._graph, self._names.fresh(f"{latent.name}_zero"), np.zeros((), np.int32)
        )
        axis = [ir.AttrInt64("axis", 0)]
        # Abs: a constant that goes into Mul itself would be learned as a factor of channels.
        operands = [self._before(node, "Abs", [scale]) for scale in (data_scale, weight_scale)]
        scale = self._before(node, "Mul", operands)
        codes = self._before(node, QUANTIZE, [latent, scale, zero], axis)
        codes.type = ir.TensorType(ir.DataType.INT32)
        return self._before(node, DEQUANTIZE, [codes, scale, zero], axis)

    def _before(
        self,
        node: ir.Node,
        op_type: str,
        inputs: list[ir.Value],
        attributes: Sequence[ir.Attr] = (),
    ) -> ir.Value:
        """What a new node in front of another computes."""
        label = self._names.fresh(f"{node.name}_{op_type}")
        made = ir.Node(
            "", op_type, inputs, attributes, name=self._names.fresh_node(label), num_outputs=1
        )
        made.outputs[0].name = label
        self._graph.insert_before(node, made)
        return made.outputs[0]

    def _free_weight(self, node: ir.Node) -> None:
        restorer = weight_dequantizer(node)
        codes = None if restorer is None else read_codes(restorer)
        if restorer is None or codes is None:
            return
        scale = restorer.inputs[1]
        assert scale is not None, "it was read"
        key = (codes.holder.inputs[0], scale)
        if key not in self._latents:
            kind = used_codes(codes, paired=self._paired)
            start = widened_scale(codes, kind)
            learns = self._selection.reason_against(node) is None
            original = self._originals.get(node) if learns else None
            floats, exact = latent_floats(codes, start, kind, original)
            name = self._names.fresh(f"{scale.name}_float")
            latent = add_initializer(self._graph, name, floats)
            self.start[name] = floats
            scale.const_value = ir.tensor(start, name=scale.name)
            zero = self._names.fresh(f"{scale.name}_middle")
            inputs = [latent, scale, add_initializer(self._graph, zero, codes.zero_point)]
            self._latents[key] = self._quantized(restorer, inputs, kind, codes.axis)
            self.weights.append(
                LatentWeight(
                    name,
                    codes.holder.name or "",
                    scale.name or "",
                    codes.zero_point,
                    kind,
                    codes.axis,
                    exact,
                )
            )
            if learns:
                self._learned[scale] = (floats.size // start.size, kind.high - codes.middle)
        restorer.replace_input_with(0, self._latents[key])

    def _quantized(
        self, restorer: ir.Node, inputs: list[ir.Value], kind: QuantizedType, axis: int | None
    ) -> ir.Value:
        """A Q of a weight in front of its DQ."""
        attributes = [ir.AttrInt64s(RANGE, (kind.low, kind.high))]
        if axis is not None:
            attributes.append(ir.AttrInt64("axis", axis))
        name = self._names.fresh_node(f"{restorer.name}_Quantize")
        node = ir.Node("", QUANTIZE, inputs, attributes, name=name)
        node.outputs[0].name = self._names.fresh(f"{name}_codes")
        node.outputs[0].type = ir.TensorType(ir.DataType.from_numpy(kind.dtype))
        self._graph.insert_before(self._graph[0], node)
        return node.outputs[0]

    def _learn(self, members: tuple[ir.Value, ...], elements: int, highest: int) -> None:
        """Puts the exponential of a constant that is learned in place of scales."""
        first = members[0]
        names = tuple(member.name or "" for member in members)
        for name in names:
            del self.fixed[name]
        label = self._names.fresh(f"{first.name}_log")
        logarithm = add_initializer(self._graph, label, np.log(_array(first)).astype(np.float32))
        node = ir.Node("", "Exp", [logarithm], name=self._names.fresh_node(label))
        node.outputs[0].name = self._names.fresh(f"{label}_exp")
        node.outputs[0].type, node.outputs[0].shape = first.type, first.shape
        for member in members:
            member.replace_all_uses_with(node.outputs[0])
        self._graph.insert_before(self._graph[0], node)
        self.scales.append(LearnedScale(label, names, elements, highest))

    def scale_values(self, learned: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[np.float32]]:
        """All scales by name, when what is learned has these exponentials."""
        found = dict(self.fixed)
        for scale in self.scales:
            found |= dict.fromkeys(scale.members, learned[scale.name])
        return found


def _join(quantizer: ir.Node) -> None:
    """Lets the Q of an activation restore it as well, in place of its only DQ."""
    data, scale, *zero_point = quantizer.inputs
    zero = const_array(zero_point[0]) if zero_point else None
    uses = list(quantizer.outputs[0].uses())
    if const_array(data) is not None or zero is None or zero.size != 1 or len(uses) != 1:
        return
    restorer = uses[0].node
    same = restorer.inputs[1] is scale and restorer.inputs[2:] == quantizer.inputs[2:]
    if restorer.op_type != DEQUANTIZE or not same:
        return
    low, high = (
        limit - int(zero.reshape(())) for limit in CODES[ir.DataType.from_numpy(zero.dtype)]
    )
    quantizer.attributes.add(ir.AttrInt64s(RESTORED, (low, high)))
    codes, restored = quantizer.outputs[0], restorer.outputs[0]
    restored.replace_all_uses_with(codes, replace_graph_outputs=True)
    codes.type, codes.shape = restored.type, restored.shape
    name, restored.name = restored.name, None
    assert quantizer.graph is not None, "it stands in the copy"
    quantizer.graph.remove(restorer, safe=True)
    codes.name = name


def _array(scale: ir.Value) -> NDArray[Any]:
    found = const_array(scale)
    assert found is not None, "scales that are computed are kept"
    return found


def _scales(model: ir.Model) -> list[ir.Value]:
    """Constant scales of Q and DQ nodes, those of biases apart, which follow from the others."""
    found: dict[ir.Value, None] = {}
    for node in model.graph:
        if node.op_type in (QUANTIZE, DEQUANTIZE):
            scale, codes = node.inputs[1], const_array(node.inputs[0])
            is_bias = codes is not None and codes.dtype == np.int32
            if scale is not None and const_array(scale) is not None and not is_bias:
                found[scale] = None
    return list(found)
