"""One network through one of torch's two exporters, tidied afterwards."""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.jit._trace import TracerWarning

from slimctl.core.contract import Feeds
from slimctl.core.errors import OptionError, SlimctlError, UnsupportedModelError
from slimctl.graph.edit import all_graphs, all_nodes
from slimctl.graph.load import load_model
from slimctl.graph.opset import default_opset
from slimctl.graph.shapes import infer_shapes
from slimctl.training.import_inputs import Declared
from slimctl.training.import_source import Kind, Network, first_line

DEFAULT_OPSET = 18
"""The oldest that both exporters write: torch.export's operators are written for it."""

_NEWEST_TRACED = 20  # torch.onnx._constants.ONNX_TORCHSCRIPT_EXPORTER_MAX_OPSET of torch 2.13


class Exporter(StrEnum):
    """How a network becomes a graph."""

    DYNAMO = "torch.export"
    TRACE = "TorchScript trace"


class Exported(NamedTuple):
    """A graph, and what is to be said about it.

    Attributes:
        model: The graph.
        notes: What the exporter warned of that may matter.
    """

    model: ir.Model
    notes: list[str]


def choose_exporter(kind: Kind, dynamo: bool | None, opset: int) -> Exporter:
    """The exporter for a kind of source.

    ``torch.export`` where it can be used: it knows more networks, and checks dynamic axes. Tracing
    needs nothing but torch, and is all that TorchScript can be given to.

    Raises:
        OptionError: The one asked for cannot do it, or not with this operator set.
        SlimctlError: onnxscript is needed and not installed.
    """
    if kind is Kind.SCRIPT and dynamo:
        raise OptionError("--dynamo", "TorchScript can only be traced", fix="leave --dynamo out")
    if kind is Kind.PROGRAM and dynamo is False:
        raise OptionError(
            "--no-dynamo", "Exported programs cannot be traced", fix="leave --no-dynamo out"
        )
    has_onnxscript = find_spec("onnxscript") is not None
    wanted = has_onnxscript if dynamo is None else dynamo
    if kind is Kind.SCRIPT or (not wanted and kind is not Kind.PROGRAM):
        if opset > _NEWEST_TRACED:
            fix = f"use --opset {_NEWEST_TRACED} or older, or --dynamo"
            raise OptionError("--opset", f"Tracing writes no operator set {opset}", fix=fix)
        return Exporter.TRACE
    if not has_onnxscript:
        raise SlimctlError("torch.export needs onnxscript", fix="pip install onnxscript")
    if opset < DEFAULT_OPSET:
        fix = f"use --opset {DEFAULT_OPSET} or newer, or --no-dynamo"
        raise OptionError("--opset", f"torch.export writes no operator set {opset}", fix=fix)
    return Exporter.DYNAMO


@contextlib.contextmanager
def quiet() -> Iterator[list[warnings.WarningMessage]]:
    """Nothing that Python code prints, logs or warns of gets out; the warnings are handed over.

    torch's loggers hold on to the stderr that they met first, so they are switched off instead.
    """
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with (
            warnings.catch_warnings(record=True) as caught,
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("always")
            yield caught
    finally:
        logging.disable(before)


def export(
    network: Network,
    declared: Declared,
    example: Feeds,
    outputs: Sequence[str],
    *,
    exporter: Exporter,
    opset: int,
    folder: Path,
) -> Exported:
    """The network as a graph.

    Args:
        network: What to export.
        declared: Its inputs.
        example: One run's inputs.
        outputs: Names, as many as the network has tensors to give.
        exporter: Which of the two.
        opset: Version of the default operator set.
        folder: For files that the graph refers to afterwards.

    Raises:
        UnsupportedModelError: The exporter refuses the network, or fixes what was to be dynamic.
        OptionError: The exporter wrote another operator set.
    """
    path = folder / "exported.onnx"
    arguments = _arguments(network, declared, example, exporter)
    try:
        with quiet() as caught, torch.no_grad():
            torch.onnx.export(
                network.exported,
                f=str(path),
                output_names=list(outputs),
                opset_version=opset,
                verbose=False,
                dynamo=exporter is Exporter.DYNAMO,
                **arguments,
            )
    except Exception as error:  # exporters raise anything, and run the user's code
        raise UnsupportedModelError(
            f"{exporter.value} cannot export the network: {first_line(error)}",
            where="forward",
            fix=_other_way(network.kind, exporter),
        ) from error
    model = load_model(path)
    if (written := default_opset(model)) != opset:
        raise OptionError(
            "--opset",
            f"The exporter wrote operator set {written} instead of {opset}",
            fix=f"use --opset {written}",
        )
    _tidy(model, declared, network.state)
    return Exported(model, _traced_notes(caught))


def _other_way(kind: Kind, exporter: Exporter) -> str:
    if exporter is Exporter.DYNAMO:
        rewrite = "change the forward so that torch.export takes it"
        return rewrite if kind is Kind.PROGRAM else f"try --no-dynamo, or {rewrite}"
    if kind is Kind.SCRIPT:
        return "give the network itself with module:function, which --dynamo takes too"
    install = "" if find_spec("onnxscript") else " after pip install onnxscript"
    return f"try --dynamo{install}, or change what the forward does there"


def _arguments(
    network: Network, declared: Declared, example: Feeds, exporter: Exporter
) -> dict[str, Any]:
    """What the exporter is told of the inputs."""
    places, named = network.parameters(list(example))
    tensors = {name: torch.from_numpy(array.copy()) for name, array in example.items()}
    axes = {
        entry.name: {axis: size for axis, size in enumerate(entry.shape) if isinstance(size, str)}
        for entry in declared.inputs
    }
    arguments: dict[str, Any] = {
        "args": tuple(tensors[name] for name in places),
        "kwargs": {name: tensors[name] for name in named} or None,
        "input_names": [*places, *named],
    }
    if exporter is Exporter.TRACE:
        return arguments | {"dynamic_axes": {name: dims for name, dims in axes.items() if dims}}
    if network.kind is Kind.PROGRAM:
        return arguments  # its axes were settled when it was made
    dims = {name: torch.export.Dim(name) for name in declared.sizes}
    shapes = {
        name: {axis: dims[dim] for axis, dim in dynamic.items()} for name, dynamic in axes.items()
    }
    # By name they must be called as in forward; by place they follow the arguments.
    by_name = {name: shapes[name] for name in (*places, *named)}
    return arguments | {"dynamic_shapes": by_name if named else tuple(by_name.values())}


_OWN = str(Path(torch.__file__).parent)


def _traced_notes(caught: Sequence[warnings.WarningMessage]) -> list[str]:
    """Where tracing made a constant of a value: right for these inputs, maybe not for others.

    torch's own layers check their inputs so, which means nothing.
    """
    return list(
        dict.fromkeys(
            f"tracing fixed a value at {warning.filename}:{warning.lineno}"
            for warning in caught
            if issubclass(warning.category, TracerWarning) and not warning.filename.startswith(_OWN)
        )
    )


def _tidy(model: ir.Model, declared: Declared, state: Mapping[str, Tensor]) -> None:
    _forget_sources(model)
    _name_dimensions(model, declared)
    _name_weights(model, state)
    _infer_again(model)


def _infer_again(model: ir.Model) -> None:
    """Shapes between inputs and outputs, from the inputs alone.

    torch.export writes sizes of the example there that are dynamic: behind an LSTM, the steps.
    """
    outputs = frozenset(model.graph.outputs)
    for node in all_nodes(model):
        for value in node.outputs:
            if value not in outputs:
                value.shape = None
    infer_shapes(model)


_KEPT = "namespace"  # the module that a node comes from; the rest repeats it, or quotes sources


def _forget_sources(model: ir.Model) -> None:
    """Takes the user's source lines and paths out, which torch.export writes into every node."""
    values = [value for node in all_nodes(model) for value in node.outputs]
    holders: list[Any] = [model, *all_graphs(model), *all_nodes(model), *values]
    for holder in holders:
        for key in [key for key in holder.metadata_props if key != _KEPT]:
            del holder.metadata_props[key]


_SYMBOL = re.compile(r"[A-Za-z_]\w*")


def _name_dimensions(model: ir.Model, declared: Declared) -> None:
    """Dimensions are called as the user called them; those that an exporter made up get no name.

    Raises:
        UnsupportedModelError: An axis that was to be dynamic has one size.
    """
    found = {value.name: value for value in model.graph.inputs}
    known: dict[str, str] = {}
    for entry in declared.inputs:
        if entry.name not in found:
            raise UnsupportedModelError(
                f"The network does not use the input '{entry.name}'",
                where="forward",
                fix="leave that --input out",
            )
        known |= _symbols(found[entry.name], entry.shape)
    for value in (*model.graph.inputs, *(v for node in all_nodes(model) for v in node.outputs)):
        if value.shape is not None:
            value.shape = ir.Shape([_renamed(dim, known) for dim in value.shape.dims])


def _symbols(value: ir.Value, wanted: Sequence[int | str]) -> dict[str, str]:
    """The user's names by the exporter's."""
    dims = value.shape.dims if value.shape is not None else ()
    known = {}
    for axis, (dim, want) in enumerate(zip(dims, wanted, strict=False)):
        if isinstance(want, str) and isinstance(dim, int):
            raise UnsupportedModelError(
                f"Axis {axis} of '{value.name}' is {dim} in the exported graph, not dynamic",
                where=f"input '{value.name}'",
                fix=f"write {dim} instead of {want}, or export the program with that axis dynamic",
            )
        if isinstance(want, str) and isinstance(dim, ir.SymbolicDim) and dim.value is not None:
            known[dim.value] = want
    return known


def correct_outputs(model: ir.Model, seen: Sequence[Seen]) -> bool:
    """Replaces what is stated of the outputs' sizes and was seen to be otherwise.

    Args:
        model: Changed in place.
        seen: Sizes of the dynamic dimensions, and shapes of all outputs with them.

    Returns:
        Whether anything was.
    """
    changed = False
    for place, value in enumerate(model.graph.outputs):
        shapes = [shape[place] for _, shape in seen]
        if value.shape is None or any(len(shape) != len(value.shape) for shape in shapes):
            continue
        sizes = [sizes for sizes, _ in seen]
        dims = [
            _corrected(dim, sizes, [shape[axis] for shape in shapes])
            for axis, dim in enumerate(value.shape.dims)
        ]
        if dims != [_stated(dim) for dim in value.shape.dims]:
            value.shape = ir.Shape(dims)
            changed = True
    return changed


Seen = tuple[Mapping[str, int], Sequence[tuple[int, ...]]]


def _stated(dim: int | ir.SymbolicDim) -> int | str | None:
    return dim if isinstance(dim, int) else dim.value


def _corrected(
    dim: int | ir.SymbolicDim, sizes: Sequence[Mapping[str, int]], found: Sequence[int]
) -> int | str | None:
    """A size that was the same each time stays; one that was always a dimension's is called so."""
    stated = _stated(dim)
    if isinstance(stated, str) or all(stated == size for size in found):
        return stated
    same = [
        name
        for name in sizes[0]
        if all(known[name] == size for known, size in zip(sizes, found, strict=True))
    ]
    return same[0] if len(same) == 1 and len(set(found)) > 1 else None


def _renamed(dim: int | ir.SymbolicDim, known: Mapping[str, str]) -> int | str | None:
    if isinstance(dim, int):
        return dim
    text = dim.value or ""
    if not text or not all(symbol in known for symbol in _SYMBOL.findall(text)):
        return None
    return _SYMBOL.sub(lambda match: known[match[0]], text)


def _name_weights(model: ir.Model, state: Mapping[str, Tensor]) -> None:
    """Weights that an exporter renamed are called as in the state dict again.

    Those with the values of one tensor, or of its transpose, are that tensor. What was made of
    several (a convolution with its normalization) is called as the convolution's own weight.
    """
    weights = model.graph.initializers
    lost = [value for name, value in weights.items() if name not in state]
    by_content = _by_content(state, set(weights))
    for value in lost:
        name = by_content.get(_content(value.const_value.numpy())) if value.const_value else None
        if name is not None and name not in weights:
            value.name = name
    for node in model.graph:
        if node.op_type in _FOLDED and node.name:
            _name_folded(node, weights, state)


_FOLDED = ("Conv", "ConvTranspose", "Gemm")


def _name_folded(
    node: ir.Node, weights: Mapping[str, ir.Value], state: Mapping[str, Tensor]
) -> None:
    # Tracing calls nodes /layer1/0/conv1/Conv.
    scope = ".".join((node.name or "").strip("/").split("/")[:-1])
    own = state.get(f"{scope}.weight")
    for value, part in zip(node.inputs[1:3], ("weight", "bias"), strict=False):
        name = f"{scope}.{part}"
        if value is None or value.name in state or name in weights or own is None:
            continue
        if not value.is_initializer() or value.shape is None:
            continue
        if part == "bias" or tuple(value.shape.numpy()) == tuple(own.shape):
            value.name = name


Content = tuple[tuple[int, ...], str, str]


def _by_content(state: Mapping[str, Tensor], present: set[str]) -> dict[Content, str]:
    """Names of tensors that are in the graph under no name of theirs; twins are left out."""
    found: dict[Content, list[str]] = {}
    for name, tensor in state.items():
        if name in present or tensor.is_quantized or tensor.dtype is torch.bfloat16:
            continue
        array = tensor.detach().cpu().numpy()
        forms = [array, array.T] if array.ndim == 2 else [array]
        for content in {_content(form) for form in forms}:
            found.setdefault(content, []).append(name)
    return {content: names[0] for content, names in found.items() if len(names) == 1}


def _content(array: NDArray[Any]) -> Content:
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return array.shape, str(array.dtype), hashlib.sha256(data.data).hexdigest()
