"""``slimctl inspect``: what a model consists of and what it costs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from slimctl.cli import words
from slimctl.cli.options import Json, Model, Verbose, optional
from slimctl.cli.output import Output
from slimctl.cli.table import Block, Facts, Table
from slimctl.core.errors import OptionError

if TYPE_CHECKING:
    from pathlib import Path

    import onnx_ir as ir

    from slimctl.graph.cost import ModelCost, NodeCost
    from slimctl.graph.edit import Port

HEAVIEST = 10
"""Nodes listed without --verbose."""


def inspect(
    model: Model,
    *,
    dim: Annotated[
        list[str] | None,
        optional(
            "--dim",
            "NAME=N",
            "Size of a symbolic dimension, or of a nameless one as input[axis]=N; repeatable. "
            "Open first dimensions are 1 unless given.",
        ),
    ] = None,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Show operators, shapes, parameters, MACs and bytes of a model."""
    from slimctl.graph.cost import model_cost, node_costs
    from slimctl.graph.edit import interface
    from slimctl.graph.load import load_model

    given = parse_dims(dim or [])
    graph = load_model(model)
    sizes = single_sample(interface(graph).inputs) | given
    found = Inspection(model, graph, sizes, model_cost(graph, sizes), node_costs(graph, sizes))
    Output(json=json).result(_document(found), list(_blocks(found, everything=verbose)))


class Inspection(NamedTuple):
    """What was looked at and what was found."""

    path: Path
    model: ir.Model
    sizes: Mapping[str, int]
    total: ModelCost
    nodes: Sequence[NodeCost]


def single_sample(inputs: Sequence[Port]) -> dict[str, int]:
    """Size 1 for every open first dimension: the costs are those of one sample by default."""
    return {
        port.shape[0] or f"{port.name}[0]": 1
        for port in inputs
        if port.shape and not isinstance(port.shape[0], int)
    }


def parse_dims(texts: Sequence[str]) -> dict[str, int]:
    """Sizes by name from texts such as ``batch=1``.

    Raises:
        OptionError: Not of that form.
    """
    sizes = {}
    for text in texts:
        name, equals, size = text.rpartition("=")
        if not (equals and name and size.isdecimal() and int(size) > 0):
            raise OptionError("--dim", f"'{text}' is not of the form NAME=N", fix="--dim batch=1")
        sizes[name] = int(size)
    return sizes


def _document(found: Inspection) -> dict[str, Any]:
    from slimctl.graph.edit import interface

    path, model, sizes, total, nodes = found
    ports = interface(model)
    return {
        "model": path,
        "sizes": sizes,
        "ir_version": model.ir_version,
        "opsets": dict(model.opset_imports),
        "producer": _producer(model),
        "inputs": [_port(port) for port in ports.inputs],
        "outputs": [_port(port) for port in ports.outputs],
        "nodes": len(nodes),
        "parameters": total.parameters,
        "weight_bytes": total.weight_bytes,
        "macs": total.macs,
        "activation_bytes": total.activation_bytes,
        "nodes_unknown": total.unknown,
        "operators": total.operators,
        "node_costs": nodes,
    }


def _producer(model: ir.Model) -> str:
    return " ".join(filter(None, [model.producer_name, model.producer_version]))


def _port(port: Port) -> dict[str, Any]:
    return {"name": port.name, "dtype": _dtype(port), "shape": port.shape}


def _dtype(port: Port) -> str:
    return "unknown" if port.dtype is None else port.dtype.name.lower()


def _blocks(found: Inspection, *, everything: bool) -> Iterator[Block]:
    from slimctl.graph.edit import interface

    path, model, sizes, total, nodes = found
    ports = interface(model)
    at_least = "at least " if total.unknown else ""
    yield Facts(
        {
            "model": str(path),
            "opset": words.setting(
                {name or "ai.onnx": v for name, v in model.opset_imports.items()}
            ),
            "IR version": str(model.ir_version),
            "producer": _producer(model) or "-",
            "nodes": str(len(nodes)),
            "parameters": words.number(total.parameters),
            "weights": words.size(total.weight_bytes),
            "sizes": words.setting(sizes) or "all fixed",
            "MACs": at_least + words.number(total.macs),
            "activations": f"{at_least}{words.size(total.activation_bytes)} read and written "
            "in one run",
        }
    )
    rows = [("input", port) for port in ports.inputs] + [("output", port) for port in ports.outputs]
    yield Table(
        ("", "name", "type", "shape"),
        [(kind, port.name, _dtype(port), shape_text(port.shape)) for kind, port in rows],
    )
    yield _operators(total.operators)
    yield _nodes(nodes, everything=everything)
    if total.unknown:
        yield (
            f"{total.unknown} nodes have unknown shapes and count as nothing; the sizes of open "
            f"dimensions are set with {' '.join(_open(ports.inputs, sizes)) or '--dim NAME=N'}"
        )


def _open(inputs: Sequence[Port], sizes: Mapping[str, int]) -> list[str]:
    """Options that would set the dimensions of the inputs that are still open."""
    names = [
        dim or f"{port.name}[{axis}]"
        for port in inputs
        for axis, dim in enumerate(port.shape or ())
        if not isinstance(dim, int)
    ]
    return [f"--dim '{name}=N'" for name in dict.fromkeys(names) if name not in sizes]


def shape_text(shape: Sequence[int | str | None] | None) -> str:
    """A shape as ``1x3xN``; ``?`` stands for what is not known."""
    if shape is None:
        return words.UNKNOWN
    return "x".join(words.UNKNOWN if dim is None else str(dim) for dim in shape) or "scalar"


def _operators(operators: Mapping[str, Any]) -> Table:
    return Table(
        ("operator", ">count", ">MACs", ">activation bytes", ">unknown"),
        [
            (
                name,
                str(cost.count),
                words.number(cost.macs),
                words.size(cost.activation_bytes),
                str(cost.unknown),
            )
            for name, cost in operators.items()
        ],
    )


def _nodes(nodes: Sequence[NodeCost], *, everything: bool) -> Table:
    heaviest = sorted(nodes, key=lambda node: -(node.macs or 0))[:HEAVIEST]
    listed = nodes if everything else heaviest
    title = "Nodes" if everything else f"Heaviest nodes ({len(listed)} of {len(nodes)})"
    return Table(
        ("node", "operator", "output", ">parameters", ">MACs", ">weights", ">activations"),
        [
            (
                node.name,
                node.op_type,
                ", ".join(shape_text(shape) for shape in node.output_shapes),
                words.number(node.parameters),
                words.number(node.macs),
                words.size(node.weight_bytes),
                words.size(node.activation_bytes),
            )
            for node in listed
        ],
        title=title,
    )
