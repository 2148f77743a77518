"""Scans: what probes find, what is kept, and where they run."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from slimctl.core.errors import OptionError, SourceError
from slimctl.evaluate.similarity import sqnr_db
from slimctl.graph.session import open_session, run
from slimctl.recipe.schema import DataSpec
from slimctl.sensitivity.executors import Local, Processes, open_executor
from slimctl.sensitivity.journal import Journal
from slimctl.sensitivity.run import scan
from slimctl.sensitivity.scan import Finding, Scanner
from slimctl.sensitivity.setup import Named, Setup, Task, groups_of
from tests.sensitivity.network import LAYERS


def _whole(scanner: Scanner, variant: object, samples: Path) -> float:
    """SQNR of the worst output, both models run from end to end."""
    with np.load(samples) as stored:
        feeds = [{"x": row[None]} for row in stored["x"]]
    sessions = [open_session(model, threads=1) for model in (scanner.model, variant)]  # type: ignore[arg-type]
    outputs = [[run(session, feed) for feed in feeds] for session in sessions]
    return min(
        sqnr_db(*(np.concatenate([found[name] for found in side]) for side in outputs))
        for name in ("y", "side")
    )


@pytest.mark.parametrize("change", ["int8", "int16", "fp16", "sparse:0.5", "int4"])
@pytest.mark.parametrize("direction", ["alone", "except"])
def test_probes_find_what_whole_models_lose(
    setup: Setup, samples: Path, change: str, direction: str
) -> None:
    both = replace(setup, changes=(change,), directions=("alone", "except"), tolerance_db=0.0)
    scanner = Scanner(both)
    # onnxruntime leaves out some roundings to float16, others in a part than in the whole.
    near_db = 3.0 if change == "fp16" else 0.1
    tasks = [task for task in scanner.tasks() if task.direction == direction]
    assert tasks
    made = scanner.changes[change]
    for task in tasks:
        found = scanner.run(task)
        variant = made.only([task.group]) if direction == "alone" else made.without([task.group])
        assert found.samples == 24
        assert found.sqnr_db == pytest.approx(_whole(scanner, variant, samples), abs=near_db)


def test_the_layer_with_an_outlier_is_found(setup: Setup) -> None:
    found = scan(setup).findings
    assert found[0].group == "conv1"
    assert sorted(f.group for f in found) == sorted(LAYERS)


def test_what_costs_most_comes_first(setup: Setup) -> None:
    found = scan(replace(setup, directions=("alone", "except"))).findings
    alone, rest = ([f.sqnr_db for f in found if f.direction == d] for d in ("alone", "except"))
    assert alone == sorted(alone)
    assert rest == sorted(rest, reverse=True)


def test_layers_of_one_operator_go_together(setup: Setup) -> None:
    found = scan(replace(setup, grouping="type")).findings
    assert {f.group: f.layers for f in found} == {"Conv": LAYERS[:4], "MatMul": LAYERS[4:]}


def test_scopes_end_at_the_last_slash_or_dot() -> None:
    layers = [Named("/a/b/Conv", "Conv"), Named("/a/b/Conv_1", "Conv"), Named("x.y", "Conv")]
    assert groups_of(layers, "scope") == {"/a/b": ["/a/b/Conv", "/a/b/Conv_1"], "x": ["x.y"]}


def test_patterns_choose_layers(setup: Setup) -> None:
    chosen = replace(setup, include=("conv*",), exclude=("conv2",))
    assert [task.group for task in Scanner(chosen).tasks()] == ["conv0", "conv1", "conv3"]
    with pytest.raises(OptionError, match="leave no layer"):
        scan(replace(setup, include=("nothing*",)))


def test_layers_that_cannot_be_changed_are_named(setup: Setup) -> None:
    skipped = scan(replace(setup, changes=("int4",))).skipped["int4"]
    assert {item.node for item in skipped} == set(LAYERS[:4])
    assert all(item.reason for item in skipped)


def test_the_metric_is_measured_on_all_samples(setup: Setup) -> None:
    found = scan(replace(setup, metric="top1:y", include=("conv1",))).findings[0]
    assert found.samples == 24
    assert found.metric is not None
    assert found.metric.low is not None
    assert found.metric.high is not None
    assert found.metric.low <= found.metric.drop <= found.metric.high


def test_a_metric_without_labels_is_refused(setup: Setup, tmp_path: Path) -> None:
    with np.load(setup.data.source) as stored:
        np.savez(tmp_path / "bare.npz", allow_pickle=False, x=stored["x"])
    bare = replace(setup, data=DataSpec(source=str(tmp_path / "bare.npz")), metric="top1:y")
    with pytest.raises(SourceError, match="needs labels"):
        scan(bare)


def test_estimates_rank_as_measurements_do(setup: Setup) -> None:
    measured = {f.group: f.sqnr_db for f in scan(replace(setup, tolerance_db=0.0)).findings}
    estimates = scan(replace(setup, fast=True)).findings
    assert all(f.low_db is None and f.samples == 1 for f in estimates)
    order = np.argsort([measured[f.group] for f in estimates])
    assert np.corrcoef(order, np.arange(len(order)))[0, 1] >= 0.8


def test_estimates_are_of_single_changes(setup: Setup) -> None:
    with pytest.raises(OptionError, match="alone"):
        Scanner(replace(setup, fast=True, directions=("except",)))


# what is kept


class _Interrupted(Local):
    """Ctrl-C after two probes."""

    def run(self, scanner: Scanner, tasks: Sequence[Task]) -> Iterator[Finding]:
        for count, found in enumerate(super().run(scanner, tasks)):
            if count == 2:
                raise KeyboardInterrupt
            yield found


def test_an_interrupted_scan_goes_on_where_it_was(setup: Setup) -> None:
    with pytest.raises(KeyboardInterrupt):
        scan(setup, executor=_Interrupted())
    found = scan(setup)
    assert found.kept == 2
    assert len(found.findings) == 5
    assert scan(setup).kept == 5
    assert scan(setup, resume=False).kept == 0


def test_findings_of_other_options_are_not_used(setup: Setup) -> None:
    scan(setup)
    assert scan(replace(setup, seed=1)).kept == 0
    assert scan(replace(setup, tolerance_db=0.5)).kept == 0
    assert scan(replace(setup, changes=("int8", "fp16"))).kept == 5  # the same probes again
    assert scan(replace(setup, data=DataSpec(source=setup.data.source, samples=5))).kept == 0


def test_a_line_that_was_cut_off_costs_one_probe(setup: Setup) -> None:
    journals: list[Journal] = []

    def journal(scanner: Scanner) -> Journal:
        journals.append(Journal(setup.model.parent / "journal.jsonl"))
        return journals[-1]

    scan(setup, journal=journal)
    path = journals[0].path
    path.write_bytes(path.read_bytes()[:-20])
    assert scan(setup, journal=journal).kept == 4
    assert scan(setup, journal=journal).kept == 5


# where probes run


@pytest.mark.parametrize("text", ["", "processes", "processes:0", "processes:x", "dask:", "cloud"])
def test_unknown_executors_are_refused(text: str) -> None:
    with pytest.raises(OptionError, match="no executor"):
        open_executor(text)


class _Killing(Processes):
    """Kills one of its workers when the first finding is there."""

    killed = 0

    def run(self, scanner: Scanner, tasks: Sequence[Task]) -> Iterator[Finding]:
        for found in super().run(scanner, tasks):
            if not self.killed:
                self.killed = _a_child()
                os.kill(self.killed, signal.SIGKILL)
            yield found


def _a_child() -> int:
    """A worker process of this one."""
    import multiprocessing

    children = [child.pid for child in multiprocessing.active_children() if child.pid]
    assert children
    return children[0]


def test_a_killed_process_loses_nothing(setup: Setup) -> None:
    many = replace(setup, changes=("int8", "fp16"), directions=("alone", "except"))
    executor = _Killing(2)
    found = scan(many, executor=executor, resume=False)
    assert executor.killed
    assert found.findings == scan(many, resume=False).findings


def test_dask_without_a_scheduler_is_refused(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("distributed")
    monkeypatch.setattr("slimctl.sensitivity.executors._CONNECT_S", 1)
    with pytest.raises(OptionError, match="No Dask scheduler"):
        scan(setup, executor=open_executor("dask:127.0.0.1:1"))
