"""From a torch network to an ONNX file that was compared with it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from torch import Tensor

from slimctl.core.contract import Feeds
from slimctl.core.errors import OptionError, UnsupportedModelError
from slimctl.core.files import check_output, publish, staging_folder
from slimctl.data.inputs import shape_text
from slimctl.data.sources import open_source
from slimctl.graph.edit import Port, interface
from slimctl.graph.save import initializer_values, parameter_count, save_model
from slimctl.graph.session import open_session, run
from slimctl.training.import_export import (
    DEFAULT_OPSET,
    Exported,
    Exporter,
    choose_exporter,
    correct_outputs,
    export,
    quiet,
)
from slimctl.training.import_inputs import Declared
from slimctl.training.import_parity import Check, check_repeatable, compare
from slimctl.training.import_source import Network, load_network, output_tensors, to_arrays

DEFAULT_TOLERANCE = 1e-4
"""Of the largest output: 840 times the spacing of float32, which sums of thousands of terms in
another order stay below; a wrong layer is off by far more."""

_GIVEN_SAMPLES = 64  # of --input-data: parity needs a few, and the rest costs the user time


@dataclass(frozen=True)
class Request:
    """What is to be imported, and how.

    Attributes:
        source: ``module:function`` or a file.
        inputs: Of the graph.
        weights: State dict for the network of ``module:function``.
        trust: Files may run code.
        output_names: Empty for names from what the network returns.
        opset: Version of the default operator set.
        dynamo: Which exporter; None for the one that can.
        tolerance: Largest difference from the network, relative to the largest output.
        seed: Of the random inputs; further ones follow it.
        data: More inputs to compare on.
    """

    source: str
    inputs: Declared
    weights: Path | None = None
    trust: bool = False
    output_names: Sequence[str] = ()
    opset: int = DEFAULT_OPSET
    dynamo: bool | None = None
    tolerance: float = DEFAULT_TOLERANCE
    seed: int = 0
    data: str | None = None


@dataclass(frozen=True)
class Imported:
    """What came of it.

    Attributes:
        kind: What the source is.
        exporter: What made the graph.
        inputs: Of the graph.
        outputs: Of the graph.
        checks: Comparisons with the network, in order.
        passed: None of them is above the tolerance; only then a file was written.
        files: What was written.
        size_bytes: Of these files together.
        parameters: Elements of all weights.
        named: Weights that have their name in the state dict.
        renamed: Those that the exporter made of it, under names of its own.
        notes: What may matter later.
    """

    kind: str
    exporter: str
    inputs: Sequence[Port]
    outputs: Sequence[Port]
    checks: Sequence[Check]
    passed: bool
    files: Sequence[Path]
    size_bytes: int
    parameters: int
    named: int
    renamed: int
    notes: Sequence[str]


def import_network(request: Request, output: Path, *, force: bool) -> Imported:
    """Exports a network, compares graph and network, and writes the graph if they agree.

    Raises:
        OutputError: The output exists, or cannot be written.
        SourceError: The source cannot be opened, or may not be.
        OptionError: An option does not fit the source or the network.
        UnsupportedModelError: The network cannot be run or exported.
        SampleError: The data do not fit the inputs.
    """
    check_output(output, force=force)
    if output.is_dir():
        raise OptionError("-o", f"'{output}' is a folder", fix="name a file, such as -o m.onnx")
    with quiet():
        network = load_network(request.source, weights=request.weights, trust=request.trust)
    exporter = choose_exporter(network.kind, request.dynamo, request.opset)
    example = request.inputs.random(request.inputs.sizes, request.seed)
    with quiet():
        returned = network.run(example)
        check_repeatable(_as_arrays(network), example)
    names = _names(returned, request)
    with tempfile.TemporaryDirectory(prefix="slimctl-") as folder:
        exported = export(
            network,
            request.inputs,
            example,
            names,
            exporter=exporter,
            opset=request.opset,
            folder=Path(folder),
        )
        _check_outputs(exported.model, names)
        with staging_folder(output) as staging:
            files = save_model(exported.model, staging / output.name)
            checks = _compared(network, files[0], exported.model, request)
            seen = [(check.sizes, check.shapes) for check in checks if check.shapes]
            if seen and correct_outputs(exported.model, seen):
                files = save_model(exported.model, staging / output.name)
            found = _report(network, exporter, exported, request, checks)
            return _published(found, files, output) if found.passed else found


def _as_arrays(network: Network) -> Any:
    return lambda feeds: to_arrays(network.run(feeds))


def _names(returned: Any, request: Request) -> list[str]:
    """Names of the outputs: the user's, or the keys of what the network returns.

    Raises:
        OptionError: Not as many names as outputs, or one name twice.
    """
    count = len(output_tensors(returned))
    given = list(request.output_names)
    if given and len(given) != count:
        raise OptionError(
            "--output-name",
            f"The network gives {count} outputs, {len(given)} names were given",
            fix="repeat --output-name once for each, in their order",
        )
    names = given or _keys(returned, count)
    inputs = {entry.name for entry in request.inputs.inputs}
    twice = [name for place, name in enumerate(names) if name in names[:place] or name in inputs]
    if twice and given:
        raise OptionError("--output-name", f"'{twice[0]}' is taken", fix="use another name")
    return _plain_names(count) if twice else names


def _keys(returned: Any, count: int) -> list[str]:
    """Keys of a dictionary or fields of a named tuple, where each holds one tensor."""
    if hasattr(returned, "_asdict"):
        returned = returned._asdict()
    if isinstance(returned, Mapping):
        tensors = {str(key): value for key, value in returned.items() if value is not None}
        if len(tensors) == count and all(isinstance(v, Tensor) for v in tensors.values()):
            return list(tensors)
    return _plain_names(count)


def _plain_names(count: int) -> list[str]:
    return ["output"] if count == 1 else [f"output_{place}" for place in range(count)]


def _check_outputs(model: ir.Model, names: Sequence[str]) -> None:
    found = [value.name or "" for value in model.graph.outputs]
    if found != list(names):
        raise UnsupportedModelError(
            f"The exporter wrote the outputs {', '.join(found)}; the network gives"
            f" {', '.join(names)}",
            where="forward",
            fix="return a tuple of tensors, each of them once",
        )


def _compared(network: Network, path: Path, model: ir.Model, request: Request) -> list[Check]:
    session = open_session(path)
    names = [value.name or "" for value in model.graph.outputs]

    def graph(feeds: Feeds) -> list[NDArray[Any]]:
        return [np.asarray(array) for array in run(session, feeds, names).values()]

    with quiet():
        return list(
            compare(
                _as_arrays(network),
                graph,
                request.inputs,
                _given(request, model),
                seed=request.seed,
            )
        )


def _given(request: Request, model: ir.Model) -> Iterator[Feeds]:
    if request.data is not None:
        source = open_source(request.data, interface=interface(model), samples=_GIVEN_SAMPLES)
        yield from (batch.feeds for batch in source.batches())


def _report(
    network: Network,
    exporter: Exporter,
    exported: Exported,
    request: Request,
    checks: Sequence[Check],
) -> Imported:
    model = exported.model
    ports = interface(model)
    weights = [value for value in initializer_values(model) if _is_weight(value)]
    named = sum(value.name in network.state for value in weights)
    return Imported(
        kind=network.kind.value,
        exporter=exporter.value,
        inputs=ports.inputs,
        outputs=ports.outputs,
        checks=checks,
        passed=all(check.largest() <= request.tolerance for check in checks),
        files=[],
        size_bytes=0,
        parameters=parameter_count(model),
        named=named,
        renamed=len(weights) - named,
        notes=[*exported.notes, *_vague_outputs(ports.outputs)],
    )


def _is_weight(value: ir.Value) -> bool:
    """Whether it holds parameters rather than a shape, an axis or a constant of an operator."""
    kind = value.dtype
    tensor = value.const_value
    return kind is not None and kind.is_floating_point() and tensor is not None and tensor.size > 1


def _vague_outputs(outputs: Sequence[Port]) -> Iterator[str]:
    for port in outputs:
        if port.shape is None or None in port.shape:
            yield f"output '{port.name}' has the shape {shape_text(port.shape)}: ? is any size"


def _published(found: Imported, files: Sequence[Path], output: Path) -> Imported:
    """Weights first: a model without them cannot be opened."""
    placed = [output.with_name(file.name) for file in files]
    sizes = sum(file.stat().st_size for file in files)
    for staged, place in reversed(list(zip(files, placed, strict=True))):
        publish(staged, place)
    return replace(found, files=placed, size_bytes=sizes)
