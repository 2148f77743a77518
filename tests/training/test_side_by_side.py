"""Networks in plain PyTorch and their graphs, trained side by side: the same losses."""

# ruff: noqa: E402 # the check for torch comes before what needs it
from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

torch = pytest.importorskip("torch", reason="torch is an extra")
from torch import nn
from torch.nn import functional

from slimctl.graph.load import load_model
from slimctl.graph.session import Level, open_session, run
from slimctl.training.learnable import separate_statistics
from slimctl.training.module import TrainableGraph

STEPS = 20
BATCH = 8
CLASSES = 5

TOLERANCE = 1e-5
"""Relative, of the loss in each step. A sum in another order differs by some units of 2^-24 = 6e-8,
and 20 steps on other weights add up that many of them at rates of convergence of about 1:
20 * 4 * 6e-8 = 5e-6. What was measured is 0, where torch calls the same kernels, to 2e-7."""


class Residual(nn.Module):
    """Convolutions, normalizations and a shortcut; depthwise and strided ones, ReLU6, a pool."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8))
        self.body = nn.Sequential(
            nn.Conv2d(8, 16, 1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU6(),
            nn.Conv2d(16, 16, 3, 1, 1, groups=16, bias=False),
            nn.BatchNorm2d(16),
            nn.Hardswish(),
            nn.Conv2d(16, 8, 1),
            nn.BatchNorm2d(8),
        )
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Any) -> Any:
        """[N, 3, H, W] -> [N, CLASSES]"""
        x = functional.relu(self.stem(x))
        x = functional.relu(x + self.body(x))
        return self.head(functional.max_pool2d(x, 2).mean((2, 3)))


class Encoder(nn.Module):
    """Two layers of a transformer over words and places."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 16)
        self.places = nn.Parameter(torch.randn(1, 6, 16) * 0.1)
        layer = nn.TransformerEncoderLayer(16, 4, 32, 0.0, "gelu", batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Any) -> Any:
        """[N, T] -> [N, CLASSES]"""
        return self.head(self.layers(self.words(x) + self.places).mean(1))


class Recurrent(nn.Module):
    """An LSTM in both directions, two layers, and a GRU."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 6, 2, batch_first=True, bidirectional=True)
        self.gru = nn.GRU(12, 8, batch_first=True)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Any) -> Any:
        """[N, T, 4] -> [N, CLASSES]"""
        y, _ = self.gru(self.lstm(x)[0])
        return self.head(y[:, -1])


def images(random: np.random.Generator) -> np.ndarray:
    return random.standard_normal((BATCH, 3, 16, 16)).astype(np.float32)


def words(random: np.random.Generator) -> np.ndarray:
    return random.integers(0, 20, (BATCH, 6))


def signals(random: np.random.Generator) -> np.ndarray:
    return random.standard_normal((BATCH, 7, 4)).astype(np.float32)


NETWORKS: dict[str, tuple[Callable[[], Any], Callable[[np.random.Generator], np.ndarray]]] = {
    "residual": (Residual, images),
    "encoder": (Encoder, words),
    "recurrent": (Recurrent, signals),
}

OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda weights: torch.optim.SGD(weights, 0.05, momentum=0.9, nesterov=True),
    "adamw": lambda weights: torch.optim.AdamW(weights, 1e-3, weight_decay=1e-2),
}


def built(network_type: Callable[[], Any]) -> Any:
    """A network whose parameters differ: exporters store equal ones once, and then they are one."""
    torch.manual_seed(0)
    network = network_type()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.05)
    return network


def exported(network: Any, example: np.ndarray, path: Path) -> ir.Model:
    """The network as ONNX, with weights of its own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter, about itself
        torch.onnx.export(
            network,
            (torch.from_numpy(example),),
            str(path),
            input_names=["x"],
            output_names=["y"],
            dynamic_axes={"x": {0: "N"}, "y": {0: "N"}},
            opset_version=17,
            dynamo=False,
            training=torch.onnx.TrainingMode.EVAL,
            do_constant_folding=False,
        )
    model = load_model(path)
    separate_statistics(model)
    return model


def channels_last(x: Any) -> Any:
    """Images as TrainableGraph arranges them; anything else as it is."""
    return x.contiguous(memory_format=torch.channels_last) if x.ndim == 4 else x


def losses(
    forward: Callable[[Any], Any], module: Any, make: Callable[[Any], Any], batches: list[Any]
) -> Iterator[float]:
    """The plain loop."""
    optimizer = make(module.parameters())
    module.train()
    for x, labels in batches:
        optimizer.zero_grad()
        loss = functional.cross_entropy(forward(x), labels)
        loss.backward()
        optimizer.step()
        yield loss.item()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", NETWORKS)
def test_losses_are_those_of_plain_torch(name: str, optimizer: str, tmp_path: Path) -> None:
    network_type, data = NETWORKS[name]
    random = np.random.default_rng(0)
    batches = [
        (torch.from_numpy(data(random)), torch.from_numpy(random.integers(0, CLASSES, BATCH)))
        for _ in range(STEPS)
    ]
    network = built(network_type)
    model = exported(network, data(random), tmp_path / "network.onnx")
    graph = TrainableGraph(model)
    make = OPTIMIZERS[optimizer]
    ours = list(losses(lambda x: graph({"x": x}, ["y"])["y"], graph, make, batches))
    # Kernels round differently for images that lie in memory in another order.
    network = network.to(memory_format=torch.channels_last)
    theirs = list(losses(lambda x: network(channels_last(x)), network, make, batches))
    np.testing.assert_allclose(ours, theirs, rtol=TOLERANCE)
    assert np.ptp(theirs) > 100 * TOLERANCE  # something was learned

    # What was learned computes in onnxruntime what the network computes.
    graph.write_back(model)
    x = data(random)
    (found,) = run(open_session(model, level=Level.DISABLED, threads=1), {"x": x}).values()
    network.eval()
    with torch.no_grad():
        wanted = network(channels_last(torch.from_numpy(x))).numpy()
    np.testing.assert_allclose(found, wanted, rtol=0, atol=20 * TOLERANCE * np.abs(wanted).max())


@pytest.mark.parametrize("name", NETWORKS)
def test_every_parameter_of_the_network_is_learned(name: str, tmp_path: Path) -> None:
    network_type, data = NETWORKS[name]
    network = built(network_type)
    example = data(np.random.default_rng(0))
    graph = TrainableGraph(exported(network, example, tmp_path / "network.onnx"))
    count = sum(weight.numel() for weight in graph.weights)
    assert count == sum(weight.numel() for weight in network.parameters())
