"""A model that begins in its middle: some of its tensors are given instead of computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import onnx_ir as ir

from slimctl.core.errors import UnsupportedModelError
from slimctl.graph.edit import NameScope, clone_model, remove_dead


class Restarted(NamedTuple):
    """A model whose readers of some tensors read inputs instead.

    Attributes:
        model: What nothing depends on any more is left out, inputs included.
        inputs: Name of the input in place of each tensor that is still read.
    """

    model: ir.Model
    inputs: Mapping[str, str]


def restarted(
    model: ir.Model, tensors: Mapping[str, ir.DataType], outputs: Sequence[str] = ()
) -> Restarted:
    """A clone that begins at some tensors; weights are shared with the original.

    Args:
        model: Stays as it is.
        tensors: Names of tensors of the main graph, inputs included, with the element types of
            those whose type the model does not state.
        outputs: Names of the tensors to give, as they are computed even if they are given to
            others; empty for the model's own outputs.

    Raises:
        UnsupportedModelError: A name is no tensor of the main graph.
    """
    clone = clone_model(model)
    graph, names = clone.graph, NameScope(clone)
    values = ir.convenience.create_value_mapping(graph, include_subgraphs=False)
    missing = [name for name in (*tensors, *outputs) if name not in values]
    if missing:
        raise UnsupportedModelError(
            f"No tensor '{missing[0]}' outside bodies", where=f"graph {graph.name}"
        )
    given = {name: _given(values[name], names.fresh(name), tensors[name]) for name in tensors}
    for name, value in given.items():
        for use in values[name].uses():
            use.node.replace_input_with(use.idx, value)
    if outputs:
        graph.outputs.clear()
        graph.outputs.extend(values[name] for name in outputs)
    graph.inputs.extend(given.values())
    remove_dead(clone)
    for value in list(graph.inputs):
        if not value.uses() and not value.is_graph_output():
            graph.inputs.remove(value)
    kept = set(graph.inputs)
    return Restarted(
        clone, {name: value.name or "" for name, value in given.items() if value in kept}
    )


def cut_out(
    model: ir.Model, tensors: Mapping[str, ir.DataType], outputs: Sequence[str]
) -> ir.Model:
    """The part of a model between some tensors; names stay, and weights are shared.

    Args:
        model: Stays as it is.
        tensors: Names of the tensors of the main graph that it begins at, with the element types
            of those whose type the model does not state.
        outputs: Names of the tensors that it computes, none of which it begins at.

    Returns:
        A model whose inputs are those of the tensors and of the whole's inputs that it reads.
    """
    inputs = {value.name or "": value for value in model.graph.inputs}
    graph = ir.convenience.extract(model.graph, [*inputs, *tensors], outputs)
    for value in list(graph.inputs):
        if not value.uses():
            graph.inputs.remove(value)
        elif (name := value.name or "") in tensors:
            # Any shape: a batch may have another size than the model states.
            value.type, value.shape = ir.TensorType(value.dtype or tensors[name]), None
    functions = [function.clone() for function in model.functions.values()]
    return ir.Model(graph, ir_version=model.ir_version, functions=functions)


def _given(value: ir.Value, name: str, kind: ir.DataType) -> ir.Value:
    """An input of any shape: a batch may have another size than the model states."""
    return ir.Value(name=name, type=ir.TensorType(value.dtype or kind))
