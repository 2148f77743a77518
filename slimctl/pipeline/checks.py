"""What every pass must hold, checked on the file that a step leaves behind.

1. The ONNX checker accepts the model, shape inference included.
2. Inputs and outputs keep their names, types and shapes (unless the pass says INTERFACE).
3. onnxruntime loads it, as it stands and fully optimized, and runs it on inputs that the model
   before ran on.
4. Outputs are finite where those of the model before were.
5. A pass that claims EXACT computes the same outputs, up to rounding.

A promise that the model before broke as well is no fault of the step: it becomes a note.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir

from slimctl.core.contract import Effect, Feeds, Pass
from slimctl.core.errors import ModelExecutionError, PassContractError
from slimctl.evaluate.compare import is_float
from slimctl.evaluate.divergence import locate
from slimctl.evaluate.metrics import sqnr_db
from slimctl.graph.edit import Port, all_nodes, interface
from slimctl.graph.opset import default_opset
from slimctl.graph.session import Level, open_session
from slimctl.pipeline.exactness import (
    CONDITION,
    largest_error,
    rounding_tolerance,
    sensitivity,
    unit,
)
from slimctl.pipeline.stage import Observation, Stage, observe

_NO_KERNEL = "Could not find an implementation"  # as onnxruntime says it
_CLOSE_DB = 30.0  # optimization levels that agree this well need no mention


@dataclass(frozen=True)
class Trial:
    """One step before the court.

    Attributes:
        label: How messages call the step.
        step: What ran.
        before: The model that it got.
        after: The model that it made, already written to its file.
        feeds: What both models are run on; of the model before, the outputs for the first of
            them at least are known.
        threads: Threads of onnxruntime.
        known: What the model after computes on ``feeds`` with all optimizations, where a model of
            equal content was run already.
    """

    label: str
    step: Pass
    before: Stage
    after: Stage
    feeds: tuple[Feeds, ...]
    threads: int = 0
    known: tuple[Feeds, ...] = ()

    def broken(self, promise: str, detail: str) -> PassContractError:
        """The error of a broken promise."""
        return PassContractError(self.label, promise, detail=detail)


class Verdict(NamedTuple):
    """What the checks found.

    Attributes:
        notes: What could not be checked, or looks odd, in sentences.
        error: Largest difference of an EXACT step's outputs, relative to their largest value.
    """

    notes: tuple[str, ...] = ()
    error: float | None = None


def check_step(trial: Trial) -> Verdict:
    """Checks every promise of one step, and fills in what its model computes.

    Raises:
        PassContractError: A promise is broken; names it, and the tensor or node where known.
    """
    keeps_interface = trial.step.actual_effect() is not Effect.INTERFACE
    if keeps_interface:
        _check_interface(trial)
    notes = tuple(_check_validity(trial))
    if trial.before.refusal:
        trial.after.refusal = trial.before.refusal
        return Verdict((*notes, f"not checked by running it: {trial.before.refusal}"))
    trial.after.refusal = _lacking_kernel(trial)
    if trial.after.refusal:
        return Verdict((*notes, f"not checked by running it: {trial.after.refusal}"))
    before = trial.before.observation
    if before is None or not keeps_interface:
        _run(trial, ())  # it has to load all the same
        return Verdict(notes)
    after = _run(trial, trial.feeds)
    trial.after.observation = after
    _check_finite(trial, before, after)
    if trial.step.actual_effect() is Effect.EXACT:
        return Verdict(notes, _check_exact(trial, before, after))
    return Verdict((*notes, *_level_notes(before, after)))


def _check_interface(trial: Trial) -> None:
    before, after = interface(trial.before.model), interface(trial.after.model)
    found = _difference("input", before.inputs, after.inputs) or _difference(
        "output", before.outputs, after.outputs
    )
    if found:
        raise trial.broken("inputs and outputs stay as they are", found)


def _difference(kind: str, before: Sequence[Port], after: Sequence[Port]) -> str:
    if len(before) != len(after):
        return f"there were {len(before)} {kind}s and are {len(after)}"
    changed = [(old, new) for old, new in zip(before, after, strict=True) if old != new]
    if not changed:
        return ""
    old, new = changed[0]
    return f"{kind} '{old.name}' was {_port_text(old)} and is '{new.name}' {_port_text(new)}"


def _port_text(port: Port) -> str:
    shape = "of any shape" if port.shape is None else str(list(port.shape))
    return f"{port.dtype} {shape}"


def _check_validity(trial: Trial) -> Iterator[str]:
    complaint = trial.after.checker_complaint()
    if complaint and not _rejected_before(trial):
        raise trial.broken("the ONNX checker accepts the model", complaint)
    if complaint:
        yield f"the ONNX checker rejects the model, as it did before the step: {complaint}"


def _rejected_before(trial: Trial) -> bool:
    """Whether the model before is at fault.

    Inference of newer operator sets knows more (Reshape of 14 the rank of its output), so a wrong
    statement, the shape of an output say, may come to light only when the operator set is raised.
    """
    before, opset = trial.before, default_opset(trial.after.model)
    if _states_wrong_rank(before):
        return True
    if before.checker_complaint() or default_opset(before.model) >= opset:
        return bool(before.checker_complaint())
    return bool(before.raised_complaint(opset, trial.after.path.parent))


def _states_wrong_rank(stage: Stage) -> bool:
    """Whether an output has another rank than the model says: true shapes then contradict it."""
    ranks = {v.name: len(v.shape) for v in stage.model.graph.outputs if v.shape is not None}
    runs = stage.observation.optimized if stage.observation is not None else ()
    found = ((name, array.ndim) for outputs in runs for name, array in outputs.items())
    return any(rank != ranks.get(name, rank) for name, rank in found)


def _lacking_kernel(trial: Trial) -> str:
    """Why a bfloat16 model cannot be run on this machine; empty when it can.

    The operator set allows bfloat16 everywhere; onnxruntime's CPU provider moves it and no more.
    That is no fault of the step: the model is for another provider.
    """
    values = (value for node in all_nodes(trial.after.model) for value in node.outputs)
    if not any(value.dtype == ir.DataType.BFLOAT16 for value in values):
        return ""
    try:
        open_session(trial.after.path, level=Level.DISABLED, threads=trial.threads)
    except ModelExecutionError as error:
        return error.what if _NO_KERNEL in error.what else ""  # others are for the checks
    return ""


def _run(trial: Trial, feeds: tuple[Feeds, ...]) -> Observation:
    try:
        known = trial.known if feeds is trial.feeds else ()
        return observe(trial.after.path, feeds, trial.threads, known)
    except ModelExecutionError as error:
        place = f"{error.where}: " if error.where.startswith("node") else ""
        raise trial.broken("onnxruntime loads and runs the model", place + error.what) from error


def _pairs(before: Observation, after: Observation) -> list[tuple[Feeds, Feeds]]:
    """Outputs of both models for the same inputs."""
    return [*zip(before.optimized, after.optimized, strict=False)]


def _check_finite(trial: Trial, before: Observation, after: Observation) -> None:
    for old, new in _pairs(before, after):
        for name, array in new.items():
            if not _finite(array) and _finite(old[name]):
                raise trial.broken("outputs are finite", f"output '{name}' holds NaN or infinity")


def _finite(array: Any) -> bool:
    return not is_float(array) or bool(np.isfinite(array).all())


def _check_exact(trial: Trial, before: Observation, after: Observation) -> float:
    pairs = _pairs(before, after)
    if after.plain is not None:
        pairs.append((before.optimized[0], after.plain))
    one = unit(trial.before.model)
    error, output = max(largest_error(old, new, one) for old, new in pairs)
    allowed = rounding_tolerance(trial.before.model)
    if error > allowed:
        moved = sensitivity(
            trial.before.path,
            before,
            trial.feeds,
            unit=one,
            threads=trial.threads,
        )
        allowed = max(allowed, CONDITION * moved)
    if error > allowed:
        detail = (
            f"output '{output}' differs by {error:.1e} of its largest value, rounding explains "
            f"{allowed:.1e}{_divergence(trial, allowed)}"
        )
        raise trial.broken("an EXACT pass keeps the function", detail)
    return error


def _divergence(trial: Trial, allowed: float) -> str:
    """Where the models part, as the end of a sentence; nothing when it cannot be told."""
    bound_db = -20.0 * math.log10(min(allowed, 1.0))
    found = locate(
        trial.before.model,
        trial.after.model,
        trial.feeds,
        bound_db=bound_db,
        threads=trial.threads,
    ).first
    return f"; they part at tensor '{found.tensor}' of node '{found.node}'" if found else ""


def _level_notes(before: Observation, after: Observation) -> Iterator[str]:
    """Says when onnxruntime's optimizations change the result more than the step did.

    onnxruntime quantizes float weights between Q/DQ pairs by itself, per tensor, at its default
    level; a graph that invites it to do so computes something else than what was built.
    """
    for name, plain in (after.plain or {}).items():
        if not is_float(plain):
            continue
        levels_db = sqnr_db(plain, after.optimized[0][name])
        step_db = sqnr_db(before.optimized[0][name], plain)
        if levels_db < min(step_db, _CLOSE_DB):
            yield (
                f"output '{name}': onnxruntime's optimizations change the result more "
                f"({levels_db:.1f} dB) than this step does ({step_db:.1f} dB)"
            )
