"""The precisions that a layer may have, by the words that plans and reports use."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

import onnx_ir as ir

from slimctl.graph.select import Selection
from slimctl.numerics.affine import INT8, INT16, UINT8, UINT16, QuantizedType

Precision = Literal["int8", "int16", "int8-weights", "float"]
"""Activations and weights of 8 bits; activations of 16 and weights of 8; weights of 8 bits and
activations in float; everything in float."""

MEANINGS: Final[Mapping[Precision, str]] = {
    "int8": "activations and weights of 8 bits",
    "int16": "activations of 16 bits, weights of 8",
    "int8-weights": "weights of 8 bits, computed in float",
    "float": "as it was",
}
"""All precisions, those that cost accuracy first."""

Choice: TypeAlias = Mapping[str, Precision]
"""Precision by name of the layer, all layers in the order of the graph."""


@dataclass
class Mixture(Selection):
    """A selection in which layers differ in how they are quantized.

    Attributes:
        precisions: ``int16`` or ``int8-weights`` by name of the node; all others are quantized as
            the options say.
    """

    precisions: Mapping[str, Precision] = field(default_factory=dict)


def precision_in(selection: Selection, node: ir.Node) -> Precision | None:
    """What a selection says about a node, None where the options decide."""
    known = selection.precisions if isinstance(selection, Mixture) else {}
    return known.get(node.name or "")


def mixture(
    include: tuple[str, ...], exclude: tuple[str, ...], choice: Choice, usual: Precision
) -> Mixture:
    """The selection that builds a choice.

    Args:
        include: Patterns of nodes to quantize.
        exclude: Patterns of nodes to leave in float.
        choice: Precisions.
        usual: What the options stand for.
    """
    reasons = dict.fromkeys(named(choice, "float"), "left in float by mixed precision")
    special = {n: kind for n, kind in choice.items() if kind not in ("float", usual)}
    return Mixture(include, exclude, reasons, precisions=special)


def named(choice: Choice, kind: Precision) -> list[str]:
    """Names of the layers of one precision."""
    return [name for name, found in choice.items() if found == kind]


def counted(choice: Choice) -> str:
    """How many layers have which precision: ``20 int8, 3 float``."""
    counts = {kind: len(named(choice, kind)) for kind in MEANINGS}
    return ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)


def all_of(layers: Iterable[str], kind: Precision, able: Collection[str]) -> Choice:
    """The layers that are able to have one precision in it, the others in float."""
    return {name: kind if name in able else "float" for name in layers}


def usual_precision(activation_type: str | None) -> Precision:
    """What layers are when only the options decide."""
    if activation_type == "none":
        return "int8-weights"
    return "int16" if activation_type in ("uint16", "int16") else "int8"


_WIDE: Final = {UINT8: UINT16, INT8: INT16}


def widened(kind: QuantizedType) -> QuantizedType:
    """The type of 16 bits with the sign of a type of 8."""
    return _WIDE.get(kind, kind)
