"""All rules. An operator that is not here blocks the channels that go into it."""

from __future__ import annotations

from slimctl.graph.channels import (
    rules_attention,
    rules_einsum,
    rules_elementwise,
    rules_fused,
    rules_indexed,
    rules_linear,
    rules_movement,
    rules_recurrent,
    rules_reduce,
    rules_reshape,
    rules_spatial,
)
from slimctl.graph.channels.rule import Rule

RULES: dict[str, Rule] = {
    **rules_attention.RULES,
    **rules_einsum.RULES,
    **rules_elementwise.RULES,
    **rules_fused.RULES,
    **rules_indexed.RULES,
    **rules_linear.RULES,
    **rules_movement.RULES,
    **rules_reshape.RULES,
    **rules_recurrent.RULES,
    **rules_reduce.RULES,
    **rules_spatial.RULES,
}
"""By operator; those of other domains than ONNX's own as ``domain::operator``."""


def key(domain: str, op_type: str) -> str:
    """Where the rule of an operator stands in the table."""
    return op_type if domain in ("", "ai.onnx") else f"{domain}::{op_type}"
