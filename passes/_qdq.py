"""Writes a placement into the graph: Q/DQ pairs, integer weights, int32 biases."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import ml_dtypes
import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from slimctl.core.contract import Range
from slimctl.core.target import Target, WeightType
from slimctl.graph.edit import NameScope, add_initializer, const_array, set_provenance
from slimctl.numerics.affine import Affine, QuantizedType, affine_from_range, quantize
from slimctl.passes._layers import Layer
from slimctl.passes._placement import Placement, clamp_bounds, origin
from slimctl.passes._weights import (
    QuantizedWeight,
    WeightSettings,
    bias_scale,
    quantize_bias,
    quantize_weight,
)

PASS: Final = "quantize-static"

_SUFFIXES: Final = {"QuantizeLinear": "_q", "DequantizeLinear": "_dq"}
"""Of what a Q and a DQ are called, and their outputs: short, as each name stands in the file thrice
and more, and in a small model names take a tenth of the bytes."""

_ZERO_POINT: Final = "zero_point"
"""Name of all zero points: few values occur, and with one name equal ones are stored once. They may
be shared, as no pass changes them; scales are not, as training changes each by itself."""


@dataclass
class Emitter:
    """Builds the Q/DQ pairs of one graph.

    Attributes:
        names: Scope of the whole model.
        placement: What to build, and in which graph.
        target: What the execution provider asks for.
        affines: Scale and zero point by activation.
        narrow: Those of 8 bits, for layers that convert what has 16.
        apart: Names of float layers that will have another form, which needs no shield.
        weights: How weights are quantized.
        removed_clamps: Relu and Clip nodes that a Q made redundant, by operator.
        full_range: Names of layers whose weights keep 8 bits where ranges are reduced.
        raised_channels: Channels whose weight scale was raised for the bias, by node.
        reduced_channels: Channels whose weights have less than 8 bits, by node.
        shielded: Float nodes that onnxruntime is kept from quantizing.
    """

    names: NameScope
    placement: Placement
    target: Target
    affines: Mapping[ir.Value, Affine]
    weights: WeightSettings
    full_range: frozenset[str] = frozenset()
    narrow: Mapping[ir.Value, Affine] = field(default_factory=dict)
    apart: frozenset[str] = frozenset()
    removed_clamps: list[str] = field(default_factory=list)
    raised_channels: dict[str, int] = field(default_factory=dict)
    reduced_channels: dict[str, int] = field(default_factory=dict)
    shielded: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.graph = self.placement.graph
        self.kernels = frozenset((*self.target.elementwise, *self.target.unary, "MatMul"))
        self.layers = {layer.node for layer in self.placement.layers}
        self._constants: dict[tuple[object, ...], ir.Value] = {}

    def emit(self) -> None:
        """Changes the graph."""
        for node in self.placement.integer:
            if node.op_type == "MatMul" and node.outputs[0] not in self.placement.tensors:
                self._keep_apart(node)
        for layer in self.placement.layers:
            self._quantize_layer(layer)
        for value in self.placement.tensors:
            self._quantize_tensor(value)

    # activations

    def _quantize_tensor(self, value: ir.Value) -> None:
        affine = self.affines[value]
        array = const_array(value)
        if array is not None:
            self._quantize_constant(value, array, affine)
            return
        through = self.placement.written_by_integer_kernel(value)
        converted = self._is_written_narrow(value)
        first = self.narrow[value] if converted else affine
        source = self._shielded(self._drop_redundant_clamp(value, first))
        readers = [
            (use.node, use.idx)
            for use in source.uses()
            # Behind a float operator, float readers keep the exact value.
            if through or self.target.quantize_readers or use.node in self.placement.integer
        ]
        before = self._pair(source, source, first) if converted else []
        read = before[-1].outputs[0] if before else source
        leaves = through and source.is_graph_output()
        count = len(readers) + leaves if self.target.asks("own_dequantize") else 1
        pairs = self._pair(read, source, affine, max(count, 1))
        restored = pairs[1:]
        self._insert_behind(source, [*before, *pairs])
        for number, (node, index) in enumerate(readers):
            given = restored[number % len(restored)].outputs[0]
            node.replace_input_with(index, self._as_read(node, given, source, value))
        if leaves:
            self._become_output(source, restored[-1].outputs[0])

    def _pair(
        self, read: ir.Value, source: ir.Value, affine: Affine, count: int = 1
    ) -> list[ir.Node]:
        """A Q of a tensor with one or more DQs, named after a source."""
        scale, zero_point = self._parameters(source, affine)
        quantized = self._node("QuantizeLinear", [read, scale, zero_point], source)
        quantized.outputs[0].type = ir.TensorType(zero_point.dtype or ir.DataType.UINT8)
        inputs = [quantized.outputs[0], scale, zero_point]
        return [
            quantized,
            *(self._node("DequantizeLinear", inputs, source) for _ in range(count)),
        ]

    # activations of two types, and layers that are float with integers around

    def _is_written_narrow(self, value: ir.Value) -> bool:
        """Whether a tensor of 16 bits comes out of a kernel of 8."""
        writer = origin(value, self.placement.clamps)
        return value in self.placement.wide_tensors and self.placement.is_narrow_layer(writer)

    def _as_read(
        self, node: ir.Node, restored: ir.Value, source: ir.Value, value: ir.Value
    ) -> ir.Value:
        """What a reader gets in place of a restored tensor.

        Layers of 8 bits convert what has 16. One whose weights alone are integers has float in
        front of it: onnxruntime would compute it in integers between its DQs.
        """
        if value in self.placement.wide_tensors and self.placement.is_narrow_layer(node):
            pair = self._pair(restored, source, self.narrow[value])
            self._insert_behind(restored, pair)
            return pair[-1].outputs[0]
        if node in self.layers and node not in self.placement.integer:
            return self._shield(restored, node)
        return restored

    def _input_affine(self, layer: Layer) -> Affine:
        """What the layer's kernel reads its input as."""
        if self.placement.is_narrow_layer(layer.node) and layer.data in self.narrow:
            return self.narrow[layer.data]
        return self.affines[layer.data]

    def _become_output(self, source: ir.Value, restored: ir.Value) -> None:
        """Makes the restored float the output of the graph, under the output's name."""
        name = source.name or ""
        for index, output in enumerate(self.graph.outputs):
            if output is source:
                self.graph.outputs[index] = restored
        source.name = self.names.fresh(f"{name}_float")
        restored.name = name

    def _insert_behind(self, value: ir.Value, nodes: list[ir.Node]) -> None:
        producer = value.producer()
        if producer is not None and producer.graph is self.graph:
            self.graph.insert_after(producer, nodes)
        else:
            self.graph.insert_before(self.graph[0], nodes)

    def _drop_redundant_clamp(self, value: ir.Value, affine: Affine) -> ir.Value:
        """Removes the Relu or Clip before a Q that saturates at the same place.

        Returns:
            The value to quantize: the clamp's input under the clamp's name, or ``value``.
        """
        clamp = self.placement.clamps.get(value)
        if clamp is None or not _is_redundant(clamp, affine) or self._is_read_exactly(value):
            return value
        source = clamp.inputs[0]
        assert source is not None, "a clamp in the placement has an input"
        name = value.name
        if value.is_graph_output():
            for index, output in enumerate(self.graph.outputs):
                if output is value:
                    self.graph.outputs[index] = source
        value.replace_all_uses_with(source)
        source.type, source.shape = value.type, value.shape
        self.graph.remove(clamp, safe=True)
        source.name = name
        self.removed_clamps.append(clamp.op_type)
        return source

    def _is_read_exactly(self, value: ir.Value) -> bool:
        """Whether somebody reads a tensor in front of its Q, where nothing saturates."""
        if self.placement.written_by_integer_kernel(value):
            return False
        integer = self.placement.integer
        in_float = any(use.node not in integer for use in value.uses())
        return value.is_graph_output() or (in_float and not self.target.quantize_readers)

    def _keep_apart(self, matmul: ir.Node) -> None:
        """Turns the Add behind a MatMul into a Sum of two, which is the same.

        onnxruntime merges MatMul and Add into a Gemm before it looks at Q/DQ pairs
        (MatMulAddFusion, where shapes are static), and with a float bias there is no integer
        kernel for Gemm. Where the provider does not run Sum, it keeps the Add.
        """
        table = self.target.operators
        if not table.installed and "Sum" not in table.names:
            return
        uses = list(matmul.outputs[0].uses())
        if len(uses) == 1 and uses[0].node.op_type == "Add" and not uses[0].node.domain:
            uses[0].node.op_type = "Sum"
            set_provenance(uses[0].node, PASS)

    def _shielded(self, value: ir.Value) -> ir.Value:
        """Puts a Max of one operand behind a float node that onnxruntime would quantize.

        Between a DQ and a Q it quantizes the float weights of Conv, ConvTranspose and Gemm by
        itself, per tensor and at its default level only, and takes its integer kernels for
        whatever has one. A node that was left in float on purpose must stay there; an Identity
        would be optimized away.
        """
        node = value.producer()
        if node is not None and node.op_type in ("Relu", "Clip") and node.inputs[0] is not None:
            node = node.inputs[0].producer()
        if node is None or not self._would_be_quantized(node):
            return value
        readers = [(use.node, use.idx) for use in value.uses()]
        shielded = self._shield(value, node)
        for reader, index in readers:
            if reader in self.placement.integer:
                reader.replace_input_with(index, shielded)
        return shielded

    def _shield(self, value: ir.Value, node: ir.Node) -> ir.Value:
        """A Max of one operand behind a tensor, which keeps a node in float."""
        shield = ir.Node("", "Max", [value], name=self.names.fresh_node(f"{node.name}_shield"))
        shield.outputs[0].name = self.names.fresh(f"{value.name}_shielded")
        shield.outputs[0].type, shield.outputs[0].shape = value.type, value.shape
        set_provenance(shield, PASS)
        self._insert_behind(value, [shield])
        self.shielded.append(node.name or "")
        return shield.outputs[0]

    def _would_be_quantized(self, node: ir.Node) -> bool:
        if node in self.layers or node in self.placement.integer or node.domain:
            return False
        if node.name in self.apart:
            return False
        if node.op_type in ("Conv", "ConvTranspose", "Gemm"):
            return _dequantized(node.inputs[0]) and const_array(node.inputs[1]) is not None
        return node.op_type in self.kernels and all(map(_dequantized, node.inputs))

    def _quantize_constant(self, value: ir.Value, array: NDArray[Any], affine: Affine) -> None:
        codes = quantize(array.astype(np.float32), affine.scale, affine.zero_point, affine.type)
        stored = self._constant(f"{value.name}_quantized", codes)
        scale, zero_point = self._parameters(value, affine)
        restored = self._node("DequantizeLinear", [stored, scale, zero_point], value)
        for use in list(value.uses()):
            if use.node in self.placement.integer:
                use.node.replace_input_with(use.idx, restored.outputs[0])
        self.graph.insert_before(self.graph[0], restored)

    def _parameters(self, value: ir.Value, affine: Affine) -> tuple[ir.Value, ir.Value]:
        return (
            self._constant(f"{value.name}_scale", affine.scale),
            self._constant(_ZERO_POINT, affine.zero_point),
        )

    # weights

    def _quantize_layer(self, layer: Layer) -> None:
        node, own_axis = layer.node, layer.channel_axis
        layer = replace(layer, channel_axis=self.target.weight_axis(node.op_type, own_axis))
        input_scale = None
        if node in self.placement.integer and not self._has_float_bias(layer, own_axis):
            input_scale = float(self._input_affine(layer).scale)
        weight = quantize_weight(layer, self._settings(node), input_scale=input_scale)
        if weight.raised:
            self.raised_channels[node.name or ""] = weight.raised
        if weight.reduced:
            self.reduced_channels[node.name or ""] = weight.reduced
        bias = layer.bias()
        node.replace_input_with(1, self._restored_weight(layer, weight))
        # What is inside the constants now; onnxruntime fuses Gemm only without both factors.
        node.attributes.pop("alpha", None)
        if bias is not None and input_scale is not None:
            node.replace_input_with(2, self._restored_bias(layer, weight, bias, input_scale))
        if bias is None or input_scale is not None:
            node.attributes.pop("beta", None)

    def _has_float_bias(self, layer: Layer, own_axis: int | None) -> bool:
        """The provider wants it so, or there is no one scale for the bias of a channel."""
        other_axis = layer.channel_axis is not None and layer.channel_axis != own_axis
        return other_axis or "float" in self.target.demands("bias", layer.node.op_type)

    def _settings(self, node: ir.Node) -> WeightSettings:
        """The settings with the type and the range that the weights of a layer may have."""
        own: WeightType = "uint8" if self.weights.unsigned else "int8"
        wanted = self.target.weight_type_of(node.op_type, own)
        # What is computed in float does not saturate.
        full = node not in self.placement.integer or node.name in self.full_range
        reduce = self.weights.reduce_range and not full
        return replace(self.weights, unsigned=wanted == "uint8", reduce_range=reduce)

    def _restored_weight(self, layer: Layer, weight: QuantizedWeight) -> ir.Value:
        source = layer.weight_value
        stored = self._stored_weight(layer.node, source, weight)
        scale = self._constant(f"{source.name}_scale", weight.scale)
        zero = self._constant(_ZERO_POINT, weight.zero_point)
        return self._dequantize(layer.node, source, [stored, scale, zero], weight.axis)

    def _stored_weight(
        self, before: ir.Node, source: ir.Value, weight: QuantizedWeight
    ) -> ir.Value:
        """The codes: a constant, of 4 bits with a Cast to int8 behind it where they fit.

        onnxruntime has integer kernels for 8 bits only, and computes the Cast of a constant when
        it loads the model; a DQ of 4 bits it would compute in float, in every run.
        """
        name = f"{source.name}_quantized"
        if weight.bits == 8:
            return self._constant(name, weight.values)
        stored = self._constant(name, weight.values.astype(ml_dtypes.int4))
        kind = ir.DataType.from_numpy(weight.values.dtype)
        cast = ir.Node(
            "",
            "Cast",
            [stored],
            [ir.AttrInt64("to", kind)],
            name=self.names.fresh_node(f"{source.name}_Cast"),
        )
        cast.outputs[0].name = self.names.fresh(f"{source.name}_widened")
        cast.outputs[0].type, cast.outputs[0].shape = ir.TensorType(kind), source.shape
        set_provenance(cast, PASS)
        self.graph.insert_before(before, cast)
        return cast.outputs[0]

    def _restored_bias(
        self, layer: Layer, weight: QuantizedWeight, bias: NDArray[Any], input_scale: float
    ) -> ir.Value:
        source = layer.bias_value
        assert source is not None, "the layer has a bias"
        scale = bias_scale(layer, weight, input_scale)
        stored = self._constant(f"{source.name}_quantized", quantize_bias(bias, scale))
        scale_value = self._constant(f"{source.name}_scale", scale)
        axis = 0 if scale.ndim else None
        return self._dequantize(layer.node, source, [stored, scale_value], axis)

    def _dequantize(
        self, before: ir.Node, source: ir.Value, inputs: list[ir.Value], axis: int | None
    ) -> ir.Value:
        node = self._node("DequantizeLinear", inputs, source)
        if axis is not None:
            node.attributes["axis"] = ir.AttrInt64("axis", axis)
        self.graph.insert_before(before, node)
        return node.outputs[0]

    # parts

    def _constant(self, name: str, array: NDArray[Any]) -> ir.Value:
        """An initializer; equal arrays made from the same name are stored once."""
        key = (name, array.dtype.str, array.shape, array.tobytes())
        if key not in self._constants:
            self._constants[key] = add_initializer(self.graph, self.names.fresh(name), array)
        return self._constants[key]

    def _node(self, op_type: str, inputs: list[ir.Value], source: ir.Value) -> ir.Node:
        name = self.names.fresh(f"{source.name}{_SUFFIXES[op_type]}")
        node = ir.Node("", op_type, inputs, num_outputs=1, name=self.names.fresh_node(name))
        node.outputs[0].type, node.outputs[0].shape = source.type, source.shape
        node.outputs[0].name = name
        set_provenance(node, PASS)
        return node


def _dequantized(value: ir.Value | None) -> bool:
    producer = None if value is None else value.producer()
    return producer is not None and producer.op_type == "DequantizeLinear"


def _is_redundant(clamp: ir.Node, affine: Affine) -> bool:
    """Whether saturation already does what a Relu or Clip does, to within half a step.

    Half a step is what rounding may move a value by anyway.
    """
    low, high = clamp_bounds(clamp)
    scale, zero_point = float(affine.scale), int(affine.zero_point)
    lowest = (affine.type.low - zero_point) * scale
    highest = (affine.type.high - zero_point) * scale
    return lowest >= low - scale / 2 and highest <= high + scale / 2


def affines_for(
    placement: Placement,
    ranges: Mapping[str, Range],
    kind: QuantizedType,
    target: Target,
    *,
    power_of_two: bool = False,
) -> dict[ir.Value, Affine]:
    """Scale and zero point of every placed tensor from the ranges of its sources.

    Args:
        placement: Tensors and the sources of their ranges.
        ranges: By tensor name, one for every source.
        kind: Integer type of activations.
        target: Symmetry, and scales that the provider fixes.
        power_of_two: Scales are powers of two.
    """
    result: dict[ir.Value, Affine] = {}
    shared: dict[tuple[ir.Value, ...], Affine] = {}
    for value in placement.tensors:
        sources = placement.sources[value]
        if sources not in shared:
            found = [ranges[source.name or ""] for source in sources]
            low = min(0.0, *(item.low for item in found))
            # In onnxruntime's own tools, too, the upper end makes up for what is missing.
            high = max(low + target.minimum_range, *(item.high for item in found))
            shared[sources] = affine_from_range(
                low,
                high,
                kind,
                symmetric=target.activation_symmetric,
                power_of_two=power_of_two,
            )
        # What moves values on has the scale of its only source.
        decides = sources[0] if len(sources) == 1 else value
        fixed = _fixed(origin(decides, placement.clamps), kind, target)
        result[value] = shared[sources] if fixed is None else fixed
    return result


def _fixed(node: ir.Node | None, kind: QuantizedType, target: Target) -> Affine | None:
    """Scale and zero point that the provider demands of an operator's output, if it does."""
    if node is None or node.domain:
        return None
    for scales in target.demands("output_scale", node.op_type):
        if kind.dtype.name in scales:
            scale, zero_point = scales[kind.dtype.name].scale, scales[kind.dtype.name].zero_point
            return Affine(np.asarray(scale, np.float32), np.asarray(zero_point, kind.dtype), kind)
    return None
