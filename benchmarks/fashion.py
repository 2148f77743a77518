"""Two small networks trained on Fashion-MNIST, for pruning benchmarks (needs torch).

``python -m benchmarks.fashion FOLDER [NAME ...]`` trains both (a quarter of an hour) and writes
their weights (``.pt``) and the same networks as ONNX; data go beside them as ``.npz``.
"""

from __future__ import annotations

import gzip
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from benchmarks.assets import fetch

CLASSES = 10
_EPOCHS = 3
_BATCH = 128
_LEARNING_RATE = 0.05
CALIBRATION_SAMPLES = 512


def load(part: str) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Images [N, 1, 28, 28], normalized, and labels [N] of ``train`` or ``t10k``."""
    files = {path.name: path for path in fetch("fashion-mnist")}
    with gzip.open(files[f"{part}-images-idx3-ubyte.gz"]) as stream:
        pixels = np.frombuffer(stream.read(), np.uint8, offset=16).reshape(-1, 1, 28, 28)
    with gzip.open(files[f"{part}-labels-idx1-ubyte.gz"]) as stream:
        labels = np.frombuffer(stream.read(), np.uint8, offset=8)
    images = ((pixels / 255 - 0.286) / 0.353).astype(np.float32)
    return images, labels.astype(np.int64)


def unit(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> list[Any]:
    """A convolution and its normalization."""
    convolution = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return [convolution, nn.BatchNorm2d(outputs)]


class BasicBlock(nn.Module):
    """Two 3 x 3 convolutions and a shortcut (He et al., 2016)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *unit(inputs, outputs, 3, stride), nn.ReLU(), *unit(outputs, outputs, 3)
        )
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same else nn.Sequential(*unit(inputs, outputs, 1, stride))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[N, C, H, W] -> [N, C', H', W']"""
        total: torch.Tensor = self.body(x) + self.shortcut(x)
        return functional.relu(total)


class InvertedResidual(nn.Module):
    """Expansion, depthwise convolution, projection (Sandler et al., 2018)."""

    def __init__(self, inputs: int, outputs: int, stride: int, expansion: int = 4) -> None:
        super().__init__()
        wide = inputs * expansion
        self.body = nn.Sequential(
            *unit(inputs, wide, 1),
            nn.ReLU6(),
            *unit(wide, wide, 3, stride, groups=wide),
            nn.ReLU6(),
            *unit(wide, outputs, 1),
        )
        self.residual = stride == 1 and inputs == outputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[N, C, H, W] -> [N, C', H', W']"""
        y: torch.Tensor = self.body(x)
        return x + y if self.residual else y


class Head(nn.Module):
    """The mean over positions, and a linear layer."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.linear = nn.Linear(channels, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.linear(x.mean((2, 3)))
        return logits


def resnet() -> nn.Module:
    """A ResNet of six basic blocks."""
    return nn.Sequential(
        *unit(1, 32, 3, 2),
        nn.ReLU(),
        BasicBlock(32, 32, 1),
        BasicBlock(32, 32, 1),
        BasicBlock(32, 64, 2),
        BasicBlock(64, 64, 1),
        BasicBlock(64, 128, 2),
        BasicBlock(128, 128, 1),
        Head(128),
    )


def mobilenet() -> nn.Module:
    """A MobileNetV2 of seven inverted residuals."""
    return nn.Sequential(
        *unit(1, 24, 3, 2),
        nn.ReLU6(),
        InvertedResidual(24, 24, 1),
        InvertedResidual(24, 40, 2),
        InvertedResidual(40, 40, 1),
        InvertedResidual(40, 40, 1),
        InvertedResidual(40, 80, 2),
        InvertedResidual(80, 80, 1),
        InvertedResidual(80, 80, 1),
        *unit(80, 320, 1),
        nn.ReLU6(),
        Head(320),
    )


NETWORKS = {"fashion-resnet": resnet, "fashion-mobilenet": mobilenet}


def train(model: nn.Module) -> None:
    """Trains with one-cycle SGD, random shifts and flips."""
    torch.manual_seed(0)
    images, labels = (torch.from_numpy(array) for array in load("train"))
    steps = _EPOCHS * (len(images) // _BATCH)
    optimizer = torch.optim.SGD(
        model.parameters(), _LEARNING_RATE, momentum=0.9, weight_decay=5e-4, nesterov=True
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4 * _LEARNING_RATE, steps)
    model.train()
    for epoch in range(_EPOCHS):
        print(f"epoch {epoch + 1} of {_EPOCHS}", flush=True)
        order = torch.randperm(len(images))
        for start in range(0, len(order) - _BATCH + 1, _BATCH):
            chosen = order[start : start + _BATCH]
            loss = functional.cross_entropy(
                model(_augmented(images[chosen])), labels[chosen], label_smoothing=0.05
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    model.eval()


def _augmented(images: torch.Tensor) -> torch.Tensor:
    if torch.rand(()) < 0.5:
        images = images.flip(3)
    down, right = torch.randint(0, 5, (2,)).tolist()
    return functional.pad(images, (2, 2, 2, 2), mode="replicate")[
        :, :, down : down + 28, right : right + 28
    ]


def export(model: nn.Module, path: Path) -> None:
    """Writes the network as ONNX; BatchNormalization stays in the graph."""
    torch.onnx.export(
        model,
        (torch.zeros(1, 1, 28, 28),),
        str(path),
        input_names=["image"],
        output_names=["logits"],
        dynamic_axes={"image": {0: "N"}, "logits": {0: "N"}},
        opset_version=17,
        dynamo=False,
        training=torch.onnx.TrainingMode.EVAL,
        do_constant_folding=False,
    )


def main(folder: Path, names: list[str]) -> None:
    """Trains and writes the named networks, and the data."""
    folder.mkdir(parents=True, exist_ok=True)
    images, labels = load("train")
    np.savez(folder / "fashion-calibration.npz", image=images[:CALIBRATION_SAMPLES])
    images, labels = load("t10k")
    np.savez(folder / "fashion-evaluation.npz", image=images, label=labels)
    for name in names:
        torch.manual_seed(0)
        model = NETWORKS[name]()
        train(model)
        with torch.no_grad():
            found = torch.cat([model(part) for part in torch.split(torch.from_numpy(images), 500)])
        accuracy = (found.argmax(1).numpy() == labels).mean()
        print(f"{name}: {accuracy:.2%} of the test images", flush=True)
        torch.save(model.state_dict(), folder / f"{name}.pt")
        export(model, folder / f"{name}.onnx")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:] or list(NETWORKS))
