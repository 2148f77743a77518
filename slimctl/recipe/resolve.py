"""A recipe with every default explicit: what will run, and the lock file that says so."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml

from slimctl.core.contract import Pass
from slimctl.core.errors import OptionError
from slimctl.core.target import Target
from slimctl.pipeline.chain import Link, order_problem, resolve_chain
from slimctl.recipe.parse import ParsedRecipe
from slimctl.recipe.schema import Data, DataSpec, EvaluationSpec, Gates, OutputSpec
from slimctl.store.backend import is_url
from slimctl.targets import load_target

_Spec = TypeVar("_Spec", bound=DataSpec)

_NOT_A_PATH = re.compile(r"random(:.*)?|hf:.*|(?!.*\.py:)[A-Za-z_][\w.]*:[A-Za-z_]\w*")
"""Sources that are no files: random data, hub data sets, callables of installed modules."""


@dataclass(frozen=True)
class Job:
    """What will run: steps resolved and expanded, paths absolute.

    Attributes:
        name: Name of the result.
        model: The model file.
        target: What the model is compressed for.
        target_name: The target's name, or its file.
        steps: Single passes in order, every option explicit.
        seed: Seed of everything random.
        threads: Threads of onnxruntime; 0 lets it decide.
        calibration: Data that passes may look at.
        training: Data that models learn from.
        evaluation: Data that gates judge with.
        gates: Bounds on the result.
        output: An ``.onnx`` file or an artifact folder; with a ledger in a folder, that of the
            current version.
        store: The ledger that the result becomes a version in, a folder or a URL.
        home: The recipe's folder.
        description: One line for people.
    """

    name: str
    model: Path | None
    target: Target
    target_name: str
    steps: tuple[Pass, ...]
    seed: int = 0
    threads: int = 0
    calibration: DataSpec | None = None
    training: DataSpec | None = None
    evaluation: EvaluationSpec | None = None
    gates: Gates = field(default_factory=Gates)
    output: Path | None = None
    store: str | None = None
    home: Path | None = None
    description: str = ""


def resolve_recipe(parsed: ParsedRecipe) -> Job:
    """Makes every default explicit. The model and the data are not opened yet.

    Raises:
        RecipeError: An impossible order of steps, or an unknown target.
    """
    recipe, folder = parsed.recipe, parsed.path.absolute().parent
    target_name = located_target(recipe.target, folder)
    target = _target(parsed, target_name)
    chain = resolve_chain([_located_step(step, folder) for step in parsed.steps], target)
    _check_order(parsed, chain)
    return Job(
        name=recipe.name,
        model=None if recipe.model is None else folder / recipe.model,
        target=target,
        target_name=target_name,
        steps=tuple(link.step for link in chain),
        seed=recipe.seed,
        threads=recipe.threads,
        calibration=locate_data(recipe.data.calibration, folder),
        training=locate_data(recipe.data.training, folder),
        evaluation=locate_data(recipe.data.evaluation, folder),
        gates=recipe.gates,
        output=_output(recipe.output, recipe.name, folder),
        store=_store(recipe.output, folder),
        home=folder,
        description=recipe.description,
    )


def check_complete(parsed: ParsedRecipe) -> None:
    """Refuses a recipe that lacks what running needs; a preset lacks it on purpose.

    Raises:
        RecipeError: There is no model, or no data for a step or gate that needs them.
    """
    recipe = parsed.recipe
    if recipe.model is None:
        raise parsed.places.error(
            (), "The recipe names no model", "add 'model: PATH', or give --set model=PATH"
        )
    for index, step in enumerate(parsed.steps):
        if step.requires_data() and recipe.data.calibration is None:
            raise parsed.places.error(
                ("steps", index),
                f"Step '{step.name}' needs calibration data",
                _add_data("calibration", "PATH"),
            )
        if step.requires_training() and not (recipe.data.training or recipe.data.calibration):
            raise parsed.places.error(
                ("steps", index),
                f"Step '{step.name}' needs training data",
                _add_data("training", "PATH"),
            )
    _check_gates(parsed)


def _check_gates(parsed: ParsedRecipe) -> None:
    gates, data = parsed.recipe.gates, parsed.recipe.data
    if gates.accuracy and not _has_metric(data):
        raise parsed.places.error(
            ("gates", "accuracy"),
            "Gate 'accuracy' needs labeled data and a metric",
            "add 'data: {evaluation: {source: PATH, metric: top1}}'",
        )
    if gates.sqnr and not (data.evaluation or data.calibration):
        raise parsed.places.error(
            ("gates", "sqnr"), "Gate 'sqnr' needs data", _add_data("evaluation", "PATH")
        )
    if gates.verify and not data.evaluation:
        raise parsed.places.error(
            ("gates", "verify"),
            "Gate 'verify' needs evaluation data",
            _add_data("evaluation", "PATH"),
        )
    if gates.verify and gates.verify.max_metric_drop is not None and not _has_metric(data):
        raise parsed.places.error(
            ("gates", "verify", "max_metric_drop"),
            "A bound on the metric needs a metric",
            "add 'metric: top1' to data.evaluation, or 'metric: agreement' without labels",
        )


def _has_metric(data: Data) -> bool:
    return data.evaluation is not None and data.evaluation.metric is not None


def _add_data(part: str, source: str) -> str:
    return (
        f"add 'data: {{{part}: {{source: {source}}}}}', or give --set data.{part}.source={source}"
    )


def _target(parsed: ParsedRecipe, name: str) -> Target:
    try:
        return load_target(name)
    except OptionError as error:
        raise parsed.places.error(("target",), error.what, error.fix) from error


def _check_order(parsed: ParsedRecipe, chain: Sequence[Link]) -> None:
    problem = order_problem([link.step for link in chain])
    if problem is not None:
        place = ("steps", chain[problem.position].origin)
        raise parsed.places.error(place, problem.what, problem.fix)


def located_target(name: str, folder: Path) -> str:
    """A target's name, or the absolute path of its file."""
    return str(folder / name) if name.endswith((".yaml", ".yml")) else name


def _located_if_file(text: str, folder: Path) -> str:
    """The path of a file beside the recipe, or the text as it is: the name of something."""
    is_path = text.endswith((".yaml", ".yml")) or (folder / text).is_file()
    return str(folder / text) if is_path else text


def _located_step(step: Pass, folder: Path) -> Pass:
    """The same step; paths among its options are relative to a folder no longer."""
    return step.model_copy(
        update={name: str(folder / path) for name, path in _paths_of(step).items()}
    )


def _paths_of(step: Pass) -> dict[str, str]:
    """Options that name files: their fields say so with ``json_schema_extra={"path": True}``."""
    found = {}
    for name, field_ in type(step).model_fields.items():
        extra = field_.json_schema_extra
        value = getattr(step, name)
        if isinstance(extra, dict) and extra.get("path") and value is not None:
            found[name] = str(value)
    return found


def locate_data(spec: _Spec | None, folder: Path) -> _Spec | None:
    """The same data with absolute paths; names of things that are no paths stay.

    Args:
        spec: As it was written.
        folder: What its paths are relative to.
    """
    if spec is None:
        return None
    source, preprocess = spec.source, spec.preprocess
    if (folder / source).exists() or not _NOT_A_PATH.fullmatch(source):
        source = str(folder / source)
    if preprocess is not None:
        preprocess = _located_if_file(preprocess, folder)
    return spec.model_copy(update={"source": source, "preprocess": preprocess})


def _output(spec: OutputSpec | None, name: str, folder: Path) -> Path | None:
    if spec is not None and spec.path is not None:
        return folder / spec.path
    store = _store(spec, folder)
    return None if store is None or is_url(store) else Path(store) / name


def _store(spec: OutputSpec | None, folder: Path) -> str | None:
    if spec is None or spec.store is None:
        return None
    return spec.store if is_url(spec.store) else str(folder / spec.store)


def explicit_steps(steps: Sequence[Pass]) -> list[dict[str, dict[str, Any]]]:
    """Steps as a recipe writes them, with every option."""
    return [{step.name: {**step.model_dump(mode="json"), **_paths_of(step)}} for step in steps]


def lock(job: Job, folder: Path) -> str:
    """The job as a recipe in YAML: running it repeats the job.

    Paths are relative to the folder that the file is going to stand in. There is no output in it:
    repeating a job must not overwrite its result.

    Args:
        job: What ran or will run.
        folder: Where the text will be written.
    """
    document: dict[str, Any] = {"version": 1, "name": job.name}
    if job.description:
        document["description"] = job.description
    if job.model is not None:
        document["model"] = _relative(str(job.model), folder)
    document["target"] = _relative_if_path(job.target_name, folder)
    document["seed"] = job.seed
    document["threads"] = job.threads
    document["data"] = {
        part: _lock_data(spec, folder)
        for part, spec in (
            ("calibration", job.calibration),
            ("training", job.training),
            ("evaluation", job.evaluation),
        )
        if spec is not None
    }
    document["steps"] = [_lock_step(step, folder) for step in job.steps]
    document["gates"] = job.gates.model_dump(mode="json", exclude_none=True)
    return yaml.safe_dump(document, sort_keys=False, allow_unicode=True)


def _lock_step(step: Pass, folder: Path) -> dict[str, dict[str, Any]]:
    (document,) = explicit_steps([step])
    # Those of a command are relative to where it was given, which is here.
    paths = {name: _relative(path, folder) for name, path in _paths_of(step).items()}
    return {step.name: {**document[step.name], **paths}}


def _lock_data(spec: DataSpec, folder: Path) -> dict[str, Any]:
    document = spec.model_dump(mode="json", exclude_none=True)
    for key in ("source", "preprocess"):
        if key in document:
            document[key] = _relative_if_path(document[key], folder)
    return document


def _relative_if_path(text: str, folder: Path) -> str:
    # A job's paths are absolute; what is not is the name of something.
    return _relative(text, folder) if os.path.isabs(text) else text


def _relative(path: str, folder: Path) -> str:
    return Path(os.path.relpath(path, folder)).as_posix()
