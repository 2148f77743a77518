"""Finds passes by name without importing them.

The built-in table is a dictionary of names and places, so that ``slimctl --help`` costs nothing.
Third parties add passes through the entry-point group ``slimctl.passes`` in the same syntax:
``name = "package.module:Class"``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

from slimctl.core.errors import ConfigError, OptionError, nearest

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from slimctl.core.contract import Pass

ENTRY_POINT_GROUP = "slimctl.passes"


class Entry(NamedTuple):
    """Where a pass lives.

    Attributes:
        place: ``package.module:Class``.
        summary: The class's summary, repeated so that help needs no import; a test compares both.
        command: The pass is also a command of its own.
    """

    place: str
    summary: str
    command: bool = False


BUILT_IN: dict[str, Entry] = {
    "fuse": Entry(
        "slimctl.passes.fuse:Fuse", "Exact graph rewrites: fold, fuse, clean up", command=True
    ),
    "quantize": Entry(
        "slimctl.passes.quantize:Quantize",
        "Quantize: static int8, dynamic, weight-only int4, fp16 or bf16",
        command=True,
    ),
    "quantize-static": Entry(
        "slimctl.passes.quantize_static:QuantizeStatic", "Calibrated static quantization (Q/DQ)"
    ),
    "quantize-dynamic": Entry(
        "slimctl.passes.quantize_dynamic:QuantizeDynamic",
        "Integer weights, activations quantized at run time",
    ),
    "quantize-embeddings": Entry(
        "slimctl.passes.quantize_embeddings:QuantizeEmbeddings",
        "Store tables of which rows are looked up as int8",
    ),
    "prune": Entry(
        "slimctl.passes.prune:Prune",
        "Remove the least important channels and what depends on them",
        command=True,
    ),
    "finetune": Entry(
        "slimctl.passes.finetune:Finetune", "Train the weights of a graph on labels", command=True
    ),
    "distill": Entry(
        "slimctl.passes.distill:Distill",
        "Train the weights of a graph on what another graph computes",
        command=True,
    ),
    "qat": Entry(
        "slimctl.passes.qat:Qat", "Train the weights and scales of a quantized graph (LSQ)"
    ),
    "equalize": Entry(
        "slimctl.passes.equalize:Equalize",
        "Make the channels of a tensor equally strong before quantization",
    ),
    "smooth": Entry(
        "slimctl.passes.smooth:Smooth",
        "Even out strong channels in front of linear layers (SmoothQuant)",
    ),
    "split-outliers": Entry(
        "slimctl.passes.split_outliers:SplitOutliers",
        "Multiply the strongest input channels of linear layers in float",
    ),
    "round-weights": Entry(
        "slimctl.passes.round_weights:RoundWeights",
        "Round weights so that what their layers compute changes least",
    ),
    "bias-correction": Entry(
        "slimctl.passes.bias_correction:BiasCorrection",
        "Move the mean error of quantized weights into the bias",
    ),
    "qoperator": Entry(
        "slimctl.passes.qoperator:QOperator",
        "Operators on integers in place of Q/DQ pairs (QOperator format)",
    ),
    "convert-float": Entry(
        "slimctl.passes.convert_float:ConvertFloat",
        "Convert float32 to float16 or bfloat16 where the values allow it",
    ),
    "quantize-weights": Entry(
        "slimctl.passes.quantize_weights:QuantizeWeights",
        "Store matrices with 2, 4 or 8 bits per weight; activations stay float",
    ),
    "legalize": Entry(
        "slimctl.passes.legalize:Legalize",
        "Rewrite what the target's provider does not take; fix open sizes",
    ),
}


def _plugins() -> dict[str, EntryPoint]:
    from importlib.metadata import entry_points  # 20 ms, which `slimctl --help` need not pay

    return {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}


def pass_names() -> list[str]:
    """All known pass names, built-in ones first."""
    return [*BUILT_IN, *sorted(set(_plugins()) - set(BUILT_IN))]


def find_pass(name: str) -> type[Pass]:
    """The class of a pass.

    Raises:
        OptionError: There is no pass of this name; the error names the nearest.
        ConfigError: A plugin could not be imported or is not a pass.
    """
    if name in BUILT_IN:
        module, _, attribute = BUILT_IN[name].place.partition(":")
        return getattr(import_module(module), attribute)  # type: ignore[no-any-return]  # checked by a test over the table
    point = _plugins().get(name)
    if point is None:
        raise OptionError("pass", f"Unknown pass '{name}'", fix=nearest(name, pass_names()))
    return _load_plugin(point)


def _load_plugin(point: EntryPoint) -> type[Pass]:
    from slimctl.core.contract import Pass

    try:
        found = point.load()
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"The plugin that offers pass '{point.name}' cannot be imported: {error}",
            where=point.value,
            fix="reinstall or remove the package that registers it",
        ) from error
    if not (isinstance(found, type) and issubclass(found, Pass)):
        raise ConfigError(
            f"The plugin that offers pass '{point.name}' is not a subclass of slimctl's Pass",
            where=point.value,
            fix="report this to the package that registers it",
        )
    return found
