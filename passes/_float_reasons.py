"""Nodes that compute in float32 for what they are, and for what they feed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import onnx_ir as ir

from slimctl.graph.edit import all_nodes, const_array
from slimctl.graph.select import Selection
from slimctl.passes._float_network import Network
from slimctl.passes._float_rules import (
    CHEAP,
    MOVEMENT,
    PRECISE,
    PRECISE_ARGUMENTS,
    REDUCTIONS,
    SQUARES,
    STEEP,
)

_LINEAR: Final = MOVEMENT | {
    "Add",
    "Cast",
    "Constant",
    "ConstantOfShape",
    "Conv",
    "Div",
    "Gemm",
    "MatMul",
    "Mul",
    "Neg",
    "Shape",
    "Sub",
}
INTEGERS: Final = frozenset(
    getattr(ir.DataType, name)
    for name in ("INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64")
)


def force_chosen(network: Network, selection: Selection, blocked: Mapping[str, str]) -> None:
    """Float32 for nodes that the user or the target names.

    Args:
        network: Reasons are added to it.
        selection: Which nodes may be touched.
        blocked: Reasons by operator.
    """
    for site, node in network.node_sites():
        reason = selection.reason_against(node) or blocked.get(node.op_type)
        if reason:
            site.force(reason)


def force_precise(network: Network, model: ir.Model) -> None:
    """Float32 for what needs more bits than the narrower type has, and for what computes it."""
    for site, node in network.node_sites():
        if node.op_type in PRECISE and not node.domain:
            site.force(f"{node.op_type} needs more bits")
        if _trains(node):
            site.force("it computes statistics of the batch")
    for node in all_nodes(model):
        for value in _precise_inputs(node):
            _force_sources(network, value, f"{node.op_type} '{node.name}' needs it precisely")


def _trains(node: ir.Node) -> bool:
    attribute = node.attributes.get("training_mode")
    return attribute is not None and bool(attribute.as_int())


def _precise_inputs(node: ir.Node) -> Iterator[ir.Value]:
    indices: tuple[int, ...] = () if node.domain else PRECISE_ARGUMENTS.get(node.op_type, ())
    if _makes_integers(node):
        indices = (0,)
    for index in indices:
        value = node.inputs[index] if index < len(node.inputs) else None
        if value is not None:
            yield value


def _makes_integers(node: ir.Node) -> bool:
    """Sizes and indices are often computed in float: 2049 is no float16."""
    return (
        node.op_type == "Cast"
        and not node.domain
        and ir.DataType(node.attributes["to"].as_int()) in INTEGERS
    )


def _force_sources(network: Network, value: ir.Value, reason: str) -> None:
    """What the value is computed from, back to the operators with weights.

    Those of a spectrum are no exception: a Conv or MatMul that does nothing but transform the input
    of the model stands in for a Fourier transform, whose faint bins a logarithm makes visible.
    """
    pending, seen = [value], set[ir.Node]()
    while pending:
        node = pending.pop().producer()
        if node is None or node in seen or not (_passes_precision(node) or _is_front_end(node)):
            continue
        seen.add(node)
        site = network.by_node.get(node)
        if site is not None:
            site.force(reason)
            pending.extend(source for source in node.inputs if source is not None)


def _passes_precision(node: ir.Node) -> bool:
    if node.op_type == "MatMul":  # an outer product: angles are positions times frequencies
        shape = node.inputs[0].shape if node.inputs[0] is not None else None
        return shape is not None and len(shape) > 1 and shape[-1] == 1
    return node.op_type in CHEAP or node.op_type in REDUCTIONS


def _is_front_end(node: ir.Node) -> bool:
    """Whether a node is linear in the inputs of the model, and so is all that leads to it."""
    pending, seen = [node], {node}
    while pending:
        found = pending.pop()
        if found.domain or found.op_type not in _LINEAR:
            return False
        sources = {value.producer() for value in found.inputs if value is not None}
        new = [source for source in sources if source is not None and source not in seen]
        seen.update(new)
        pending.extend(new)
    return True


def force_for_cpu(network: Network) -> None:
    """Float32 for nodes that onnxruntime 1.32 cannot run in float16 on the CPU.

    Its kernels of ScatterND and ScatterElements copy float16 and do not add it up. Its
    MatmulTransposeFusion crashes the process where a Cast, which the provider needs behind a
    float16 Transpose, stands between the MatMul and a Transpose that moves the first axis to one of
    the last two places.
    """
    for site, node in network.node_sites():
        if node.domain:
            continue
        if node.op_type.startswith("Scatter") and _reduces(node):
            site.force(f"onnxruntime's CPU provider has no float16 {node.op_type} that reduces")
        if node.op_type == "Transpose" and _moves_first_axis_back(node):
            users = {use.node.op_type for use in node.outputs[0].uses()}
            if "MatMul" in users:
                site.force("onnxruntime's CPU provider crashes on it in float16 before a MatMul")


def _reduces(node: ir.Node) -> bool:
    attribute = node.attributes.get("reduction")
    return attribute is not None and attribute.as_string() != "none"


def _moves_first_axis_back(node: ir.Node) -> bool:
    attribute = node.attributes.get("perm")
    perm = [] if attribute is None else list(attribute.as_ints())
    others = [axis for axis in perm if axis != 0]
    return len(perm) > 2 and 0 in perm[-2:] and others == sorted(others)


def may_overflow(node: ir.Node) -> bool:
    """Whether the operator can leave the range of float16 for inputs that lie in it."""
    if node.domain:
        return False
    if node.op_type == "Pow":
        exponent = const_array(node.inputs[1])
        return exponent is None or bool((exponent < 0).any() or (exponent > 1).any())
    return node.op_type in REDUCTIONS | SQUARES | STEEP


def force_unknown(network: Network, fitting: frozenset[ir.Node], *, data: bool) -> None:
    """Float32 for operators that may overflow float16.

    Args:
        network: Reasons are added to it.
        fitting: Nodes of which the data said that they do not.
        data: Whether there were data.
    """
    reason = (
        "by what it adds up on the data, or that is not known"
        if data
        else "and there are no data that say it does not"
    )
    for site, node in network.node_sites():
        if node not in fitting and may_overflow(node):
            site.force(f"{node.op_type} may overflow float16, {reason}")
