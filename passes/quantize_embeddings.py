"""Tables of which rows are looked up, stored as int8 and restored after the look-up.

Word tables are the largest part of small language models and nothing is computed from more than a
few of their rows. ``Gather`` takes the rows as they are stored and one DequantizeLinear, with a
scale for each column, restores what was looked up: a quarter of the bytes, in standard operators.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import ClassVar, Final, NamedTuple

import numpy as np
import onnx_ir as ir
from pydantic import Field

from slimctl.core.contract import Context, Effect, Pass, PassReport, Skipped
from slimctl.core.target import Target
from slimctl.graph.edit import NameScope, all_nodes, const_array, remove_dead
from slimctl.graph.select import Patterns, Selection
from slimctl.numerics.affine import INT8, dequantize, quantize, symmetric_scales
from slimctl.passes._weights_write import Editor, home_of

_PER_AXIS_OPSET: Final = 13
_FEWEST_ROWS: Final = 8
"""With fewer, scales take as much as codes save."""


class QuantizeEmbeddings(Pass):
    """Store tables of embeddings as int8."""

    name: ClassVar[str] = "quantize-embeddings"
    summary: ClassVar[str] = "Store tables of which rows are looked up as int8"
    effect: ClassVar[Effect] = Effect.APPROXIMATE

    include: Patterns = Field(
        (), description="Only matching nodes: name glob, op:TYPE or re:REGEX; repeatable."
    )
    exclude: Patterns = Field(
        (), description="Leave matching nodes in float: as --include; repeatable."
    )

    def minimum_opset(self, model: ir.Model, target: Target) -> int:
        """One scale per column needs opset 13, where there is a table to store."""
        there = target.embeddings and any(_tables(model))
        return _PER_AXIS_OPSET if there else 0

    def apply(self, model: ir.Model, context: Context) -> PassReport:
        """Stores every table that is only looked up.

        Formula: codes [rows, width] = round(table / scale), scale [width] = max |column| / 127.
        """
        selection = Selection(self.include, self.exclude)
        editor = Editor(model, NameScope(model), self.name)
        skipped: list[Skipped] = []
        stored: dict[str, _Stored] = {}
        changed = 0
        for table, look_ups in _tables(model).items():
            reasons = [*map(selection.reason_against, look_ups)]
            reasons.append(_reason_against(table, look_ups, context.target))
            reason = next(filter(None, reasons), None)
            if reason is None:
                stored[table.name or ""] = _store(table, look_ups, editor)
                changed += len(look_ups)
            else:
                skipped.extend(Skipped(node.name or "", reason) for node in look_ups)
        remove_dead(model)
        return PassReport(
            changed={"Gather": changed} if changed else {},
            skipped=tuple(skipped),
            notes=_notes(stored),
            facts={name: one._asdict() for name, one in stored.items()},
        )


class _Stored(NamedTuple):
    """A table in bytes, before and after, and the SQNR of its values in dB."""

    before: int
    after: int
    sqnr_db: float | None


def _tables(model: ir.Model) -> dict[ir.Value, list[ir.Node]]:
    """Constant float matrices of which rows are looked up, and by which nodes."""
    found: dict[ir.Value, list[ir.Node]] = defaultdict(list)
    for node in all_nodes(model):
        if node.op_type != "Gather" or node.domain not in ("", "ai.onnx"):
            continue
        table = node.inputs[0]
        array = const_array(table)
        if table is not None and array is not None and array.dtype.kind == "f" and array.ndim == 2:
            found[table].append(node)
    return found


def _reason_against(table: ir.Value, look_ups: list[ir.Node], target: Target) -> str | None:
    array = const_array(table)
    assert array is not None, "a table is constant"
    others = [node for node in table.consumers() if node not in look_ups]
    if not target.embeddings:
        reason = f"{target.name} has no way to restore one scale per column behind a look-up"
    elif any(_axis(node) % array.ndim for node in look_ups):
        reason = "it does not look up rows: its axis is not the first"
    elif array.dtype != np.float32:
        reason = f"its values are {array.dtype}, which DequantizeLinear restores from opset 19 on"
    elif table.is_graph_output():
        reason = f"'{table.name}' is an output as well"
    elif others:
        reason = f"'{others[0].name}' ({others[0].op_type}) reads the same table"
    elif len(array) < _FEWEST_ROWS:
        reason = f"{len(array)} rows are so few that scales take what codes save"
    else:
        return None
    return reason


def _axis(node: ir.Node) -> int:
    attribute = node.attributes.get("axis")
    return 0 if attribute is None else attribute.as_int()


def _store(table: ir.Value, look_ups: list[ir.Node], editor: Editor) -> _Stored:
    array = const_array(table)
    assert array is not None, "a table is constant"
    scale = symmetric_scales(array, 1, INT8)
    zero_point = np.zeros(scale.shape, INT8.dtype)
    codes = quantize(array, scale, zero_point, INT8, axis=1)
    home, base = home_of(table), table.name or look_ups[0].name or "table"
    constants = [
        editor.constant(home, f"{base}_int8", codes),
        editor.constant(home, f"{base}_scale", scale),
    ]
    for node in look_ups:
        rows = editor.before(node, "Gather", [constants[0], node.inputs[1]], {"axis": 0})
        editor.become(node, ("", "DequantizeLinear"), [rows.outputs[0], constants[1]], {"axis": -1})
    noise = np.square(dequantize(codes, scale, zero_point, axis=1) - array, dtype=np.float64).sum()
    signal = np.square(array, dtype=np.float64).sum()
    decibels = 10 * math.log10(signal / noise) if signal and noise else None
    return _Stored(array.nbytes, codes.nbytes + scale.nbytes, decibels)


def _notes(stored: dict[str, _Stored]) -> list[str]:
    if not stored:
        return []
    before, after = (
        sum(getattr(one, part) for one in stored.values()) for part in ("before", "after")
    )
    known = [one.sqnr_db for one in stored.values() if one.sqnr_db is not None]
    quality = f", the worst at {min(known):.1f} dB" if known else ""
    return [f"tables of embeddings take {after:,} bytes instead of {before:,}{quality}"]
