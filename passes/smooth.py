"""SmoothQuant: strong input channels of linear layers are weakened, their weights strengthened.

Transformers have a few channels that are a hundred times stronger than the rest, in front of every
linear layer; with one scale for all, the rest keeps a few levels. ``X W = (X / s) (s W)`` for any
positive factor per channel (Xiao et al., "SmoothQuant: Accurate and Efficient Post-Training
Quantization for Large Language Models", ICML 2023, section 4):

    s_j = max|X_j|^alpha / max|W_j|^(1 - alpha)

Where nothing else reads ``X`` the division goes into constants that make it (a normalization's
scale and shift, a factor); else one multiplication is added in front of the layers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from pydantic import Field

from slimctl.core.contract import Context, Effect, Outlook, Pass, PassReport, Skipped
from slimctl.core.target import Target
from slimctl.graph.edit import clone_model
from slimctl.graph.select import Patterns, Selection
from slimctl.graph.shapes import infer_shapes
from slimctl.numerics.affine import (
    INT8_NARROW,
    UINT8,
    Affine,
    affine_from_range,
    fake_quantize,
    symmetric_scales,
)
from slimctl.passes._layers import QUANTIZERS
from slimctl.passes._outlook import WORTH_DB, gain_note, why_not
from slimctl.passes._smooth_fold import Divider
from slimctl.passes._smooth_inputs import SharedInput, Strength, by_weight, shared_inputs, strengths

_ALPHAS: Final = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
"""Above, weights of single channels take the whole scale, and other data show it."""
_WORTH: Final = 0.8
"""Layers are smoothed when their error falls to this part of what it was: an added multiplication
costs time, too."""

_NOTHING_IN_FRONT: Final = "no factor or shift in front of it takes one number per channel"


@dataclass(frozen=True)
class _Choice:
    """What is done about one tensor.

    Attributes:
        shared: The tensor and the layers that read it.
        factors: What each channel is divided by, [channels].
        alpha: Where they come from.
        left: What is left of the expected error.
        gone: What goes of it, relative to the energy of the outputs.
    """

    shared: SharedInput
    factors: NDArray[np.float64]
    alpha: float
    left: float
    gone: float


class Smooth(Pass):
    """SmoothQuant: strong channels in front of linear layers are evened out."""

    name: ClassVar[str] = "smooth"
    summary: ClassVar[str] = "Even out strong channels in front of linear layers (SmoothQuant)"
    effect: ClassVar[Effect] = Effect.EXACT
    needs_data: ClassVar[bool] = True
    not_after: ClassVar[frozenset[str]] = QUANTIZERS

    alpha: float | None = Field(
        None,
        gt=0.0,
        le=1.0,
        description="How much of the strength moves into the weights.",
        json_schema_extra={"unset": "searched for each tensor"},
    )
    include: Patterns = Field(
        (), description="Smooth only matching layers: name glob, op:TYPE or re:REGEX; repeatable."
    )
    exclude: Patterns = Field(
        (), description="Leave matching layers as they are: as --include; repeatable."
    )

    def minimum_opset(self, model: ir.Model, target: Target) -> int:
        """What quantization will ask for, so that what is measured here serves it too."""
        del model
        return target.minimum_opset

    def apply(self, model: ir.Model, context: Context) -> PassReport:
        """Moves strength into weights, if what comes later makes more of that."""
        infer_shapes(model)
        selection = Selection(self.include, self.exclude)
        smooth = clone_model(model)
        found, skipped = shared_inputs(smooth, selection)
        divider = Divider(smooth, self.name)
        for shared in found:
            if not divider.can_divide(shared):
                skipped.extend(Skipped(name, _NOTHING_IN_FRONT) for name in shared.names)
        found = [shared for shared in found if divider.can_divide(shared)]
        choices = []
        for shared, strength in strengths(smooth, found, context):
            choice = self._choose(shared, strength)
            if isinstance(choice, str):
                skipped.extend(Skipped(name, choice) for name in shared.names)
            else:
                choices.append(choice)
        searched = choices and self.alpha is None
        reason = _too_little(choices, context.outlook(model, model, ())) if searched else ""
        if reason:
            skipped.extend(Skipped(name, reason) for c in choices for name in c.shared.names)
        if reason or not choices:
            return PassReport(skipped=tuple(skipped), notes=_unused(selection))
        for choice in choices:
            divider.divide(choice.shared, choice.factors)
        outlook = context.outlook(model, smooth, divider.changed)
        reason = why_not(outlook, context.later, "smoothed")
        if reason:
            skipped.extend(Skipped(name, reason) for c in choices for name in c.shared.names)
            return PassReport(skipped=tuple(skipped), notes=(f"dropped: {reason}",))
        model.graph = smooth.graph
        return PassReport(
            changed=_counts(choices, divider),
            skipped=tuple(skipped),
            notes=(gain_note(_text(choices, divider), outlook), *_unused(selection)),
            facts={
                "alpha": {c.shared.name: c.alpha for c in choices},
                "error_left": {c.shared.name: round(c.left, 4) for c in choices},
                "outlook_db": None if outlook is None else list(outlook),
            },
        )

    def _choose(self, shared: SharedInput, strength: Strength) -> _Choice | str:
        if not len(strength.rows[0]):
            return "its input never held a finite value"
        alphas = _ALPHAS if self.alpha is None else (self.alpha,)
        before = _error(shared, strength, np.ones(strength.peak.size))
        if before == 0.0:
            return "its input is quantized without an error"
        tried = [(alpha, _factors(shared, strength, alpha)) for alpha in alphas]
        errors = [_error(shared, strength, factors) / before for _, factors in tried]
        best = int(np.argmin(errors))
        if self.alpha is None and errors[best] > _WORTH:
            return f"no alpha lowers the error of its output below {_WORTH:.0%}"
        alpha, factors = tried[best]
        return _Choice(shared, factors, alpha, errors[best], before * (1.0 - errors[best]))


def _factors(shared: SharedInput, strength: Strength, alpha: float) -> NDArray[np.float64]:
    """Equation 4 of the paper; 1 for channels that never held anything or that nothing reads."""
    weights = shared.weight_peaks()
    known = (strength.peak > 0.0) & (weights > 0.0)
    x, w = np.where(known, strength.peak, 1.0), np.where(known, weights, 1.0)
    factors = x**alpha / w ** (1.0 - alpha)
    # One factor for all changes nothing: around 1, numbers stay in the middle of float32.
    middle = np.exp(np.mean(np.log(factors[known]))) if np.any(known) else 1.0
    return np.asarray(np.where(known, factors / middle, 1.0))


def _error(shared: SharedInput, strength: Strength, factors: NDArray[np.float64]) -> float:
    """Expected squared error of all outputs relative to their energy, with 8 bits for both sides.

    The input has one scale for [min, max], the weights one for each output.
    """
    low, high = float((strength.low / factors).min()), float((strength.high / factors).max())
    affine = affine_from_range(low, high, UINT8, symmetric=False)
    total = 0.0
    for layer, seen in zip(shared.layers, strength.rows, strict=True):
        columns = by_weight(layer, factors)  # [groups, 1, columns]
        rows = (seen.transpose(1, 0, 2) / columns).astype(np.float32)  # [groups, rows, columns]
        weight = (layer.matrix() * columns).astype(np.float32)  # [groups, outputs, columns]
        exact = rows @ weight.transpose(0, 2, 1)
        rounded = fake_quantize(rows, affine) @ _rounded(weight).transpose(0, 2, 1)
        energy = float(np.sum(exact.astype(np.float64) ** 2))
        total += float(np.sum((rounded - exact).astype(np.float64) ** 2)) / max(energy, 1e-30)
    return total


def _rounded(weight: NDArray[np.float32]) -> NDArray[np.float32]:
    """Weights [groups, outputs, columns] in 8 bits, one scale for each output."""
    flat = weight.reshape(-1, weight.shape[2])
    scale = symmetric_scales(flat, 0, INT8_NARROW)
    zero = np.zeros(scale.shape, np.int8)
    return fake_quantize(flat, Affine(scale, zero, INT8_NARROW), 0).reshape(weight.shape)


def _too_little(choices: Sequence[_Choice], outlook: Outlook | None) -> str:
    """Whether even all errors that would go, added up, are little beside those of the outputs.

    Convolutional networks have one linear layer at their end; trying it out would take longer than
    quantizing them.
    """
    if outlook is None:
        return ""
    gone = sum(choice.gone for choice in choices)
    noise = 10.0 ** (-outlook.model_db / 10.0)
    if gone >= noise * (1.0 - 10.0 ** (-WORTH_DB / 10.0)):
        return ""
    return (
        f"its error is little beside that of the outputs, which keep {outlook.model_db:.1f} dB as "
        "they are"
    )


def _counts(choices: Sequence[_Choice], divider: Divider) -> dict[str, int]:
    counts = Counter(layer.layer.node.op_type for c in choices for layer in c.shared.layers)
    added = {"Mul added": divider.added} if divider.added else {}
    return {**dict(sorted(counts.items())), **added}


def _text(choices: Sequence[_Choice], divider: Divider) -> str:
    typical = float(np.median([choice.left for choice in choices]))
    alphas = sorted(choice.alpha for choice in choices)
    return (
        f"{len(choices)} tensors smoothed with alpha {alphas[0]:g} to {alphas[-1]:g}, "
        f"{divider.added} multiplications added; {typical:.0%} of the expected error is left "
        "(median)"
    )


def _unused(selection: Selection) -> tuple[str, ...]:
    return tuple(f"the pattern '{pattern}' matched nothing" for pattern in selection.unused())
