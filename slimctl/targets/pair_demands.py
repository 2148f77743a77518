"""Demands on the Q/DQ pairs around a node; see :mod:`slimctl.targets.demands`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import onnx_ir as ir

from slimctl.core.rules import FixedScale
from slimctl.graph.edit import const_array
from slimctl.targets.units import Quantized, Unit

Found = str | None
"""What was found instead of what is demanded."""

_PARAMETERS: Final = ("Clip", "Dropout", "Pad", "Resize", "Upsample")
"""Operators whose further float inputs say what to do, and are never quantized."""

_SAME_SCALE: Final = 1e-6
"""Relative distance of two scales that are the same number, written in decimal or as float32."""


def _quantized(unit: Unit, wanted: bool) -> Found:
    if unit.is_quantized == wanted:
        return None
    return "its inputs are float" if wanted else "its inputs are quantized"


def _complete(unit: Unit, wanted: object) -> Found:
    del wanted
    if not any(unit.inputs):
        return None
    first = unit.leader or unit.node
    data = first.inputs[:1] if first.op_type in _PARAMETERS else first.inputs
    pairs = zip(data, unit.inputs, strict=False)
    bare = [v for v, q in pairs if q is None and v is not None and _is_float(v)]
    if bare:
        return f"its input '{bare[0].name}' is float"
    open_ends = zip(unit.node.outputs, unit.outputs, strict=False)
    loose = [v for v, q in open_ends if q is None and _is_float(v) and (v.uses() or _leaves(v))]
    return f"its output '{loose[0].name}' is float" if loose else None


def _is_float(value: ir.Value) -> bool:
    return value.dtype is None or value.dtype.is_floating_point()


def _leaves(value: ir.Value) -> bool:
    return value.is_graph_output()


def _activations(unit: Unit) -> list[Quantized]:
    return [*unit.activations, *(item for item in unit.outputs if item is not None)]


def _types_among(found: Sequence[Quantized], wanted: Sequence[str], what: str) -> Found:
    others = [item.type for item in found if item.type and item.type not in wanted]
    return f"{what} are {others[0]}, not {' or '.join(wanted)}" if others else None


def _activation_types(unit: Unit, wanted: Sequence[str]) -> Found:
    return _types_among(_activations(unit), wanted, "activations")


def _weight_types(unit: Unit, wanted: Sequence[str]) -> Found:
    return _types_among(unit.weights, wanted, "weights")


def _type_pairs(unit: Unit, wanted: Sequence[Sequence[str]]) -> Found:
    kinds = tuple(item.type for item in unit.inputs[:2] if item is not None)
    if len(kinds) < 2 or "" in kinds or kinds in {tuple(pair) for pair in wanted}:
        return None
    return f"its inputs are {kinds[0]} and {kinds[1]}"


def _same_types(unit: Unit, wanted: object) -> Found:
    del wanted
    kinds = sorted({item.type for item in _activations(unit)} - {""})
    return f"activations are {' and '.join(kinds)}" if len(kinds) > 1 else None


def _same_scales(unit: Unit, wanted: object) -> Found:
    del wanted
    known = [
        (item.pair.name, np.ravel(item.scale), np.ravel(item.zero_point))
        for item in _around(unit)
        if item.scale is not None and item.zero_point is not None
    ]
    for name, scale, zero in known[1:]:
        first, its_scale, its_zero = known[0]
        if not (np.array_equal(scale, its_scale) and np.array_equal(zero, its_zero)):
            return f"'{first}' and '{name}' have different scales"
    return None


def _off_middle(found: Sequence[Quantized], what: str) -> Found:
    for item in found:
        zero = item.zero_point
        if zero is not None and item.type and np.any(zero.astype(np.int64) != item.middle):
            return f"{what} have the zero point {int(zero.reshape(-1)[0])}, not {item.middle}"
    return None


def _symmetric_activations(unit: Unit, wanted: object) -> Found:
    del wanted
    return _off_middle(_activations(unit), "activations")


def _symmetric_weights(unit: Unit, wanted: object) -> Found:
    del wanted
    return _off_middle(unit.weights, "weights")


def _narrow_weights(unit: Unit, wanted: object) -> Found:
    del wanted
    for item in unit.weights:
        codes = const_array(item.pair.inputs[0])
        if codes is not None and codes.size and codes.dtype.kind == "i":
            lowest = np.iinfo(codes.dtype).min
            if codes.min() == lowest:
                return f"weights hold {lowest}"
    return None


def _weight_axes(unit: Unit, wanted: Sequence[int]) -> Found:
    for item in unit.weights:
        if item.axis is not None and item.axis not in wanted:
            return f"there is one weight scale per channel of axis {item.axis}"
    return None


def _per_tensor(unit: Unit, wanted: object) -> Found:
    del wanted
    channels = [item for item in _around(unit) if item.axis is not None]
    return f"there is one scale per channel of axis {channels[0].axis}" if channels else None


def _around(unit: Unit) -> Iterator[Quantized]:
    yield from (item for item in (*unit.inputs, *unit.outputs) if item is not None)


def _power_of_two(unit: Unit, wanted: object) -> Found:
    del wanted
    for item in (*_activations(unit), *unit.weights):
        if item.scale is not None:
            mantissa, _ = np.frexp(item.scale)
            if np.any(mantissa != 0.5):
                return f"the scale {item.scale.reshape(-1)[0]:.6g} is no power of two"
    return None


def _constant_scales(unit: Unit, wanted: object) -> Found:
    del wanted
    computed = [q for q in _around(unit) if q.scale is None or q.zero_point is None]
    return f"'{computed[0].pair.name}' has a computed scale" if computed else None


def _output_scale(unit: Unit, wanted: Mapping[str, FixedScale]) -> Found:
    item = unit.outputs[0] if unit.outputs else None
    fixed = wanted.get(item.type) if item is not None else None
    if item is None or fixed is None or item.scale is None or item.zero_point is None:
        return None
    scale, zero = float(item.scale.reshape(-1)[0]), int(item.zero_point.reshape(-1)[0])
    if abs(scale - fixed.scale) <= _SAME_SCALE * fixed.scale and zero == fixed.zero_point:
        return None
    return f"its output has scale {scale:.6g} and zero point {zero}"


def _bias(unit: Unit, wanted: str) -> Found:
    bias = unit.bias
    if wanted == "float":
        return None if bias is None else f"its bias is {bias.type}"
    there = len(unit.node.inputs) > 2 and unit.node.inputs[2] is not None
    return "its bias is float" if there and bias is None and unit.leader is None else None


def _own_dequantize(unit: Unit, wanted: object) -> Found:
    del wanted
    for item in unit.inputs:
        if item is not None and len(item.pair.outputs[0].uses()) > 1:
            return f"'{item.pair.name}' serves other nodes, too"
    return None


PAIR_DEMANDS: Final[Mapping[str, Callable[[Unit, Any], Found]]] = {
    "quantized": _quantized,
    "complete": _complete,
    "activation_types": _activation_types,
    "weight_types": _weight_types,
    "type_pairs": _type_pairs,
    "same_types": _same_types,
    "same_scales": _same_scales,
    "symmetric_activations": _symmetric_activations,
    "symmetric_weights": _symmetric_weights,
    "narrow_weights": _narrow_weights,
    "weight_axes": _weight_axes,
    "per_tensor": _per_tensor,
    "power_of_two": _power_of_two,
    "constant_scales": _constant_scales,
    "output_scale": _output_scale,
    "bias": _bias,
    "own_dequantize": _own_dequantize,
}
"""By name of the demand."""
