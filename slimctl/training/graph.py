"""An ONNX graph that runs in torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import onnx_ir as ir
from numpy.typing import NDArray
from torch import Tensor

from slimctl.core.errors import ModelExecutionError, UnsupportedModelError
from slimctl.graph.edit import attribute_graphs, const_tensor
from slimctl.training.branches import flat_graph
from slimctl.training.operator import Call, Operator
from slimctl.training.table import OPERATORS, OPSET
from slimctl.training.tensors import TYPES, to_torch

_OWN_DOMAINS = ("", "ai.onnx")


class _Step(NamedTuple):
    """One node.

    Attributes:
        call: The node.
        operator: What computes it.
        inputs: Names; empty for those left out.
        outputs: Names.
        done: Tensors that nobody reads after this node.
    """

    call: Call
    operator: Operator
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    done: tuple[str, ...]


class TorchGraph:
    """Computes in torch what a model computes in onnxruntime, and what can be differentiated.

    Tensors have the names that they have in the model.

    Attributes:
        model: The model, raised to the operator set that is implemented, branches that are always
            taken in place of their If nodes.
        constants: Initializers, and what Constant nodes hold, as tensors of their own.

    Args:
        model: Not changed.
        remedy: What a user can do instead, where it cannot run.

    Raises:
        UnsupportedModelError: There is no function for an operator or for a form of it; names the
            node. Nothing has run by then.
    """

    def __init__(self, model: ir.Model, remedy: str = "use another --importance") -> None:
        self.model = flat_graph(model, OPSET)
        for value in self.model.graph.inputs:
            _check_type(value, value.dtype, remedy)
        computed = [node for node in self.model.graph if not _is_constant(node)]
        calls = [_called(node, model, remedy) for node in computed]
        self.constants = {
            value.name or "": _stored(value, remedy)
            for value in (*self.model.graph.initializers.values(), *_constants(self.model.graph))
            if value.uses() or value.is_graph_output()
        }
        last = _last_readers(computed)
        self._steps = [
            _Step(call, operator, _names(node.inputs), _names(node.outputs), last[node])
            for node, (call, operator) in zip(computed, calls, strict=True)
        ]

    def numbers(self) -> frozenset[str]:
        """Constants that are only read as numbers, such as the scales of a Resize."""
        read: dict[str, bool] = dict.fromkeys(self.constants, True)
        for step in self._steps:
            for index, name in enumerate(step.inputs):
                if name in read:
                    read[name] = read[name] and index in step.operator.numbers
        return frozenset(name for name, only in read.items() if only)

    def run(self, feeds: Mapping[str, NDArray[Any]], keep: Collection[str]) -> dict[str, Tensor]:
        """Runs the graph once.

        Args:
            feeds: Arrays by input name.
            keep: Names of the tensors to give back: inputs, constants, outputs, or what lies in
                between. Floats among them can be differentiated by.

        Returns:
            The tensors by name.

        Raises:
            ModelExecutionError: The inputs do not fit; names the node.
        """
        given = {name: to_torch(array) for name, array in feeds.items()}
        return self.execute({**self.constants, **given}, keep, leaves=True)

    def execute(
        self, held: Mapping[str, Tensor], keep: Collection[str], *, leaves: bool = False
    ) -> dict[str, Tensor]:
        """Runs the graph once on tensors.

        Args:
            held: Inputs and constants by name.
            keep: Names of the tensors to give back.
            leaves: Gradients can be taken by each of them, constants included.

        Returns:
            The tensors by name.

        Raises:
            ModelExecutionError: The inputs do not fit; names the node.
        """
        wanted = set(keep)
        marked = wanted if leaves else frozenset[str]()
        known = {
            name: _differentiable(tensor) if name in marked else tensor
            for name, tensor in held.items()
        }
        elsewhere = any(tensor.device.type != "cpu" for tensor in known.values())
        for step in self._steps:
            given = [known[name] if name else None for name in step.inputs]
            results = _computed(step, _together(step.operator, given) if elsewhere else given)
            for name, tensor in zip(step.outputs, results, strict=False):
                known[name] = _differentiable(tensor) if name in marked else tensor
            for name in step.done:
                if name not in wanted:
                    known.pop(name, None)
        return {name: known[name] for name in keep}

    def set_training(self, nodes: Collection[str]) -> None:
        """Which nodes do as in training: normalize by the statistics of the batch."""
        for step in self._steps:
            step.call.training = step.call.node.name in nodes


def _computed(step: _Step, inputs: list[Tensor | None]) -> tuple[Tensor, ...]:
    try:
        results = step.operator.run(step.call, *inputs)
    except (RuntimeError, IndexError, ValueError) as error:  # what torch raises for shapes
        node = step.call.node
        raise ModelExecutionError(
            f"torch cannot run {node.op_type}: {error}",
            where=f"node '{node.name}'",
            fix="check that the data fit the model's inputs; if they do, report the model",
        ) from error
    return results if isinstance(results, tuple) else (results,)


def _together(operator: Operator, inputs: list[Tensor | None]) -> list[Tensor | None]:
    """Inputs on one device; what is read as a number stays where it is."""
    places = [
        index
        for index, tensor in enumerate(inputs)
        if tensor is not None and index not in operator.numbers
    ]
    devices = {tensor.device for index in places if (tensor := inputs[index]) is not None}
    device = next((device for device in devices if device.type != "cpu"), None)
    if len(devices) < 2 or device is None:
        return inputs
    return [
        tensor.to(device) if tensor is not None and index in places else tensor
        for index, tensor in enumerate(inputs)
    ]


def _differentiable(tensor: Tensor) -> Tensor:
    """The same tensor, such that gradients are computed behind it."""
    if tensor.requires_grad or not tensor.is_floating_point():
        return tensor
    return tensor.detach().requires_grad_()  # it may be another name of a constant


# what the graph holds


def _names(values: Collection[ir.Value | None]) -> tuple[str, ...]:
    return tuple("" if value is None else value.name or "" for value in values)


def _is_constant(node: ir.Node) -> bool:
    return node.op_type == "Constant" and node.domain in _OWN_DOMAINS


def _constants(graph: ir.Graph) -> list[ir.Value]:
    return [node.outputs[0] for node in graph if _is_constant(node)]


def _stored(value: ir.Value, remedy: str) -> Tensor:
    tensor = value.const_value if value.is_initializer() else const_tensor(value)
    _check_type(value, None if tensor is None else tensor.dtype, remedy)
    assert tensor is not None, "it has a type"
    return to_torch(tensor.numpy())


def _check_type(value: ir.Value, kind: ir.DataType | None, remedy: str) -> None:
    if kind not in TYPES:
        raise UnsupportedModelError(
            f"Tensors of {'an unknown type' if kind is None else kind.name} cannot run in torch",
            where=f"tensor '{value.name}'",
            fix=remedy,
        )


def _last_readers(nodes: list[ir.Node]) -> dict[ir.Node, tuple[str, ...]]:
    """Names of what no later node reads, by node; results that nobody reads included."""
    last: dict[str, ir.Node] = {}
    for node in nodes:
        for name in (*_names(node.inputs), *_names(node.outputs)):
            last[name] = node
    found: dict[ir.Node, list[str]] = {node: [] for node in nodes}
    for name, node in last.items():
        found[node].append(name)
    return {node: tuple(names) for node, names in found.items()}


def _called(node: ir.Node, model: ir.Model, remedy: str) -> tuple[Call, Operator]:
    """A node and what computes it.

    Raises:
        UnsupportedModelError: Nothing does; names the operator with the version that the model has.
    """
    own = node.domain in _OWN_DOMAINS
    operator = OPERATORS.get(node.op_type) if own else None
    call = Call(node)
    other = "add the operator to slimctl/training: one function"
    if any(attribute_graphs(node)):
        reason = "it runs a graph of its own"
        if node.op_type == "If":
            reason = "which branch it takes depends on the inputs of the model"
            other = "export the model for one of its branches"
    elif operator is None:
        reason = "there is no function for this operator"
    else:
        reason = operator.objection(call)
        if not reason:
            return call, operator
    name = node.op_type if own else f"{node.domain}::{node.op_type}"
    version = model.opset_imports.get("" if own else node.domain, 0)
    raise UnsupportedModelError(
        f"{name} of operator set {version} cannot run in torch: {reason}",
        where=f"node '{node.name}'",
        fix=f"{remedy}, or {other}",
    )
