"""What the function of an operator is, and what it sees of its node."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import onnx_ir as ir
from torch import Tensor

from slimctl.graph.edit import const_tensor

Results: TypeAlias = Tensor | tuple[Tensor, ...]
"""The outputs of a node: one tensor, or several in their order."""


class Call:
    """A node as the function of its operator sees it.

    Attributes:
        node: The node.
        outputs: How many outputs somebody reads, counted to the last of them.
        training: Whether statistics of batches are learned rather than used.
    """

    def __init__(self, node: ir.Node) -> None:
        self.node = node
        self.training = False
        read = [i for i, v in enumerate(node.outputs) if v.uses() or v.is_graph_output()]
        self.outputs = max(read, default=0) + 1
        self._attributes = {name: attribute.value for name, attribute in node.attributes.items()}
        self._numbers = [_number(value) for value in node.inputs]

    def attribute(self, name: str, default: Any = None) -> Any:
        """The plain value of an attribute."""
        return self._attributes.get(name, default)

    def number(self, index: int) -> float | None:
        """An input that is one float in every run; None where it is not, or not given."""
        return self._numbers[index] if index < len(self._numbers) else None

    def has_input(self, index: int) -> bool:
        """Whether there is such an input."""
        return index < len(self.node.inputs) and self.node.inputs[index] is not None


def _number(value: ir.Value | None) -> float | None:
    tensor = const_tensor(value)
    if tensor is None or tensor.size != 1 or not tensor.dtype.is_floating_point():
        return None
    return float(tensor.numpy().reshape(-1)[0])


Refusal: TypeAlias = Callable[[Call], str]
"""Why a node cannot be computed; empty when it can."""


def _accept(call: Call) -> str:
    del call
    return ""


class Operator(NamedTuple):
    """How an operator is computed.

    Attributes:
        run: From the call and the inputs, None for those left out, to the outputs.
        refuses: Looks at a node before anything runs.
        outputs: How many outputs ``run`` gives.
        numbers: Inputs that are read as numbers, such as sizes: they need not be on the device.
    """

    run: Callable[..., Results]
    refuses: Refusal = _accept
    outputs: int = 1
    numbers: tuple[int, ...] = ()

    def objection(self, call: Call) -> str:
        """Why this node cannot be computed; empty when it can."""
        if call.outputs > self.outputs:
            return f"output {call.outputs} is read"
        return self.refuses(call)


def plain(function: Callable[..., Tensor]) -> Operator:
    """An operator without attributes that torch has under another name."""
    return Operator(lambda call, *inputs: function(*inputs))


def only(**allowed: tuple[Any, ...]) -> Refusal:
    """Refuses nodes whose attributes have other values than these."""

    def refuses(call: Call) -> str:
        for name, values in allowed.items():
            value = call.attribute(name, values[0])
            if value not in values:
                return f"{name} is {value!r}"
        return ""

    return refuses


def without_inputs(**places: int) -> Refusal:
    """Refuses nodes that have these inputs."""

    def refuses(call: Call) -> str:
        given = [name for name, place in places.items() if call.has_input(place)]
        return f"{given[0]} is given" if given else ""

    return refuses


def any_of(*refusals: Refusal) -> Refusal:
    """Refuses what one of these refuses."""
    return lambda call: next(filter(None, (refuses(call) for refuses in refusals)), "")
