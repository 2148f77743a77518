"""Whether the installed onnxruntime can run a node: its own list of kernels is asked.

onnxruntime assigns a node to a provider that has a kernel for the operator, its version and its
types. Two things happen before: float16 becomes float32 around nodes without a float16 kernel, and
operators that ONNX defines by others are expanded where there is no kernel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Protocol, cast

import onnx
import onnx_ir as ir

from slimctl.graph.session import CPU, Kernel, registered_kernels

_HALF = "tensor(float16)"
_SINGLE = "tensor(float)"

_RARE = (ir.DataType.BFLOAT16, ir.DataType.FLOAT4E2M1)
"""Element types that kernels move, and hardly any computes with."""

_Schema = onnx.defs.OpSchema


def why_no_kernel(node: ir.Node, opset: int, provider: str = CPU) -> str | None:
    """Why an installed provider cannot run a node, None where it can.

    Args:
        node: Its tensors need types; what is unknown is taken to fit.
        opset: Version of the node's domain.
        provider: An installed execution provider.

    Raises:
        ModelExecutionError: The installed onnxruntime does not have the provider.
    """
    domain = "" if node.domain == "ai.onnx" else node.domain
    named = _by_name(provider).get((domain, node.op_type), ())
    schema = _schema(node.op_type, opset, domain)
    since = opset if schema is None else schema.since_version
    kernels = [kernel for kernel in named if _implements(kernel, since)]
    if any(_fits(node, schema, kernel) for kernel in kernels):
        return None
    if schema is not None and not domain and _is_defined_by_others(schema) and _is_common(node):
        return None
    if kernels:
        return f"there is no kernel of this operator for {_type_text(node)}"
    return "there is no kernel of this operator" + (f" in version {since}" if named else "")


def version_of(op_type: str, opset: int) -> int | None:
    """Version of an ONNX operator that nodes of an operator set are; None where it has none."""
    schema = _schema(op_type, opset, "")
    return None if schema is None else schema.since_version


def last_opset(op_type: str, version: int) -> int:
    """Newest operator set whose nodes are of this version of an ONNX operator, or an older one."""
    opset = onnx.defs.onnx_opset_version()
    while (found := version_of(op_type, opset)) is not None and found > version:
        opset = found - 1
    return opset


_OPEN_END = 2**31 - 1
"""Last version of a kernel that serves until the operator changes."""


def _implements(kernel: Kernel, since: int) -> bool:
    """As onnxruntime has it: an open end serves the version that the kernel was written for."""
    if kernel.until == _OPEN_END:
        return kernel.since == since
    return kernel.since <= since <= kernel.until


class _Expandable(Protocol):
    """What onnx's schemas have and its type stubs do not list."""

    has_function: bool
    has_context_dependent_function: bool


def _is_common(node: ir.Node) -> bool:
    """Whether the operators that others are expanded into have kernels for the node's types."""
    values = (*node.inputs, *node.outputs)
    return all(value is None or value.dtype is None or value.dtype not in _RARE for value in values)


def _is_defined_by_others(schema: _Schema) -> bool:
    found = cast(_Expandable, schema)
    return found.has_function or found.has_context_dependent_function


@cache
def _by_name(provider: str) -> Mapping[tuple[str, str], Sequence[Kernel]]:
    found: dict[tuple[str, str], list[Kernel]] = {}
    for kernel in registered_kernels(provider):
        found.setdefault((kernel.domain, kernel.op_type), []).append(kernel)
    return found


@cache
def _schema(op_type: str, version: int, domain: str) -> _Schema | None:
    try:
        return onnx.defs.get_schema(op_type, version, domain)
    except onnx.defs.SchemaError:
        return None  # of another domain: its types are not known here


def _fits(node: ir.Node, schema: _Schema | None, kernel: Kernel) -> bool:
    """Whether the types of all inputs and outputs are among those of the kernel."""
    if schema is None:
        return True
    pairs = [*_typed(schema.inputs, node.inputs), *_typed(schema.outputs, node.outputs)]
    return all(
        found in kernel.types[parameter] or (found == _HALF and _SINGLE in kernel.types[parameter])
        for parameter, found in pairs
        if parameter in kernel.types
    )


def _typed(
    parameters: Sequence[_Schema.FormalParameter], values: Sequence[ir.Value | None]
) -> list[tuple[str, str]]:
    """Type parameter and type of each tensor whose type is known."""
    found = []
    for index, value in enumerate(values):
        if parameters and value is not None and value.type is not None:
            parameter = parameters[min(index, len(parameters) - 1)]  # the last may be variadic
            found.append((parameter.type_str, _type_name(value.type)))
    return found


def _type_name(kind: ir.TypeProtocol) -> str:
    """A type as onnxruntime writes it, ``tensor(float)``."""
    if isinstance(kind, ir.TensorType):
        return f"tensor({kind.dtype.name.lower()})"
    if isinstance(kind, ir.SequenceType):
        return f"seq({_type_name(kind.elem_type)})"
    if isinstance(kind, ir.OptionalType):
        return f"optional({_type_name(kind.elem_type)})"
    return str(kind)


def _type_text(node: ir.Node) -> str:
    kinds = [value.type for value in node.inputs if value is not None and value.type is not None]
    return ", ".join(dict.fromkeys(map(_type_name, kinds))) or "these types"
