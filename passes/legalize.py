"""Makes a graph what an execution provider takes, as far as that costs nothing.

The rules of the target say what it minds; see :mod:`slimctl.targets.check`. What is done computes
the same: open sizes are fixed, operators expanded, negative indices counted from the front, a bias
stored as what its DQ makes of it, a DQ copied for each of its readers, attributes written out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, ClassVar, Self

import onnx_ir as ir
from pydantic import Field, field_validator

from slimctl.core.contract import Context, Effect, Pass, PassReport, Skipped
from slimctl.core.rules import Rule
from slimctl.core.target import Target
from slimctl.graph.edit import NameScope, all_nodes, remove_dead
from slimctl.graph.shapes import infer_shapes
from slimctl.passes._legalize_nodes import REWRITES, Rewriter
from slimctl.passes._legalize_operators import OPSET, Expander, is_expandable, is_missing
from slimctl.passes._legalize_shapes import fix_sizes, parse_sizes
from slimctl.targets.demands import broken_demand
from slimctl.targets.units import Unit, is_pair, unit_of

_DONE = {
    "own_dequantize": "DQ of its own",
    "bias": "float bias",
    "nonnegative_inputs": "positive indices",
    "explicit_attributes": "attributes written out",
}


class Legalize(Pass):
    """Rewrites what the target's provider does not take, where another form is the same."""

    name: ClassVar[str] = "legalize"
    summary: ClassVar[str] = "Rewrite what the target's provider does not take; fix open sizes"
    effect: ClassVar[Effect] = Effect.INTERFACE

    dims: tuple[str, ...] = Field(
        (),
        description="Sizes of open dimensions, by symbol or place: batch=1, input[2]=224; "
        "repeatable.",
        json_schema_extra={"metavar": "NAME=SIZE"},
    )
    batch: int | None = Field(
        None,
        ge=0,
        description="Size of open first dimensions that dims does not name; 0 leaves them open.",
    )

    @field_validator("dims")
    @classmethod
    def _sizes_parse(cls, texts: tuple[str, ...]) -> tuple[str, ...]:
        parse_sizes(texts)
        return texts

    def resolve(self, target: Target) -> Self:
        """Batch size 1 where the target wants fixed sizes."""
        if self.batch is not None:
            return self
        return self.model_copy(update={"batch": 1 if target.asks("static_shapes") else 0})

    def actual_effect(self) -> Effect:
        """Only sizes change the interface."""
        return Effect.INTERFACE if self.dims or self.batch else Effect.EXACT

    def minimum_opset(self, model: ir.Model, target: Target) -> int:
        """What the parts of operators need that are going to be expanded."""
        missing = any(is_missing(node, target) for node in all_nodes(model))
        return OPSET if missing else 0

    def apply(self, model: ir.Model, context: Context) -> PassReport:
        """Fixes sizes, then rewrites nodes.

        Raises:
            OptionError: ``dims`` names no open dimension.
        """
        target = context.target
        sizes, batch = parse_sizes(self.dims), self.resolve(target).batch or 0
        fixed, skipped = fix_sizes(model, sizes, batch)
        if not target.asks("static_shapes"):
            skipped = []  # open sizes are as good as any
        infer_shapes(model)
        changed: Counter[str] = Counter({"fixed sizes": fixed} if fixed else {})
        rewriter = Rewriter(model)
        changed += _expand(model, target, rewriter.names)
        for node in list(all_nodes(model)):
            for demand, wanted in _broken(node, target):
                reason = REWRITES[demand](rewriter, node, wanted)
                if reason is None:
                    changed[_DONE[demand]] += 1
                else:
                    skipped.append(Skipped(node.name or "", reason))
        if changed:
            remove_dead(model)
        notes = () if changed or skipped else (f"{target.name} takes this form",)
        return PassReport(changed=dict(changed), skipped=tuple(skipped), notes=notes)


def _expand(model: ir.Model, target: Target, names: NameScope) -> Counter[str]:
    """Puts parts in place of float operators that the provider lacks."""
    expander, expanded = Expander(names), Counter[str]()
    for node in list(all_nodes(model)):
        if is_expandable(node, target) and not unit_of(node).is_quantized:
            expander.expand(node)
            expanded[f"{node.op_type} expanded"] += 1
    return expanded


def _broken(node: ir.Node, target: Target) -> Iterator[tuple[str, Any]]:
    """Demands that the node breaks, and for which there is a rewrite."""
    if is_pair(node):
        return
    unit = unit_of(node, target.absorbing_integers)
    for rule in target.rules:
        if rule.covers(unit.operator) and _applies(rule, unit):
            for demand, wanted in rule.require.given().items():
                if demand in REWRITES and broken_demand(unit, demand, wanted):
                    yield demand, wanted


def _applies(rule: Rule, unit: Unit) -> bool:
    return rule.applies_to == "all" or unit.is_quantized == (rule.applies_to == "quantized")
