"""Commands that are one pass, such as ``slimctl fuse``: their options come from its class."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from slimctl.cli import options
from slimctl.cli.derive import build_pass, pass_parameters
from slimctl.cli.output import Output
from slimctl.core.registry import BUILT_IN, find_pass

if TYPE_CHECKING:
    from slimctl.core.contract import Pass
    from slimctl.recipe.schema import DataSpec, EvaluationSpec

_DATA: dict[str, tuple[Any, Any]] = {
    "calib": (options.Calibration, None),
    "samples": (options.Samples, None),
    "batch_size": (options.BatchSize, None),
    "preprocess": (options.Preprocess, None),
    "skip_bad_samples": (options.SkipBadSamples, False),
}
_CACHE: dict[str, tuple[Any, Any]] = {"cache": (options.UseCache, True)}
_EVALUATION: dict[str, tuple[Any, Any]] = {
    "data": (options.EvaluationData, None),
    "metric": (options.Metric, "top1"),
}
_COMMON = {
    "target": (options.TargetName, "cpu"),
    "seed": (options.Seed, 0),
    "threads": (options.Threads, 0),
    "dry_run": (options.DryRun, False),
    "force": (options.Force, False),
    "json": (options.Json, False),
    "quiet": (options.Quiet, False),
    "verbose": (options.Verbose, False),
}


def build_command(name: str) -> Any:
    """The command of a built-in pass."""
    from slimctl.cli.group import as_command

    return as_command(_function(find_pass(name), f"{BUILT_IN[name].summary}."), name)


def _function(kind: type[Pass], summary: str) -> Callable[..., None]:
    """A function whose signature lists the pass's options and the common ones."""

    def command(**values: Any) -> None:
        _run(kind, values)

    required = inspect.Parameter.empty
    data: dict[str, tuple[Any, Any]] = {}
    if kind.needs_data or kind.uses_data:
        data |= _DATA
    if kind.needs_data:
        data |= _CACHE
    if kind.uses_metric:
        data |= _EVALUATION
    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]  # functions take it, typeshed does not list it
        [
            _parameter("model", options.Model, required),
            _parameter("output", options.OutputPath, required),
            *(_parameter(key, kind_, default) for key, (kind_, default) in data.items()),
            *pass_parameters(kind),
            *(_parameter(key, kind_, default) for key, (kind_, default) in _COMMON.items()),
        ]
    )
    command.__doc__ = summary
    return command


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )


def _run(kind: type[Pass], values: Mapping[str, Any]) -> None:
    from slimctl.cli.summary import run_blocks, run_document
    from slimctl.recipe.run import run_passes

    output = Output(json=values["json"], quiet=values["quiet"])
    result = run_passes(
        values["model"],
        [build_pass(kind, values)],
        output=values["output"],
        target=values["target"],
        calibration=_calibration(values),
        evaluation=_evaluation(values),
        seed=values["seed"],
        threads=values["threads"],
        force=values["force"],
        dry_run=values["dry_run"],
        use_cache=values.get("cache", True),
        progress=output.progress(),
    )
    output.result(run_document(result), list(run_blocks(result, everything=values["verbose"])))


def _calibration(values: Mapping[str, Any]) -> DataSpec | None:
    from slimctl.recipe.schema import DataSpec

    if values.get("calib") is None:
        return None
    return DataSpec(
        source=values["calib"],
        samples=values["samples"],
        batch_size=values["batch_size"],
        preprocess=values["preprocess"],
        skip_bad_samples=values["skip_bad_samples"],
    )


def _evaluation(values: Mapping[str, Any]) -> EvaluationSpec | None:
    from slimctl.recipe.schema import EvaluationSpec

    if values.get("data") is None:
        return None
    return EvaluationSpec(
        source=values["data"], preprocess=values["preprocess"], metric=values["metric"]
    )
