"""What a student is told about how far it is from its teacher."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from slimctl.core.errors import OptionError  # noqa: E402
from slimctl.training.distillation import (  # noqa: E402
    Distillation,
    Projection,
    Weights,
    classes_loss,
    relative_error,
    sigmoid_loss,
)
from slimctl.training.losses import cross_entropy  # noqa: E402
from slimctl.training.objective import FromLabels  # noqa: E402
from slimctl.training.pairs import (  # noqa: E402
    AttentionPair,
    FeaturePair,
    OutputPair,
    Pairs,
)
from slimctl.training.samples import Part  # noqa: E402

Tensor = torch.Tensor


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def softmax(scores: np.ndarray) -> np.ndarray:
    exponents = np.exp(scores - scores.max(1, keepdims=True))
    return exponents / exponents.sum(1, keepdims=True)


def test_classes_are_compared_as_the_formula_says() -> None:
    ours, theirs = random(5, 3), random(5, 3, seed=1)
    p, q = softmax(theirs.numpy() / 4), softmax(ours.numpy() / 4)
    expected = 16 * (p * np.log(p / q)).sum(1).mean()
    assert classes_loss(ours, theirs, 1, 4.0).item() == pytest.approx(expected, rel=1e-5)


def test_gradients_do_not_shrink_with_the_temperature() -> None:
    """At high temperatures they are those of a squared error (Hinton et al., 2015, eq. 4)."""
    theirs = random(4, 3, seed=1) - random(4, 3, seed=1).mean(1, keepdim=True)
    ours = (random(4, 3) - random(4, 3).mean(1, keepdim=True)).requires_grad_()
    classes_loss(ours, theirs, 1, 1000.0).backward()
    expected = (ours.detach() - theirs) / 3 / 4
    assert torch.allclose(ours.grad, expected, atol=1e-3)


def test_masked_scores_are_no_problem() -> None:
    ours = random(2, 3).requires_grad_()
    mask = torch.tensor([0.0, 0.0, -torch.inf])
    loss = classes_loss(ours + mask, random(2, 3, seed=1) + mask, -1, 1.0)
    loss.backward()
    assert torch.isfinite(loss) and torch.isfinite(ours.grad).all()
    assert (ours.grad[:, 2] == 0).all() and (ours.grad[:, :2] != 0).all()


def test_yes_or_no_is_a_divergence_of_two_probabilities() -> None:
    ours, theirs = random(5, 3), random(5, 3, seed=1)
    p, q = (1 / (1 + np.exp(-t.numpy() / 2)) for t in (theirs, ours))
    expected = 4 * (p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q))).mean()
    assert sigmoid_loss(ours, theirs, 2.0).item() == pytest.approx(expected, rel=1e-4)
    assert sigmoid_loss(theirs, theirs, 2.0).item() == pytest.approx(0, abs=1e-6)


def test_values_count_relative_to_their_size() -> None:
    theirs = random(6, 2)
    assert relative_error(1.1 * theirs, theirs).item() == pytest.approx(0.01, rel=1e-4)
    assert relative_error(110 * theirs, 100 * theirs).item() == pytest.approx(0.01, rel=1e-4)
    assert relative_error(torch.zeros(2), torch.zeros(2)).item() == 0


def test_the_temperature_falls_linearly() -> None:
    weights = Weights(0.9, 4.0, 1.0, 1.0, 1.0)
    assert [weights.temperature_at(done) for done in (0, 0.5, 1)] == [4, 2.5, 1]


@pytest.mark.parametrize("axis", [1, 2])
def test_a_projection_begins_where_least_squares_ends(axis: int) -> None:
    student = random(40, 5, 5)
    true = random(5, 7, seed=1)
    teacher = (student.movedim(axis, -1) @ true + 3).movedim(-1, axis)
    layer = Projection(FeaturePair("s", "t", axis, (5, 7)))
    layer.fit(student, teacher)
    assert relative_error(layer(student), teacher).item() < 1e-5
    layer.fit(student, -teacher)
    assert relative_error(layer(student), teacher).item() < 1e-5, "it is fitted once"


def test_dead_channels_do_not_hurt_a_projection() -> None:
    layer = Projection(FeaturePair("s", "t", 1, (3, 2)))
    layer.fit(torch.zeros(8, 3), random(8, 2))
    assert torch.isfinite(layer(torch.ones(8, 3))).all()


# the whole

PAIRS = Pairs(
    [OutputPair("y", "logits", "scores", "classes")],
    [FeaturePair("f", "g", 1, (2, 3))],
    [AttentionPair("a", "b", -1)],
)
FOUND = {"logits": random(4, 3), "f": random(4, 2), "a": random(4, 1, 2, 2)}
SAID = {"scores": random(4, 3, seed=1), "g": random(4, 3, seed=2), "b": random(4, 1, 2, 2, seed=3)}


def part(labels: Tensor | None = None) -> Part:
    return Part({"x": torch.zeros(4, 1)}, labels, np.arange(4), 4)


def objective(
    pairs: Pairs = PAIRS, said: Mapping[str, Tensor] = SAID, *, labels: bool = False
) -> Distillation:
    from_labels = FromLabels("logits", cross_entropy, "cross-entropy") if labels else None
    return Distillation(lambda _: said, pairs, Weights(0.75, 4.0, 1.0, 10.0, 100.0), from_labels)


def test_the_loss_is_the_weighted_sum() -> None:
    labels = torch.tensor([0, 1, 2, 0])
    whole = objective(labels=True)
    found = whole.loss(FOUND, part(labels), 0.5).item()
    layer = whole.extra[0]
    expected = (
        0.75 * classes_loss(FOUND["logits"], SAID["scores"], 1, 2.5)
        + 0.25 * cross_entropy(FOUND["logits"], labels)
        + 10 * relative_error(layer(FOUND["f"]), SAID["g"])
        + 100 * classes_loss(FOUND["a"], SAID["b"], -1, 1.0)
    )
    assert found == pytest.approx(expected.item(), rel=1e-5)
    assert whole.tensors == ("logits", "f", "a")


def test_without_labels_only_the_teacher_counts() -> None:
    alone = Pairs(PAIRS.outputs)
    expected = classes_loss(FOUND["logits"], SAID["scores"], 1, 1.0).item()
    assert objective(alone).loss(FOUND, part(), 1.0).item() == pytest.approx(expected)


def test_a_projection_goes_into_a_checkpoint_with_that_it_was_fitted() -> None:
    first, second = objective(), objective()
    first.loss(FOUND, part(), 0.0)
    second.extra.load_state_dict(first.extra.state_dict())
    with torch.no_grad():
        second.extra[0].linear.weight.add_(1)
    before = second.extra[0].linear.weight.clone()
    second.loss(FOUND, part(), 0.0)
    assert torch.equal(second.extra[0].linear.weight, before)


def test_equal_widths_need_no_projection() -> None:
    pairs = Pairs(PAIRS.outputs, [FeaturePair("f", "g", 1, (2, 2))])
    assert list(objective(pairs).extra.parameters()) == []


@pytest.mark.parametrize("name", ["scores", "g"])
def test_tensors_of_other_shapes_are_named(name: str) -> None:
    said = {**SAID, name: random(3, 3)}
    with pytest.raises(OptionError, match="has the shape"):
        objective(said=said).loss(FOUND, part(), 0.0)
