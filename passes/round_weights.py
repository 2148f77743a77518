"""Weights are rounded so that the outputs of their layer change least.

What a layer reads in the quantized model is looked at on the calibration data. Rounding one weight
up or down is made good for by the others, in closed form (:mod:`slimctl.numerics.second_order`) or
by a search (:mod:`slimctl.numerics.adaptive_rounding`); scales stay as they are, so the result runs
as fast. Layers go in graph order, as many at a time as memory allows, and those behind see the
rounded ones before them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import ClassVar, Final, Literal, NamedTuple, Protocol

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from pydantic import Field

from slimctl.core.contract import Context, Effect, Pass, PassReport, Skipped
from slimctl.core.errors import UnsupportedModelError
from slimctl.graph.edit import NameScope, add_initializer, clone_model, remove_dead
from slimctl.numerics.adaptive_rounding import round_adaptive
from slimctl.numerics.affine import along
from slimctl.numerics.second_order import round_second_order, rounding_error
from slimctl.passes._input_moments import Reader
from slimctl.passes._linear_samples import LinearLayer, linear_layer
from slimctl.passes._linear_write import Bias
from slimctl.passes._portions import in_portions
from slimctl.passes._quantized_layers import QuantizedLayer, quantized_layers, was_quantized
from slimctl.passes.bias_correction import BiasCorrection, correct_biases

_RIDGES: Final = (0.01, 0.1, 1.0)
"""Tried on the other half of the rows: with few of them, correlations are mostly chance."""

_BUDGET_BYTES: Final = 1 << 27
"""Second moments that are held at once."""

_NARROW: Final = {4: 7, 8: 127}
"""Largest magnitude of a code by its bits: weights are symmetric and leave the lowest out."""


class _Rule(Protocol):
    """How the weights of a layer are rounded: as :func:`round_second_order` takes them."""

    def __call__(
        self,
        matrix: NDArray[np.float64],
        scale: NDArray[np.float64],
        moments: NDArray[np.float64],
        *,
        low: int,
        high: int,
        ridge: float,
    ) -> NDArray[np.int64]: ...


class _Target(NamedTuple):
    """One layer to round.

    Attributes:
        quantized: The layer in the quantized model.
        linear: Its original as matrices.
        data: Name of what it reads in the quantized model.
        centered: Mean errors go into its bias later.
    """

    quantized: QuantizedLayer
    linear: LinearLayer
    data: str
    centered: bool

    @property
    def bytes(self) -> int:
        """Of its second moments, for both halves of the rows."""
        groups, _, inputs = map(int, self.linear.matrix().shape)
        return 2 * 8 * groups * inputs * inputs


class RoundWeights(Pass):
    """Round quantized weights so that what their layers compute changes least."""

    name: ClassVar[str] = "round-weights"
    summary: ClassVar[str] = "Round weights so that what their layers compute changes least"
    effect: ClassVar[Effect] = Effect.APPROXIMATE
    needs_data: ClassVar[bool] = True
    after: ClassVar[frozenset[str]] = frozenset({"quantize-static"})
    not_after: ClassVar[frozenset[str]] = frozenset({"qoperator", "bias-correction"})

    method: Literal["second-order", "adaround"] = Field(
        "second-order",
        description="GPTQ's rule, in closed form; or AdaRound's search, which takes a minute where "
        "the other takes seconds, and leaves a little less of the error.",
    )
    steps: int = Field(1000, ge=1, description="adaround: of the search in each layer.")

    def _rule(self) -> _Rule:
        if self.method == "adaround":
            return partial(round_adaptive, steps=self.steps)
        return round_second_order

    def requires(self, model: ir.Model) -> None:
        """Wants a model with quantized weights.

        Raises:
            UnsupportedModelError: There is none.
        """
        found = any(node.op_type == "DequantizeLinear" for node in model.graph.all_nodes())
        if not found and not was_quantized(model):
            raise UnsupportedModelError(
                "No layer has quantized weights, so there is nothing to round",
                fix="put round-weights behind quantize-static",
            )

    def apply(self, model: ir.Model, context: Context) -> PassReport:
        """Rounds every layer anew for which that holds on rows that it was not computed from."""
        rounded = clone_model(model)
        corrected = BiasCorrection.name in context.later
        layers, skipped = quantized_layers(rounded, context.reference)
        targets = []
        for layer in layers:
            found = _target(layer, corrected)
            if isinstance(found, str):
                skipped.append(Skipped(layer.name, found))
            else:
                targets.append(found)
        left: dict[str, float] = {}
        names = NameScope(rounded)
        for portion in in_portions(targets, lambda target: target.bytes, _BUDGET_BYTES):
            for target, moments in zip(portion, _observe(rounded, portion, context), strict=True):
                share = _round(target, moments, names, self._rule())
                if isinstance(share, str):
                    skipped.append(Skipped(target.quantized.name, share))
                else:
                    left[target.quantized.name] = share
            remove_dead(rounded)
        loss = self._loss(model, rounded, context) if left else ""
        if loss:
            skipped.extend(Skipped(name, loss) for name in left)
            return PassReport(skipped=tuple(skipped), notes=(f"dropped: {loss}",))
        model.graph = rounded.graph
        counts = Counter(t.quantized.node.op_type for t in targets if t.quantized.name in left)
        return PassReport(
            changed=dict(sorted(counts.items())),
            skipped=tuple(skipped),
            notes=_notes(left),
            facts={"error_left": {name: round(share, 4) for name, share in left.items()}},
        )

    def _loss(self, model: ir.Model, rounded: ir.Model, context: Context) -> str:
        """Why the outputs are better off without, as they will be with corrected biases."""
        before, after = (self._worst(each, context) for each in (model, rounded))
        if before is None or after is None or after > before:
            return ""
        return f"it does not help: the worst output falls from {before:.1f} to {after:.1f} dB"

    def _worst(self, model: ir.Model, context: Context) -> float | None:
        clone = clone_model(model)
        if BiasCorrection.name in context.later:
            correct_biases(clone, context.reference, context)
        return min(context.fidelity(clone, "scores").values(), default=None)


def _notes(left: Mapping[str, float]) -> tuple[str, ...]:
    if not left:
        return ()
    typical = float(np.median(list(left.values())))
    return (f"{typical:.0%} of the squared error of rounding is left (median of layers)",)


def _target(layer: QuantizedLayer, corrected: bool) -> _Target | str:
    linear = linear_layer(layer.original.node)
    if isinstance(linear, str):
        return linear
    codes, _, _ = layer.parameters()
    if codes.dtype.itemsize != 1:
        return f"its codes are {codes.dtype}"
    if len(layer.dequantizer.outputs[0].uses()) > 1:
        return "several layers share its weights"
    data = layer.node.inputs[0]
    assert data is not None, "checked when the layer was recognized"
    return _Target(layer, linear, data.name or "", corrected and Bias(linear).free)


class _Moments:
    """Second moments of what a layer reads, for two halves of the rows.

    They are summed up around the mean of the first rows: the difference of large numbers would not
    be one of squares any more.
    """

    def __init__(self, groups: int, inputs: int) -> None:
        self._count = np.zeros(2)
        self._middle: NDArray[np.float32] | None = None  # [groups, inputs]
        self._sum = np.zeros((2, groups, inputs))
        self._square = np.zeros((2, groups, inputs, inputs))

    def add(self, rows: NDArray[np.float32], odd: bool) -> None:
        """Rows [rows, groups, inputs]; those that are not finite are left out."""
        rows = rows[np.isfinite(rows).all(axis=(1, 2))]
        if not len(rows):
            return
        if self._middle is None:
            self._middle = rows.mean(axis=0)
        around = rows - self._middle
        grouped = np.ascontiguousarray(around.transpose(1, 2, 0))  # [groups, inputs, rows]
        half = int(odd)
        self._count[half] += len(rows)
        self._sum[half] += grouped.sum(axis=2)
        self._square[half] += grouped @ grouped.transpose(0, 2, 1)

    def of(self, half: int | None, *, centered: bool) -> NDArray[np.float64] | None:
        """``E[x x^T]`` [groups, inputs, inputs] of one half or of all rows; None without rows."""
        halves = slice(None) if half is None else slice(half, half + 1)
        count = float(self._count[halves].sum())
        if not count or self._middle is None:
            return None
        square = np.asarray(self._square[halves].sum(axis=0) / count)
        mean = self._sum[halves].sum(axis=0) / count
        spread = square - mean[:, :, None] * mean[:, None, :]
        if centered:
            return np.asarray(spread)
        mean += self._middle
        return np.asarray(spread + mean[:, :, None] * mean[:, None, :])


def _observe(model: ir.Model, portion: Sequence[_Target], context: Context) -> list[_Moments]:
    found = []
    for target in portion:
        groups, _, inputs = target.linear.matrix().shape
        found.append(_Moments(groups, inputs))
    readers = [Reader(t.linear, np.arange(t.linear.matrix().shape[2])) for t in portion]
    tensors = list(dict.fromkeys(target.data for target in portion))
    batches = sum(1 for _ in context.activations(model, tensors[:1]))
    seen = context.activations(model, tensors)
    shown = context.progress.track(seen, total=batches, label="looking at inputs of layers")
    for index, arrays in enumerate(shown):
        for target, reader, moments in zip(portion, readers, found, strict=True):
            x = arrays[target.data]
            places = reader.places(x, batches, (context.seed, index))
            if places is None:
                continue
            rows = reader.rows(x, places)
            odd = (index + places[:, 0]) % 2 == 1  # whole samples: they are independent
            for half in (False, True):
                moments.add(rows[odd == half], half)
    return found


def _round(target: _Target, moments: _Moments, names: NameScope, rule: _Rule) -> float | str:
    """Gives a layer new codes.

    The closed form says, whatever the rule, whether correlations of one half of the rows hold on
    the other, and how much of them.

    Returns:
        The share of the squared error that is left, or why the layer keeps the old codes.
    """
    first, second, both = (moments.of(h, centered=target.centered) for h in (0, 1, None))
    if both is None:
        return "its input never held a finite value"
    matrix = target.linear.matrix()
    scale = _scales(target)
    limit = _NARROW[ir.DataType.from_numpy(target.quantized.parameters()[0].dtype).bitwidth]
    nearest = target.linear.matrix(target.quantized.restored()) / scale[:, :, None]
    plain = np.rint(nearest)

    def fitted(by: _Rule, spread: NDArray[np.float64], ridge: float) -> NDArray[np.float64]:
        found = by(matrix, scale, spread, low=-limit, high=limit, ridge=ridge)
        return found.astype(np.float64)

    def error(codes: NDArray[np.float64], spread: NDArray[np.float64]) -> float:
        return rounding_error(matrix - codes * scale[:, :, None], spread)

    ridge = _RIDGES[1]
    if first is not None and second is not None:
        before = error(plain, second)
        tried = [error(fitted(round_second_order, first, ridge), second) for ridge in _RIDGES]
        ridge = _RIDGES[int(np.argmin(tried))]
        if min(tried) >= before:
            return "it does not help on rows that it was not computed from"
    codes = fitted(rule, both, ridge)
    _store(target, codes, names)
    return error(codes, both) / max(error(plain, both), 1e-30)


def _scales(target: _Target) -> NDArray[np.float64]:
    """The step of every output, [groups, outputs]."""
    _, scale, _ = target.quantized.parameters()
    groups, outputs, _ = target.linear.matrix().shape
    return np.broadcast_to(scale.astype(np.float64).reshape(-1), (groups * outputs,)).reshape(
        groups, outputs
    )


def _store(target: _Target, codes: NDArray[np.float64], names: NameScope) -> None:
    node, holder = target.quantized.dequantizer, target.quantized.holder
    old, scale, zero_point = target.quantized.parameters()
    weight = target.linear.weight_of(codes).astype(np.int64)
    attribute = node.attributes.get("axis")
    axis = None if scale.size == 1 or attribute is None else attribute.as_int()
    shifted = weight + along(zero_point, axis, weight.ndim).astype(np.int64)
    assert isinstance(node.graph, ir.Graph), "a node of a model"
    label = names.fresh(f"{target.quantized.name}_rounded")
    value = add_initializer(node.graph, label, shifted.astype(old.dtype))
    holder.replace_input_with(0, value)
