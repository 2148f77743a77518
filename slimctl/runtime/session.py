"""Runs a planned graph: tensors come, are used, and are let go of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir
from threadpoolctl import ThreadpoolController

from slimctl.core.errors import ModelExecutionError
from slimctl.runtime.counts import Counts
from slimctl.runtime.device import EXACT, Device
from slimctl.runtime.plan import Plan, Settings, Step, plan_graph
from slimctl.runtime.registry import ENGINE, OUTPUTS, Value

Probe: TypeAlias = Callable[[Step, str, Value], Value]
"""Sees each tensor that a step of the main graph makes, and gives back what goes on instead."""


class Arithmetic(StrEnum):
    """How Q/DQ regions are computed."""

    INTEGER = "integer"
    """As integer operators with int32 sums and one requantization."""
    FLOAT = "float"
    """As they are written: dequantize, compute, quantize."""


class Runtime:
    """A model that is ready to run.

    Attributes:
        plan: Its steps.

    Args:
        model: As ``load_model`` leaves it; not changed.
        arithmetic: Of Q/DQ regions.
        device: Whose integer arithmetic it is.
        counting: Whether saturation, overflow and used ranges are counted; see ``counts``.
        tracing: Whether each integer operator keeps the values that it rounded last.

    Raises:
        UnsupportedModelError: There is no function for an operator in its version; names node,
            operator and operator set. Nothing has run by then.
    """

    def __init__(
        self,
        model: ir.Model,
        *,
        arithmetic: Arithmetic = Arithmetic.INTEGER,
        device: Device = EXACT,
        counting: bool = False,
        tracing: bool = False,
    ) -> None:
        integers = arithmetic is Arithmetic.INTEGER
        settings = Settings(model.opset_imports, integers, device, counting, tracing)
        self.plan = plan_graph(model.graph, settings)

    def counts(self) -> dict[str, Counts]:
        """What was counted in all runs so far, by node of the main graph."""
        found = {step.name: step.engine.counts for step in self.plan.steps}
        return {name: c for name, c in found.items() if c is not None and c.elements}

    def run(
        self, feeds: Mapping[str, Value], *, keep: Sequence[str] = (), probe: Probe | None = None
    ) -> dict[str, Value]:
        """Runs the model once, with one thread of BLAS.

        Args:
            feeds: Values by input name.
            keep: Names of further tensors of the main graph to give back.
            probe: Sees every tensor as it is made, and may replace it.

        Returns:
            The outputs in their order, then what was to be kept.

        Raises:
            ModelExecutionError: An input is missing, or a node cannot compute what it was given;
                names the node.
        """
        missing = [name for name in self.plan.inputs if name not in feeds]
        if missing:
            raise ModelExecutionError(
                f"Input '{missing[0]}' has no value",
                where=f"input '{missing[0]}'",
                fix="give an array for every input",
            )
        with _blas().limit(limits=1, user_api="blas"):
            values = run_plan(self.plan, feeds, keep=keep, probe=probe)
        return {name: values[name] for name in (*self.plan.outputs, *keep)}


@cache
def _blas() -> ThreadpoolController:
    """What multiplies numpy's matrices.

    Most products here take microseconds. Its threads wait for each other after each of them, on a
    busy machine far longer than they compute; and sums are added in an order that depends on their
    number.
    """
    return ThreadpoolController()


@dataclass(frozen=True)
class Body:
    """A graph inside a node, as a function of its inputs.

    Attributes:
        plan: Its steps.
        captured: Tensors of the graphs around it that it reads.
    """

    plan: Plan
    captured: Mapping[str, Value]

    def __call__(self, *inputs: Value) -> tuple[Value, ...]:
        """The outputs, in their order."""
        feeds = dict(zip(self.plan.inputs, inputs, strict=True))
        values = run_plan(self.plan, {**self.captured, **feeds})
        return tuple(values[name] for name in self.plan.outputs)


def run_plan(
    plan: Plan,
    feeds: Mapping[str, Value],
    *,
    keep: Sequence[str] = (),
    probe: Probe | None = None,
) -> dict[str, Value]:
    """Runs all steps; the result holds at least the outputs and what was to be kept."""
    wanted = {*plan.outputs, *keep}
    values: dict[str, Value] = {**plan.constants, **feeds}
    for step in plan.steps:
        results = _computed(step, values)
        for name, result in zip(step.outputs, results, strict=False):
            if name:
                values[name] = result if probe is None else probe(step, name, result)
        for name in step.done:
            if name not in wanted:
                values.pop(name, None)
    return values


def _computed(step: Step, values: Mapping[str, Value]) -> tuple[Value, ...]:
    inputs = [values[name] if name else None for name in step.inputs]
    keywords: dict[str, Any] = dict(step.attributes)
    for name, plan in step.bodies.items():
        keywords[name] = Body(plan, {free: values[free] for free in plan.captured})
    if OUTPUTS in step.kernel.extras:
        keywords[OUTPUTS] = len(step.outputs)
    if ENGINE in step.kernel.extras:
        keywords[ENGINE] = step.engine
    try:
        with np.errstate(all="ignore"):  # NaN and infinity are results here, as in every runtime
            results = step.kernel.run(*inputs, **keywords)
    except (ValueError, IndexError, TypeError, KeyError, ArithmeticError) as error:
        shapes = [list(np.shape(value)) if value is not None else None for value in inputs]
        raise ModelExecutionError(
            f"{step.op_type} cannot compute inputs of the shapes {shapes}: {error}",
            where=f"node '{step.name}'",
            fix="check that the data fit the model's inputs; if they do, report the model",
        ) from error
    return results if isinstance(results, tuple) else (results,)
