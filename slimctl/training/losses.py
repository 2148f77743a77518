"""What is minimized when a model learns from labels."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir
import torch
from torch import Tensor
from torch.nn import functional

from slimctl.core.errors import OptionError, SampleError, UnsupportedModelError
from slimctl.data.callables import load_function

Loss = Callable[[Tensor, Tensor], Tensor]
"""From an output [N, ...] and labels [N, ...] to a number, the mean over samples."""

BLANK = 0
"""Class of CTC that stands for no letter, as in PaddleOCR and CRNN models."""


def cross_entropy(scores: Tensor, labels: Tensor) -> Tensor:
    """Scores [N, C, ...] and classes [N, ...], or probabilities of classes [N, C, ...]."""
    return functional.cross_entropy(scores, labels)


def binary_cross_entropy(scores: Tensor, labels: Tensor) -> Tensor:
    """Scores before the sigmoid and targets from 0 to 1, of one shape."""
    return functional.binary_cross_entropy_with_logits(scores, labels.to(scores.dtype))


def mean_squared_error(outputs: Tensor, labels: Tensor) -> Tensor:
    """Outputs and targets of one shape."""
    return functional.mse_loss(outputs, labels.to(outputs.dtype))


def ctc(scores: Tensor, labels: Tensor) -> Tensor:
    """Graves et al., 2006. Scores [N, T, C], letters [N, L] padded with -1; blank is class 0."""
    logs = torch.log_softmax(scores, -1).transpose(0, 1)
    lengths = (labels >= 0).sum(1)
    steps = torch.full((scores.shape[0],), scores.shape[1], dtype=torch.int64)
    return functional.ctc_loss(
        logs, labels.clamp_min(0), steps, lengths, blank=BLANK, zero_infinity=True
    )


_BY_NAME: dict[str, Loss] = {
    "cross-entropy": cross_entropy,
    "bce": binary_cross_entropy,
    "mse": mean_squared_error,
    "ctc": ctc,
}

_BEHIND = {"cross-entropy": "Softmax", "ctc": "Softmax", "bce": "Sigmoid"}
"""Losses that take scores, and what may make probabilities of them at the end of a model."""


def loss_named(name: str) -> Loss:
    """A loss by its name, or the function that ``module:function`` names.

    Raises:
        SourceError: There is no such function.
    """
    return _BY_NAME[name] if name in _BY_NAME else load_function(name)


def scores_of(model: ir.Model, loss: str, output: str) -> str:
    """Name of the tensor that a loss looks at.

    An output that a Softmax (or Sigmoid, for ``bce``) makes is looked at before it: losses of
    scores are exact where probabilities saturate.

    Args:
        model: The graph.
        loss: Name of the loss.
        output: Name of an output; the first of floats when empty.

    Raises:
        OptionError: There is no such output.
        UnsupportedModelError: No output holds floats.
    """
    value = find_output(model, output)
    return scores_behind(value, _BEHIND.get(loss, ""))


def scores_behind(value: ir.Value, operator: str) -> str:
    """What an operator at the end of a model makes its output from; the output itself without."""
    node = value.producer()
    if operator and node is not None and not node.domain and node.op_type == operator:
        (source,) = node.inputs
        assert source is not None, "it has one input"
        return source.name or ""
    return value.name or ""


def find_output(model: ir.Model, name: str) -> ir.Value:
    """An output of floats by name; the first when the name is empty.

    Raises:
        OptionError: There is no such output.
        UnsupportedModelError: No output holds floats.
    """
    floats = [v for v in model.graph.outputs if v.dtype is not None and v.dtype.is_floating_point()]
    if not floats:
        raise UnsupportedModelError(
            "No output of the model holds floats: there is nothing to learn from",
            where=f"graph {model.graph.name}",
            fix="cut the model before it turns scores into integers",
        )
    if not name:
        return floats[0]
    for value in floats:
        if value.name == name:
            return value
    names = ", ".join(value.name or "" for value in floats)
    raise OptionError(
        "--output-name", f"No output of floats is called '{name}'", fix=f"use {names}"
    )


def labeled(loss: Loss, name: str, scores: Tensor, labels: Tensor | None, place: str) -> Tensor:
    """The loss of one part of a batch.

    Raises:
        SampleError: There are no labels, or they do not fit the output.
    """
    if labels is None:
        raise SampleError(
            place,
            "labels",
            found="no labels",
            wanted=f"labels for --loss {name}",
            fix="add an array 'labels' to the npz file, class folders, or a column 'label'",
        )
    try:
        return loss(scores, labels)
    except (RuntimeError, IndexError, ValueError) as error:  # what torch raises for shapes
        raise SampleError(
            place,
            "labels",
            found=f"{str(labels.dtype).removeprefix('torch.')} of shape {list(labels.shape)}",
            wanted=f"labels that fit an output of shape {list(scores.shape)} ({error})",
            fix="choose --loss and --output-name that fit the labels",
        ) from error
