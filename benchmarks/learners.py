"""The network that the benchmarks of training begin with: trained here in plain PyTorch.

``python -m benchmarks.learners FOLDER`` trains it (ten minutes) and writes it as ONNX.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from benchmarks.fashion import BasicBlock, Head, export, load, unit

EPOCHS = 8
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


def train(model: nn.Module) -> None:
    """Trains with one-cycle SGD and random flips, on one thread, for the same weights each time."""
    torch.set_num_threads(1)
    images, labels = (torch.from_numpy(array) for array in load("train"))
    steps = EPOCHS * (len(images) // _BATCH)
    optimizer = torch.optim.SGD(
        model.parameters(), _LEARNING_RATE, momentum=0.9, weight_decay=5e-4, nesterov=True
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, _LEARNING_RATE, steps, pct_start=0.25)
    generator = torch.Generator().manual_seed(1)
    model.train()
    for epoch in range(EPOCHS):
        print(f"epoch {epoch + 1} of {EPOCHS}", flush=True)
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


def main(folder: Path) -> None:
    """Trains and writes it."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    model = resnet()
    for weight in model.parameters():
        if weight.ndim == 4:  # faster, and images come so, too
            weight.data = weight.data.contiguous(memory_format=torch.channels_last)
    train(model)
    export(model.eval(), folder / "resnet.onnx")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
