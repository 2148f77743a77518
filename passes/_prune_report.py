"""Sentences that the structures of pruning share."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from slimctl.core.contract import Context
from slimctl.graph.cost import ModelCost
from slimctl.passes._prune_goal import Latency
from slimctl.passes._reconstruct import Reconstruction


def cost_note(before: ModelCost, after: ModelCost) -> str:
    """Parameters and multiply-accumulates before and after."""
    macs = f"{after.macs / before.macs:.0%} of the original's" if before.macs else "unknown"
    return (
        f"parameters {before.parameters:,} -> {after.parameters:,} "
        f"({after.parameters / max(before.parameters, 1):.0%}), multiply-accumulates {macs}"
    )


def time_note(original: ir.Model, model: ir.Model, context: Context) -> list[str]:
    """Time of one run before and after, where inputs are known that the model takes."""
    feeds = context.example()
    if feeds is None:
        return []
    before, after = Latency(original, feeds).both(model)
    what = "one calibration batch" if context.has_data else "random inputs"
    return [f"P50 {before:.2f} -> {after:.2f} ms ({after / before:.2f}x) on {what}, one thread"]


def refit_note(done: Reconstruction) -> str:
    """How much refitting has helped."""
    typical = float(np.median(list(done.explained.values()))) if done.explained else 0.0
    return (
        f"{len(done.explained)} layers refitted on data: of what each computed wrongly "
        f"{typical:.0%} is gone (median, on positions that were not fitted)"
    )


def rounded(shares: Mapping[str, float]) -> dict[str, float]:
    """To four digits, for the manifest."""
    return {name: round(share, 4) for name, share in shares.items()}
