from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from slimctl.core.contract import Effect, Feeds, LinearInput, Pass, RangeRequest
from slimctl.core.errors import SourceError
from slimctl.data.sources import DataSource, open_source
from slimctl.graph.edit import interface
from slimctl.graph.load import load_model
from slimctl.graph.session import open_session, run, tapped
from slimctl.pipeline import context as context_module
from slimctl.pipeline.context import PipelineContext
from slimctl.pipeline.run import PipelineResult
from slimctl.targets import load_target

MakePass = Callable[..., Pass]
RunChain = Callable[..., PipelineResult]

REQUEST = RangeRequest(("x", "r", "f"), "minmax")
GEMM = LinearInput("gemm", "f")
CONV = LinearInput("conv", "x", kernel=(3, 3), strides=(1, 1), dilations=(1, 1), pads=(1, 1, 1, 1))


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SLIMCTL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def passes_over_data(monkeypatch: pytest.MonkeyPatch) -> list[tuple[set[str], set[str]]]:
    """For every pass over the data, the tensors and the nodes it was for."""
    seen: list[tuple[set[str], set[str]]] = []
    collect = context_module.collect

    def counted(model: ir.Model, tensors: Any, layers: Any, *rest: Any, **settings: Any) -> Any:
        seen.append((set(tensors), {layer.node for layer in layers}))
        return collect(model, tensors, layers, *rest, **settings)

    monkeypatch.setattr(context_module, "collect", counted)
    return seen


@pytest.fixture
def model(network: Path) -> ir.Model:
    return load_model(network)


@pytest.fixture
def data(calibration: Path, model: ir.Model) -> DataSource:
    return open_source(str(calibration), interface=interface(model), batch_size=5)


def context_of(data: DataSource | None, **settings: Any) -> PipelineContext:
    return PipelineContext(load_target("cpu"), data=data, threads=1, **settings)


def observed(model: ir.Model, calibration: Path, name: str) -> np.ndarray:
    """A tensor's values, from onnxruntime alone."""
    x = np.load(calibration)["x"]
    feeds: Feeds = {"x": x}
    return x if name == "x" else run(open_session(tapped(model, [name])), feeds)[name]


def test_ranges_are_those_of_the_data(model: ir.Model, data: DataSource, calibration: Path) -> None:
    ranges = context_of(data).ranges(model, REQUEST)
    assert set(ranges) == {"x", "r", "f"}
    for name, found in ranges.items():
        values = observed(model, calibration, name)
        assert found.low == pytest.approx(min(values.min(), 0.0), rel=1e-5)
        assert found.high == pytest.approx(values.max(), rel=1e-5)


def test_means_are_those_of_the_data(model: ir.Model, data: DataSource, calibration: Path) -> None:
    means = context_of(data).input_means(model, [GEMM])
    expected = observed(model, calibration, "f").mean(axis=0, dtype=np.float64)
    np.testing.assert_allclose(means["gemm"].both, expected, rtol=1e-5)


def test_nothing_is_run_twice(
    model: ir.Model, data: DataSource, passes_over_data: list[Any]
) -> None:
    context = context_of(data, use_cache=False)
    first = context.ranges(model, REQUEST)
    assert context.ranges(model.clone(), REQUEST) == first
    assert set(context.ranges(model, RangeRequest(("r",), "kl"))) == {"r"}
    context.input_means(model, [GEMM])
    context.input_means(model, [GEMM])
    context.ranges(model, RangeRequest(("r", "y"), "minmax"))
    assert passes_over_data == [({"x", "r", "f"}, set()), (set(), {"gemm"}), ({"y"}, set())]


def test_another_model_is_run_on_its_own(
    model: ir.Model, data: DataSource, passes_over_data: list[Any], set_weight: Any
) -> None:
    context = context_of(data, use_cache=False)
    before = context.ranges(model, REQUEST)
    changed = model.clone()
    set_weight(changed, "w", np.zeros((8, 3, 3, 3), np.float32))
    assert context.ranges(changed, REQUEST)["r"].high == 0.0 != before["r"].high
    assert len(passes_over_data) == 2


class TestOnePass:
    """Ranges and means of one model come from one pass over the data."""

    def chain(self, make_pass: MakePass, layers: list[LinearInput], **settings: Any) -> list[Pass]:
        def calibrate(model: ir.Model, context: Any) -> None:
            context.ranges(model, REQUEST)

        def correct(model: ir.Model, context: Any) -> None:
            context.input_means(context.reference, [GEMM, CONV])

        first = make_pass(
            calibrate,
            name="first",
            effect=Effect.APPROXIMATE,
            anticipates=lambda self, model, target: layers,
        )
        return [first, make_pass(correct, name="second", effect=Effect.APPROXIMATE, **settings)]

    def test_when_the_first_step_knows_what_the_second_will_ask(
        self,
        make_pass: MakePass,
        run_chain: RunChain,
        data: DataSource,
        passes_over_data: list[Any],
    ) -> None:
        run_chain(*self.chain(make_pass, [GEMM, CONV], after=frozenset({"first"})), data=data)
        assert passes_over_data == [({"x", "r", "f"}, {"gemm", "conv"})]

    def test_what_it_did_not_know_is_looked_up_later(
        self,
        make_pass: MakePass,
        run_chain: RunChain,
        data: DataSource,
        passes_over_data: list[Any],
    ) -> None:
        run_chain(*self.chain(make_pass, [GEMM], after=frozenset({"first"})), data=data)
        assert passes_over_data == [({"x", "r", "f"}, {"gemm"}), (set(), {"conv"})]

    def test_nothing_is_gathered_that_nobody_will_ask_for(
        self,
        make_pass: MakePass,
        run_chain: RunChain,
        data: DataSource,
        passes_over_data: list[Any],
    ) -> None:
        first, _ = self.chain(make_pass, [GEMM, CONV])
        run_chain(first, data=data)
        assert passes_over_data == [({"x", "r", "f"}, set())]


class TestCache:
    def test_another_run_takes_what_is_there(
        self, model: ir.Model, data: DataSource, passes_over_data: list[Any]
    ) -> None:
        first = context_of(data).ranges(model, REQUEST)
        assert context_of(data).ranges(model, REQUEST) == first
        assert context_of(data).ranges(model, RangeRequest(REQUEST.tensors, "kl"))
        assert len(passes_over_data) == 1

    def test_other_data_are_other_entries(
        self, model: ir.Model, data: DataSource, calibration: Path, passes_over_data: list[Any]
    ) -> None:
        context_of(data).ranges(model, REQUEST)
        fewer = open_source(str(calibration), interface=interface(model), samples=3)
        context_of(fewer).ranges(model, REQUEST)
        assert len(passes_over_data) == 2

    def test_it_can_be_left_alone(
        self, model: ir.Model, data: DataSource, passes_over_data: list[Any], own_cache: Path
    ) -> None:
        for _ in range(2):
            context_of(data, use_cache=False).ranges(model, REQUEST)
        assert len(passes_over_data) == 2
        assert not own_cache.exists()

    def test_a_damaged_entry_is_made_anew_and_mentioned(
        self, model: ir.Model, data: DataSource, passes_over_data: list[Any], own_cache: Path
    ) -> None:
        first = context_of(data).ranges(model, REQUEST)
        (entry,) = own_cache.rglob("*.npz")
        entry.write_bytes(entry.read_bytes()[:-9])
        again = context_of(data)
        assert again.ranges(model, REQUEST) == first
        assert len(passes_over_data) == 2
        assert any("damaged" in note for note in again.notes)


def test_without_data_there_is_nothing_to_ask(model: ir.Model) -> None:
    context = context_of(None)
    assert not context.has_data
    with pytest.raises(SourceError, match="no calibration data"):
        context.ranges(model, REQUEST)
    with pytest.raises(SourceError, match="no calibration data"):
        context.input_means(model, [GEMM])


def test_tensors_without_a_usable_range_have_no_entry(
    tmp_path: Path, model: ir.Model, set_weight: Any, data: DataSource
) -> None:
    broken = model.clone()
    set_weight(broken, "g", np.full((8, 5), np.nan, np.float32))
    assert set(context_of(data).ranges(broken, RangeRequest(("y", "r"), "minmax"))) == {"r"}


def test_progress_is_told_how_many_batches_there_are(model: ir.Model, data: DataSource) -> None:
    seen: list[tuple[int | None, int]] = []

    class Watch:
        def track(self, items: Iterator[Any], *, total: int | None, label: str) -> Iterator[Any]:
            found = list(items)
            seen.append((total, len(found)))
            return iter(found)

    context_of(data, progress=Watch()).ranges(model, REQUEST)
    assert seen == [(3, 3)]


def test_time_is_kept(model: ir.Model, data: DataSource) -> None:
    context = context_of(data)
    context.ranges(model, REQUEST)
    assert context.calibration_seconds > 0
