"""What a training run minimizes, as the loop sees it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor, nn

from slimctl.training.losses import Loss, labeled
from slimctl.training.samples import Part


class Objective(Protocol):
    """What is minimized.

    Attributes:
        tensors: Names of the tensors of the model that it looks at.
        extra: What is learned along with the model and thrown away afterwards.
    """

    tensors: Sequence[str]
    extra: nn.Module

    def loss(self, found: Mapping[str, Tensor], part: Part, done: float) -> Tensor:
        """The loss of one part of a batch, a number: the mean over its samples.

        Args:
            found: The tensors.
            part: What the model ran on.
            done: Share of the training that is over, 0 to 1.
        """
        ...


class FromLabels:
    """A loss of one output and its labels.

    Args:
        tensor: Name of the output, or of the scores behind it.
        loss: The loss.
        name: Its name, for messages.
    """

    def __init__(self, tensor: str, loss: Loss, name: str) -> None:
        self.tensors: Sequence[str] = (tensor,)
        self.extra = nn.Module()
        self._loss, self._name = loss, name

    def loss(self, found: Mapping[str, Tensor], part: Part, done: float) -> Tensor:
        """The loss of one part of a batch."""
        del done
        place = f"training sample {int(part.rows[0])}"
        return labeled(self._loss, self._name, found[self.tensors[0]], part.labels, place)
