"""Operators that onnxruntime makes of several, as it saves them in an optimized model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from slimctl.graph.channels import rules_elementwise, rules_linear
from slimctl.graph.channels.coupling import Axis, Role
from slimctl.graph.channels.rule import Rule
from slimctl.graph.channels.site import Site
from slimctl.graph.channels.units import FIXED, Ids

if TYPE_CHECKING:
    from slimctl.graph.channels.removal import Removal

_CHANNEL = 1
_MIXED = "it normalizes over these channels: without some of them the others would change"


def _last(site: Site, index: int = 0) -> Axis | None:
    """Labels of the last axis."""
    rank = site.rank(index)
    return None if rank is None else site.axes(index).get(rank - 1)


# activations


def _biased(site: Site) -> None:
    """BiasGelu, FastGelu: Gelu(X + bias), with a bias [channels] that may be missing."""
    last = _last(site)
    if last is not None and site.has(1):
        if site.is_constant(1):
            site.member(1, 0, last.ids, Role.PRODUCE)
        else:
            site.block(last.ids, "its bias is computed at run time")
    site.block_inputs("its bias is computed at run time", [1])
    for axis, labels in site.axes().items():
        passed = not site.has(1) or labels is last
        site.label(axis, labels.unknown(site.name) if passed else site.alive(labels))


# layers with an activation behind them

_ZERO_AT_ZERO = frozenset({"", "Relu", "LeakyRelu", "Tanh", "Elu", "Selu", "Softsign"})


def _fused_conv(site: Site) -> None:
    """FusedConv: activation(Conv(X, W, B) + Z)."""
    rules_linear.RULES["Conv"].follow(site)
    if site.has(3):
        _added(site)
    _activated(site)


def _added(site: Site) -> None:
    """Z [N, O, ...] has the channels of the output."""
    mine = site.channels.tensors.get(site.node.outputs[0], {}).get(_CHANNEL)
    other = site.axes(3).get(_CHANNEL)
    for axis, labels in site.axes(3).items():
        if axis != _CHANNEL or mine is None:
            site.block(labels.ids, "what it is added to does not change")
    if mine is None:
        return
    fixed = np.full(mine.ids.size, FIXED, np.int64)
    ids = site.tie(mine.ids, fixed if other is None else other.ids)
    tied = Axis(ids, mine.rest, mine.alive)
    site.label(_CHANNEL, tied if other is not None and other.silent else site.alive(tied))


def _fused_gemm(site: Site) -> None:
    """FusedGemm: activation(Gemm(A, B, C))."""
    rules_linear.RULES["Gemm"].follow(site)
    _activated(site)


def _activated(site: Site) -> None:
    name = site.attribute("activation", "")
    low, high = (*site.attribute("activation_params", ()), 0.0, 0.0)[:2]
    if name in _ZERO_AT_ZERO or (name == "Clip" and low <= 0.0 <= high):
        return
    for axis, labels in list(site.channels.tensors.get(site.node.outputs[0], {}).items()):
        site.label(axis, site.alive(labels))


def _fused_matmul(site: Site) -> None:
    """FusedMatMul: alpha * A @ B, either of them transposed."""
    if site.attribute("transBatchA", 0) or site.attribute("transBatchB", 0):
        site.block_inputs("it transposes the batch of an operand")
    else:
        rules_linear.RULES["MatMul"].follow(site)


# normalizations


def _mixed(site: Site) -> None:
    site.block_inputs(_MIXED)


def _skip_rms(site: Site) -> None:
    """SkipSimplifiedLayerNormalization: RMSNormalization of input + skip + bias.

    Channels that are zero leave the sum of squares as it is; see RMSNormalization.
    """
    sides = [_last(site, index) for index in (0, 1)]
    first, second = sides
    plain = all(not site.has(index) or site.is_constant(index) for index in (2, 3))
    if first is None or second is None or not plain or any(map(site.is_read, (1, 2))):
        site.block_inputs(_MIXED)
        return
    for index, side in enumerate(sides):
        for labels in site.axes(index).values():
            if labels is not side:
                site.block(labels.ids, "it is normalized for each of them")
    ids = site.tie(site.consume(first), site.consume(second))
    site.member(2, 0, ids, Role.CARRY)
    if site.has(3):
        site.member(3, 0, ids, Role.PRODUCE)
    rank = site.rank() or 0
    site.label(rank - 1, site.computed(ids))
    if len(site.node.outputs) > 3:
        site.label(rank - 1, site.computed(ids), output=3)
    site.when_fewer(ids, lambda removal: _shrink_rms(site, ids, removal))


def _shrink_rms(site: Site, ids: Ids, removal: Removal) -> None:
    """With a share s of the channels left: epsilon / s, and a scale times sqrt(s)^-1."""
    share = removal.count(ids) / ids.size
    epsilon = float(site.attribute("epsilon", 1e-12))
    site.node.attributes["epsilon"] = ir.AttrFloat32("epsilon", epsilon / share)
    scale = site.constant(2)
    assert scale is not None, "the rule looked"
    removal.set_input(site.node, 2, (scale / np.sqrt(share)).astype(scale.dtype))


_MICROSOFT = {
    **dict.fromkeys(("BiasGelu", "FastGelu"), Rule(_biased)),
    **dict.fromkeys(("Gelu", "QuickGelu"), rules_elementwise.RULES["Gelu"]),
    **dict.fromkeys(
        ("EmbedLayerNormalization", "GroupNorm", "SkipGroupNorm", "SkipLayerNormalization"),
        Rule(_mixed),
    ),
    "FusedConv": Rule(_fused_conv, computes=True),
    "FusedGemm": Rule(_fused_gemm, computes=True),
    "FusedMatMul": Rule(_fused_matmul, computes=True),
    "SkipSimplifiedLayerNormalization": Rule(_skip_rms),
}
RULES = {f"com.microsoft::{name}": rule for name, rule in _MICROSOFT.items()}
