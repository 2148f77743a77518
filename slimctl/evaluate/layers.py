"""What each layer of a quantized model loses by itself, and what is lost up to it.

The quantized model runs in the built-in runtime twice: as it is, and with every tensor of codes
replaced by the codes of the reference's tensor of the same name. In the second run each layer sees
what the reference has there, rounded to its own scales. The reference then runs on the same rounded
tensors: what its layer makes of them, quantized, is the best that the quantized layer could do. The
rest, counted in quantization steps, was done by the layer's weights, bias, scales and zero points;
in a sound int8 layer it is a fraction of a step, and its mean is almost zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from slimctl.core.contract import Feeds
from slimctl.evaluate.code_histogram import BINS, count_values
from slimctl.evaluate.metrics import Similarity
from slimctl.evaluate.replay import is_codes
from slimctl.evaluate.weight_noise import weight_noise
from slimctl.graph.edit import const_tensor
from slimctl.graph.scaled import recorded_scaling
from slimctl.runtime.kernels.quantize import dequantize_linear, quantize_linear
from slimctl.runtime.plan import Step
from slimctl.runtime.registry import Value
from slimctl.runtime.session import Probe, Runtime


class Coding(NamedTuple):
    """How a tensor of the reference stands in the quantized model.

    Attributes:
        tensor: Name of the real tensor, in both models.
        codes: Name of the tensor of codes.
        node: Name of the node that computes it.
        op_type: Its operator.
        scale: Of the codes.
        zero_point: Of the codes, None for 0.
        axis: Of channels, where there are several scales.
        value: The real tensor; its record says what the reference's is multiplied with to be it.
    """

    tensor: str
    codes: str
    node: str
    op_type: str
    scale: NDArray[Any]
    zero_point: NDArray[Any] | None
    axis: int
    value: ir.Value | None = None

    def factors(self, rank: int) -> NDArray[np.float32] | None:
        """What passes multiplied channels with, broadcasting; None where they did not."""
        return None if self.value is None else recorded_scaling(self.value, rank)

    def meant(self, reference: NDArray[Any]) -> NDArray[Any]:
        """The tensor that this one stands for, from the reference's."""
        factors = self.factors(reference.ndim)
        return reference if factors is None else reference * factors

    def quantized(self, real: NDArray[Any]) -> NDArray[Any]:
        """Codes of real values."""
        return quantize_linear(real, self.scale, self.zero_point, axis=self.axis)

    def rounded(self, reference: NDArray[Any]) -> NDArray[Any]:
        """The reference's tensor as it is after quantizing."""
        return self.original(self.quantized(self.meant(reference)), reference.dtype)

    def original(self, codes: NDArray[Any], kind: np.dtype[Any]) -> NDArray[Any]:
        """The reference's tensor, of its type, that codes stand for."""
        restored = self.restored(codes).astype(kind)
        factors = self.factors(codes.ndim)
        return restored if factors is None else restored / factors

    def restored(self, codes: NDArray[Any]) -> NDArray[Any]:
        """Real values of codes."""
        return dequantize_linear(codes, self.scale, self.zero_point, axis=self.axis)


@dataclass(frozen=True)
class LayerError:
    """One layer's output against the reference.

    Attributes:
        node: Its name.
        op_type: Its operator.
        tensor: Name of its output.
        own_db: SQNR of the layer on the reference's rounded tensors.
        best_db: SQNR of the best layer with the same output parameters.
        total_db: SQNR against the reference when the whole model is quantized.
        cosine: Cosine similarity of the layer on the reference's rounded tensors.
        mean_steps: Mean difference from the best layer, in quantization steps.
        rms_steps: Root mean square of it.
        expected_steps: What rounding of weights and outputs lets expect, likewise.
        channel_ratio: The largest ratio of both of any channel (axis 1).
        clipped: Part of the reference's values that the output's range cuts off.
        used_range: Part of the codes' range that the reference's values need, at most 1.
        low: Least value that the codes represent; None where channels have scales of their own.
        high: Largest value that they represent.
        histogram: The reference's values around that range, see ``code_histogram``; empty where
            channels have scales of their own.
    """

    node: str
    op_type: str
    tensor: str
    own_db: float
    best_db: float
    total_db: float
    cosine: float
    mean_steps: float
    rms_steps: float
    expected_steps: float
    channel_ratio: float
    clipped: float
    used_range: float
    low: float | None = None
    high: float | None = None
    histogram: tuple[int, ...] = ()

    @property
    def excess_db(self) -> float:
        """What the layer loses beyond the rounding of its output."""
        return self.best_db - self.own_db


_TWO_ROUNDINGS = 1 / 6
"""Variance of the difference of two codes that were rounded independently, in squared steps."""


class _Totals:
    """What accumulates for one layer."""

    def __init__(self) -> None:
        self.own, self.best, self.total = Similarity(), Similarity(), Similarity()
        self.steps = 0.0
        self.squares: NDArray[Any] = np.zeros(1)  # by channel
        self.expected: NDArray[Any] = np.zeros(1)  # likewise
        self.per_channel = 0
        self.clipped = 0
        self.low, self.high = np.inf, -np.inf
        self.histogram = np.zeros(BINS, np.int64)

    def add(
        self,
        coding: Coding,
        real: NDArray[Any],
        codes: NDArray[Any],
        noise: NDArray[Any] | None,
    ) -> None:
        """Adds a layer's codes, what the reference makes of the same input, expected noise."""
        best = coding.quantized(real)
        self.own.update(real, coding.restored(codes))
        self.best.update(real, coding.restored(best))
        steps = codes.astype(np.float64) - best
        self.steps += float(steps.sum())
        others = tuple(i for i in range(steps.ndim) if i != 1)
        self.squares = self.squares + np.square(steps).sum(axis=others)
        count = steps.size // max(self.squares.size, 1)
        self.per_channel += count
        self.expected = self.expected + count * (_TWO_ROUNDINGS + (0.0 if noise is None else noise))
        if coding.scale.size == 1:
            values = real / coding.scale.reshape(())
            zero = 0 if coding.zero_point is None else float(coding.zero_point.reshape(()))
            limits = np.iinfo(codes.dtype)
            self.low = min(self.low, float(values.min(initial=np.inf)) + zero)
            self.high = max(self.high, float(values.max(initial=-np.inf)) + zero)
            outside = (values > limits.max - zero + 0.5) | (values < limits.min - zero - 0.5)
            self.clipped += int(np.count_nonzero(outside))
            self.histogram += count_values(values + zero, limits.min, limits.max)

    def used(self, kind: np.dtype[Any]) -> float:
        """Part of the range of the type that the reference's values need."""
        limits = np.iinfo(kind)
        low, high = max(self.low, limits.min), min(self.high, limits.max)
        return max((high - low) / (limits.max - limits.min), 0.0) if high > low else 0.0


def layer_errors(
    model: ir.Model, reference: ir.Model, samples: Iterable[Feeds]
) -> tuple[LayerError, ...]:
    """Compares all layers on some samples, in the order in which they run.

    Args:
        model: The quantized model, as ``load_model`` leaves it.
        reference: The original, likewise.
        samples: Inputs of one run each.

    Raises:
        UnsupportedModelError: The runtime has no function for an operator.
        ModelExecutionError: A model cannot compute the inputs.
    """
    quantized, original = Runtime(model), Runtime(reference)
    made = {name for step in original.plan.steps for name in step.outputs}
    known = {*made, *original.plan.inputs}
    codings = {c.codes: c for c in find_codings(model, quantized) if c.tensor in known}
    inner = sorted({c.tensor for c in codings.values()} & made)
    totals = {name: _Totals() for name in codings}
    constants = {**quantized.plan.constants, **_widened(model)}
    for feeds in samples:
        real = {**feeds, **original.run(feeds, keep=inner)}
        best = _run_rounded(original, feeds, codings, real)
        fed = _fed(codings, real, best, totals, constants)
        quantized.run(feeds, probe=fed)
        quantized.run(feeds, probe=_free(codings, real, totals))
    return tuple(
        _error(coding, totals[name])
        for name, coding in codings.items()
        if totals[name].own.elements
    )


def find_codings(model: ir.Model, runtime: Runtime) -> list[Coding]:
    """Every tensor of codes whose parameters are constants, in the order in which they are made."""
    values = {v.name: v for node in model.graph for v in node.outputs if v.name}
    found: list[Coding] = []
    for step in runtime.plan.steps:
        for name in step.outputs:
            value = values.get(name)
            coding = None if value is None or not is_codes(value) else _coding(value, step)
            if coding is not None:
                found.append(coding)
    return found


def _coding(codes: ir.Value, step: Step) -> Coding | None:
    node = codes.producer()
    assert node is not None, "an input holds no codes"
    if node.op_type == "QuantizeLinear":
        real, parameters = node.inputs[0], node.inputs[1:3]
        tensor = None if real is None else real.name
    else:
        parameters = _output_parameters(node)
        real = _restored(codes)
        tensor = None if real is None else real.name
    arrays = [None if p is None or p.const_value is None else p.const_value for p in parameters]
    if not tensor or not arrays or arrays[0] is None or "block_size" in node.attributes:
        return None
    zero_point = arrays[1].numpy() if len(arrays) > 1 and arrays[1] is not None else None
    axis = node.attributes.get_int("axis", 1)
    named = (step.name, step.op_type)
    return Coding(tensor, codes.name or "", *named, arrays[0].numpy(), zero_point, axis, real)


def _output_parameters(node: ir.Node) -> list[ir.Value | None]:
    """Scale and zero point of the output of an operator in QOperator format."""
    places = {"QLinearConv": 6, "QLinearMatMul": 6, "QLinearAdd": 6, "QLinearMul": 6, "QGemm": 7}
    start = {**places, "QLinearConcat": 0, "QLinearWhere": 7}.get(node.op_type, 3)
    return list(node.inputs[start : start + 2])


def _restored(codes: ir.Value) -> ir.Value | None:
    """The real tensor that codes become, where a DequantizeLinear reads them."""
    readers = (use.node for use in codes.uses())
    restored = (node for node in readers if node.op_type == "DequantizeLinear")
    return next((node.outputs[0] for node in restored), None)


def _run_rounded(
    original: Runtime,
    feeds: Feeds,
    codings: Mapping[str, Coding],
    real: Mapping[str, Value],
) -> dict[str, Value]:
    """What each layer of the reference makes of its own tensors, rounded to the model's scales."""
    rounding = {coding.tensor: coding for coding in codings.values()}
    found: dict[str, Value] = {n: v for n, v in feeds.items() if n in rounding}

    def probe(step: Step, name: str, value: Value) -> Value:
        del step
        if name not in rounding:
            return value
        found[name] = value
        return rounding[name].rounded(real[name])

    rounded = {n: rounding[n].rounded(v) if n in rounding else v for n, v in feeds.items()}
    original.run(rounded, probe=probe)
    return found


def _widened(model: ir.Model) -> dict[str, Value]:
    """Weights of 4 bits as the int8 that kernels read: behind a Cast."""
    found: dict[str, Value] = {}
    for node in model.graph:
        stored = const_tensor(node.inputs[0]) if node.op_type == "Cast" else None
        if stored is not None and stored.dtype == ir.DataType.INT4:
            found[node.outputs[0].name or ""] = stored.numpy().astype(np.int8)
    return found


def _fed(
    codings: Mapping[str, Coding],
    real: Mapping[str, Value],
    best: Mapping[str, Value],
    totals: Mapping[str, _Totals],
    constants: Mapping[str, Value],
) -> Probe:
    """Compares each layer with the best one, and goes on with the reference's tensor."""

    def probe(step: Step, name: str, value: Value) -> Value:
        coding = codings.get(name)
        if coding is None or np.shape(value) != np.shape(real[coding.tensor]):
            return value
        source = codings.get(step.inputs[0])
        noise = None
        if source is not None:
            noise = weight_noise(step, source.meant(real[source.tensor]), constants)
        totals[name].add(coding, coding.meant(best[coding.tensor]), value, noise)
        return coding.quantized(coding.meant(real[coding.tensor]))

    return probe


def _free(
    codings: Mapping[str, Coding], real: Mapping[str, Value], totals: Mapping[str, _Totals]
) -> Probe:
    """Compares each layer with the reference, and goes on with what it computed."""

    def probe(step: Step, name: str, value: Value) -> Value:
        del step
        coding = codings.get(name)
        if coding is not None and np.shape(value) == np.shape(real[coding.tensor]):
            totals[name].total.update(coding.meant(real[coding.tensor]), coding.restored(value))
        return value

    return probe


def _error(coding: Coding, totals: _Totals) -> LayerError:
    elements = totals.own.elements
    kind = np.dtype(np.uint8) if coding.zero_point is None else coding.zero_point.dtype
    return LayerError(
        coding.node,
        coding.op_type,
        coding.tensor,
        totals.own.sqnr_db,
        totals.best.sqnr_db,
        totals.total.sqnr_db,
        totals.own.cosine,
        totals.steps / elements,
        float(np.sqrt(totals.squares.sum() / elements)),
        float(np.sqrt(totals.expected.mean() / max(totals.per_channel, 1))),
        float(np.sqrt(np.max(totals.squares / np.maximum(totals.expected, 1e-9), initial=0.0))),
        totals.clipped / elements,
        totals.used(kind),
        *_represented(coding, kind),
        tuple(totals.histogram.tolist()) if coding.scale.size == 1 else (),
    )


def _represented(coding: Coding, kind: np.dtype[Any]) -> tuple[float | None, float | None]:
    """The values of the least and the largest code; None where channels have several scales."""
    if coding.scale.size != 1:
        return None, None
    limits = np.iinfo(kind)
    scale = float(coding.scale.reshape(()))
    zero = 0 if coding.zero_point is None else int(coding.zero_point.reshape(()))
    return (limits.min - zero) * scale, (limits.max - zero) * scale
