"""What each demand of a profile means: one small function for each, by its name.

A function gets the node with its Q/DQ pairs and what is demanded, and says what it found instead,
or None where the demand is met. What cannot be known (an unknown shape, a scale computed at run
time) meets every demand but those that ask for it to be known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import onnx
import onnx_ir as ir

from slimctl.core.rules import Demand
from slimctl.graph.edit import const_array, const_tensor, dimensions
from slimctl.targets.pair_demands import PAIR_DEMANDS, Found
from slimctl.targets.units import DEQUANTIZE, Unit


def broken(unit: Unit, demand: Demand, opset: int) -> Found:
    """What is there instead of what is demanded; None where everything holds.

    Args:
        unit: The node and its Q/DQ pairs.
        demand: Of one rule.
        opset: Version of the node's domain, for defaults of attributes.
    """
    for name, wanted in demand.given().items():
        found = broken_demand(unit, name, wanted, opset)
        if found is not None:
            return found
    return None


def broken_demand(unit: Unit, name: str, wanted: Any, opset: int = 1) -> Found:
    """As :func:`broken`, for one demand by its name."""
    if name in _NEED_DEFAULTS:
        return _NEED_DEFAULTS[name](unit, wanted, opset)
    return _CHECKS[name](unit, wanted)


def _never(unit: Unit, wanted: object) -> Found:
    del wanted
    return f"it is {unit.operator}"


def _types(unit: Unit, wanted: Sequence[str]) -> Found:
    values = [*unit.node.inputs[:1], *unit.node.outputs[:1]]
    for value in values:
        if value is not None and value.dtype is not None:
            kind = value.dtype.name.lower()
            if kind not in wanted:
                return f"'{value.name}' is {kind}"
    return None


def _static_shapes(unit: Unit, wanted: object) -> Found:
    del wanted
    for value in (*unit.node.inputs, *unit.node.outputs):
        if value is None or not value.name or const_tensor(value) is not None:
            continue
        shape = dimensions(value.shape)
        if shape is None:
            return f"the shape of '{value.name}' is not known"
        if any(not isinstance(size, int) for size in shape):
            text = ", ".join("?" if size is None else str(size) for size in shape)
            return f"'{value.name}' is [{text}]"
    return None


def _ranks(unit: Unit, wanted: Sequence[int]) -> Found:
    value = unit.node.inputs[0] if unit.node.inputs else None
    shape = None if value is None else value.shape
    if shape is None or len(shape) in wanted:
        return None
    return f"its input has {len(shape)} dimensions"


def _input(unit: Unit, place: int) -> ir.Value | None:
    return unit.node.inputs[place] if place < len(unit.node.inputs) else None


def _constant_inputs(unit: Unit, wanted: Sequence[int]) -> Found:
    for place in wanted:
        value = _input(unit, place)
        if value is not None and not _is_constant(value):
            return f"its input '{value.name}' is computed"
    return None


def _is_constant(value: ir.Value) -> bool:
    if const_tensor(value) is not None:
        return True
    producer = value.producer()
    stored = producer is not None and producer.op_type in (DEQUANTIZE, "QuantizeLinear")
    source = producer.inputs[0] if producer is not None and stored else None
    return source is not None and _is_constant(source)


def _nonnegative_inputs(unit: Unit, wanted: Sequence[int]) -> Found:
    for place in wanted:
        array = const_array(_input(unit, place))
        if array is not None and array.size and array.min() < 0:
            return f"its input {place} holds {array.min()}"
    return None


def _explicit_attributes(unit: Unit, wanted: Sequence[str]) -> Found:
    missing = [name for name in wanted if name not in unit.node.attributes]
    return f"{', '.join(missing)} not written out" if missing else None


def _attributes(unit: Unit, wanted: Mapping[str, Sequence[Any]], opset: int) -> Found:
    for name, values in wanted.items():
        found = attribute_value(unit.node, name, opset)
        if found is not None and found not in values:
            return f"{name} is {found}"
    return None


def _last_axis(unit: Unit, wanted: object, opset: int) -> Found:
    del wanted
    axis = attribute_value(unit.node, "axis", opset)
    value = unit.node.inputs[0]
    rank = None if value is None or value.shape is None else len(value.shape)
    if axis is None or axis == -1 or rank is None or axis == rank - 1:
        return None
    return f"axis is {axis} of {rank} dimensions"


def attribute_value(node: ir.Node, name: str, opset: int) -> Any:
    """An attribute's value, or its default; None when there is neither. Texts are ``str``."""
    stored = node.attributes.get(name)
    if stored is not None:
        return None if stored.is_ref() else stored.value
    try:
        schema = onnx.defs.get_schema(node.op_type, max(opset, 1), node.domain)
    except onnx.defs.SchemaError:
        return None
    known = schema.attributes.get(name)
    if known is None or known.default_value.type == onnx.AttributeProto.UNDEFINED:
        return None
    value = onnx.helper.get_attribute_value(known.default_value)
    return value.decode() if isinstance(value, bytes) else value


def _single_output(unit: Unit, wanted: object) -> Found:
    del wanted
    used = [v for v in unit.node.outputs[1:] if v.name and (v.uses() or v.is_graph_output())]
    return f"its output '{used[0].name}' is used" if used else None


_NEED_DEFAULTS: Final[Mapping[str, Callable[[Unit, Any, int], Found]]] = {
    "attributes": _attributes,
    "last_axis": _last_axis,
}

_CHECKS: Final[Mapping[str, Callable[[Unit, Any], Found]]] = {
    **PAIR_DEMANDS,
    "never": _never,
    "types": _types,
    "static_shapes": _static_shapes,
    "ranks": _ranks,
    "constant_inputs": _constant_inputs,
    "nonnegative_inputs": _nonnegative_inputs,
    "explicit_attributes": _explicit_attributes,
    "single_output": _single_output,
}
