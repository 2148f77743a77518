from __future__ import annotations

import math

import pytest

from slimctl.core.errors import GateFailedError
from slimctl.recipe.gates import Evidence, GateResult, gate_error, judge
from slimctl.recipe.schema import (
    AccuracyGate,
    Gates,
    LatencyGate,
    PlacementGate,
    SizeGate,
    SqnrGate,
)


def one(gates: Gates, **evidence: object) -> GateResult:
    (result,) = judge(gates, Evidence(**{"size_ratio": 0.5, **evidence}))  # type: ignore[arg-type]  # a table of fields
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
    assert one(Gates(size=SizeGate(max_ratio=0.35)), size_ratio=found).passed is passed


@pytest.mark.parametrize(("found", "passed"), [(0, True), (2, True), (3, False)])
def test_placement(found: int, passed: bool) -> None:
    result = one(Gates(placement=PlacementGate(max_fallback_nodes=2)), fallbacks=found)
    assert result.passed is passed
    assert result.message.startswith(f"{found} nodes")


@pytest.mark.parametrize(("percentile", "passed"), [("p50", True), ("p90", False), ("p99", False)])
def test_latency(percentile: str, passed: bool) -> None:
    before = {"p50_ms": 10.0, "p90_ms": 12.0, "p99_ms": 20.0}
    after = {"p50_ms": 5.0, "p90_ms": 10.0, "p99_ms": 20.0}
    gate = LatencyGate(min_speedup=1.5, percentile=percentile)  # type: ignore[arg-type]  # literals
    result = one(Gates(latency=gate), latency=(before, after))
    assert result.passed is passed
    assert not result.repeatable


@pytest.mark.parametrize(
    "gates",
    [
        Gates(accuracy=AccuracyGate(max_drop=1)),
        Gates(sqnr=SqnrGate(min_db=-300)),
        Gates(latency=LatencyGate(min_speedup=0.1)),
        Gates(placement=PlacementGate(max_fallback_nodes=99)),
    ],
)
def test_what_cannot_be_measured_has_not_passed(gates: Gates) -> None:
    result = one(gates)
    assert not result.passed
    assert result.found is None
    assert "cannot be judged" in result.message


def test_gates_that_are_not_set_say_nothing() -> None:
    assert judge(Gates(), Evidence(size_ratio=9.0)) == ()


def test_the_error_lists_every_broken_gate_and_ends_with_exit_code_1() -> None:
    broken = [one(Gates(size=SizeGate(max_ratio=0.1))), one(Gates(sqnr=SqnrGate(min_db=1)))]
    error = gate_error(broken, "the result was not published")
    assert isinstance(error, GateFailedError)
    assert error.exit_code == 1
    assert error.what.startswith("2 gates failed: size: 0.5000 of the original's size")
    assert "sqnr: cannot be judged" in error.what
    assert error.where == "the result was not published"
