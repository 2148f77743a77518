"""How much each group matters to the outputs, measured with part of its channels silenced.

Importance compares channels within a group well and groups with one another badly: a layer's error
may vanish or grow on its way to the outputs. One run per group puts the groups on one scale.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import onnx_ir as ir

from slimctl.core.contract import Context
from slimctl.graph.channels import Channels, Role, silence_channels
from slimctl.passes._fallback import noise_of
from slimctl.passes._prune_select import Candidate, Ids

_PART = 0.5
"""Share of a group's channels that is silenced: enough to be felt, not enough to end everything."""

_LEAST = 1e-9
"""Noise below this, -90 dB, is rounding."""


def scaled_by_sensitivity(
    model: ir.Model, channels: Channels, candidates: Sequence[Candidate], context: Context
) -> list[Candidate]:
    """The candidates with scores that add up to the noise they cause at the outputs.

    Args:
        model: The analyzed model; the same afterwards.
        channels: Its analysis.
        candidates: The groups.
        context: Gives the outputs to compare with. Without data the scores stay.
    """
    tracked = context.progress.track(
        iter(candidates), total=len(candidates), label="measuring sensitivity"
    )
    before = context.fidelity(model)
    if not before:
        return list(candidates)
    already = max(noise_of(before).values())
    scaled: list[Candidate] = []
    for entry in tracked:
        count = round(entry.most * _PART)
        expected = float(entry.ranks[:count].sum())
        if not count or expected <= 0.0:
            scaled.append(entry)
            continue
        with _silenced(channels, entry.ranked[:count]):
            noise = max(noise_of(context.fidelity(model)).values()) - already
        scaled.append(replace(entry, ranks=entry.ranks * (max(noise, _LEAST) / expected)))
    return scaled


@contextmanager
def _silenced(channels: Channels, gone: Ids) -> Iterator[None]:
    """The model with these units zero, for a while."""
    values = {m.value for m in channels.members if m.role is Role.PRODUCE}
    stored = {value: value.const_value for value in values}
    silence_channels(channels, gone)
    try:
        yield
    finally:
        for value, tensor in stored.items():
            value.const_value = tensor
