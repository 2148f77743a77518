from __future__ import annotations

import json
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slimctl.core.errors import ModelExecutionError
from slimctl.evaluate import queueing as module
from slimctl.evaluate.batching import resized, why_fixed
from slimctl.evaluate.load import closed_loop
from slimctl.evaluate.queueing import Batcher, Service, arrivals, simulate, suggest
from slimctl.evaluate.serving import Serving, serving, write_serving
from slimctl.evaluate.study import Questions, study_load
from slimctl.evaluate.throughput import MIN_RUNS, BatchTimes, batch_times
from slimctl.graph.edit import Port, interface


def constant(*pairs: tuple[int, float]) -> Service:
    """A server that takes the same time for each batch of a size."""
    return Service([BatchTimes(size, np.full(4, seconds)) for size, seconds in pairs])


ALONE = Batcher(1, 0.0)


# the simulation against queueing theory


@pytest.mark.parametrize("load", [0.3, 0.5, 0.8])
def test_mean_wait_of_constant_service(load: float):
    """M/D/1, Pollaczek and Khinchine: rho s / (2 (1 - rho)).

    Waits are correlated over about 1 / (1 - rho)^2 requests; 200,000 requests make 8,000
    independent ones at 0.8, whose mean is good to about 1.5 %. Five of these deviations.
    """
    seconds = 0.01
    found = simulate(constant((1, seconds)), load / seconds, ALONE, requests=200_000)
    expected = load * seconds / (2 * (1 - load))
    assert found.wait == pytest.approx(expected, rel=0.075)
    assert found.busy == pytest.approx(load, rel=0.02)
    assert found.stable


def test_mean_wait_of_varying_service():
    """M/G/1: rate E[s^2] / (2 (1 - rho)), with two service times of equal probability."""
    times = np.array([0.005, 0.015])
    rate = 50.0
    expected = rate * np.mean(times**2) / (2 * (1 - rate * times.mean()))
    service = Service([BatchTimes(1, np.repeat(times, 100))])
    found = simulate(service, rate, ALONE, requests=200_000)
    assert found.wait == pytest.approx(expected, rel=0.05)


def test_overload_is_called_by_its_name():
    found = simulate(constant((1, 0.01)), 120.0, ALONE)
    assert not found.stable and found.busy == pytest.approx(1.0, abs=1e-3)
    # A batch of eight takes as long as one: eight times the capacity.
    assert simulate(constant((1, 0.01), (8, 0.01)), 120.0, Batcher(8, 0.0)).stable


# the simulation step by step


def followed(moments, service: Service, batcher: Batcher):
    return list(module._served(moments, service.drawn(0), batcher))


def test_a_complete_batch_goes_at_once():
    batches = followed([0, 1, 2, 3], constant((1, 5), (2, 5)), Batcher(2, 100.0))
    assert batches == [(2, 1.0, 6.0), (2, 6.0, 11.0)]


def test_the_oldest_waits_for_the_delay_only():
    batches = followed([0, 2, 9], constant((1, 1), (4, 1)), Batcher(4, 3.0))
    assert batches == [(2, 3.0, 4.0), (1, 12.0, 13.0)]


def test_what_came_while_the_server_worked_goes_together():
    batches = followed([0, 1, 2, 3, 30], constant((1, 10), (4, 10)), Batcher(4, 0.0))
    assert batches == [(1, 0.0, 10.0), (3, 10.0, 20.0), (1, 30.0, 40.0)]


@given(
    gaps=st.lists(st.floats(0.0, 3.0), min_size=1, max_size=40),
    size=st.integers(1, 5),
    delay=st.floats(0.0, 4.0),
)
@settings(max_examples=60, deadline=None)
def test_every_request_is_served_once_and_in_order(gaps, size: int, delay: float):
    moments = np.cumsum(gaps).tolist()
    service = constant((1, 1.0), (5, 2.0))
    batches = list(module._served(moments, service.drawn(0), Batcher(size, delay)))
    assert sum(batch.size for batch in batches) == len(moments)
    assert all(1 <= batch.size <= size for batch in batches)
    first = 0
    for before, batch in zip([None, *batches], batches, strict=False):
        free = 0.0 if before is None else before.end
        members = moments[first : first + batch.size]
        assert batch.start >= free and batch.start >= members[-1]
        assert batch.start <= max(free, members[0] + delay) + 1e-9
        first += batch.size


def test_service_times_between_measured_sizes():
    service = constant((1, 1.0), (4, 4.0))
    assert next(service.drawn(0)) == pytest.approx([1.0, 2.0, 3.0, 4.0])
    assert service.forward == 1.0 and service.largest == 4


def test_arrivals_have_the_rate():
    moments = arrivals(50.0, 10_000, seed=3)
    assert (np.diff(moments) >= 0).all()
    # The mean of 10,000 exponential gaps is good to 1 %; four of these.
    assert moments[-1] == pytest.approx(200.0, rel=0.04)
    assert (arrivals(50.0, 10_000, seed=3) == moments).all()


# suggestions

SHARED = constant((1, 0.010), (2, 0.011), (4, 0.013), (8, 0.017))
"""Most of a run's time does not depend on the batch."""


def test_suggestion_meets_the_bound_with_the_least_work():
    found = suggest(SHARED, (1, 2, 4, 8), 300.0, 0.0355)
    assert found is not None and found.stable and found.p99 <= 0.0355
    again = simulate(SHARED, 300.0, found.batcher)
    assert again == found
    for setting in module.settings(SHARED, (1, 2, 4, 8)):
        other = simulate(SHARED, 300.0, setting)
        assert not (other.stable and other.p99 <= 0.0355) or other.busy >= found.busy - 0.01
    assert found.batcher.max_batch > 1  # one by one, 100 requests per second are all it can do


def test_nothing_meets_an_impossible_bound():
    assert suggest(SHARED, (1, 2, 4, 8), 300.0, 0.005) is None
    assert suggest(constant((1, 0.01)), (1,), 200.0, 10.0) is None


def test_equal_settings_fall_to_the_simplest():
    """Batches gain nothing where each sample costs the same."""
    linear = constant((1, 0.01), (2, 0.02), (4, 0.04))
    found = suggest(linear, (1, 2, 4), 20.0, 0.5)
    assert found is not None and found.batcher == ALONE


def test_serving_configuration(tmp_path):
    found = suggest(SHARED, (1, 2, 4, 8), 300.0, 0.0355)
    assert found is not None
    chosen = serving(found, 0.0355, 2)
    write_serving(tmp_path / "serving.json", chosen)
    values = json.loads((tmp_path / "serving.json").read_text())
    assert values["max_batch_size"] == found.batcher.max_batch
    assert values["preferred_batch_size"] == [found.batcher.max_batch]
    delay = values["max_queue_delay_microseconds"]
    assert 0 <= found.batcher.delay * 1e6 - delay < 1
    assert values["p99_ms"] <= values["p99_bound_ms"] == pytest.approx(35.5)
    assert Serving.model_validate(values) == chosen


# measuring


def test_batch_sizes_take_turns():
    clock = iter(np.arange(0.0, 1e6, 1.0))
    calls: list[int] = []
    times = batch_times(
        calls.append, (1, 4), max_seconds=1e9, rounds=3, clock=lambda: float(next(clock))
    )
    assert calls == [1, 4, 1, 4, 4, 1, 1, 4]
    assert [item.size for item in times] == [1, 4]
    assert all((item.seconds == 1.0).all() and len(item.seconds) == 3 for item in times)
    assert times[1].per_second == 4.0
    assert times[1].to_dict()["p99_ms"] == 1000.0


def test_batch_sizes_stop_in_time():
    clock = iter(np.arange(0.0, 1e6, 10.0))
    (found,) = batch_times(lambda size: None, (1,), max_seconds=5, clock=lambda: float(next(clock)))
    assert len(found.seconds) == MIN_RUNS


def test_closed_loop_counts_and_obeys_littles_law():
    ticks, lock = iter(np.arange(0.0, 1e6, 0.25)), threading.Lock()

    def clock() -> float:
        with lock:
            return float(next(ticks))

    calls: list[int] = []
    found = closed_loop(lambda: calls.append(1), 3, seconds=40.0, clock=clock)
    assert found.clients == 3 and found.requests == len(calls) - 1  # less the first run
    assert found.per_second * found.mean <= 3 * (1 + 1e-9)
    assert 0 < found.p50 <= found.p90 <= found.p99


def test_each_client_sends_one_request_at_least():
    assert closed_loop(lambda: None, 4, seconds=0.0).requests == 4


def test_errors_of_clients_come_out():
    calls = iter([None])

    def call() -> None:
        if next(calls, "end") == "end":
            raise ModelExecutionError("no", where="here")

    with pytest.raises(ModelExecutionError):
        closed_loop(call, 2, seconds=0.0)


# batches


def port(name: str, *shape: int | str | None) -> Port:
    return Port(name, None, shape)


@pytest.mark.parametrize(
    ("inputs", "word"),
    [
        ([port("x", "N", 3)], None),
        ([port("x", None, 3), port("scale")], None),
        ([port("x", 1, 3)], "fixed at 1"),
        ([port("x", "N", 3), port("z", 7)], "'z'"),
        ([Port("x", None, None)], "does not state"),
        ([port("scale")], "no input with a batch axis"),
    ],
)
def test_fixed_batches_are_explained(inputs, word):
    reason = why_fixed(inputs)
    assert reason is None if word is None else word in reason


def test_samples_are_repeated_in_turn():
    feeds = {"x": np.arange(3).reshape(3, 1), "scale": np.float32(2)}
    found = resized(feeds, 5)
    assert found["x"].ravel().tolist() == [0, 1, 2, 0, 1]
    assert found["scale"] == 2
    assert resized(feeds, 2)["x"].shape == (2, 1)


# everything together


def test_study_of_a_model(chain):
    model = chain()
    questions = Questions((1, 3), (2,), (5.0, 10.0), p99=10.0, max_seconds=0.2, client_seconds=0.0)
    feeds = {"x": np.ones((2, 8), np.float32)}
    found = study_load(model, feeds, interface(model).inputs, questions, threads=1)
    assert found.fixed is None
    assert [item.size for item in found.batches] == [1, 3]
    assert [item.clients for item in found.clients] == [2]
    assert {(load.rate, load.batcher.max_batch) for load in found.offered} >= {
        *((5.0, 1), (10.0, 1), (5.0, 3), (10.0, 3))
    }
    assert found.suggestion is not None and found.suggestion.rate == 10.0


def test_study_of_a_fixed_batch(chain):
    model = chain()
    model.graph.inputs[0].shape = model.graph.inputs[0].shape.copy()
    model.graph.inputs[0].shape[0] = 2
    feeds = {"x": np.ones((2, 8), np.float32)}
    questions = Questions(batch_sizes=(1, 4), rates=(5.0,), max_seconds=0.1)
    found = study_load(model, feeds, interface(model).inputs, questions, threads=1)
    assert found.fixed is not None and "fixed at 2" in found.fixed
    assert [item.size for item in found.batches] == [1]
    assert {load.batcher for load in found.offered} == {ALONE}
    silent = Questions(batch_sizes=(1, 4))
    assert study_load(model, feeds, interface(model).inputs, silent, threads=1).batches == ()
