"""Moves the mean error of quantized weights into the bias.

Rounding a weight shifts the mean output of its channel by ``E[dW x] = dW E[x]``. Nagel et al.,
"Data-Free Quantization Through Weight Equalization and Bias Correction", ICCV 2019, section 4.2,
subtract that shift from the bias; here ``E[x]`` is measured on the calibration data (their
empirical form). A linear layer's mean output depends only on the mean of what each weight sees, so
the shift is exact, padding and strides included, without running the layer. What comes from layers
in front can be taken back, too (:mod:`slimctl.passes._bias_predecessors`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from pydantic import Field

from slimctl.core.contract import (
    Context,
    Effect,
    InputMean,
    Pass,
    PassReport,
    Skipped,
)
from slimctl.core.errors import UnsupportedModelError
from slimctl.graph.edit import (
    NameScope,
    clone_model,
    remove_dead,
)
from slimctl.passes._bias_predecessors import Predecessors
from slimctl.passes._bias_write import write_bias
from slimctl.passes._layers import expected_output, linear_input
from slimctl.passes._quantized_layers import (
    QuantizedLayer,
    observable_nodes,
    quantized_layers,
    was_quantized,
    weight_dequantizer,
)


class BiasCorrection(Pass):
    """Move the mean error of quantized weights into the bias."""

    name: ClassVar[str] = "bias-correction"
    summary: ClassVar[str] = "Move the mean error of quantized weights into the bias"
    effect: ClassVar[Effect] = Effect.APPROXIMATE
    needs_data: ClassVar[bool] = True
    after: ClassVar[frozenset[str]] = frozenset({"quantize-static"})
    not_after: ClassVar[frozenset[str]] = frozenset({"qoperator"})

    inputs: Literal["float", "quantized"] = Field(
        "float",
        description="What shows the mean error of a layer: its inputs in the float model; or, one "
        "layer after another, those in the quantized model, so that the error of what stands in "
        "front goes, too.",
    )

    def requires(self, model: ir.Model) -> None:
        """Wants a model with quantized weights.

        Raises:
            UnsupportedModelError: There is none.
        """
        found = any(weight_dequantizer(node) is not None for node in observable_nodes(model))
        if not found and not was_quantized(model):
            raise UnsupportedModelError(
                "No layer has quantized weights, so there is no error to correct",
                fix="put bias-correction behind quantize-static",
            )

    def apply(self, model: ir.Model, context: Context) -> PassReport:
        """Corrects each layer for which the correction holds on data it was not computed from."""
        before, uncorrected = context.fidelity(model), clone_model(model)
        gains, skipped = correct_biases(model, context.reference, context)
        loss = _loss(before, context.fidelity(model)) if gains else ""
        if loss:  # a few samples may mislead
            loss = _loss(context.fidelity(uncorrected, "scores"), context.fidelity(model, "scores"))
        if loss:
            model.graph = clone_model(uncorrected).graph
            skipped.extend(Skipped(name, loss) for name in gains)
            gains = {}
        notes = _notes(gains)
        if self.inputs == "quantized":
            found, note = _in_order(uncorrected, model, context)
            if found is not None:
                (gains, skipped), notes = found, ()
            notes = (*notes, note)
        return PassReport(
            changed={"bias": len(gains)},
            skipped=tuple(skipped),
            notes=notes,
            facts={"explained": {name: round(gain, 4) for name, gain in sorted(gains.items())}},
        )


Corrected = tuple[dict[str, float], list[Skipped]]
"""The share of the squared mean error that goes, by layer; and the layers left alone."""


def _in_order(
    uncorrected: ir.Model, model: ir.Model, context: Context
) -> tuple[Corrected | None, str]:
    """Corrects one layer after another instead, if that is better.

    Args:
        uncorrected: As it was quantized.
        model: Corrected by the means of the float model; changed in place if that is worse.
        context: Gives data.
    """
    walked = clone_model(uncorrected)
    found = correct_biases(walked, context.reference, context, in_order=True)
    before, after = (
        min(context.fidelity(each, "scores").values(), default=0.0) for each in (model, walked)
    )
    measured = f"one layer after another, the worst output keeps {after:.1f} dB on these samples"
    if after <= before:
        return None, f"dropped: {measured}, and {before:.1f} dB by the means of the float model"
    model.graph = walked.graph
    return found, f"{measured}, instead of {before:.1f} dB by the means of the float model"


def correct_biases(
    model: ir.Model, reference: ir.Model, context: Context, *, in_order: bool = False
) -> Corrected:
    """Corrects every layer for which it holds on the other half of the data; outputs are not run.

    Args:
        model: Quantized; changed in place.
        reference: The float model that it was made from.
        context: Gives the means of its layers' inputs.
        in_order: Correct what comes from in front of a layer, too.
    """
    candidates, skipped = quantized_layers(model, reference)
    before = Predecessors(model, reference, candidates, context) if in_order else None
    layers = [linear_input(candidate.original) for candidate in candidates]
    means = context.input_means(reference, layers)
    names = NameScope(model)
    gains: dict[str, float] = {}
    for candidate in candidates:
        found = _correct(candidate, means, names, before)
        if isinstance(found, str):
            skipped.append(Skipped(candidate.node.name or "", found))
        else:
            gains[candidate.node.name or ""] = found
    remove_dead(model)  # the biases before
    return gains, skipped


def _loss(before: Mapping[str, float], after: Mapping[str, float]) -> str:
    """What the corrections of all layers together cost the worst output; empty when nothing."""
    if not before or min(after.values()) >= min(before.values()):
        return ""
    return (
        "the corrections together do not help: the worst output falls from "
        f"{min(before.values()):.1f} to {min(after.values()):.1f} dB"
    )


def _notes(gains: dict[str, float]) -> tuple[str, ...]:
    if not gains:
        return ()
    typical = float(np.median(list(gains.values())))
    return (f"mean output error of rounded weights lowered by {typical:.0%} (median of layers)",)


def _error(candidate: QuantizedLayer) -> NDArray[np.float32]:
    """What quantization added to the weight; exact in float32 where it is of any size."""
    return candidate.restored() - candidate.original.weight().astype(np.float32, copy=False)


def _correct(
    candidate: QuantizedLayer,
    means: Mapping[str, InputMean],
    names: NameScope,
    predecessors: Predecessors | None,
) -> float | str:
    """Changes the bias of one layer.

    Returns:
        The share of the squared mean error that the correction removes on data it was not computed
        from, or the reason why the layer was left alone.
    """
    mean = means.get(candidate.node.name or "")
    if mean is None:
        return "its input never held a finite value"
    error = _error(candidate)
    shift = expected_output(candidate.original, error, mean.both)
    gain = _gain(candidate, error, mean)
    seen = None if predecessors is None else predecessors.shift(candidate, shift)
    if seen is not None:
        shift, gain = seen
    elif gain <= 0:
        return "the correction does not help: it differs between the halves of the data"
    bias = candidate.original.bias()
    corrected = (0.0 if bias is None else bias.astype(np.float64)) - shift
    reason = write_bias(candidate, corrected, names, BiasCorrection.name)
    return reason or gain


def _gain(candidate: QuantizedLayer, error: NDArray[np.float32], mean: InputMean) -> float:
    """Cross-validated: each half of the samples is corrected by what the other half says."""
    if mean.second is None:
        return 1.0
    first = expected_output(candidate.original, error, mean.first)
    second = expected_output(candidate.original, error, mean.second)
    before = float(np.sum(first**2) + np.sum(second**2))
    after = float(2 * np.sum((first - second) ** 2))
    return 0.0 if before == 0.0 else 1.0 - after / before
