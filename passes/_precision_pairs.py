"""The precisions that Q/DQ pairs express, and float."""

from __future__ import annotations

from typing import ClassVar, Final

from slimctl.core.target import Target
from slimctl.passes._precision import FLOAT, Aim, Carrier, Kind, Layers
from slimctl.passes.qoperator import QOperator

OPSET_16_BITS: Final = 21


def lists_16_bits(target: Target) -> bool:
    """Whether the profile names activations of 16 bits."""
    listed = (kind for kinds in target.demands("activation_types") for kind in kinds)
    return any(kind in ("int16", "uint16") for kind in listed)


class Int8(Kind):
    """Activations and weights of 8 bits."""

    name: ClassVar[str] = "int8"
    meaning: ClassVar[str] = "activations and weights of 8 bits"
    stored_bits: ClassVar[float] = 8
    multiplied_bits: ClassVar[int] = 8 * 8
    carrier: ClassVar[Carrier] = "codes"
    in_pairs: ClassVar[bool] = True

    def against(self, layer: str, layers: Layers) -> str:
        """Whether the options make it."""
        if layers.usual != self.name:
            return f"the options make activations {_activations(layers)}"
        return _without_integers(layer, layers)


class Int16(Kind):
    """Activations of 16 bits, weights of 8."""

    name: ClassVar[str] = "int16"
    meaning: ClassVar[str] = "activations of 16 bits, weights of 8"
    stored_bits: ClassVar[float] = 8
    multiplied_bits: ClassVar[int] = 16 * 8
    carrier: ClassVar[Carrier] = "wide"
    in_pairs: ClassVar[bool] = True

    def against(self, layer: str, layers: Layers) -> str:
        """Whether the options make it, or pairs of 16 bits can stand beside those of 8."""
        work = layers.work
        if layers.usual not in (self.name, "int8"):
            return f"the options make activations {_activations(layers)}"
        if layer not in layers.integer:
            return _without_integers(layer, layers)
        if QOperator.name in work.context.later:
            return "--format qoperator has operators of 8 bits only (--format qdq has both)"
        opset = work.model.opset_imports.get("", 0)
        if opset < OPSET_16_BITS:
            return f"pairs of 16 bits need opset {OPSET_16_BITS}, and the model has {opset}"
        return ""

    def passed_over(self, layers: Layers, aim: Aim) -> str:
        """Only where it is known what becomes of it."""
        del aim
        target = layers.work.context.target
        known = lists_16_bits(target) or target.operators.installed
        return "" if known else f"the profile of {target.name} lists no activations of 16 bits"


class Int8Weights(Kind):
    """Weights of 8 bits, activations in float."""

    name: ClassVar[str] = "int8-weights"
    meaning: ClassVar[str] = "weights of 8 bits, computed in float"
    stored_bits: ClassVar[float] = 8
    multiplied_bits: ClassVar[int] = 32 * 32
    carrier: ClassVar[Carrier] = "real"
    in_pairs: ClassVar[bool] = True

    def against(self, layer: str, layers: Layers) -> str:
        """Whether there are weights that the options store."""
        if layer in layers.stored:
            return ""
        node, target = layers.nodes[layer], layers.work.context.target
        if node.op_type in (*target.weighted, *target.storage_only):
            return "it has no constant weights that can be stored so"
        return f"{target.name} has no {node.op_type} with weights that are stored as integers"


class Float(Kind):
    """Everything in float."""

    name: ClassVar[str] = FLOAT
    meaning: ClassVar[str] = "as it was"
    stored_bits: ClassVar[float] = 32
    multiplied_bits: ClassVar[int] = 32 * 32
    carrier: ClassVar[Carrier] = "real"

    def against(self, layer: str, layers: Layers) -> str:
        """Nothing: what the provider does not take runs on the CPU."""
        del layer, layers
        return ""


def _without_integers(layer: str, layers: Layers) -> str:
    if layer in layers.integer:
        return ""
    node, target = layers.nodes[layer], layers.work.context.target
    if node.op_type not in target.weighted:
        return f"{node.op_type} has no integer kernel on target {target.name}"
    return "it is left in float for where it stands, or for what it holds"


def _activations(layers: Layers) -> str:
    return layers.work.options.activation_type or "integers of another type"
