"""Networks for the benchmarks of training, as ONNX files that nobody has trained yet (needs torch).

``python -m benchmarks.learners FOLDER`` writes them.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn

from benchmarks.fashion import Head, InvertedResidual, export, resnet, unit


def mobilenet() -> nn.Module:
    """A MobileNetV2 of six inverted residuals."""
    return nn.Sequential(
        *unit(1, 16, 3, 2),
        nn.ReLU6(),
        InvertedResidual(16, 16, 1),
        InvertedResidual(16, 32, 2),
        InvertedResidual(32, 32, 1),
        InvertedResidual(32, 96, 2),
        InvertedResidual(96, 96, 1),
        InvertedResidual(96, 96, 1),
        *unit(96, 256, 1),
        nn.ReLU6(),
        Head(256),
    )


NETWORKS = {"resnet": resnet, "mobilenet": mobilenet}


def _told_apart(model: nn.Module) -> None:
    """Makes no two normalizations equal: exporters would store what is equal once, and share it."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            for tensor in (module.weight, module.bias, module.running_mean, module.running_var):
                assert isinstance(tensor, torch.Tensor), "normalizations here learn and measure"
                tensor.data += 1e-3 * torch.rand(tensor.shape)


def main(folder: Path) -> None:
    """Writes all networks."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, network in NETWORKS.items():
        torch.manual_seed(0)
        model = network()
        _told_apart(model)
        count = sum(parameter.numel() for parameter in model.parameters())
        print(f"{name}: {count:,} weights", flush=True)
        export(model.eval(), folder / f"{name}.onnx")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
