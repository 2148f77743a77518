"""Raising the operator set of a model, exactly and node by node."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import onnx
import onnx_ir as ir

from slimctl.core.errors import UnsupportedModelError
from slimctl.graph._opset_changes import CHANGES, UNSUPPORTED, Constants, add_constant_node
from slimctl.graph.edit import NameScope, add_initializer, clone_model
from slimctl.graph.shapes import infer_shapes

OLDEST = 7
"""onnxruntime promises nothing for older operator sets."""

_Option = onnx.defs.OpSchema.FormalParameterOption
_Parameter = onnx.defs.OpSchema.FormalParameter


def default_opset(model: ir.Model) -> int:
    """Version of the default operator set; 0 for a model of custom operators alone."""
    return model.opset_imports.get("", 0)


def raise_opset(model: ir.Model, minimum: int) -> ir.Model:
    """The model with a default operator set of at least ``minimum``.

    Nodes whose meaning did not change in between keep everything; others are edited so that they
    compute the same. Other domains, names, metadata and weights stay as they are.

    Args:
        model: Not changed. It must be normalized, as :func:`load_model` leaves it.
        minimum: Version of the default operator set.

    Returns:
        The model itself where its version suffices, else a converted clone (weights shared).

    Raises:
        UnsupportedModelError: A node cannot be converted; names it, its operator and the versions.
    """
    if default_opset(model) >= minimum:
        return model
    if minimum > (newest := onnx.defs.onnx_opset_version()):
        raise UnsupportedModelError(
            f"Operator set {minimum} is not known; the newest is {newest}",
            fix="ask for an older one, or update the package onnx",
        )
    raised = clone_model(model)
    infer_shapes(raised)
    names = NameScope(raised)
    _raise(raised.graph, minimum, Constants(raised.graph, names, add_initializer))
    raised.ir_version = max(raised.ir_version, _oldest_ir(raised))
    infer_shapes(raised)
    return raised


def _oldest_ir(model: ir.Model) -> int:
    """The IR version that came with the model's operator set."""
    opsets = [onnx.helper.make_opsetid("", default_opset(model))]
    return int(onnx.helper.find_min_ir_version_for(opsets))


def raise_graph(graph: ir.Graph, target: int) -> None:
    """Raises the operator set of a main graph or of a function's body, in place.

    Raises:
        UnsupportedModelError: A node cannot be converted.
    """
    names = NameScope(ir.Model(graph, ir_version=onnx.IR_VERSION))
    _raise(graph, target, Constants(graph, names, add_constant_node))


def _raise(graph: ir.Graph, target: int, constants: Constants) -> None:
    start = graph.opset_imports.get("", target)
    if start < OLDEST:
        raise UnsupportedModelError(
            f"The model uses operator set {start}; the oldest that can be raised is {OLDEST}",
            where=f"graph {graph.name}",
            fix=f"export the model with operator set {target} or newer",
        )
    for node in list(graph.all_nodes()):
        if not node.domain:
            _raise_node(node, start, target, constants)
    graph.opset_imports[""] = target


def _raise_node(node: ir.Node, start: int, target: int, constants: Constants) -> None:
    version = start
    while (change := _next_change(node.op_type, version, target)) is not None:
        edit = CHANGES.get((node.op_type, change))
        parametrized = any(attribute.is_ref() for attribute in node.attributes.values())
        if edit is not None and not parametrized:
            edit(node, constants)
        elif edit is not None or not _compatible(node.op_type, version, change):
            raise UnsupportedModelError(
                f"{node.op_type} changed its meaning in operator set {change} (the model uses"
                f" {start}, {target} is needed)",
                where=f"node '{node.name}'",
                fix=f"export the model with operator set {target} or newer",
            )
        version = change


@cache
def _history(op_type: str) -> tuple[int, ...]:
    """Versions in which an operator changed, oldest first."""
    return tuple(
        version
        for version in range(1, onnx.defs.onnx_opset_version() + 1)
        if onnx.defs.has(op_type, "")
        and (schema := _schema(op_type, version)) is not None
        and schema.since_version == version
    )


def _schema(op_type: str, version: int) -> onnx.defs.OpSchema | None:
    try:
        return onnx.defs.get_schema(op_type, version, "")
    except onnx.defs.SchemaError:
        return None


def _next_change(op_type: str, version: int, target: int) -> int | None:
    later = (change for change in _history(op_type) if version < change <= target)
    return next(later, None)


@cache
def _compatible(op_type: str, version: int, change: int) -> bool:
    """Whether every node of the older version means the same under the newer, as it stands."""
    old, new = _schema(op_type, version), _schema(op_type, change)
    if old is None or new is None or new.deprecated or (op_type, change) in UNSUPPORTED:
        return False
    return (
        _attributes_kept(old, new)
        and _parameters_kept(old.inputs, new.inputs)
        and _parameters_kept(old.outputs, new.outputs)
    )


def _attributes_kept(old: onnx.defs.OpSchema, new: onnx.defs.OpSchema) -> bool:
    """Old attributes keep type and default; new ones may be left out."""
    kept = all(
        (now := new.attributes.get(name)) is not None
        and now.type == before.type
        and now.default_value == before.default_value
        and not (now.required and not before.required)
        for name, before in old.attributes.items()
    )
    added = new.attributes.keys() - old.attributes.keys()
    return kept and not any(new.attributes[name].required for name in added)


def _parameters_kept(old: Sequence[_Parameter], new: Sequence[_Parameter]) -> bool:
    """Old inputs (or outputs) keep their places; further ones may be left out."""
    if len(new) < len(old):
        return False
    same = all(
        now.option in (before.option, _Option.Optional)
        for before, now in zip(old, new, strict=False)
    )
    return same and all(further.option == _Option.Optional for further in new[len(old) :])
