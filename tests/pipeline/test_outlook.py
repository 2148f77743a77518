"""What a pass learns about channels, and about what a later step would make of its work."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from slimctl.core.contract import Context, Effect, Outlook, Pass, RangeRequest
from slimctl.core.errors import SourceError
from slimctl.data.sources import DataSource, open_source
from slimctl.graph.edit import interface
from slimctl.graph.load import load_model
from slimctl.graph.session import open_session, run, tapped
from slimctl.pipeline import context as context_module
from slimctl.pipeline.context import PipelineContext
from slimctl.targets import load_target

MakePass = Callable[..., Pass]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIMCTL_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def model(network: Path) -> ir.Model:
    return load_model(network)


@pytest.fixture
def data(calibration: Path, model: ir.Model) -> DataSource:
    return open_source(str(calibration), interface=interface(model), batch_size=5)


@pytest.fixture
def collected(monkeypatch: pytest.MonkeyPatch) -> list[tuple[set[str], set[str]]]:
    """For every pass over the data, the tensors counted and those whose channels were measured."""
    seen: list[tuple[set[str], set[str]]] = []
    collect = context_module.collect

    def counted(model: ir.Model, tensors: Any, *rest: Any, **settings: Any) -> Any:
        seen.append((set(tensors), {channels.tensor for channels in settings["channels"]}))
        return collect(model, tensors, *rest, **settings)

    monkeypatch.setattr(context_module, "collect", counted)
    return seen


def _context(data: DataSource | None, **settings: Any) -> PipelineContext:
    return PipelineContext(load_target("cpu"), data=data, threads=1, **settings)


def _judge(make_pass: MakePass, asks: tuple[str, ...] = ("r", "y")) -> Pass:
    """A lossy pass that asks for ranges of both models, and gives their sums."""

    def outlook(self: Pass, model: ir.Model, other: ir.Model, context: Context) -> Outlook:
        request = RangeRequest(asks, "minmax")
        ranges = [context.ranges(m, request) for m in (model, other)]
        return Outlook(*(sum(found.high for found in each.values()) for each in ranges))

    return make_pass(
        name="judge",
        effect=Effect.APPROXIMATE,
        anticipates_ranges=lambda self, model, target: asks,
        outlook=outlook,
    )


def test_channel_rms_is_that_of_the_data(
    model: ir.Model, data: DataSource, calibration: Path
) -> None:
    context = _context(data)
    context.enter(Pass(), (), model)
    found = context.channel_rms(model, {"r": 1, "f": 1})
    outputs = run(open_session(tapped(model, ["r", "f"])), {"x": np.load(calibration)["x"]})
    for name in ("r", "f"):
        values = np.moveaxis(outputs[name].astype(np.float64), 1, 0).reshape(8, -1)
        np.testing.assert_allclose(found[name], np.sqrt((values**2).mean(axis=1)), rtol=1e-5)


def test_channel_rms_needs_data(model: ir.Model) -> None:
    with pytest.raises(SourceError, match="no calibration data"):
        _context(None).channel_rms(model, {"r": 1})


def test_channels_and_what_comes_later_need_one_pass(
    model: ir.Model, data: DataSource, make_pass: MakePass, collected: list[Any]
) -> None:
    context = _context(data)
    context.enter(make_pass(), (make_pass(), _judge(make_pass)), model)
    first = context.channel_rms(model, {"r": 1})
    context.ranges(model, RangeRequest(("r", "y"), "kl"))
    assert collected == [({"r", "y"}, {"r"})]
    again = _context(data)  # from the cache
    again.enter(make_pass(), (make_pass(), _judge(make_pass)), model)
    np.testing.assert_array_equal(again.channel_rms(model, {"r": 1})["r"], first["r"])
    assert len(collected) == 1


def test_only_what_changed_is_collected_again(
    model: ir.Model, data: DataSource, make_pass: MakePass, collected: list[Any], set_weight: Any
) -> None:
    context = _context(data, use_cache=False)
    context.enter(make_pass(), (_judge(make_pass),), model)
    other = model.clone()
    set_weight(other, "g", np.zeros((8, 5), np.float32))
    context.channel_rms(model, {"r": 1})
    found = context.outlook(model, other, {"y"})
    assert found is not None
    assert found.model_db > found.other_db
    assert collected == [({"r", "y"}, {"r"}), ({"y"}, set())]


def test_the_judge_runs_as_the_step_that_it_is(
    model: ir.Model, data: DataSource, make_pass: MakePass
) -> None:
    seen: list[Any] = []

    def outlook(self: Pass, model: ir.Model, other: ir.Model, context: Context) -> None:
        seen.append((model is context.reference, list(context.later)))

    judge = make_pass(name="judge", effect=Effect.APPROXIMATE, outlook=outlook)
    context = _context(data)
    context.enter(make_pass(), (make_pass(), judge, make_pass(name="last")), model.clone())
    before = context.reference
    assert context.outlook(model, model.clone(), ()) is None
    assert seen == [(True, ["last"])]
    assert context.reference is before
    assert list(context.later) == ["edit", "judge", "last"]


def test_without_a_lossy_step_there_is_no_outlook(
    model: ir.Model, data: DataSource, make_pass: MakePass
) -> None:
    context = _context(data)
    context.enter(make_pass(), (make_pass(),), model)
    assert context.outlook(model, model.clone(), ()) is None


def test_what_was_computed_is_remembered(data: DataSource) -> None:
    context = _context(data)
    calls: list[int] = []

    def compute() -> int:
        calls.append(1)
        return len(calls)

    assert [context.remembered(key, compute) for key in ("a", "a", "b")] == [1, 1, 2]
