"""What a metric loses: at each output of a model, and through each of its layers alone.

Through a layer alone: the layer gets the reference's tensors, rounded to its own scales, and what
it makes of them takes the place of the reference's tensor in the reference.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from slimctl.core.contract import Feeds, Progress, SilentProgress
from slimctl.core.errors import OptionError, SampleError
from slimctl.data.batch import Batch
from slimctl.data.sources import DataSource
from slimctl.evaluate.accuracy import check_needs
from slimctl.evaluate.layers import Coding, LayerError, find_codings
from slimctl.evaluate.metric import Measured, Metric
from slimctl.evaluate.metrics import open_metric
from slimctl.evaluate.metrics.function import FunctionMetric
from slimctl.graph.restart import restarted
from slimctl.graph.session import Products, open_session, run, tapped
from slimctl.runtime.session import Runtime


@dataclass(frozen=True)
class Drop:
    """A metric before and after.

    Attributes:
        output: Name of the output that it is measured at; empty where it is one of the model.
        reference: Of the reference.
        model: Of the model.
        drop: How much worse the model is.
    """

    output: str
    reference: float
    model: float
    drop: float


@dataclass(frozen=True)
class LayerDrop:
    """What a metric loses when one layer alone is quantized.

    Attributes:
        node: Its name.
        op_type: Its operator.
        tensor: Name of its output.
        own_db: SQNR of its output on the reference's rounded tensors.
        drops: One for each output that the metric is measured at.
    """

    node: str
    op_type: str
    tensor: str
    own_db: float
    drops: tuple[Drop, ...]

    @property
    def worst(self) -> Drop:
        """At the output that loses most."""
        return worst(self.drops)


@dataclass(frozen=True)
class MetricDrops:
    """All that a metric loses.

    Attributes:
        metric: As the user spelled it.
        outputs: One for each output that it can be measured at.
        layers: The layers that were looked at, those that cost most first.
    """

    metric: str
    outputs: tuple[Drop, ...]
    layers: tuple[LayerDrop, ...] = ()

    def at(self, output: str) -> Drop | None:
        """What is lost at an output; None where the metric is not measured."""
        return next((drop for drop in self.outputs if drop.output == output), None)

    def to_dict(self) -> dict[str, Any]:
        """All of it, JSON types only; the worst output first."""
        return {"metric": self.metric, **asdict(worst(self.outputs)), **asdict(self)}


def worst(drops: Iterable[Drop]) -> Drop:
    """The largest drop."""
    return max(drops, key=_cost)


def _cost(drop: Drop) -> tuple[bool, float]:
    return drop.drop != drop.drop, drop.drop  # NaN is worse than any number


def worst_layers(layers: Iterable[LayerError], count: int) -> list[LayerError]:
    """The layers that change their tensors most by themselves."""
    return sorted(layers, key=lambda layer: layer.own_db)[:count]


def metric_drops(
    model: ir.Model,
    reference: ir.Model,
    source: DataSource,
    metric: str,
    *,
    layers: Sequence[LayerError] = (),
    threads: int = 0,
    progress: Progress | None = None,
) -> MetricDrops:
    """Measures a metric of both models, and of the reference with single layers of the model.

    A metric that names no output is measured at each that it can read by itself. One pass is made
    over the data, and one more for each layer.

    Args:
        model: The quantized model.
        reference: The original, with the same inputs and outputs.
        source: Data opened for their interface.
        metric: See :mod:`slimctl.evaluate.metrics`.
        layers: Layers of the model to be looked at one by one.
        threads: Threads of onnxruntime, 0 for all cores.
        progress: Where to say how far the work is.

    Raises:
        OptionError: Unknown metric, or one that does not fit the model.
        SourceError: The metric needs labels and the data have none.
        SampleError: Labels are not what the metric needs.
        ModelExecutionError: onnxruntime refuses a model.
    """
    opened = open_metric(metric)
    check_needs(opened, source, reference)
    told = progress or SilentProgress()
    before, after = _Scores(opened.metric), _Scores(opened.metric)
    teacher, pupil = _Running(reference, threads), _Running(model, threads)
    for batch in told.track(source.batches(), total=None, label=f"evaluate {metric}"):
        expected = teacher(batch.feeds)
        before.add(expected, expected, batch)
        after.add(pupil(batch.feeds), expected, batch)
    del teacher, pupil  # each layer opens its own, and memory should not hold all
    drops = after.drops(before)
    codings = _codings(model, reference) if layers else {}
    found = []
    for layer in told.track(iter(layers), total=len(layers), label=f"{metric} by layers"):
        made = codings[layer.node, layer.tensor]
        alone = _Alone(made, codings.values(), model, reference, threads)
        scores = _Scores(opened.metric)
        for batch in source.batches():
            scores.add(*alone.outputs(batch.feeds), batch)
        named = (layer.node, layer.op_type, layer.tensor, layer.own_db)
        found.append(LayerDrop(*named, scores.drops(before)))
    found.sort(key=lambda layer: _cost(layer.worst), reverse=True)
    return MetricDrops(metric, drops, tuple(found))


class _Scores:
    """A metric of one model at each output that it can read by itself."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric
        self._measured: dict[str, Measured] = {}

    def add(self, found: Feeds, expected: Feeds, batch: Batch) -> None:
        """Adds one batch: the outputs of the model, and the reference's."""
        if not self._measured:
            places = _places(self._metric, expected, batch)
            self._measured = {name: Measured(metric) for name, metric in places.items()}
        for measured in self._measured.values():
            measured.update(found, batch.labels, batch.size, reference=expected)

    def drops(self, before: _Scores) -> tuple[Drop, ...]:
        """How much worse they are."""
        return tuple(
            _drop(name, before._measured[name], after) for name, after in self._measured.items()
        )


def _drop(output: str, before: Measured, after: Measured) -> Drop:
    reference, model = before.value(), after.value()
    loss = reference - model
    return Drop(output, reference, model, loss if after.higher_is_better else -loss)


def _places(metric: Metric, expected: Feeds, batch: Batch) -> dict[str, Metric]:
    """The metric at each output that it can read; under no name where it is one of the model."""
    if metric.output or isinstance(metric, FunctionMetric):
        return {metric.output: metric}
    alone = {name: metric.model_copy(update={"output": name}) for name in expected}
    reading = {name: one for name, one in alone.items() if _reads(one, expected, batch)}
    return reading or {"": metric}  # which reads several together, or says what it wants


def _reads(metric: Metric, expected: Feeds, batch: Batch) -> bool:
    """Whether it can read the output that it names, and the labels fit."""
    try:
        Measured(metric).update(expected, batch.labels, batch.size, reference=expected)
    except (OptionError, SampleError):
        return False
    return True


def _codings(model: ir.Model, reference: ir.Model) -> dict[tuple[str, str], Coding]:
    """Tensors of codes by node, and by the tensor of the reference that they stand for."""
    graph = reference.graph
    known = {value.name for node in graph for value in node.outputs}
    known |= {value.name for value in graph.inputs}
    found = (coding for coding in find_codings(model, Runtime(model)) if coding.tensor in known)
    return {(coding.node, coding.tensor): coding for coding in found}


class _Running:
    """A model that takes from some arrays what it asks for."""

    def __init__(self, model: ir.Model, threads: int) -> None:
        self._asked = [value.name or "" for value in model.graph.inputs]
        self._session = open_session(model, threads=threads, products=Products.NATIVE)

    def __call__(self, given: Mapping[str, Any]) -> Feeds:
        return run(self._session, {name: given[name] for name in self._asked if name in given})


class _Alone:
    """The reference with one layer of the model.

    Args:
        layer: What the layer makes.
        codings: All tensors of codes of the model that the reference knows.
        model: The quantized model.
        reference: The original.
        threads: Threads of onnxruntime.
    """

    def __init__(
        self,
        layer: Coding,
        codings: Collection[Coding],
        model: ir.Model,
        reference: ir.Model,
        threads: int,
    ) -> None:
        begun = restarted(model, {c.codes: _kind(c) for c in codings}, [layer.codes])
        rest = restarted(reference, {layer.tensor: ir.DataType.FLOAT})
        self._layer = layer
        self._read = {begun.inputs[c.codes]: c for c in codings if c.codes in begun.inputs}
        self._taken = rest.inputs.get(layer.tensor)
        self._names = [value.name or "" for value in reference.graph.outputs]
        inputs = {value.name for value in reference.graph.inputs}
        seen = {coding.tensor for coding in (layer, *self._read.values())} - inputs
        self._whole = _Running(tapped(reference, sorted(seen)), threads)
        self._begun, self._rest = _Running(begun.model, threads), _Running(rest.model, threads)

    def outputs(self, feeds: Feeds) -> tuple[Feeds, Feeds]:
        """Outputs with the layer, and those of the reference."""
        real = {**feeds, **self._whole(feeds)}
        read = {name: c.quantized(c.meant(real[c.tensor])) for name, c in self._read.items()}
        codes = self._begun({**feeds, **read})[self._layer.codes]
        tensor = self._layer.tensor
        made = self._layer.original(codes, real[tensor].dtype)
        found = self._rest(feeds if self._taken is None else {**feeds, self._taken: made})
        if tensor in found:  # an output is computed as it was: only its readers are given another
            found = {**found, tensor: made}
        return found, {name: real[name] for name in self._names}


def _kind(coding: Coding) -> ir.DataType:
    kind = np.uint8 if coding.zero_point is None else coding.zero_point.dtype
    return ir.DataType.from_numpy(np.dtype(kind))
