from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from slimctl.core.contract import Effect, Pass, PassReport
from slimctl.core.errors import (
    ConfigError,
    OutputError,
    PassFailedError,
    SourceError,
    UnsupportedModelError,
)
from slimctl.data.sources import open_source
from slimctl.evaluate.metrics import Similarity
from slimctl.graph.edit import interface
from slimctl.graph.load import load_model
from slimctl.graph.save import content_hash
from slimctl.graph.session import open_session, run
from slimctl.pipeline import checks, probe
from slimctl.pipeline import run as pipeline_run
from slimctl.pipeline.context import PipelineContext
from slimctl.pipeline.run import PipelineResult, run_steps
from slimctl.targets import load_target

MakePass = Callable[..., Pass]
RunChain = Callable[..., PipelineResult]
SetWeight = Callable[[ir.Model, str, np.ndarray], None]

APPROXIMATE = Effect.APPROXIMATE


def weight(model: ir.Model, name: str) -> np.ndarray:
    tensor = model.graph.initializers[name].const_value
    assert tensor is not None
    return tensor.numpy()


@pytest.fixture
def scale(set_weight: SetWeight) -> Callable[[ir.Model, Any], None]:
    def edit(model: ir.Model, _: Any) -> None:
        set_weight(model, "g", weight(model, "g") * np.float32(1.01))

    return edit


@pytest.fixture
def source(network: Path, calibration: Path) -> Any:
    return open_source(str(calibration), interface=interface(load_model(network)))


def test_the_given_model_stays_as_it_is_and_weights_are_not_copied(
    network: Path, tmp_path: Path, make_pass: MakePass, scale: Any
) -> None:
    model = load_model(network)
    before = content_hash(model)
    shared = []

    def look(clone: ir.Model, _: Any) -> None:
        shared.append(
            clone is not model
            and clone.graph.initializers["w"].const_value
            is model.graph.initializers["w"].const_value
        )

    run_steps(
        model,
        [make_pass(look), make_pass(scale, effect=APPROXIMATE)],
        PipelineContext(load_target("cpu"), threads=1),
        source=network,
        workspace=tmp_path,
    )
    assert shared == [True]
    assert content_hash(model) == before


def test_every_step_is_recorded(
    make_pass: MakePass, run_chain: RunChain, scale: Any, source: Any, network: Path
) -> None:
    def grow(model: ir.Model, _: Any) -> PassReport:
        relu = next(node for node in model.graph if node.name == "relu")
        copy = ir.node("Identity", [relu.outputs[0]], name="copy")
        for user, index in list(relu.outputs[0].uses()):
            if user is not copy:
                user.replace_input_with(index, copy.outputs[0])
        model.graph.insert_after(relu, copy)
        return PassReport(changed={"Identity": 1}, notes=("grown",))

    done = run_chain(
        make_pass(grow, name="grow"), make_pass(scale, name="scale", effect=APPROXIMATE),
        data=source,
    )  # fmt: skip
    first, second = done.records
    assert (first.step.name, first.nodes, first.sqnr_db) == ("grow", 6, 200.0)
    assert first.report.notes == ("grown",)
    assert first.weight_bytes == 4 * (8 * 3 * 3 * 3 + 8 * 5 + 5)
    assert second.exact_error is None
    assert second.seconds > 0

    # The same number from onnxruntime alone.
    totals = Similarity()
    sessions = [open_session(path, threads=1) for path in (network, done.path)]
    for feeds in done.probes.samples:
        expected, found = (run(session, feeds)["y"] for session in sessions)
        totals.update(expected, found)
    assert second.sqnr_db == pytest.approx(totals.sqnr_db)


def test_without_data_there_is_no_sqnr(make_pass: MakePass, run_chain: RunChain) -> None:
    assert run_chain(make_pass()).records[0].sqnr_db is None


def test_the_metric_is_measured_after_every_step_that_changed_something(
    make_pass: MakePass, run_chain: RunChain, scale: Any, network: Path
) -> None:
    seen: list[Path] = []

    def measure(path: Path) -> float:
        seen.append(path)
        return float(len(seen))

    done = run_chain(make_pass(changed={}), make_pass(scale, effect=APPROXIMATE), measure=measure)
    assert done.metric == 1.0
    assert [record.metric for record in done.records] == [1.0, 2.0]
    assert seen == [network, done.path]


def test_a_step_that_changes_nothing_costs_no_checks(
    make_pass: MakePass, run_chain: RunChain, monkeypatch: pytest.MonkeyPatch, network: Path
) -> None:
    monkeypatch.setattr(pipeline_run, "check_step", lambda trial: pytest.fail("checked again"))
    done = run_chain(make_pass(changed={}), make_pass(changed={}))
    assert done.path == network


def test_a_pass_that_hides_its_changes_is_checked_all_the_same(
    make_pass: MakePass, run_chain: RunChain, scale: Any
) -> None:
    with pytest.raises(checks.PassContractError):
        run_chain(make_pass(scale, changed={}))


def test_only_the_last_file_is_left_in_the_workspace(
    make_pass: MakePass, run_chain: RunChain, tmp_path: Path
) -> None:
    done = run_chain(make_pass(), make_pass(), make_pass())
    assert list((tmp_path / "work").rglob("*.onnx")) == [done.path]


def test_a_failed_step_leaves_the_previous_file(
    make_pass: MakePass, run_chain: RunChain, scale: Any, tmp_path: Path
) -> None:
    with pytest.raises(checks.PassContractError, match="step 2"):
        run_chain(make_pass(), make_pass(scale))
    kept = tmp_path / "work" / "step1" / "model.onnx"
    onnx.checker.check_model(str(kept), full_check=True)


def raiser(error: BaseException) -> Callable[[ir.Model, Any], None]:
    def edit(model: ir.Model, _: Any) -> None:
        raise error

    return edit


@pytest.mark.parametrize(
    ("error", "where"),
    [
        (UnsupportedModelError("No", where="node 'a'", fix="f"), "step 2 (bad), node 'a'"),
        (SourceError("calib", "No", fix="f"), "step 2 (bad), calib"),
        (PassFailedError("bad", "No", node="a"), "step bad, node 'a'"),
        (ConfigError("No"), "step 2 (bad)"),
    ],
)
def test_the_step_is_named_and_the_class_of_the_error_kept(
    error: Any, where: str, make_pass: MakePass, run_chain: RunChain
) -> None:
    with pytest.raises(type(error)) as caught:
        run_chain(make_pass(), make_pass(raiser(error), name="bad"))
    assert caught.value is error
    assert caught.value.where == where
    assert where in str(caught.value)


def test_an_unexpected_exception_passes_through_with_a_note(
    make_pass: MakePass, run_chain: RunChain
) -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        run_chain(make_pass(raiser(ZeroDivisionError("oh")), name="bad"))
    assert caught.value.__notes__ == ["while running step 1 (bad)"]


def test_requires_is_asked_before_anything_is_changed(
    make_pass: MakePass, run_chain: RunChain
) -> None:
    def requires(self: Pass, model: ir.Model) -> None:
        raise UnsupportedModelError("Not this one")

    edit = raiser(AssertionError("applied"))
    with pytest.raises(UnsupportedModelError, match="Not this one"):
        run_chain(make_pass(edit, requires=requires))


def test_data_that_a_step_needs_must_be_there(make_pass: MakePass, run_chain: RunChain) -> None:
    with pytest.raises(SourceError, match="needs calibration data") as caught:
        run_chain(make_pass(needs_data=True))
    assert "--calib" in caught.value.fix


def test_an_impossible_order_is_refused_before_work_begins(
    make_pass: MakePass, run_chain: RunChain
) -> None:
    first = make_pass(raiser(AssertionError("ran")), name="first")
    with pytest.raises(ConfigError, match="cannot run after 'first'"):
        run_chain(first, make_pass(name="second", not_after=frozenset({"first"})))


def test_old_models_are_raised_to_what_a_step_needs(
    make_pass: MakePass, run_chain: RunChain, tmp_path: Path
) -> None:
    path = tmp_path / "old.onnx"
    old = onnx.load(tmp_path / "network.onnx")
    old.opset_import[0].version = 11
    onnx.save(old, path)
    done = run_chain(make_pass(minimum_opset=lambda self, model, target: 13), model=path)
    assert done.model.opset_imports[""] == 13
    assert done.records[0].exact_error is not None


class TestReference:
    """The float model that a step may compare with."""

    def chain(self, run_chain: RunChain, *steps: Pass) -> None:
        run_chain(*steps)

    def watcher(self, make_pass: MakePass, seen: list[np.ndarray], **settings: Any) -> Pass:
        def look(model: ir.Model, context: Any) -> None:
            seen.append(weight(context.reference, "g"))

        return make_pass(look, name="watch", **settings)

    def test_is_the_model_before_the_step_that_it_must_stand_after(
        self, make_pass: MakePass, run_chain: RunChain, scale: Any, network: Path
    ) -> None:
        seen: list[np.ndarray] = []
        watch = self.watcher(make_pass, seen, effect=APPROXIMATE, after=frozenset({"round"}))
        run_chain(
            make_pass(scale, name="prune", effect=APPROXIMATE),
            make_pass(scale, name="round", effect=APPROXIMATE),
            make_pass(scale, name="other", effect=APPROXIMATE),
            watch,
        )
        original = weight(load_model(network), "g")
        np.testing.assert_array_equal(seen[0], original * np.float32(1.01))

    def test_is_the_model_before_the_row_of_approximate_steps_for_others(
        self, make_pass: MakePass, run_chain: RunChain, scale: Any, network: Path
    ) -> None:
        seen: list[np.ndarray] = []
        run_chain(
            make_pass(),
            make_pass(scale, name="a", effect=APPROXIMATE),
            make_pass(scale, name="b", effect=APPROXIMATE),
            self.watcher(make_pass, seen, effect=APPROXIMATE),
        )
        np.testing.assert_array_equal(seen[0], weight(load_model(network), "g"))

    def test_is_its_own_input_for_the_first(
        self, make_pass: MakePass, run_chain: RunChain, network: Path
    ) -> None:
        seen: list[np.ndarray] = []
        run_chain(self.watcher(make_pass, seen, effect=APPROXIMATE))
        np.testing.assert_array_equal(seen[0], weight(load_model(network), "g"))


@pytest.fixture
def saved(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Files that are written, as ``folder/name``; a model of 100 bytes is large."""
    monkeypatch.setattr(pipeline_run, "PASSING_THRESHOLD", 100)
    found: list[list[str]] = []
    original = pipeline_run.save_model

    def watched(*given: Any, **options: Any) -> list[Path]:
        files = original(*given, **options)
        found.append([f"{file.parent.name}/{file.name}" for file in files])
        return files

    monkeypatch.setattr(pipeline_run, "save_model", watched)
    return found


@pytest.mark.parametrize("changing", [[], [0], [1], [0, 1]])
def test_large_files_between_steps_keep_their_weights_apart(
    make_pass: MakePass, run_chain: RunChain, scale: Any, saved: Any, changing: list[int]
) -> None:
    """Results do not: their layout is that of every result."""
    edits = [
        {"edit": scale} if index in changing else {"changed": {}, "edit": None} for index in (0, 1)
    ]
    done = run_chain(*(make_pass(effect=APPROXIMATE, **edit) for edit in edits))
    expected = [["original/model.onnx", "original/model.onnx.data"]]
    if 0 in changing:
        expected.append(["step1/model.onnx", "step1/model.onnx.data"])
    if 1 in changing:
        expected.append(["step2/model.onnx"])
    elif 0 in changing:
        expected.append(["result/model.onnx"])
    assert saved == expected
    place = f"{done.path.parent.name}/{done.path.name}"
    assert place == expected[-1][0] if changing else done.path.parent.parent.name != "work"
    found, known = (open_session(one, threads=1) for one in (done.path, done.model))
    feeds = done.probes.all[0]
    np.testing.assert_array_equal(run(found, feeds)["y"], run(known, feeds)["y"])


def test_long_texts_are_cut_for_the_checks_unless_the_model_wants_them_whole(
    tmp_path: Path, make_pass: MakePass, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "_WORK", 1000)
    feeds = tmp_path / "ids.npz"
    np.savez(feeds, ids=np.random.default_rng(0).integers(0, 9, (5, 256)))
    for size, length in (("S", probe.SHORT), ("T", 256)):
        shape = "[0, 2, 128]" if size == "T" else "[0, -1]"
        model = onnx.parser.parse_model(
            '<ir_version: 8, opset_import: ["": 17]> g (int64[N,S] ids) => (float y) '
            f"<float[9,4] table = {{{', '.join(['0.5'] * 36)}}}, int64[{shape.count(',') + 1}] s = "
            f"{{{shape[1:-1]}}}> {{ i = Reshape(ids, s) e = Gather(table, i) y = Identity(e) }}"
        )
        del model.graph.output[0].type.tensor_type.shape.dim[:]
        model.graph.output[0].type.tensor_type.ClearField("shape")
        path = tmp_path / f"{size}.onnx"
        onnx.save(model, path)
        loaded = load_model(path)
        context = PipelineContext(load_target("cpu"), threads=1)
        context.data = open_source(str(feeds), interface=interface(loaded))
        workspace = tmp_path / f"work_{size}"
        workspace.mkdir()
        done = run_steps(loaded, [make_pass()], context, source=path, workspace=workspace)
        assert {feed["ids"].shape for feed in done.probes.samples} == {(1, length)}
        assert done.probes.random is None  # numbers of tokens are taken over: the same again
        assert bool(context.notes) == (length == probe.SHORT)


@pytest.mark.parametrize("stated", [[], ["h"]])
def test_shapes_are_written_where_the_source_writes_them(
    make_pass: MakePass, run_chain: RunChain, tmp_path: Path, stated: list[str]
) -> None:
    proto = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> g (float[N,4] x) => (float[N,4] y) '
        "{ h = Relu(x) k = Neg(h) y = Abs(k) }"
    )
    for name in stated:
        info = onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["N", 4])
        proto.graph.value_info.append(info)
    onnx.save(proto, tmp_path / "stated.onnx")

    def rename(model: ir.Model, _: object) -> None:
        model.graph[0].name = "renamed"

    done = run_chain(make_pass(rename), model=tmp_path / "stated.onnx")
    assert [info.name for info in onnx.load(done.path).graph.value_info] == stated


def test_a_full_disk_is_the_users_to_mend(
    make_pass: MakePass, run_chain: RunChain, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pipeline_run, "save_model", full)
    with pytest.raises(OutputError, match="No space left") as caught:
        run_chain(make_pass())
    assert "free some space" in caught.value.fix
    assert caught.value.exit_code == 2
