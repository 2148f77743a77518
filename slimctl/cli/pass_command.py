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
_MAY_TRAIN: dict[str, tuple[Any, Any]] = {"train_data": (options.OptionalTrainingData, None)}
_TRAINING: dict[str, tuple[Any, Any]] = {
    "data": (options.TrainingData, inspect.Parameter.empty),
    "eval_data": (options.JudgingData, None),
    "metric": (options.Metric, "top1"),
    "samples": (options.Samples, None),
    "preprocess": (options.Preprocess, None),
    "skip_bad_samples": (options.SkipBadSamples, False),
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
    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]  # functions take it, typeshed does not list it
        [
            _parameter("model", options.Model, required),
            _parameter("output", options.OutputPath, required),
            *(_parameter(key, kind_, default) for key, (kind_, default) in _data(kind).items()),
            *pass_parameters(kind),
            *(_parameter(key, kind_, default) for key, (kind_, default) in _COMMON.items()),
        ]
    )
    command.__doc__ = summary
    return command


def _data(kind: type[Pass]) -> dict[str, tuple[Any, Any]]:
    """Options about data, as far as the pass looks at data."""
    if kind.trains:
        return _TRAINING
    data: dict[str, tuple[Any, Any]] = {}
    if kind.needs_data or kind.uses_data:
        data |= _DATA
    if kind.needs_data:
        data |= _CACHE
    if kind.may_train:
        data |= _MAY_TRAIN
    if kind.uses_metric:
        data |= _EVALUATION
    return data


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
        **_sources(kind, values),
        seed=values["seed"],
        threads=values["threads"],
        force=values["force"],
        dry_run=values["dry_run"],
        use_cache=values.get("cache", True),
        progress=output.progress(),
    )
    output.result(run_document(result), list(run_blocks(result, everything=values["verbose"])))


_ALL_SAMPLES = {"samples": None, "batch_size": None}

_LOOKED_AT = 256
"""Training samples on which steps are checked, and pruned layers are refitted."""


def _sources(kind: type[Pass], values: Mapping[str, Any]) -> dict[str, Any]:
    """Data by what they are for."""
    if not kind.trains:
        found = {
            "calibration": _samples(values, values.get("calib")),
            # --samples and --batch-size are about calibration there.
            "training": _samples({**values, **_ALL_SAMPLES}, values.get("train_data")),
            "evaluation": _evaluation(values, values.get("data")),
        }
    else:
        # Their --batch-size says how many samples make a step.
        training = _samples({**values, "batch_size": None}, values["data"])
        assert training is not None, "the option is required"
        few = min(training.samples or _LOOKED_AT, _LOOKED_AT)
        found = {
            "calibration": training.model_copy(update={"samples": few}),
            "training": training,
            "evaluation": _evaluation(values, values["eval_data"]),
        }
    return {name: spec for name, spec in found.items() if spec is not None}


def _samples(values: Mapping[str, Any], source: str | None) -> DataSpec | None:
    from slimctl.recipe.schema import DataSpec

    if source is None:
        return None
    return DataSpec(
        source=source,
        samples=values["samples"],
        batch_size=values["batch_size"],
        preprocess=values["preprocess"],
        skip_bad_samples=values["skip_bad_samples"],
    )


def _evaluation(values: Mapping[str, Any], source: str | None) -> EvaluationSpec | None:
    from slimctl.recipe.schema import EvaluationSpec

    if source is None:
        return None
    return EvaluationSpec(source=source, preprocess=values["preprocess"], metric=values["metric"])
