"""Choices of precisions: by layer, and as a selection for the quantizer."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import onnx_ir as ir

from slimctl.graph.select import Selection
from slimctl.numerics.affine import INT8, INT16, UINT8, UINT16, QuantizedType
from slimctl.passes._precision import FLOAT, Carrier, Kind
from slimctl.passes._precisions import PRECISIONS

Precision: TypeAlias = str
"""A name in the table of precisions."""

Choice: TypeAlias = Mapping[str, Precision]
"""Precision by name of the layer, all layers in the order of the graph."""


@dataclass
class Mixture(Selection):
    """A selection in which layers differ in how they are quantized.

    Attributes:
        precisions: By name of the node, of all layers that are neither in float nor quantized as
            the options say.
    """

    precisions: Mapping[str, Precision] = field(default_factory=dict)


def carrier_in(selection: Selection, node: ir.Node) -> Carrier | None:
    """What a selection lets a node read and write, None where the options decide."""
    word = _precisions(selection).get(node.name or "")
    return None if word is None else PRECISIONS[word].carrier


def _precisions(selection: Selection) -> Mapping[str, Precision]:
    return selection.precisions if isinstance(selection, Mixture) else {}


def without_pairs(selection: Selection) -> dict[Kind, list[str]]:
    """Names of the layers whose precision Q/DQ pairs do not express, float apart."""
    found: dict[Kind, list[str]] = {}
    for name, word in _precisions(selection).items():
        if not PRECISIONS[word].in_pairs:
            found.setdefault(PRECISIONS[word], []).append(name)
    return found


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
    reasons = {
        name: f"left in float by mixed precision: {PRECISIONS[word].meaning}"
        if word != FLOAT
        else "left in float by mixed precision"
        for name, word in choice.items()
        if not PRECISIONS[word].in_pairs
    }
    special = {n: kind for n, kind in choice.items() if kind not in (FLOAT, usual)}
    return Mixture(include, exclude, reasons, precisions=special)


def named(choice: Choice, kind: Precision) -> list[str]:
    """Names of the layers of one precision."""
    return [name for name, found in choice.items() if found == kind]


def counted(choice: Choice) -> str:
    """How many layers have which precision: ``20 int8, 3 float``."""
    counts = {kind: len(named(choice, kind)) for kind in PRECISIONS}
    return ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)


def all_of(layers: Iterable[str], kind: Precision, able: Collection[str]) -> Choice:
    """The layers that are able to have one precision in it, the others in float."""
    return {name: kind if name in able else FLOAT for name in layers}


def usual_precision(activation_type: str | None) -> Precision:
    """What layers are when only the options decide."""
    if activation_type == "none":
        return "int8-weights"
    return "int16" if activation_type in ("uint16", "int16") else "int8"


_WIDE: Final = {UINT8: UINT16, INT8: INT16}


def widened(kind: QuantizedType) -> QuantizedType:
    """The type of 16 bits with the sign of a type of 8."""
    return _WIDE.get(kind, kind)
