"""Networks that the benchmarks of training begin with: trained here in plain PyTorch.

``python -m benchmarks.learners FOLDER [NAME ...]`` trains those that are named, or those that are
not there (a quarter of an hour each), and writes them as ONNX.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch
from torch import nn
from torch.nn import functional

from benchmarks.fashion import BasicBlock, Head, InvertedResidual, export, load, unit

_BATCH = 128
_LEARNING_RATE = 0.15


def resnet() -> nn.Module:
    """A ResNet of five basic blocks, 0.32 million weights."""
    return nn.Sequential(
        *unit(1, 16, 3, 2),
        nn.ReLU(),
        BasicBlock(16, 16, 1),
        BasicBlock(16, 32, 2),
        BasicBlock(32, 32, 1),
        BasicBlock(32, 96, 2),
        BasicBlock(96, 96, 1),
        Head(96),
    )


def mobilenet() -> nn.Module:
    """A MobileNetV2 of seven inverted residuals, 0.31 million weights."""
    return nn.Sequential(
        *unit(1, 16, 3, 2),
        nn.ReLU6(),
        InvertedResidual(16, 16, 1, 3),
        InvertedResidual(16, 40, 2, 4),
        InvertedResidual(40, 40, 1, 3),
        InvertedResidual(40, 40, 1, 3),
        InvertedResidual(40, 128, 2, 4),
        InvertedResidual(128, 128, 1, 3),
        InvertedResidual(128, 128, 1, 3),
        *unit(128, 256, 1),
        nn.ReLU6(),
        Head(256),
    )


NETWORKS: Final = {"resnet": (resnet, 8), "mobilenet": (mobilenet, 10)}
"""How each is made, and for how many epochs it is trained."""


def train(model: nn.Module, epochs: int) -> None:
    """Trains with one-cycle SGD and random flips, on one thread, for the same weights each time."""
    torch.set_num_threads(1)
    images, labels = (torch.from_numpy(array) for array in load("train"))
    steps = epochs * (len(images) // _BATCH)
    optimizer = torch.optim.SGD(
        model.parameters(), _LEARNING_RATE, momentum=0.9, weight_decay=5e-4, nesterov=True
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, _LEARNING_RATE, steps, pct_start=0.25)
    generator = torch.Generator().manual_seed(1)
    model.train()
    for epoch in range(epochs):
        print(f"epoch {epoch + 1} of {epochs}", flush=True)
        order = torch.randperm(len(images), generator=generator)
        for chosen in order.split(_BATCH)[: len(images) // _BATCH]:
            seen = images[chosen]
            flipped = torch.rand(len(seen), generator=generator) < 0.5
            seen = torch.where(flipped[:, None, None, None], seen.flip(3), seen)
            loss = functional.cross_entropy(
                model(seen.contiguous(memory_format=torch.channels_last)),
                labels[chosen],
                label_smoothing=0.05,
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()


def _channels_last(weight: torch.Tensor) -> torch.Tensor:
    """The same values; strides say so for kernels of one element, too, whose order says nothing.

    Without that all of a MobileNet on images of one channel would be computed channels first, in
    half as much time again.
    """
    if weight.shape[1] == 1:
        return weight
    return torch.empty_like(weight, memory_format=torch.channels_last).copy_(weight)


def main(folder: Path, names: Sequence[str]) -> None:
    """Trains and writes them."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names or [name for name in NETWORKS if not (folder / f"{name}.onnx").exists()]:
        print(name, flush=True)
        torch.manual_seed(0)
        made, epochs = NETWORKS[name]
        model = made()
        for weight in model.parameters():
            if weight.ndim == 4:  # faster, and images come so, too
                weight.data = _channels_last(weight.data)
        train(model, epochs)
        export(model.eval(), folder / f"{name}.onnx")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
