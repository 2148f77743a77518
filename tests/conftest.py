"""Fixtures that tests of several folders use."""

from __future__ import annotations

import os

# One thread for each worker: with more than there are processors, small products of matrices wait
# for each other most of the time. numpy reads the number when it is imported.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from slimctl.core.contract import (
    Feeds,
    InputMean,
    LinearInput,
    Outlook,
    Progress,
    Range,
    RangeRequest,
    SampleSet,
    SilentProgress,
)
from slimctl.core.target import Target
from slimctl.graph.session import Level, open_session, run, tapped
from slimctl.targets import load_target


@dataclass
class PlainContext:
    """A context that measures the obvious way, independently of slimctl.calibration.

    Ranges are minima and maxima. Means of what a weight sees come from running the layer in
    onnxruntime with one-hot weights, sample by sample.
    """

    feeds: list[Feeds]
    reference: ir.Model
    target: Target = field(default_factory=lambda: load_target("cpu"))
    seed: int = 0
    later: Sequence[str] = ()
    progress: Progress = field(default_factory=SilentProgress)
    has_data: bool = True
    judge: Callable[[ir.Model], float] | None = None
    requests: list[RangeRequest] = field(default_factory=list)

    def observe(self, model: ir.Model, names: Sequence[str]) -> dict[str, list[np.ndarray]]:
        """Every value of some tensors, one array per sample."""
        inputs = {value.name for value in model.graph.inputs}
        inner = [name for name in names if name not in inputs]
        session = open_session(tapped(model, inner), level=Level.DISABLED, threads=1)
        found: dict[str, list[np.ndarray]] = {name: [] for name in names}
        for feed in self.feeds:
            results = {**feed, **run(session, feed)}
            for name in names:
                found[name].append(np.asarray(results[name]))
        return found

    def fidelity(self, model: ir.Model, samples: SampleSet = "few") -> Mapping[str, float]:
        del samples
        names = [value.name or "" for value in model.graph.outputs]
        ours, theirs = (self.observe(m, names) for m in (self.reference, model))
        found = {}
        for name in names:
            a, b = (np.concatenate([x.ravel() for x in side[name]]) for side in (ours, theirs))
            signal, noise = (float(np.sum(v**2, dtype=np.float64)) for v in (a, a - b))
            found[name] = 10 * np.log10(max(signal, 1e-30) / max(noise, 1e-30))
        return found

    def metric(self, model: ir.Model) -> float | None:
        return None if self.judge is None else self.judge(model)

    def example(self) -> Feeds | None:
        return self.feeds[0] if self.feeds else None

    def activations(
        self, model: ir.Model, tensors: Sequence[str], feeds: Iterable[Feeds] | None = None
    ) -> Iterator[Feeds]:
        given = self.feeds if feeds is None else list(feeds)
        observed = replace(self, feeds=given).observe(model, tensors)
        for index in range(len(given)):
            yield {name: arrays[index] for name, arrays in observed.items()}

    def taylor_terms(self, model: ir.Model, tensors: Sequence[str]) -> Iterator[Feeds]:
        from slimctl.training.taylor import taylor_terms  # torch is an extra

        return taylor_terms(model, tensors, self.feeds, seed=self.seed, threads=1)

    def ranges(self, model: ir.Model, request: RangeRequest) -> Mapping[str, Range]:
        self.requests.append(request)
        ranges = {}
        for name, arrays in self.observe(model, request.tensors).items():
            values = np.concatenate([array.ravel() for array in arrays])
            values = values[np.isfinite(values)]
            if values.size:
                ranges[name] = Range(float(values.min()), float(values.max()))
        return ranges

    def input_means(
        self, model: ir.Model, layers: Sequence[LinearInput]
    ) -> Mapping[str, InputMean]:
        observed = self.observe(model, sorted({layer.tensor for layer in layers}))
        means = {}
        for layer in layers:
            halves = [
                np.mean([_seen(array, layer) for array in observed[layer.tensor][half::2]], axis=0)
                for half in (0, 1)
            ]
            means[layer.node] = InputMean(halves[0], halves[1], (halves[0] + halves[1]) / 2)
        return means

    def channel_rms(self, model: ir.Model, axes: Mapping[str, int]) -> Mapping[str, np.ndarray]:
        found = {}
        for name, arrays in self.observe(model, sorted(axes)).items():
            values = np.moveaxis(np.stack(arrays).astype(np.float64), axes[name] + 1, 0)
            found[name] = np.sqrt((values.reshape(len(values), -1) ** 2).mean(axis=1))
        return found

    def outlook(self, model: ir.Model, other: ir.Model, changed: Collection[str]) -> Outlook | None:
        del model, other, changed
        return None

    def remembered(self, key: Hashable, compute: Callable[[], Any]) -> Any:
        del key
        return compute()


def _seen(array: np.ndarray, layer: LinearInput) -> np.ndarray:
    """Mean over positions of what each weight sees, by loops over kernel positions."""
    if not layer.kernel:
        moved = np.moveaxis(array, layer.channel_axis, -1)
        return moved.reshape(-1, moved.shape[-1]).mean(axis=0, dtype=np.float64)
    rank = len(layer.kernel)
    assert layer.auto_pad == "NOTSET", "explicit pads only"
    pads = [(layer.pads[i], layer.pads[i + rank]) for i in range(rank)]
    padded = np.pad(array.astype(np.float64), [(0, 0), (0, 0), *pads])
    out = np.zeros((array.shape[1], *layer.kernel))
    for position in np.ndindex(*layer.kernel):
        window: list[slice] = [slice(None), slice(None)]
        for axis, offset in enumerate(position):
            size = padded.shape[2 + axis]
            dilation, stride = layer.dilations[axis], layer.strides[axis]
            count = (size - dilation * (layer.kernel[axis] - 1) - 1) // stride + 1
            start = offset * dilation
            window.append(slice(start, start + (count - 1) * stride + 1, stride))
        out[(slice(None), *position)] = padded[tuple(window)].mean(axis=(0, *range(2, 2 + rank)))
    return out


@pytest.fixture
def plain_context() -> Callable[..., PlainContext]:
    """Builds a :class:`PlainContext`."""
    return PlainContext


@pytest.fixture
def outputs_of() -> Callable[..., list[np.ndarray]]:
    """Outputs of a model on samples, concatenated along samples, one array per output."""

    def outputs(model: ir.Model, feeds: list[Feeds], level: Level = Level.ALL) -> list[Any]:
        session = open_session(model, level=level, threads=1)
        results = [list(run(session, feed).values()) for feed in feeds]
        return [np.concatenate([r[i].ravel() for r in results]) for i in range(len(results[0]))]

    return outputs
