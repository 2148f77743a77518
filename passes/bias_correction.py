"""Moves the mean error of quantized weights into the bias.

Rounding a weight shifts the mean output of its channel by ``E[dW x] = dW E[x]``. Nagel et al.,
"Data-Free Quantization Through Weight Equalization and Bias Correction", ICCV 2019, section 4.2,
subtract that shift from the bias; here ``E[x]`` is measured on the calibration data (their
empirical form). A linear layer's mean output depends only on the mean of what each weight sees, so
the shift is exact, padding and strides included, without running the layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

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
    add_initializer,
    clone_model,
    const_array,
    remove_dead,
    set_provenance,
)
from slimctl.passes._layers import expected_output, linear_input
from slimctl.passes._quantized_layers import (
    QuantizedLayer,
    observable_nodes,
    quantized_layers,
    was_quantized,
    weight_dequantizer,
)
from slimctl.passes._weights import BIAS_LIMIT, quantize_bias


class BiasCorrection(Pass):
    """Move the mean error of quantized weights into the bias."""

    name: ClassVar[str] = "bias-correction"
    summary: ClassVar[str] = "Move the mean error of quantized weights into the bias"
    effect: ClassVar[Effect] = Effect.APPROXIMATE
    needs_data: ClassVar[bool] = True
    after: ClassVar[frozenset[str]] = frozenset({"quantize-static"})
    not_after: ClassVar[frozenset[str]] = frozenset({"qoperator"})

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
            model.graph = uncorrected.graph
            skipped.extend(Skipped(name, loss) for name in gains)
            gains = {}
        return PassReport(
            changed={"bias": len(gains)},
            skipped=tuple(skipped),
            notes=_notes(gains),
            facts={"explained": {name: round(gain, 4) for name, gain in sorted(gains.items())}},
        )


def correct_biases(
    model: ir.Model, reference: ir.Model, context: Context
) -> tuple[dict[str, float], list[Skipped]]:
    """Corrects every layer for which it holds on the other half of the data; outputs are not run.

    Args:
        model: Quantized; changed in place.
        reference: The float model that it was made from.
        context: Gives the means of its layers' inputs.

    Returns:
        The share of the squared mean error that goes, by layer; and the layers left alone.
    """
    candidates, skipped = quantized_layers(model, reference)
    layers = [linear_input(candidate.original) for candidate in candidates]
    means = context.input_means(reference, layers)
    names = NameScope(model)
    gains: dict[str, float] = {}
    for candidate in candidates:
        found = _correct(candidate, means, names)
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


def _graph(node: ir.Node) -> ir.Graph:
    assert isinstance(node.graph, ir.Graph), "a node of a model"
    return node.graph


def _error(candidate: QuantizedLayer) -> NDArray[np.float32]:
    """What quantization added to the weight; exact in float32 where it is of any size."""
    return candidate.restored() - candidate.original.weight().astype(np.float32, copy=False)


def _correct(candidate: QuantizedLayer, means: Any, names: NameScope) -> float | str:
    """Changes the bias of one layer.

    Returns:
        The share of the squared mean error that the correction removes on data it was not computed
        from, or the reason why the layer was left alone.
    """
    mean: InputMean | None = means.get(candidate.node.name)
    if mean is None:
        return "its input never held a finite value"
    error = _error(candidate)
    shift = expected_output(candidate.original, error, mean.both)
    gain = _gain(candidate, error, mean)
    if gain <= 0:
        return "the correction does not help: it differs between the halves of the data"
    bias = candidate.original.bias()
    corrected = (0.0 if bias is None else bias.astype(np.float64)) - shift
    reason = _write_bias(candidate, corrected, names)
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


def _write_bias(
    candidate: QuantizedLayer, bias: NDArray[np.float64], names: NameScope
) -> str | None:
    """Stores the corrected bias where the layer keeps it; returns a reason when it cannot."""
    node, graph = candidate.node, _graph(candidate.node)
    if node.op_type == "MatMul":
        return _write_following_add(candidate, bias, names)
    current = node.inputs[2] if len(node.inputs) > 2 else None
    label = f"{node.name}_corrected_bias"
    data = node.inputs[0].producer() if node.inputs[0] is not None else None
    if data is None or data.op_type != "DequantizeLinear":
        value = add_initializer(graph, names.fresh(label), bias.astype(np.float32))
        _set_bias(node, value)
        return None
    scale = _int32_scale(candidate, data, current)
    if np.any(np.abs(bias) > scale.astype(np.float64) * 2 * BIAS_LIMIT):
        return "the corrected bias does not fit into int32"
    codes = quantize_bias(bias, scale)
    stored = add_initializer(graph, names.fresh(label), codes)
    old = current.producer() if current is not None else None
    if old is not None and old.inputs[1] is not None:
        scale_value = old.inputs[1]
    else:
        scale_value = add_initializer(graph, names.fresh(f"{label}_scale"), scale)
    attributes = [ir.AttrInt64("axis", 0)] if scale.ndim else []
    restored = ir.Node(
        "",
        "DequantizeLinear",
        [stored, scale_value],
        attributes,
        name=names.fresh_node(f"{label}_dq"),
    )
    restored.outputs[0].name = names.fresh(f"{label}_dq")
    set_provenance(restored, BiasCorrection.name)
    graph.insert_before(node, restored)
    _set_bias(node, restored.outputs[0])
    if old is not None and not old.outputs[0].uses():
        graph.remove(old, safe=True)
    return None


def _set_bias(node: ir.Node, value: ir.Value) -> None:
    if len(node.inputs) < 3:
        node.resize_inputs(3)
    node.replace_input_with(2, value)


def _int32_scale(
    candidate: QuantizedLayer, data: ir.Node, current: ir.Value | None
) -> NDArray[np.float32]:
    """Scale of the int32 bias: the existing one, or input scale times weight scale."""
    old = current.producer() if current is not None else None
    stored = const_array(old.inputs[1]) if old is not None else None
    if stored is not None:
        return stored.astype(np.float32)
    input_scale = const_array(data.inputs[1])
    weight = weight_dequantizer(candidate.node)
    assert weight is not None and input_scale is not None
    weight_scale = const_array(weight.inputs[1])
    assert weight_scale is not None
    scale = np.float32(input_scale) * weight_scale.astype(np.float32)
    if weight_scale.ndim and candidate.node.op_type == "ConvTranspose":
        scale = np.tile(scale, candidate.original.groups)
    return np.asarray(scale, np.float32)


def _write_following_add(
    candidate: QuantizedLayer, bias: NDArray[np.float64], names: NameScope
) -> str | None:
    """Corrects the constant that is added right behind a MatMul."""
    users = list(candidate.node.outputs[0].uses())
    add = users[0].node if len(users) == 1 else None
    if (
        add is None
        or add.op_type not in ("Add", "Sum")
        or candidate.node.outputs[0].is_graph_output()
    ):
        return "a MatMul without an Add behind it has no bias to correct"
    index = 1 - users[0].idx
    constant = const_array(add.inputs[index])
    if constant is None or constant.size != bias.size or constant.shape[-1:] != bias.shape:
        return "the Add behind the MatMul adds no vector over its channels"
    corrected = (constant.astype(np.float64).reshape(-1) + bias).reshape(constant.shape)
    label = names.fresh(f"{candidate.node.name}_corrected_bias")
    value = add_initializer(_graph(add), label, corrected.astype(constant.dtype))
    add.replace_input_with(index, value)
    return None
