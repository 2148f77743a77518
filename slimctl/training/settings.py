"""How a model is trained. Imports no torch: options are checked before it is there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from slimctl.core.errors import OptionError

OptimizerName = Literal["adamw", "sgd"]
ScheduleName = Literal["cosine", "one-cycle", "constant"]


@dataclass(frozen=True)
class Settings:
    """How a model is trained.

    Attributes:
        epochs: How often every sample is seen.
        batch_size: Samples whose gradients make one step.
        learning_rate: Its largest value.
        optimizer: AdamW (Loshchilov and Hutter, 2019), or SGD with Nesterov momentum 0.9.
        schedule: Of the learning rate: cosine to zero (Loshchilov and Hutter, 2017), one-cycle
            (Smith and Topin, 2019), or constant.
        warmup: Share of the steps in which it rises to its largest value.
        weight_decay: Of matrices; biases and normalizations have none.
        clip_norm: Largest norm of the gradient; 0 leaves it as it is.
        patience: Epochs without a better metric after which training ends; 0 for none.
        augment: Augmentations, as :mod:`slimctl.core.augmentations` reads them.
        device: ``cpu``, ``cuda`` or ``cuda:1``.
        checkpoint_minutes: Minutes between two checkpoints; 0 for none.
        resume: Continue from the checkpoint of a run that was killed.
    """

    epochs: int = 10
    batch_size: int = 128
    learning_rate: float = 1e-3
    optimizer: OptimizerName = "adamw"
    schedule: ScheduleName = "cosine"
    warmup: float = 0.05
    weight_decay: float = 1e-4
    clip_norm: float = 1.0
    patience: int = 0
    augment: str = ""
    device: str = "cpu"
    checkpoint_minutes: float = 10.0
    resume: bool = False


LOSSES = ("cross-entropy", "bce", "mse", "ctc")
"""Names of the losses of labels; ``module:function`` is another way to name one."""


def check_loss(name: str) -> str:
    """The name, if there is such a loss.

    Raises:
        OptionError: There is none.
    """
    if name not in LOSSES and ":" not in name:
        raise OptionError(
            "--loss",
            f"There is no loss '{name}'",
            fix=f"use {', '.join(LOSSES)}, or module:function",
        )
    return name
