from __future__ import annotations

import math
from typing import Any

import pytest

from slimctl.core.errors import GateFailedError
from slimctl.evaluate.benchmark import Outcome, Ratio
from slimctl.evaluate.benchmark import Verdict as TimeVerdict
from slimctl.evaluate.replay import NodeTotals, Replay
from slimctl.evaluate.verification import Judgment, Verdict, Verification
from slimctl.graph.session import CPU, Level
from slimctl.recipe.gates import Evidence, GateResult, Last, gate_error, judge
from slimctl.recipe.schema import (
    AccuracyGate,
    Gates,
    LatencyGate,
    MemoryGate,
    PlacementGate,
    SizeGate,
    SqnrGate,
    VerifyGate,
)


def one(gates: Gates, **evidence: object) -> GateResult:
    (result,) = judge(gates, Evidence(**{"size": 50, "original_size": 100, **evidence}))  # type: ignore[arg-type]  # a table of fields
    return result


METRIC = {"metric": "top1", "metric_original": 0.98}


@pytest.mark.parametrize(
    ("after", "passed"),
    [(0.98, True), (0.99, True), (0.97, True), (0.9699, False), (0.5, False), (math.nan, False)],
)
def test_accuracy(after: float, passed: bool) -> None:
    # 0.98 - 0.97 is more than 0.01 in floating point.
    gates = Gates(accuracy=AccuracyGate(max_drop=0.01))
    assert one(gates, **METRIC, metric_result=after).passed is passed


def test_accuracy_where_less_is_better() -> None:
    gates = Gates(accuracy=AccuracyGate(max_drop=0.1))
    errors = {"metric": "m:wer", "metric_original": 0.2, "higher_is_better": False}
    assert one(gates, **errors, metric_result=0.05).passed
    assert one(gates, **errors, metric_result=0.29).passed
    assert not one(gates, **errors, metric_result=0.31).passed


def test_a_broken_gate_says_by_how_much() -> None:
    result = one(Gates(accuracy=AccuracyGate(max_drop=0.01)), **METRIC, metric_result=0.95)
    assert result.message == (
        "top1 went from 0.9800 to 0.9500, a drop of 0.0300; at most 0.01 allowed: 0.0200 too much"
    )


@pytest.mark.parametrize(("found", "passed"), [(20.0, True), (25, True), (19.99, False)])
def test_sqnr(found: float, passed: bool) -> None:
    result = one(Gates(sqnr=SqnrGate(min_db=20)), sqnr_db=found)
    assert result.passed is passed
    assert ("0.01 dB too little" in result.message) is not passed


@pytest.mark.parametrize(("found", "passed"), [(0.35, True), (0.1, True), (0.36, False)])
def test_size(found: float, passed: bool) -> None:
    assert one(Gates(size=SizeGate(max_ratio=0.35)), size=round(found * 100)).passed is passed


@pytest.mark.parametrize(("found", "passed"), [(0, True), (2, True), (3, False)])
def test_placement(found: int, passed: bool) -> None:
    result = one(Gates(placement=PlacementGate(max_fallback_nodes=2)), fallbacks=found)
    assert result.passed is passed
    assert result.message.startswith(f"{found} nodes")


def speedup(value: float, outcome: Outcome) -> TimeVerdict:
    """What was measured, within 10 %."""
    ratio = Ratio(value, value / 1.1, value * 1.1)
    return TimeVerdict(outcome, ratio, 0.02, 1.5, "the interval holds 1.5")


@pytest.mark.parametrize(
    ("value", "outcome", "passed"),
    [
        (2.0, Outcome.FASTER, True),
        (1.2, Outcome.SLOWER, False),
        (1.55, Outcome.TOO_NOISY, True),
        (1.45, Outcome.TOO_NOISY, False),
    ],
)
def test_latency(value: float, outcome: Outcome, passed: bool) -> None:
    gates = Gates(latency=LatencyGate(min_speedup=1.5))
    result = one(gates, speedup=speedup(value, outcome))
    assert result.passed is passed
    assert not result.repeatable
    assert ("within noise" in result.message) is (outcome is Outcome.TOO_NOISY)


# against the last accepted version

SINCE = {
    "accuracy": ({"max_drop_from_last": 0.01}, {"metric": 0.95}),
    "sqnr": ({"max_loss_from_last_db": 1.0}, {"sqnr_db": 25.0}),
    "size": ({"max_ratio_to_last": 1.1}, {}),
    "latency": ({"min_speedup_over_last": 1.5}, {}),
    "memory": ({"max_ratio_to_last": 1.1}, {"memory": 100}),
    "placement": ({"max_more_than_last": 1}, {"fallbacks": 2}),
}
FOUND: dict[str, tuple[dict[str, object], dict[str, object]]] = {
    "accuracy": ({"metric_result": 0.945}, {"metric_result": 0.93}),
    "sqnr": ({"sqnr_db": 24.5}, {"sqnr_db": 23.5}),
    "size": ({"size": 44}, {"size": 46}),
    "memory": ({"memory": (300, 105)}, {"memory": (300, 120)}),
    "placement": ({"fallbacks": 3}, {"fallbacks": 4}),
}


@pytest.mark.parametrize("gate", [*FOUND])
@pytest.mark.parametrize("good", [True, False])
def test_bounds_against_the_last_version(gate: str, good: bool) -> None:
    bound, known = SINCE[gate]
    last = Last("net@3", 40, **known)  # type: ignore[arg-type]  # a table of fields
    found = FOUND[gate][0 if good else 1]
    result = one(Gates(**{gate: bound}), **{**METRIC, **found}, last=last)  # type: ignore[arg-type]
    assert result.gate == f"{gate}.last"
    assert result.passed is good
    assert "net@3" in result.message


def test_latency_against_the_last_version() -> None:
    gates = Gates(latency=LatencyGate(min_speedup_over_last=1.5))
    good, bad = speedup(2.0, Outcome.FASTER), speedup(1.2, Outcome.SLOWER)
    assert one(gates, last=Last("net@3", 40, speedup=good)).passed
    assert not one(gates, last=Last("net@3", 40, speedup=bad)).passed


@pytest.mark.parametrize("gate", [*SINCE])
def test_without_an_accepted_version_there_is_nothing_to_break(gate: str) -> None:
    result = one(Gates(**{gate: SINCE[gate][0]}))  # type: ignore[arg-type]  # a table of fields
    assert result.passed
    assert "no accepted version" in result.message


@pytest.mark.parametrize("gate", ["accuracy", "sqnr", "latency", "memory", "placement"])
def test_what_cannot_be_compared_has_not_passed(gate: str) -> None:
    result = one(Gates(**{gate: SINCE[gate][0]}), last=Last("net@3", 40))  # type: ignore[arg-type]
    assert not result.passed
    assert "cannot be judged" in result.message


def test_both_bounds_of_a_gate_are_judged() -> None:
    gates = Gates(size=SizeGate(max_ratio=0.6, max_ratio_to_last=1.1))
    results = judge(gates, Evidence(50, 100, last=Last("net@3", 40)))
    assert [(r.gate, r.passed) for r in results] == [("size", True), ("size.last", False)]


@pytest.mark.parametrize("gate", [*SINCE])
def test_a_gate_without_a_bound_is_refused(gate: str) -> None:
    with pytest.raises(ValueError, match="give at least one of"):
        Gates(**{gate: {}})


@pytest.mark.parametrize(("found", "passed"), [((200, 90), True), ((200, 110), False)])
def test_memory(found: tuple[int, int], passed: bool) -> None:
    result = one(Gates(memory=MemoryGate(max_ratio=0.5)), memory=found)
    assert result.passed is passed
    assert not result.repeatable


@pytest.mark.parametrize(
    "gates",
    [
        Gates(accuracy=AccuracyGate(max_drop=1)),
        Gates(sqnr=SqnrGate(min_db=-300)),
        Gates(latency=LatencyGate(min_speedup=0.1)),
        Gates(placement=PlacementGate(max_fallback_nodes=99)),
        Gates(memory=MemoryGate(max_ratio=9)),
    ],
)
def test_what_cannot_be_measured_has_not_passed(gates: Gates) -> None:
    result = one(gates)
    assert not result.passed
    assert result.found is None
    assert "cannot be judged" in result.message


def found_inside(*, wrong: tuple[str, ...] = (), steps: tuple[int, ...] = ()) -> Verification:
    """What a verification found: nodes that are wrong, and the steps at nodes conv0, conv1, ..."""
    nodes = tuple(
        NodeTotals(f"conv{place}", "QLinearConv", "t", is_codes=True, elements=9, steps=most)
        for place, most in enumerate(steps)
    )
    faults = tuple(Judgment(name, "Conv", "t", Verdict.MODEL, "its bias is off") for name in wrong)
    tie = Judgment("tie", "Conv", "t", Verdict.TIE, "ties", Level.ALL, 1.0)
    return Verification(4, (Replay(Level.ALL, CPU, "exact", nodes),), (), (*faults, tie), {})


def by_name(gate: VerifyGate, **evidence: Any) -> dict[str, GateResult]:
    judged = judge(Gates(verify=gate), Evidence(50, 100, **evidence))
    return {result.gate.removeprefix("verify."): result for result in judged}


@pytest.mark.parametrize(
    ("wrong", "bound", "passed"),
    [((), 0, True), (("a",), 0, False), (("a", "a"), 1, True), (("a", "b"), 1, False)],
)
def test_verify_counts_wrong_nodes_and_names_the_first(
    wrong: tuple[str, ...], bound: int, passed: bool
) -> None:
    inside = found_inside(wrong=wrong)
    result = by_name(VerifyGate(max_faults=bound), verification=inside)["max_faults"]
    assert (result.passed, result.found) == (passed, len(set(wrong)))
    assert ("first 'a': its bias is off" in result.message) is bool(wrong)
    assert result.repeatable


@pytest.mark.parametrize(("bound", "passed"), [(1, False), (2, False), (3, True)])
def test_verify_names_the_node_with_the_most_steps(bound: int, passed: bool) -> None:
    inside = found_inside(steps=(0, 3, 1))
    gate = VerifyGate(max_step_difference=bound)
    result = by_name(gate, verification=inside)["max_step_difference"]
    assert (result.passed, result.found) == (passed, 3)
    assert "differ by 3 steps at node 'conv1' (QLinearConv)" in result.message
    assert not result.repeatable


def test_verify_names_the_worst_output() -> None:
    outputs = {"boxes": 30.0, "scores": 19.5}
    result = by_name(VerifyGate(min_sqnr=20), verification=found_inside(), outputs_db=outputs)
    assert not result["min_sqnr"].passed
    assert "19.50 dB at output 'scores'" in result["min_sqnr"].message
    assert "0.50 dB too little" in result["min_sqnr"].message


@pytest.mark.parametrize(("after", "passed"), [(0.97, True), (0.9699, False)])
def test_verify_bounds_the_metric(after: float, passed: bool) -> None:
    gate = VerifyGate(max_metric_drop=0.01)
    result = by_name(gate, verification=found_inside(), **METRIC, metric_result=after)
    assert result["max_metric_drop"].passed is passed


def test_verify_judges_only_what_is_bounded() -> None:
    assert list(by_name(VerifyGate(min_sqnr=1), verification=found_inside())) == [
        *("max_faults", "min_sqnr")
    ]


def test_what_verify_cannot_measure_has_not_passed() -> None:
    gate = VerifyGate(max_step_difference=99, min_sqnr=-300, max_metric_drop=1, max_faults=99)
    results = by_name(gate).values()
    assert len(results) == 4
    assert not any(result.passed for result in results)
    assert all("cannot be judged" in result.message for result in results)
    float_model = by_name(gate, verification=found_inside())["max_step_difference"]
    assert not float_model.passed
    assert not float_model.repeatable
    assert "no node of the result has quantized outputs" in float_model.message


def test_gates_that_are_not_set_say_nothing() -> None:
    assert judge(Gates(), Evidence(900, 100)) == ()


def test_the_error_lists_every_broken_gate_and_ends_with_exit_code_1() -> None:
    broken = [one(Gates(size=SizeGate(max_ratio=0.1))), one(Gates(sqnr=SqnrGate(min_db=1)))]
    error = gate_error(broken, "the result was not published")
    assert isinstance(error, GateFailedError)
    assert error.exit_code == 1
    assert error.what.startswith("2 gates failed: size: 0.5000 of the original's size")
    assert "sqnr: cannot be judged" in error.what
    assert error.where == "the result was not published"
