"""Losses of labels, by hand and by torch; where they look, and what they refuse."""

# ruff: noqa: E402 # the check for torch comes before what needs it
from __future__ import annotations

import itertools

import numpy as np
import onnx
import onnx_ir as ir
import pytest

torch = pytest.importorskip("torch", reason="torch is an extra")
from torch import Tensor
from torch.nn import functional

from slimctl.core.errors import OptionError, SampleError, SourceError, UnsupportedModelError
from slimctl.training.losses import find_output, labeled, loss_named, scores_of
from slimctl.training.objective import FromLabels
from slimctl.training.samples import Part
from slimctl.training.settings import check_loss

SCORES = torch.tensor([[2.0, 0.0, -1.0], [0.5, 0.5, 3.0]])


def test_cross_entropy_by_hand() -> None:
    classes = torch.tensor([0, 1])
    logs = [2 - np.log(np.exp([2, 0, -1]).sum()), 0.5 - np.log(np.exp([0.5, 0.5, 3]).sum())]
    assert loss_named("cross-entropy")(SCORES, classes).item() == pytest.approx(-np.mean(logs))


def test_cross_entropy_of_probabilities_and_of_pixels() -> None:
    loss = loss_named("cross-entropy")
    certain = functional.one_hot(torch.tensor([0, 1]), 3).float()
    assert loss(SCORES, certain).item() == pytest.approx(loss(SCORES, torch.tensor([0, 1])).item())
    pixels = SCORES.T.reshape(1, 3, 2, 1)  # [N, C, H, W]
    found = loss(pixels, torch.tensor([[[0], [1]]])).item()
    assert found == pytest.approx(loss(SCORES, torch.tensor([0, 1])).item())


def test_bce_by_hand() -> None:
    """Integers are targets as well; scores of 100 do not overflow."""
    scores, labels = torch.tensor([[0.0, 2.0], [100.0, -100.0]]), torch.tensor([[1, 0], [1, 0]])
    wanted = (np.log(2) + 2 + np.log1p(np.exp(-2))) / 4
    assert loss_named("bce")(scores, labels).item() == pytest.approx(wanted)


def test_mse_by_hand() -> None:
    outputs, targets = (
        torch.tensor([[1.0], [2.0]]),
        torch.tensor([[0.0], [5.0]], dtype=torch.double),
    )
    assert loss_named("mse")(outputs, targets).item() == pytest.approx(5.0)


def _read(path: tuple[int, ...]) -> list[int]:
    """What a path of classes spells: repeats are one letter, blanks none."""
    return [letter for letter, _ in itertools.groupby(path) if letter]


def test_ctc_sums_over_all_paths() -> None:
    """Four steps, two letters and a blank: 81 paths, added up one by one."""
    random = np.random.default_rng(0)
    scores = random.standard_normal((2, 4, 3))
    words = [[1, 2], [2]]
    chances = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    wanted = []
    for chance, word in zip(chances, words, strict=True):
        paths = (p for p in itertools.product(range(3), repeat=4) if _read(p) == word)
        total = sum(np.prod([chance[step, letter] for step, letter in enumerate(p)]) for p in paths)
        wanted.append(-np.log(total) / len(word))  # per letter, as torch has it
    labels = torch.tensor([[1, 2], [2, -1]])
    found = loss_named("ctc")(torch.from_numpy(scores), labels).item()
    assert found == pytest.approx(np.mean(wanted))


def test_ctc_of_what_cannot_be_spelled_is_left_out() -> None:
    """Three equal letters take five steps."""
    scores = torch.zeros(1, 4, 3, requires_grad=True)
    loss = loss_named("ctc")(scores, torch.tensor([[1, 1, 1]]))
    loss.backward()
    assert loss.item() == 0.0
    assert scores.grad is not None
    assert not scores.grad.any()


# functions of the user


def absolute(outputs: Tensor, labels: Tensor) -> Tensor:
    return (outputs - labels).abs().mean()


def test_a_function_can_be_named() -> None:
    loss = loss_named(f"{__name__}:absolute")
    assert loss(torch.ones(2), torch.zeros(2)).item() == 1.0


def test_a_function_that_is_not_there() -> None:
    with pytest.raises(SourceError):
        loss_named(f"{__name__}:missing")


def test_a_name_that_is_none() -> None:
    with pytest.raises(OptionError, match="no loss 'hinge'"):
        check_loss("hinge")
    assert check_loss("my.module:loss") == "my.module:loss"


# where they look


def model(behind: str) -> ir.Model:
    text = f"""
    <ir_version: 8, opset_import: ["": 17]>
    g (float[N,3] x) => (float[N,3] y, int64[N,1] top, float[N,3] other) {{
        s = Relu(x)  y = {behind}(s)  top = ArgMax<axis = 1>(s)  other = Neg(s)
    }}
    """
    return ir.from_proto(onnx.parser.parse_model(text))


@pytest.mark.parametrize(
    ("behind", "loss", "tensor"),
    [
        ("Softmax", "cross-entropy", "s"),
        ("Softmax", "ctc", "s"),
        ("Softmax", "bce", "y"),
        ("Softmax", "mse", "y"),
        ("Sigmoid", "bce", "s"),
        ("Sigmoid", "cross-entropy", "y"),
        ("Sigmoid", "module:function", "y"),
        ("Neg", "cross-entropy", "y"),
    ],
)
def test_losses_of_scores_look_before_probabilities(behind: str, loss: str, tensor: str) -> None:
    assert scores_of(model(behind), loss, "") == tensor
    assert scores_of(model(behind), loss, "other") == "other"


def test_outputs_are_found_by_name() -> None:
    assert find_output(model("Neg"), "").name == "y"
    with pytest.raises(OptionError, match="No output of floats is called 'top'") as caught:
        find_output(model("Neg"), "top")
    assert caught.value.fix == "use y, other"


def test_a_model_of_integers_has_nothing_to_learn_from() -> None:
    text = """
    <ir_version: 8, opset_import: ["": 17]>
    g (float[N,3] x) => (int64[N,1] y) { y = ArgMax<axis = 1>(x) }
    """
    with pytest.raises(UnsupportedModelError, match="nothing to learn from"):
        find_output(ir.from_proto(onnx.parser.parse_model(text)), "")


# what they refuse


def test_missing_labels_are_an_error() -> None:
    with pytest.raises(SampleError, match="found no labels"):
        labeled(loss_named("mse"), "mse", SCORES, None, "training sample 7")


@pytest.mark.parametrize(
    ("name", "labels"),
    [
        ("cross-entropy", torch.tensor([0, 1, 2])),
        ("cross-entropy", torch.tensor([0, 3])),
        ("bce", torch.zeros(2)),
    ],
)
def test_labels_that_do_not_fit_are_an_error(name: str, labels: Tensor) -> None:
    with pytest.raises(SampleError, match="labels that fit an output of shape") as caught:
        labeled(loss_named(name), name, SCORES, labels, "training sample 7")
    assert caught.value.where == "training sample 7"


def test_the_objective_names_the_sample() -> None:
    objective = FromLabels("y", loss_named("mse"), "mse")
    part = Part({}, None, np.array([12, 3]), 2)
    with pytest.raises(SampleError) as caught:
        objective.loss({"y": SCORES}, part, 0.0)
    assert caught.value.where == "training sample 12"
    assert list(objective.tensors) == ["y"]
