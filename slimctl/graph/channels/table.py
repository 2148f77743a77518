"""All rules. An operator that is not here blocks the channels that go into it."""

from __future__ import annotations

from slimctl.graph.channels import rules_elementwise, rules_linear, rules_movement, rules_reduce
from slimctl.graph.channels.rule import Rule

RULES: dict[str, Rule] = {
    **rules_elementwise.RULES,
    **rules_linear.RULES,
    **rules_movement.RULES,
    **rules_reduce.RULES,
}
"""By operator; those of other domains than ONNX's own as ``domain::operator``."""


def key(domain: str, op_type: str) -> str:
    """Where the rule of an operator stands in the table."""
    return op_type if domain in ("", "ai.onnx") else f"{domain}::{op_type}"
