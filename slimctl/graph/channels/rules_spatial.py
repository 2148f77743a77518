"""Operators that sample an image at computed places: they treat every channel alike."""

from __future__ import annotations

import math

import numpy as np

from slimctl.graph.channels.coupling import Axis, Role
from slimctl.graph.channels.rule import Rule
from slimctl.graph.channels.site import Site

_CHANNEL = 1
_SAMPLED = "it is sampled along this axis"
_PLACES = "it says where to sample"


def _sampled(site: Site) -> None:
    """GridSample, RoiAlign, MaxRoiPool: X [N, C, ...] is sampled at places for all channels."""
    site.block_inputs(_PLACES, range(1, len(site.node.inputs)))
    for axis, labels in site.axes().items():
        if axis == _CHANNEL:
            site.label(axis, labels.unknown(site.name))
        else:
            site.block(labels.ids, _SAMPLED)


def _col2im(site: Site) -> None:
    """Col2Im: X [N, C*K, L], K elements of a block, becomes [N, C, ...]."""
    block = site.constant(2)
    site.block_inputs(_PLACES, (1, 2))
    for axis, labels in site.axes().items():
        size = 0 if block is None else math.prod(int(side) for side in block)
        if axis == 0:
            site.label(axis, labels.unknown(site.name))
        elif axis != _CHANNEL or size < 1 or labels.ids.size % size:
            site.block(labels.ids, _SAMPLED)
        else:
            columns = labels.ids.reshape(-1, size).T
            ids = columns[0]
            for column in columns[1:]:
                ids = site.tie(ids, column)
            zero = np.all(labels.rest.reshape(-1, size) == 0.0, axis=1)
            held = np.where(zero, 0.0, np.nan)
            site.label(axis, Axis(ids, held, labels.alive or site.name))


def _deform_conv(site: Site) -> None:
    """DeformConv: X [N, I, H, W], W [O, I/g, ...], offset, B [O], mask."""
    weight = site.constant(1)
    site.block_inputs(_PLACES, (2, 4))
    groups = max(int(site.attribute("group", 1)), int(site.attribute("offset_group", 1)))
    if weight is None or (site.has(3) and not site.is_constant(3)):
        site.block_inputs("the weight is computed at run time")
        return
    for axis, labels in site.axes().items():
        if axis != _CHANNEL or groups > 1:
            site.block(labels.ids, _SAMPLED if axis != _CHANNEL else "it is sampled in groups")
        else:
            site.member(1, 1, site.consume(labels), Role.CONSUME)
    per_group = weight.shape[0] // int(site.attribute("group", 1))
    ids = np.tile(site.fresh(int(per_group)), weight.shape[0] // per_group)
    site.member(1, 0, ids, Role.PRODUCE)
    if site.has(3):
        site.member(3, 0, ids, Role.PRODUCE)
    site.label(_CHANNEL, site.computed(ids))


RULES = {
    **dict.fromkeys(
        ("GridSample", "MaxRoiPool", "RoiAlign", "com.microsoft::GridSample"), Rule(_sampled)
    ),
    "Col2Im": Rule(_col2im),
    "DeformConv": Rule(_deform_conv, computes=True),
}
