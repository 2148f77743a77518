"""Learning rates by hand, and which weights decay."""

# ruff: noqa: E402 # the check for torch comes before what needs it
from __future__ import annotations

import math
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is an extra")
from torch import nn

from slimctl.training.module import TrainableGraph
from slimctl.training.schedule import optimizer_for, rate, set_rate
from slimctl.training.settings import Settings
from tests.training.operator_cases import recurrent
from tests.training.training_data import classifier


def rates(steps: int, **settings: Any) -> list[float]:
    return [rate(Settings(**settings), step, steps) for step in range(steps)]


def test_a_cosine_falls_from_the_top_almost_to_zero() -> None:
    found = rates(4, schedule="cosine", warmup=0.0)
    assert found == pytest.approx([1.0, 0.5 + math.sqrt(0.125), 0.5, 0.5 - math.sqrt(0.125)])


def test_a_warm_up_rises_evenly_and_then_comes_the_cosine() -> None:
    found = rates(10, schedule="cosine", warmup=0.2)
    assert found[:3] == pytest.approx([1 / 3, 2 / 3, 1.0])
    assert found[2:] == pytest.approx(rates(8, schedule="cosine", warmup=0.0))


def test_a_constant_rate_stays_after_its_warm_up() -> None:
    found = rates(10, schedule="constant", warmup=0.3)
    assert found == pytest.approx([0.25, 0.5, 0.75] + 7 * [1.0])


def test_one_cycle_rises_from_a_25th_and_falls_to_a_ten_thousandth() -> None:
    found = rates(1000, schedule="one-cycle", warmup=0.0)
    assert found[0] == pytest.approx(1 / 25)
    assert found[150] == pytest.approx((1 / 25 + 1) / 2)
    assert found[300] == 1.0
    assert found[650] == pytest.approx((1 + 1e-4) / 2)
    assert found[-1] == pytest.approx(1e-4, rel=0.06)
    assert max(found) == 1.0


def test_one_cycle_is_that_of_torch() -> None:
    """torch gives the peak to the last step of the rise: its 300 steps end at step 299."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], 1.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, 1000, final_div_factor=400)
    theirs = []
    for _ in range(1000):
        theirs.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    ours = rates(1000, schedule="one-cycle", warmup=0.3)
    assert ours == pytest.approx(theirs, abs=0.006)


@pytest.mark.parametrize("schedule", ["cosine", "one-cycle", "constant"])
@pytest.mark.parametrize("steps", [1, 2, 3, 7])
def test_short_runs_have_rates_as_well(schedule: str, steps: int) -> None:
    found = rates(steps, schedule=schedule, warmup=0.5)
    assert all(0.0 < value <= 1.0 for value in found)


@pytest.mark.parametrize("schedule", ["cosine", "one-cycle"])
def test_more_steps_than_were_counted_do_not_turn_around(schedule: str) -> None:
    settings = Settings(schedule=schedule)  # type: ignore[arg-type]  # one of its texts
    assert rate(settings, 25, 20) == rate(settings, 20, 20) < 1e-3


# optimizers


def groups(optimizer: torch.optim.Optimizer) -> dict[float, set[int]]:
    return {
        group["weight_decay"]: {id(weight) for weight in group["params"]}
        for group in optimizer.param_groups
    }


def test_matrices_decay_and_nothing_else() -> None:
    module = TrainableGraph(classifier())
    extra = nn.Parameter(torch.zeros(3, 3))
    decaying, others = module.by_decay()
    optimizer = optimizer_for(Settings(weight_decay=0.1), decaying, [*others, extra])
    by_name = {name: id(w) for name, w in zip(module.learned, module.weights, strict=True)}
    assert groups(optimizer) == {
        0.1: {by_name["w"], by_name["u"]},
        0.0: {id(extra)} | {by_name[name] for name in "bcst"},
    }


def test_biases_of_recurrent_layers_are_biases() -> None:
    """They have an axis of directions, as matrices have two axes."""
    layer = recurrent("LSTM", 4, 2, 2, direction="bidirectional")
    module = TrainableGraph(layer.model(constants=True))
    decaying, others = module.by_decay()
    assert [weight.ndim for weight in decaying] == [3, 3]
    assert [weight.ndim for weight in others] == [2]


@pytest.mark.parametrize(("name", "kind"), [("adamw", "AdamW"), ("sgd", "SGD")])
def test_optimizers_are_those_of_torch(name: str, kind: str) -> None:
    weights = [nn.Parameter(torch.zeros(2, 2))]
    settings = Settings(optimizer=name, learning_rate=0.5)  # type: ignore[arg-type]  # one of two
    optimizer = optimizer_for(settings, weights, [])
    assert type(optimizer).__name__ == kind
    (group,) = optimizer.param_groups
    assert group["lr"] == 0.5
    if name == "sgd":
        assert group["nesterov"]
        assert group["momentum"] == 0.9
    set_rate(optimizer, 0.25)
    assert group["lr"] == 0.25
    group["share"] = 0.1  # of quantization scales, say
    set_rate(optimizer, 0.25)
    assert group["lr"] == pytest.approx(0.025)
