from __future__ import annotations

import json
import re
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from slimctl.core.errors import ModelExecutionError, OptionError
from slimctl.evaluate import benchmark as module
from slimctl.evaluate.benchmark import BenchResult, Ratio, benchmark, peak_memory, speedup
from slimctl.graph.save import save_model

linux = pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="memory is read from /proc"
)


@pytest.fixture
def feeds():
    return {"x": np.ones((2, 8), np.float32)}


def result(latencies) -> BenchResult:
    values = np.asarray(latencies, np.float64)
    p50, p90, p99 = np.percentile(values, [50, 90, 99])
    return BenchResult(
        p50, p90, p99, values.mean(), 0.0, 0.0, values.size, len(values), None, values
    )


def test_results_of_real_models(chain, feeds, tmp_path):
    path = tmp_path / "m.onnx"
    save_model(chain(), path)
    found = benchmark([chain(), path], feeds, threads=1, rounds=4, warmup=20, memory=False)
    assert len(found) == 2
    for item in found:
        assert 0 < item.p50 <= item.p90 <= item.p99
        assert item.rounds == 4 and item.latencies.shape[0] == 4
        assert item.runs == item.latencies.size
        assert item.p50 == pytest.approx(np.percentile(item.latencies, 50))
        assert item.load > 0 and item.cpu >= 0 and item.peak_memory is None
        values = json.loads(json.dumps(item.to_dict()))
        assert values["p50_ms"] == item.p50 and "latencies" not in values


class FakeRunner:
    """Records in which order models are measured."""

    log: ClassVar[list[str]] = []

    def __init__(self, model, feeds, threads, level):
        self.model = model
        self.load = 0.0

    def warm_up(self, limit, deadline):
        self.log.append(f"warm {self.model}")

    def measure(self):
        self.log.append(self.model)

    def result(self, peak):
        return self.model


def test_rounds_alternate_the_order(monkeypatch):
    monkeypatch.setattr(module, "_Runner", FakeRunner)
    monkeypatch.setattr(FakeRunner, "log", [])
    assert benchmark(["a", "b"], {}, rounds=3, memory=False) == ["a", "b"]
    assert FakeRunner.log == ["warm a", "warm b", "a", "b", "b", "a", "a", "b"]


def test_time_limit_leaves_three_rounds(monkeypatch):
    monkeypatch.setattr(module, "_Runner", FakeRunner)
    monkeypatch.setattr(FakeRunner, "log", [])
    clock = iter(range(0, 10_000, 10))
    monkeypatch.setattr(module.time, "perf_counter", lambda: next(clock))
    benchmark(["a"], {}, rounds=100, max_seconds=5, memory=False)
    assert FakeRunner.log.count("a") == module.MIN_ROUNDS


def test_warm_up_ends_when_stable(chain, feeds, monkeypatch):
    runner = module._Runner(chain(), feeds, 1, module.Level.ALL)
    times = iter([9.0, 7.0, 5.0, 3.0, 2.0, *[1.0] * 100])
    calls = []
    monkeypatch.setattr(runner, "once", lambda: calls.append(1) or next(times))
    runner.warm_up(80, float("inf"))
    # Ten runs whose halves have the same median: [3, 2, 1, 1, 1] and [1, 1, 1, 1, 1].
    assert len(calls) == 13
    assert runner.block == 1  # one run of a second is a block


def test_blocks_of_fast_models_are_bounded(chain, feeds, monkeypatch):
    runner = module._Runner(chain(), feeds, 1, module.Level.ALL)
    monkeypatch.setattr(runner, "once", lambda: 1e-6)
    runner.warm_up(10, float("inf"))
    assert runner.block == module.MAX_BLOCK
    runner.measure()
    assert np.shape(runner.latencies) == (1, module.MAX_BLOCK)


def test_speedup_is_the_ratio_of_medians():
    generator = np.random.default_rng(0)
    base = result(4.0 + generator.normal(size=(40, 8)) * 0.1)
    fast = result(2.0 + generator.normal(size=(40, 8)) * 0.1)
    ratio = speedup(base, fast)
    assert ratio.value == base.p50 / fast.p50
    assert ratio.low <= ratio.value <= ratio.high
    assert ratio.low < 2.0 < ratio.high and ratio.high - ratio.low < 0.1
    assert speedup(base, fast) == ratio  # seeded
    assert isinstance(ratio, Ratio)


def test_interval_widens_when_rounds_disagree():
    """Drifts hit whole rounds; runs within a round would hide them."""
    drift = np.repeat(np.linspace(1.0, 3.0, 20), 8).reshape(20, 8)
    steady = result(np.full((20, 8), 1.0))
    ratio = speedup(result(drift), steady)
    assert ratio.low < 1.7 and ratio.high > 2.3


def test_ratios_of_a_pair_share_their_rounds():
    """A drift that hits both models alike does not widen the ratio."""
    drift = np.repeat(np.linspace(1.0, 3.0, 21), 8).reshape(21, 8)
    ratio = speedup(result(2 * drift), result(drift))
    assert ratio == pytest.approx((2.0, 2.0, 2.0))


@pytest.mark.parametrize("options", [{"rounds": 0}, {"warmup": -1}, {"max_seconds": 0}])
def test_numbers_that_make_no_sense(chain, feeds, options):
    with pytest.raises(OptionError):
        benchmark([chain()], feeds, **options)


def test_inputs_that_do_not_fit(chain):
    with pytest.raises(ModelExecutionError):
        benchmark([chain()], {"x": np.ones((2, 9), np.float32)}, memory=False)


# memory


@linux
def test_peak_memory_follows_the_size_of_the_model(chain, tmp_path):
    small = peak_memory(chain(), {"x": np.ones((2, 8), np.float32)}, threads=1)
    wide = chain(layers=4, channels=1024)  # 5 x 4 MB of weights
    save_model(wide, tmp_path / "wide.onnx")
    large = peak_memory(tmp_path / "wide.onnx", {"x": np.ones((2, 1024), np.float32)}, threads=1)
    assert small < 20e6
    assert 20e6 < large < 120e6


@linux
def test_peak_memory_does_not_see_this_process(chain):
    ballast = np.ones(30_000_000)  # 240 MB
    assert peak_memory(chain(), {"x": np.ones((2, 8), np.float32)}, threads=1) < 20e6
    assert ballast.size


@linux
def test_inputs_with_names_that_are_no_file_names(chain):
    model = chain()
    model.graph.inputs[0].name = "a/b:0"
    assert peak_memory(model, {"a/b:0": np.ones((2, 8), np.float32)}, threads=1) is not None


@linux
def test_the_measuring_process_fails(chain, monkeypatch):
    monkeypatch.setattr(module, "save_model", lambda model, path: [path])  # writes nothing
    with pytest.raises(ModelExecutionError, match=re.escape("measures memory ended with code")):
        peak_memory(chain(), {"x": np.ones((2, 8), np.float32)})
