"""The only door to onnxruntime. It is imported when a session is opened, not before."""

from __future__ import annotations

import json
import tempfile
import warnings
from collections.abc import Collection, Mapping, Sequence
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import onnx_ir as ir

from slimctl.core.contract import Feeds
from slimctl.core.cpu import products_saturate
from slimctl.core.errors import ModelExecutionError, ModelLoadError, UnsupportedModelError
from slimctl.graph._ort_errors import translated
from slimctl.graph.bodies import expose, observable_graphs
from slimctl.graph.edit import NameScope, clone_model, remove_dead, used_values
from slimctl.graph.exact_products import has_int8_activations, with_exact_products
from slimctl.graph.load import detach, load_model, quiet_onnx_ir
from slimctl.graph.opset import default_opset, raise_opset
from slimctl.graph.save import (
    EXTERNAL_THRESHOLD,
    in_memory,
    is_large,
    placeholder,
    replaced_weights,
    save_model,
    serialize,
    weight_bytes,
)

if TYPE_CHECKING:
    import onnxruntime as ort

CPU = "CPUExecutionProvider"
_WEIGHTS_FILE = "session.optimized_model_external_initializers_file_name"
_BYTE = 8  # bits; narrower types are packed, and onnxruntime wants them packed its own way
_SILENT = 4  # onnxruntime's severity "fatal"; what goes wrong comes as an exception anyway


class Level(StrEnum):
    """How much onnxruntime may rewrite a graph when it loads it."""

    DISABLED = "disabled"
    BASIC = "basic"
    EXTENDED = "extended"
    ALL = "all"


class Products(StrEnum):
    """How x86 processors without VNNI multiply uint8 codes by int8 weights; others are exact."""

    EXACT = "exact"
    """As others: int8 weights become uint8, so that what is measured is the same everywhere."""
    NATIVE = "native"
    """As they are written: pairs of products saturate at 16 bits there."""


def installed_providers() -> list[str]:
    """Execution providers that the installed onnxruntime offers, best first."""
    import onnxruntime as ort

    return list(ort.get_available_providers())


def onnxruntime_version() -> str:
    """Version of the installed onnxruntime."""
    import onnxruntime as ort

    return str(ort.__version__)


class Kernel(NamedTuple):
    """An implementation of an operator in the installed onnxruntime.

    Attributes:
        domain: Of the operator, empty for ONNX's own.
        op_type: Its name.
        since: First version of the operator set that it implements.
        until: Last version.
        types: Types it takes, such as ``tensor(float)``, by type parameter of the schema.
    """

    domain: str
    op_type: str
    since: int
    until: int
    types: Mapping[str, Sequence[str]]


@cache
def registered_kernels(provider: str = CPU) -> tuple[Kernel, ...]:
    """Every kernel of an installed execution provider.

    Raises:
        ModelExecutionError: The installed onnxruntime does not have the provider.
    """
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    _providers(provider)
    found = [kernel for kernel in state.get_all_opkernel_def() if kernel.provider == provider]
    return tuple(
        Kernel(kernel.domain, kernel.op_name, since, until, kernel.type_constraints)
        for kernel in found
        for since, until in (kernel.version_range,)
    )


def open_session(
    model: ir.Model | Path,
    *,
    level: Level = Level.ALL,
    threads: int = 0,
    provider: str = CPU,
    memory_pattern: bool = True,
    products: Products = Products.EXACT,
) -> ort.InferenceSession:
    """Loads a model into onnxruntime.

    Args:
        model: A model in memory, or a file.
        level: How much of it onnxruntime may rewrite.
        threads: Threads within one operator; 0 lets onnxruntime take every core.
        provider: Execution provider. Nodes that it refuses run on the CPU.
        memory_pattern: Whether onnxruntime plans the memory of a run as one block. Runs at the
            same time, or of many shapes, keep one each.
        products: Arithmetic of integer kernels. What a user of the model will see on a processor
            like this one is NATIVE; what the model is worth on its target is EXACT.

    Raises:
        ModelExecutionError: onnxruntime refuses the model; names the node if onnxruntime does.
    """
    options = _options(level, threads)
    options.enable_mem_pattern = memory_pattern
    if products is Products.EXACT and products_saturate():
        model = _exact(model, options)
    return _open(model, options, provider)


_KEEP_INT8 = "session.qdqisint8allowed"
"""On x86 onnxruntime makes int8 activations between Q/DQ pairs uint8, whose products with int8
weights saturate; those of int8 and int8 are exact."""


def _exact(model: ir.Model | Path, options: ort.SessionOptions) -> ir.Model | Path:
    """The same with exact products; the file itself where it has them already."""
    try:
        read = load_model(model) if isinstance(model, Path) else model
    except ModelLoadError:
        return model  # onnxruntime is about to say what is wrong with it
    if has_int8_activations(read):
        options.add_session_config_entry(_KEEP_INT8, "1")
    return with_exact_products(read) or model


def _options(level: Level, threads: int) -> ort.SessionOptions:
    import onnxruntime as ort

    levels = {
        Level.DISABLED: ort.GraphOptimizationLevel.ORT_DISABLE_ALL,
        Level.BASIC: ort.GraphOptimizationLevel.ORT_ENABLE_BASIC,
        Level.EXTENDED: ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
        Level.ALL: ort.GraphOptimizationLevel.ORT_ENABLE_ALL,
    }
    options = ort.SessionOptions()
    options.log_severity_level = _SILENT
    options.graph_optimization_level = levels[level]
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    return options


def _open(
    model: ir.Model | Path, options: ort.SessionOptions, provider: str
) -> ort.InferenceSession:
    providers = _providers(provider)
    if isinstance(model, Path):
        with translated(_failures(), "cannot load the model", where=str(model)):
            return _session(str(model), options, providers)
    with translated(
        _failures(), "cannot load the model", where=f"graph {model.graph.name}", model=model
    ):
        return _open_in_memory(model, options, providers)


def _providers(provider: str) -> list[str]:
    installed = installed_providers()
    if provider not in installed:
        raise ModelExecutionError(
            f"The installed onnxruntime has no {provider}",
            where="execution provider",
            fix=f"choose among {', '.join(installed)}, or install an onnxruntime that has it",
        )
    return [provider] if provider == CPU else [provider, CPU]


def _open_in_memory(
    model: ir.Model, options: ort.SessionOptions, providers: list[str]
) -> ort.InferenceSession:
    lent = _lend(model)
    if weight_bytes(model) - sum(map(_lent_bytes, lent.values())) > EXTERNAL_THRESHOLD:
        with tempfile.TemporaryDirectory(prefix="slimctl-") as folder:
            path = save_model(model, Path(folder) / "model.onnx")[0]
            return _session(str(path), options, providers)
    options.add_external_initializers(list(lent), list(lent.values()))
    return _session(_without(model, lent), options, providers)


def _session(
    source: str | bytes, options: ort.SessionOptions, providers: list[str]
) -> ort.InferenceSession:
    import onnxruntime as ort

    return ort.InferenceSession(source, options, providers=providers)


def _lend(model: ir.Model) -> dict[str, ort.OrtValue]:
    """The large weights as they lie in memory. onnxruntime copies them once, while it opens.

    In a serialized model they would be copied four times, and models above 2 GiB could not be
    opened without a file.
    """
    import onnxruntime as ort

    lent = {}
    used = used_values(model)
    for name, value in model.graph.initializers.items():
        tensor = value.const_value
        if tensor is None or not is_large(tensor) or not _can_lend(tensor.dtype):
            continue
        if value not in used:  # onnxruntime drops these first, and then does not find them
            continue
        array = np.ascontiguousarray(tensor.numpy())
        if array.dtype.isbuiltin != 1:  # of ml_dtypes: handed over as integers of the same width
            array = array.view(f"u{array.itemsize}")
        lent[name] = ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array, tensor.dtype.value)
    return lent


def _can_lend(kind: ir.DataType) -> bool:
    return kind.bitwidth >= _BYTE and kind not in (ir.DataType.COMPLEX64, ir.DataType.COMPLEX128)


def _lent_bytes(value: ort.OrtValue) -> int:
    return int(value.tensor_size_in_bytes())


def _without(model: ir.Model, lent: Collection[str]) -> bytes:
    """The model as bytes, lent weights replaced by placeholders."""
    main = model.graph.initializers

    def replace(value: ir.Value, tensor: ir.TensorProtocol) -> ir.TensorProtocol:
        name = value.name or ""
        if name in lent and main.get(name) is value:
            return placeholder(tensor)
        return in_memory(value, tensor)

    with replaced_weights(model, replace):
        return serialize(model)


def run(session: ort.InferenceSession, feeds: Feeds, names: Sequence[str] | None = None) -> Feeds:
    """Runs a model once.

    Args:
        session: From :func:`open_session`.
        feeds: Arrays by input name. Names that the model does not ask for are an error.
        names: Outputs to give; None for all.

    Returns:
        Outputs by name.

    Raises:
        ModelExecutionError: onnxruntime refuses the inputs or fails; names the node if it does.
    """
    if names is None:
        names = [output.name for output in session.get_outputs()]
    with translated(_failures(), "cannot run the model"):
        return dict(zip(names, session.run(names, feeds), strict=True))


@cache
def _failures() -> tuple[type[Exception], ...]:
    """Every exception that onnxruntime raises for a bad model or bad inputs."""
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    kinds = [kind for kind in vars(state).values() if isinstance(kind, type)]
    own = [kind for kind in kinds if issubclass(kind, Exception)]
    # Its Python layer raises built-ins: missing inputs, wrong Python types.
    return (*own, RuntimeError, ValueError, TypeError)


_IF_OF_ANY_SHAPE = 11
"""Operator set from which the branches of an If may give tensors of different shapes."""


def tapped(model: ir.Model, tensors: Sequence[str], *, only: bool = False) -> ir.Model:
    """A clone with intermediate tensors as outputs; weights are shared with the original.

    Args:
        model: Stays as it is.
        tensors: Names of tensors of the main graph, or of branches of If nodes: those are empty in
            a run that takes the other branch.
        only: Give just these; what only the original outputs need is left out.

    Raises:
        UnsupportedModelError: A name is no tensor that can be observed.
    """
    clone = clone_model(model)
    values = ir.convenience.create_value_mapping(clone.graph, include_subgraphs=False)
    inside = [name for name in tensors if name not in values]
    if inside and default_opset(model) < _IF_OF_ANY_SHAPE:
        clone = clone_model(raise_opset(model, _IF_OF_ANY_SHAPE))
        values = ir.convenience.create_value_mapping(clone.graph, include_subgraphs=False)
    values |= _exposed(clone, inside)
    missing = [name for name in tensors if name not in values]
    if missing:
        raise UnsupportedModelError(
            f"No tensor '{missing[0]}' outside loops", where=f"graph {clone.graph.name}"
        )
    if only:
        clone.graph.outputs.clear()
    present = {output.name for output in clone.graph.outputs}
    clone.graph.outputs.extend(
        values[name] for name in dict.fromkeys(tensors) if name not in present
    )
    if only:
        remove_dead(clone)
    return clone


def _exposed(model: ir.Model, tensors: Sequence[str]) -> dict[str, ir.Value]:
    """Tensors inside branches, led out to the main graph."""
    found: dict[str, ir.Value] = {}
    wanted = set(tensors)
    if not wanted:
        return found
    names = NameScope(model)
    for place in list(observable_graphs(model)):
        inside = [v for node in place.graph for v in node.outputs if v.name in wanted]
        found |= {value.name or "": expose(value, place, names) for value in inside}
    return found


def optimized(
    model: ir.Model | Path,
    level: Level = Level.EXTENDED,
    *,
    threads: int = 1,
    provider: str = CPU,
    settings: Mapping[str, str] | None = None,
) -> ir.Model:
    """What onnxruntime makes of a model: its own fusions applied, its own operators in it.

    The result is for looking at, not for shipping: it depends on this machine.

    Args:
        model: A model in memory, or a file.
        level: How much of it onnxruntime may rewrite.
        threads: Threads within one operator.
        provider: Execution provider.
        settings: Entries of onnxruntime's session configuration.

    Raises:
        ModelExecutionError: onnxruntime refuses the model.
    """
    with tempfile.TemporaryDirectory(prefix="slimctl-") as folder:
        target = Path(folder) / "optimized.onnx"
        options = _options(level, threads)
        options.optimized_model_filepath = str(target)
        # Else models above 2 GiB could not be written.
        options.add_session_config_entry(_WEIGHTS_FILE, "optimized.data")
        for key, value in (settings or {}).items():
            options.add_session_config_entry(key, value)
        _open(model, options, provider)
        with quiet_onnx_ir():
            result = ir.load(target)
        detach(result, target)
        return result


class Platform(StrEnum):
    """Processors that a model in ORT format is made for."""

    ANY = "any"
    ARM = "arm"
    AMD64 = "amd64"


def save_ort_format(
    model: Path,
    target: Path,
    *,
    level: Level = Level.ALL,
    platform: Platform = Platform.ANY,
) -> ort.InferenceSession:
    """Writes a model in ORT format, as ``onnxruntime.tools.convert_onnx_models_to_ort`` does.

    Args:
        model: An ONNX file.
        target: The ``.ort`` file.
        level: How much onnxruntime rewrites before it writes.
        platform: On ARM int8 activations stay int8; on AMD64 convolutions get the blocked layout
            (NCHWc), which other processors have no kernels for.

    Returns:
        The session whose graph was written.

    Raises:
        ModelExecutionError: onnxruntime refuses the model, or cannot write it in this format.
    """
    options = _options(level, threads=1)
    options.optimized_model_filepath = str(target)
    options.add_session_config_entry("session.save_model_format", "ORT")
    options.add_session_config_entry(_KEEP_INT8, "1" if platform is Platform.ARM else "0")
    left_out = [] if platform is Platform.AMD64 else ["NchwcTransformer"]
    with translated(_failures(), "cannot convert the model to ORT format", where=str(model)):
        import onnxruntime as ort

        return ort.InferenceSession(
            str(model), options, providers=[CPU], disabled_optimizers=left_out
        )


def required_operators(model: Path) -> Mapping[str, Mapping[int, Collection[str]]]:
    """Operators that a model in ORT format needs: names by domain and by version of its set.

    Args:
        model: An ``.ort`` file.
    """
    from onnxruntime.tools.ort_format_model import OrtFormatModelProcessor

    found: dict[str, dict[int, set[str]]] = {}
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", ResourceWarning
        )  # it leaves its file to be closed by itself
        OrtFormatModelProcessor(str(model), found, None).process()
    return found


class Recording(NamedTuple):
    """What onnxruntime's profiler wrote down.

    Attributes:
        model: The graph as it ran: onnxruntime's fusions applied, its own operators in it.
        events: The profile's entries, in the order in which they ended; times in microseconds.
    """

    model: ir.Model
    events: list[dict[str, Any]]


def record(
    model: ir.Model | Path,
    feeds: Feeds,
    *,
    runs: int,
    level: Level = Level.ALL,
    threads: int = 0,
) -> Recording:
    """Runs a model under onnxruntime's profiler, with the arithmetic that users will see.

    Args:
        model: A model in memory, or a file.
        feeds: Inputs of each run.
        runs: Number of runs, at least 1.
        level: How much of the model onnxruntime may rewrite.
        threads: Threads within one operator; 0 lets onnxruntime take every core.

    Raises:
        ModelExecutionError: onnxruntime refuses the model or the inputs.
    """
    with tempfile.TemporaryDirectory(prefix="slimctl-") as folder:
        target = Path(folder) / "optimized.onnx"
        options = _options(level, threads)
        options.optimized_model_filepath = str(target)
        options.add_session_config_entry(_WEIGHTS_FILE, "optimized.data")
        options.enable_profiling = True
        options.profile_file_prefix = str(Path(folder) / "profile")
        session = _open(model, options, CPU)
        for _ in range(runs):
            run(session, feeds)
        events = json.loads(Path(session.end_profiling()).read_text("utf-8"))
        with quiet_onnx_ir():
            result = ir.load(target)
        detach(result, target)
        return Recording(result, events)
