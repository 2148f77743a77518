"""What a student learns from a teacher: its outputs, its features and its attention maps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from slimctl.core.errors import OptionError
from slimctl.training.objective import FromLabels
from slimctl.training.pairs import FeaturePair, OutputPair, Pairs
from slimctl.training.samples import Part

_LEAST_LOG = -1e4
"""Of probabilities: those of masked places are 0, and 0 times infinity is no number."""

_TINY = 1e-12
"""Energy of a tensor that is zero everywhere: nothing is divided by less."""

_FIT_ROWS = 4096
"""Positions that a projection is fitted on before the first step."""

_RIDGE = 1e-3
"""Added to the diagonal of the moments, relative to their mean: dead channels have none."""


@dataclass(frozen=True)
class Weights:
    """What counts how much.

    Attributes:
        alpha: Of the teacher's outputs; that of the labels is 1 - alpha.
        temperature: At the beginning.
        final_temperature: At the end.
        features: Of the features.
        attention: Of the attention maps.
    """

    alpha: float
    temperature: float
    final_temperature: float
    features: float
    attention: float

    def temperature_at(self, done: float) -> float:
        """The temperature when a share of the training is over.

        Falls linearly, as in annealed distillation (Jafari et al., EACL 2021): soft targets first,
        at the end those that the model is used with.
        """
        return self.temperature + (self.final_temperature - self.temperature) * done


# losses


def classes_loss(student: Tensor, teacher: Tensor, axis: int, temperature: float) -> Tensor:
    """T^2 KL(softmax(t/T) || softmax(s/T)), the mean over samples and places (Hinton et al., 2015).

    With the factor gradients stay as large as those of labels, whatever the temperature.

    Args:
        student: Scores, with the classes along ``axis``.
        teacher: The same of the teacher.
        axis: Of the classes.
        temperature: T.
    """
    ours = functional.log_softmax(student / temperature, axis).clamp_min(_LEAST_LOG)
    theirs = functional.log_softmax(teacher / temperature, axis).clamp_min(_LEAST_LOG)
    divergence = (theirs.exp() * (theirs - ours)).sum(axis)
    return temperature**2 * divergence.mean()


def sigmoid_loss(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """T^2 KL of one yes or no per element, the mean over all, as the loss of labels is."""
    target = torch.sigmoid(teacher / temperature)
    cross = functional.binary_cross_entropy_with_logits(student / temperature, target)
    entropy = functional.binary_cross_entropy_with_logits(teacher / temperature, target)
    return temperature**2 * (cross - entropy)


def relative_error(student: Tensor, teacher: Tensor) -> Tensor:
    """||s - t||^2 / ||t||^2: the same whatever the size and the unit of a tensor."""
    error = (student - teacher).square().mean()
    return error / teacher.square().mean().clamp_min(_TINY)


# features


class Projection(nn.Module):
    """Channels of the student as a linear map to those of the teacher; dropped after training.

    FitNets (Romero et al., 2015) learn it from nothing; here least squares on the first samples
    is where it begins, so that what it can say is not learned in steps that the student needs.

    Args:
        pair: The tensors.
    """

    fitted: Tensor

    def __init__(self, pair: FeaturePair) -> None:
        super().__init__()
        ours, theirs = pair.widths
        self._axis = pair.axis
        self.linear = nn.Linear(ours, theirs)
        self.register_buffer("fitted", torch.zeros((), dtype=torch.bool))

    def forward(self, feature: Tensor) -> Tensor:
        """[..., ours, ...] -> [..., theirs, ...]"""
        found: Tensor = self.linear(feature.movedim(self._axis, -1))
        return found.movedim(-1, self._axis)

    @torch.no_grad()
    def fit(self, student: Tensor, teacher: Tensor) -> None:
        """Sets the map to what fits best, once."""
        if bool(self.fitted):
            return
        self.fitted.fill_(True)
        x = _positions(student, self._axis)
        y = _positions(teacher, self._axis)
        mean_x, mean_y = x.mean(0), y.mean(0)
        moments = (x - mean_x).T @ (x - mean_x)
        scale = moments.diagonal().mean().clamp_min(_TINY)
        moments += _RIDGE * scale * torch.eye(len(moments), dtype=x.dtype, device=x.device)
        weight = torch.linalg.solve(moments, (x - mean_x).T @ (y - mean_y))  # [ours, theirs]
        self.linear.weight.copy_(weight.T)
        self.linear.bias.copy_(mean_y - mean_x @ weight)


def _positions(tensor: Tensor, axis: int) -> Tensor:
    """[N, ..., C, ...] -> [positions, C], at most as many as are needed, evenly spread."""
    rows = tensor.movedim(axis, -1).flatten(0, -2)
    return rows[:: max(len(rows) // _FIT_ROWS, 1)].double()


# the whole


class Distillation:
    """Outputs, features and attention maps of a teacher, and labels where there are some.

    loss = alpha outputs + (1 - alpha) labels + w_f features + w_a attention, each the mean over its
    pairs. Without labels alpha is 1.

    Args:
        teacher: Says what its tensors hold for some samples.
        pairs: What is compared with what.
        weights: What counts how much.
        labels: The loss of labels; None without.
    """

    def __init__(
        self,
        teacher: Callable[[Part], Mapping[str, Tensor]],
        pairs: Pairs,
        weights: Weights,
        labels: FromLabels | None,
    ) -> None:
        self._teacher, self._labels, self._weights = teacher, labels, weights
        self._outputs, self._features = pairs.outputs, pairs.features
        self._attention = pairs.attention
        names = [*pairs.student, *([] if labels is None else labels.tensors)]
        self.tensors: Sequence[str] = tuple(dict.fromkeys(names))
        self._layers = nn.ModuleList(
            [
                nn.Identity() if pair.widths[0] == pair.widths[1] else Projection(pair)
                for pair in pairs.features
            ]
        )
        self.extra: nn.Module = self._layers

    def loss(self, found: Mapping[str, Tensor], part: Part, done: float) -> Tensor:
        """The loss of one part of a batch."""
        said = self._teacher(part)
        weights = self._weights
        alpha = 1.0 if self._labels is None else weights.alpha
        temperature = weights.temperature_at(done)
        soft = [_output_loss(pair, found, said, temperature) for pair in self._outputs]
        total = alpha * _mean(soft)
        if self._labels is not None:
            total = total + (1.0 - alpha) * self._labels.loss(found, part, done)
        if self._features:
            parts = [self._feature_loss(index, found, said) for index in range(len(self._features))]
            total = total + weights.features * _mean(parts)
        if self._attention:
            maps = [
                classes_loss(found[pair.student], said[pair.teacher], pair.axis, 1.0)
                for pair in self._attention
            ]
            total = total + weights.attention * _mean(maps)
        return total

    def _feature_loss(
        self, index: int, found: Mapping[str, Tensor], said: Mapping[str, Tensor]
    ) -> Tensor:
        pair, layer = self._features[index], self._layers[index]
        ours, theirs = found[pair.student], said[pair.teacher]
        if isinstance(layer, Projection):
            _check_places(pair, ours, theirs)
            layer.fit(ours, theirs)
        projected = layer(ours)
        _check_shapes(f"{pair.student}={pair.teacher}", projected, theirs)
        return relative_error(projected, theirs)


def _output_loss(
    pair: OutputPair, found: Mapping[str, Tensor], said: Mapping[str, Tensor], temperature: float
) -> Tensor:
    ours, theirs = found[pair.student], said[pair.teacher]
    _check_shapes(pair.name, ours, theirs)
    if pair.kind == "classes":
        return classes_loss(ours, theirs, pair.axis, temperature)
    if pair.kind == "sigmoid":
        return sigmoid_loss(ours, theirs, temperature)
    return relative_error(ours, theirs)


def _mean(losses: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(losses)).mean()


def _check_places(pair: FeaturePair, ours: Tensor, theirs: Tensor) -> None:
    sizes = [[n for i, n in enumerate(t.shape) if i != pair.axis] for t in (ours, theirs)]
    if sizes[0] != sizes[1]:
        raise _different(f"{pair.student}={pair.teacher}", ours, theirs)


def _check_shapes(what: str, ours: Tensor, theirs: Tensor) -> None:
    if ours.shape != theirs.shape:
        raise _different(what, ours, theirs)


def _different(what: str, ours: Tensor, theirs: Tensor) -> OptionError:
    return OptionError(
        "--teacher",
        f"'{what}' has the shape {list(ours.shape)} in the student and {list(theirs.shape)} in "
        "the teacher",
        fix="give a teacher that computes tensors of the same shapes, or other pairs: --feature",
    )
