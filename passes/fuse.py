"""``fuse``: rewrites that keep the function and make the graph smaller."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import ClassVar

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedFunctionsPass, RemoveUnusedOpsetsPass
from pydantic import Field

from slimctl.core.contract import Context, Effect, Pass, PassReport
from slimctl.graph.edit import remove_dead
from slimctl.graph.select import Patterns, Selection
from slimctl.graph.shapes import infer_shapes
from slimctl.passes._fuse_affine import fold_affine
from slimctl.passes._fuse_branches import inline_branches
from slimctl.passes._fuse_constants import fold_constants
from slimctl.passes._fuse_duplicates import merge_duplicates
from slimctl.passes._fuse_gemm import make_gemm
from slimctl.passes._fuse_graph import Workbench
from slimctl.passes._fuse_movement import merge_movement
from slimctl.passes._fuse_noops import remove_noops
from slimctl.passes._fuse_pad import fold_pad


class Rewrite(StrEnum):
    """Families of rewrites, in the order in which they are applied."""

    CONSTANTS = "constants"
    BRANCHES = "branches"
    NO_OPS = "no-ops"
    MOVEMENT = "movement"
    PAD = "pad"
    AFFINE = "affine"
    GEMM = "gemm"
    DUPLICATES = "duplicates"


_FAMILIES: dict[Rewrite, Callable[[Workbench], None]] = {
    Rewrite.CONSTANTS: fold_constants,
    Rewrite.BRANCHES: inline_branches,
    Rewrite.NO_OPS: remove_noops,
    Rewrite.MOVEMENT: merge_movement,
    Rewrite.PAD: fold_pad,
    Rewrite.AFFINE: fold_affine,
    Rewrite.GEMM: make_gemm,
    Rewrite.DUPLICATES: merge_duplicates,
}

_MAX_ROUNDS = 50
"""Every round but the last removes or simplifies something, and few models need more than three.
The bound only keeps a defect from running forever."""


class Fuse(Pass):
    """Exact graph rewrites: fold, fuse, clean up."""

    name: ClassVar[str] = "fuse"
    summary: ClassVar[str] = "Exact graph rewrites: fold, fuse, clean up"
    effect: ClassVar[Effect] = Effect.EXACT

    fold_limit_bytes: int = Field(
        default=1 << 20,
        ge=0,
        description="Largest constant that folding may add, in bytes. A larger one is stored only "
        "where it replaces constants of at least its size.",
    )
    rewrites: tuple[Rewrite, ...] = Field(
        default=tuple(Rewrite),
        description="Families of rewrites to apply. Dead code is removed in any case.",
    )
    include: Patterns = Field(
        default=(),
        description="Only rewrite nodes that match one of these patterns (node or tensor name, "
        "op:Type, re:expression). A rewrite of several nodes needs all of them to match.",
    )
    exclude: Patterns = Field(
        default=(),
        description="Leave nodes alone that match one of these patterns (node or tensor name, "
        "op:Type, re:expression).",
    )

    def apply(self, model: ir.Model, context: Context) -> PassReport:
        """Rewrites until nothing more can be done."""
        del context
        selection = Selection(self.include, self.exclude)
        bench = Workbench(model, selection, self.fold_limit_bytes)
        families = [_FAMILIES[rewrite] for rewrite in Rewrite if rewrite in self.rewrites]
        for _ in range(_MAX_ROUNDS):
            if not _round(bench, families):
                break
        _remove_imports(bench)
        return PassReport(
            changed=dict(sorted(bench.changed.items())),
            skipped=tuple(bench.skipped),
            notes=[f"pattern '{pattern}' matches no candidate" for pattern in selection.unused()],
        )


def _round(bench: Workbench, families: list[Callable[[Workbench], None]]) -> bool:
    """Applies every family once; says whether anything changed."""
    before = bench.changed.total()
    infer_shapes(bench.model)
    bench.skipped.clear()
    for family in families:
        family(bench)
    bench.count("Unused node or initializer removed", remove_dead(bench.model))
    return bench.changed.total() > before


def _remove_imports(bench: Workbench) -> None:
    """Removes functions and operator sets that nothing uses any more."""
    functions, opsets = len(bench.model.functions), len(bench.model.opset_imports)
    for clean_up in (RemoveUnusedFunctionsPass(), RemoveUnusedOpsetsPass()):  # type: ignore[no-untyped-call]  # onnx_ir leaves this one constructor untyped
        clean_up(bench.model)
    bench.count("Unused function removed", functions - len(bench.model.functions))
    bench.count("Unused operator set removed", opsets - len(bench.model.opset_imports))
