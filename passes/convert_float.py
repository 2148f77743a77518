"""Converts a float32 model to float16 or bfloat16, except where that would not hold the values.

A node computes in float32 when its operator has no narrower form, when the user or the target says
so, when the values that it sees leave the range of the type (on the data, or by its kind where
there are no data), or when a constant cannot be held. The rest becomes narrow with as few Casts as
possible; float32 nodes that are close together become one island where that saves Casts.

onnxruntime's CPU provider has no bfloat16 kernels: for it weights are stored as bfloat16 and cast
to float32, where everything is computed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import ClassVar, Final, Literal

import onnx_ir as ir
from pydantic import Field

from slimctl.core.contract import Context, Effect, Pass, PassReport, Skipped
from slimctl.core.errors import UnsupportedModelError
from slimctl.core.target import Target
from slimctl.graph.edit import all_nodes
from slimctl.graph.select import Patterns, Selection
from slimctl.graph.shapes import infer_shapes
from slimctl.passes._float_constants import Clamps, force_constants
from slimctl.passes._float_network import Network, Site, read_network
from slimctl.passes._float_ranges import force_ranges, magnitudes
from slimctl.passes._float_reasons import (
    force_chosen,
    force_for_cpu,
    force_precise,
    force_unknown,
)
from slimctl.passes._float_rules import CPU, provider_block_list
from slimctl.passes._float_write import Writer
from slimctl.passes._layers import QUANTIZERS, refuse_quantized

_INTEGER_OPERATORS: Final = frozenset(
    {"ConvInteger", "DynamicQuantizeLinear", "MatMulInteger", "MatMulIntegerToFloat"}
)
_NARROW: Final = {"fp16": ir.DataType.FLOAT16, "bf16": ir.DataType.BFLOAT16}
_TYPE_NAMES: Final = {"fp16": "float16", "bf16": "bfloat16"}
_BFLOAT16_OPSET: Final = 22  # the first in which Conv and pooling take bfloat16
_BFLOAT16_CAST_OPSET: Final = 13
_FIX: Final = "convert the float model, before it is quantized"


class ConvertFloat(Pass):
    """Convert float32 to float16 or bfloat16 where the values allow it."""

    name: ClassVar[str] = "convert-float"
    summary: ClassVar[str] = "Convert float32 to float16 or bfloat16 where the values allow it"
    effect: ClassVar[Effect] = Effect.APPROXIMATE
    uses_data: ClassVar[bool] = True
    not_after: ClassVar[frozenset[str]] = QUANTIZERS

    kind: Literal["fp16", "bf16"] = Field(
        default="fp16", description="float16 (11 bits, up to 65504) or bfloat16 (8 bits, 3e38)."
    )
    keep_io: bool = Field(default=True, description="Inputs and outputs of the model stay float32.")
    block_list: tuple[str, ...] = Field(
        default=(), description="Operators kept in float32 besides those that need it."
    )
    include: Patterns = Field(
        default=(), description="Only nodes that match one of these patterns become narrow."
    )
    exclude: Patterns = Field(
        default=(), description="Nodes that match one of these patterns stay float32."
    )

    def actual_effect(self) -> Effect:
        """Without ``keep_io`` inputs and outputs change their type."""
        return self.effect if self.keep_io else Effect.INTERFACE

    def minimum_opset(self, model: ir.Model, target: Target) -> int:
        """Operators learned bfloat16 one after the other."""
        del model
        if self.kind == "fp16":
            return 0
        return _BFLOAT16_CAST_OPSET if self._only_stores(target) else _BFLOAT16_OPSET

    def requires(self, model: ir.Model) -> None:
        """Wants a float model.

        Raises:
            UnsupportedModelError: It is quantized; names the first such node.
        """
        refuse_quantized(model, _FIX)
        for node in all_nodes(model):
            if node.op_type in _INTEGER_OPERATORS:
                raise UnsupportedModelError(
                    f"The model is quantized already: it holds {node.op_type}",
                    where=f"node '{node.name}'",
                    fix=_FIX,
                )

    def apply(self, model: ir.Model, context: Context) -> PassReport:
        """Decides for every node, then writes types, constants and Casts."""
        infer_shapes(model)
        network = read_network(model, _NARROW[self.kind], keep_io=self.keep_io)
        selection = Selection(self.include, self.exclude)
        force_chosen(network, selection, self._blocked(context.target))
        clamps, precise = Clamps(), _forced(network)
        if self._only_stores(context.target):
            for site in network.sites:
                site.force("computed in float32")
        else:
            force_precise(network, model)
            precise = _forced(network)
            clamps = self._force(network, model, context)
        network.decide()
        writer = Writer(model, network, clamps, self.name)
        writer.write(keep=clamps.unfit | _read_by(network, precise))
        return self._report(network, writer, selection, context.target)

    def _force(self, network: Network, model: ir.Model, context: Context) -> Clamps:
        """Finds what must compute in float32 because of values."""
        clamps = force_constants(network, model)
        if self.kind == "bf16":  # as many exponents as float32: nothing overflows
            return clamps
        if context.target.provider == CPU:
            force_for_cpu(network)
        known = magnitudes(network, model, context) if context.has_data else {}
        fitting = force_ranges(network, known, clamps)
        force_unknown(network, fitting, data=context.has_data)
        return clamps

    def _only_stores(self, target: Target) -> bool:
        return self.kind == "bf16" and target.provider == CPU

    def _blocked(self, target: Target) -> dict[str, str]:
        always = (*provider_block_list(target.provider), *target.float32_only)
        blocked = {
            op_type: f"{op_type} has no kernel for {_TYPE_NAMES[self.kind]} on {target.name}"
            for op_type in target.without_type(_TYPE_NAMES[self.kind])
        }
        blocked |= {
            op_type: f"{op_type} runs in float32 only on {target.name}" for op_type in always
        }
        return blocked | {op_type: f"{op_type} is on the block list" for op_type in self.block_list}

    def _report(
        self, network: Network, writer: Writer, selection: Selection, target: Target
    ) -> PassReport:
        nodes = _float_nodes(network)
        sites = [site for site, node in network.node_sites() if node in nodes]
        changed = Counter(site.op_type for site in sites if not site.full)
        if self._only_stores(target) and writer.stored:
            changed["constant"] = writer.stored
        full = () if self._only_stores(target) else tuple(site for site in sites if site.full)
        return PassReport(
            changed=dict(sorted(changed.items())),
            skipped=() if self._only_stores(target) else tuple(_skipped(network, full)),
            notes=tuple(self._notes(writer, changed, len(full), selection, target)),
            facts={
                "casts": writer.casts,
                "float32_nodes": len(full),
                "clamped": sorted(writer.clamped),
            },
        )

    def _notes(
        self,
        writer: Writer,
        changed: Counter[str],
        full: int,
        selection: Selection,
        target: Target,
    ) -> Iterator[str]:
        kind = _NARROW[self.kind].name.lower()
        if self._only_stores(target):
            yield (
                f"{writer.stored} constants are stored as {kind} and computed with in float32: "
                f"{target.provider} has no {kind} kernels"
            )
        else:
            yield (
                f"{sum(changed.values())} nodes compute in {kind}, {full} in float32, with "
                f"{writer.casts} Casts between them"
            )
        if writer.clamped:
            yield f"clamped to the range of {kind}: " + ", ".join(sorted(writer.clamped))
        for pattern in selection.unused():
            yield f"the pattern '{pattern}' matched nothing"


def _forced(network: Network) -> set[Site]:
    return {site for site, _ in network.node_sites() if site.reason}


def _read_by(network: Network, sites: set[Site]) -> set[ir.Value]:
    """Values that one of these sites reads."""
    return {
        value for value, reads in network.reads.items() if any(read.site in sites for read in reads)
    }


def _float_nodes(network: Network) -> set[ir.Node | ir.Graph | None]:
    """What reads or writes a value of the type that is converted.

    A Cast from integers to integers does not, and neither does one that takes every type.
    """
    readers = {read.user for reads in network.reads.values() for read in reads}
    return readers | {value.producer() for value in network.producers}


def _skipped(network: Network, sites: tuple[Site, ...]) -> Iterator[Skipped]:
    for site in sites:
        yield Skipped(site.name, site.reason or "it stands between float32 nodes: fewer Casts")
    for site in network.sites[1:]:
        if site.node is None and site.full and site.reason:
            yield Skipped(site.name, f"{site.op_type}: {site.reason}")
