"""Learning rates over the steps of a run, and optimizers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from slimctl.training.settings import Settings

_START, _END = 1.0 / 25.0, 1e-4
"""One-cycle: where the rate begins and ends, as shares of its largest value."""


def rate(settings: Settings, step: int, steps: int) -> float:
    """The learning rate of a step, as a share of the largest.

    Args:
        settings: Schedule and warm-up.
        step: From 0.
        steps: Of the whole run.
    """
    if settings.schedule == "one-cycle":
        return _one_cycle(step, steps, rising=max(settings.warmup, 0.3))
    warm = round(settings.warmup * steps)
    if step < warm:
        return (step + 1) / (warm + 1)
    if settings.schedule == "constant":
        return 1.0
    return _cosine(1.0, 0.0, min((step - warm) / max(steps - warm, 1), 1.0))


def _one_cycle(step: int, steps: int, rising: float) -> float:
    """Smith and Topin, "Super-convergence", 2019: up, then down to almost nothing."""
    peak = max(round(rising * steps), 1)
    if step < peak:
        return _cosine(_START, 1.0, step / peak)
    return _cosine(1.0, _END, min((step - peak) / max(steps - peak, 1), 1.0))


def _cosine(start: float, end: float, share: float) -> float:
    return end + (start - end) * (1.0 + math.cos(math.pi * share)) / 2.0


def optimizer_for(
    settings: Settings, decaying: Sequence[nn.Parameter], others: Iterable[nn.Parameter]
) -> torch.optim.Optimizer:
    """An optimizer of everything that is learned.

    Args:
        settings: Which one, and its numbers.
        decaying: Matrices, kernels, tables of words.
        others: What does not decay: biases, scales, what is learned along.
    """
    groups = [
        {"params": [*decaying], "weight_decay": settings.weight_decay},
        {"params": [*others], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if settings.optimizer == "sgd":
        return torch.optim.SGD(groups, settings.learning_rate, momentum=0.9, nesterov=True)
    return torch.optim.AdamW(groups, settings.learning_rate)


def set_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    """Sets the learning rate of all groups."""
    for group in optimizer.param_groups:
        group["lr"] = value * group.get("share", 1.0)
