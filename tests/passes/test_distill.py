"""Distillation through the pipeline: what it needs, what it finds by itself, what it says."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import yaml
from onnx import numpy_helper
from pydantic import ValidationError

pytest.importorskip("torch")

from slimctl.core.contract import Pass, SilentProgress
from slimctl.core.errors import OptionError, UnsupportedModelError
from slimctl.passes.distill import Distill
from slimctl.passes.finetune import Finetune
from slimctl.passes.fuse import Fuse
from slimctl.passes.prune import Prune
from slimctl.passes.quantize import Quantize
from slimctl.recipe.parse import load_recipe
from slimctl.recipe.resolve import lock, resolve_recipe
from slimctl.recipe.run import RunResult, run_passes, run_recipe
from slimctl.recipe.schema import DataSpec, EvaluationSpec

TEXT = """
<ir_version: 8, opset_import: ["": 17]>
net (float[N,1,8,8] x) => (float[N,4] {output})
{{
    c1 = Conv<pads=[1,1,1,1]>(x, w1)
    n1 = BatchNormalization(c1, s1, b1, m1, v1)
    r1 = Relu(n1)
    c2 = Conv<pads=[1,1,1,1], strides=[2,2]>(r1, w2)
    n2 = BatchNormalization(c2, s2, b2, m2, v2)
    r2 = Relu(n2)
    pooled = GlobalAveragePool(r2)
    flat = Flatten(pooled)
    {last} = Gemm<transB=1>(flat, w3, b3)
    {softmax}
}}
"""
WIDTHS = (16, 32)


def network(*, seed: int = 0, softmax: bool = False, output: str = "y") -> onnx.ModelProto:
    """A small network; its normalizations have seen nothing yet."""
    random = np.random.default_rng(seed)
    last = "scores" if softmax else output
    text = TEXT.format(
        output=output, last=last, softmax=f"{output} = Softmax(scores)" if softmax else ""
    )
    model = onnx.parser.parse_model(text)
    for index, node in enumerate(model.graph.node):
        node.name = f"{node.op_type}_{index}"
    shapes = {"w1": (16, 1, 3, 3), "w2": (32, 16, 3, 3), "w3": (4, 32)}
    arrays = {
        name: random.standard_normal(shape) * np.sqrt(2 / np.prod(shape[1:]))
        for name, shape in shapes.items()
    }
    for place, width in enumerate(WIDTHS, start=1):
        arrays |= {f"s{place}": np.ones(width), f"v{place}": np.ones(width)}
        arrays |= {f"b{place}": 0.1 * np.ones(width), f"m{place}": np.zeros(width)}
    arrays["b3"] = np.zeros(4)
    for name, array in arrays.items():
        model.graph.initializer.append(numpy_helper.from_array(array.astype(np.float32), name))
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """teacher.onnx, trained, and data: four patterns with noise."""
    path = tmp_path_factory.mktemp("distill")
    random = np.random.default_rng(1)
    patterns = random.standard_normal((4, 1, 8, 8))
    for name, count in (("train", 256), ("test", 200)):
        labels = np.arange(count) % 4
        x = (patterns[labels] + 1.5 * random.standard_normal((count, 1, 8, 8))).astype(np.float32)
        np.savez(path / f"{name}.npz", x=x, labels=labels)
        np.savez(path / f"{name}-unlabeled.npz", x=x)
    onnx.save(network(), path / "raw.onnx")
    run_passes(
        path / "raw.onnx",
        [Finetune(epochs=8, batch_size=32, learning_rate=0.01)],
        output=path / "teacher.onnx",
        training=DataSpec(source=str(path / "train.npz")),
        threads=1,
    )
    return path


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("SLIMCTL_CACHE", str(tmp_path / "cache"))
    yield
    left = [path for path in (tmp_path / "cache" / "training").glob("*") if path.is_file()]
    assert left == [], "neither checkpoints nor outputs of the teacher are left"


QUICK: dict[str, Any] = {"epochs": 2, "batch_size": 32}


def run(
    folder: Path, *steps: Pass, model: str = "teacher.onnx", data: str = "train.npz", **more: Any
) -> RunResult:
    return run_passes(
        folder / model,
        steps,
        output=folder / "unused.onnx",
        training=DataSpec(source=str(folder / data)),
        calibration=DataSpec(source=str(folder / data), samples=64),
        threads=1,
        dry_run=True,
        **more,
    )


def report(result: RunResult) -> Any:
    (record,) = (record for record in result.records if record.step.name == "distill")
    return record.report


PRUNE = Prune(sparsity=0.6, min_channels=4, round_to=1)


def test_a_pruned_model_learns_from_what_it_was(folder: Path) -> None:
    result = run(
        folder,
        PRUNE,
        Distill(epochs=6, batch_size=32, learning_rate=0.005),
        data="train-unlabeled.npz",
        evaluation=EvaluationSpec(source=str(folder / "test.npz"), metric="top1"),
    )
    found = report(result)
    pruned, distilled = (record.sqnr_db for record in result.records)
    assert pruned is not None and distilled is not None and distilled > pruned + 1
    assert found.facts["loss"][-1] < 0.9 * found.facts["loss"][0]
    assert found.facts["pairs"]["outputs"] == {"y": "values"}
    widths = [(pair[0], *pair[3]) for pair in found.facts["pairs"]["features"]]
    assert widths == [("r1", 6, 16), ("r2", 13, 32)]
    assert len(found.facts["metric"]) == 7
    assert any(note.startswith("features: r1 (6 -> 16 channels)") for note in found.notes)
    assert "the teacher ran on 256 of the 1536 samples" in found.timings[0]


def test_the_graph_stays_what_it_is(folder: Path, tmp_path: Path) -> None:
    """What was learned along, the projections, is gone."""
    made = {}
    for name, steps in (("pruned", [PRUNE]), ("distilled", [PRUNE, Distill(**QUICK)])):
        made[name] = run_passes(
            folder / "teacher.onnx",
            steps,
            output=tmp_path / f"{name}.onnx",
            training=DataSpec(source=str(folder / "train.npz")),
            calibration=DataSpec(source=str(folder / "train.npz"), samples=64),
            threads=1,
        )
    graphs = [onnx.load(tmp_path / f"{name}.onnx").graph for name in made]
    nodes = [[(n.op_type, list(n.input), list(n.output)) for n in graph.node] for graph in graphs]
    sizes = [{t.name: list(t.dims) for t in graph.initializer} for graph in graphs]
    assert nodes[0] == nodes[1] and sizes[0] == sizes[1]


def test_labels_count_where_there_are_some(folder: Path) -> None:
    student = Distill(teacher=str(folder / "raw.onnx"), **QUICK)
    with_labels = report(run(folder, student))
    assert with_labels.facts["pairs"]["outputs"] == {"y": "classes"}
    assert "learned from the teacher: y as classes; and from labels" in with_labels.notes
    alone = report(run(folder, student, data="train-unlabeled.npz"))
    assert "learned from the teacher: y as values" in alone.notes
    doubt = "if y holds scores of classes, --kind classes suits it better"
    assert doubt in alone.notes and doubt not in with_labels.notes
    ignored = report(run(folder, student.model_copy(update={"alpha": 1.0})))
    assert "learned from the teacher: y as classes" in ignored.notes


def test_two_runs_give_the_same(folder: Path) -> None:
    steps = (PRUNE, Distill(**QUICK))
    first, second = run(folder, *steps), run(folder, *steps)
    assert first.manifest.model == second.manifest.model
    assert first.manifest.steps == second.manifest.steps
    other = run(folder, *steps, seed=1)
    assert first.manifest.model != other.manifest.model


class Interrupted(SilentProgress):
    """Ctrl-C in the middle of training."""

    def track(self, items: Iterator[Any], *, total: int | None, label: Any) -> Iterator[Any]:
        for index, item in enumerate(items):
            if index == 10 and callable(label):
                signal.raise_signal(signal.SIGINT)  # the step that begins is finished
            yield item


def test_a_run_that_was_stopped_goes_on(folder: Path, tmp_path: Path) -> None:
    steps = (PRUNE, Distill(**QUICK))
    whole = report(run(folder, *steps))
    with pytest.raises(KeyboardInterrupt):
        run(folder, *steps, progress=Interrupted())
    assert len(list((tmp_path / "cache" / "training").iterdir())) == 1
    other = Distill(**QUICK, resume=True, alpha=0.5)
    anew = report(run(folder, PRUNE, other))
    assert "there was no checkpoint of this run: it began anew" in anew.timings
    found = report(run(folder, PRUNE, Distill(**QUICK, resume=True)))
    assert "continued from a checkpoint at step 11" in found.timings
    assert found.facts["loss"] == pytest.approx(whole.facts["loss"], rel=1e-4)


def test_what_the_teacher_said_is_not_kept_where_samples_change(folder: Path) -> None:
    student = Distill(teacher=str(folder / "raw.onnx"), augment="flip", **QUICK)
    assert "the teacher ran on 512 of the 512" in report(run(folder, student)).timings[0]
    plain = student.model_copy(update={"augment": "", "teacher_cache_mb": 0})
    assert "the teacher ran on 512 of the 512" in report(run(folder, plain)).timings[0]


def test_keeping_changes_nothing(folder: Path) -> None:
    kept = Distill(teacher=str(folder / "raw.onnx"), **QUICK)
    again = kept.model_copy(update={"teacher_cache_mb": 0})
    losses = [report(run(folder, step)).facts["loss"] for step in (kept, again)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_another_file_can_be_the_teacher(folder: Path) -> None:
    onnx.save(network(seed=3, softmax=True, output="p"), folder / "other.onnx")
    found = report(run(folder, Distill(teacher=str(folder / "other.onnx"), **QUICK)))
    assert found.facts["pairs"]["outputs"] == {"y": "classes"}
    different = report(run(folder, Distill(teacher=str(folder / "raw.onnx"), **QUICK)))
    assert found.facts["teacher"] != different.facts["teacher"]


def test_shrinking_is_a_step_of_its_own() -> None:
    prune, distill = Distill(shrink=0.5, epochs=3).expand()
    assert prune == Prune(target_macs=0.5) and distill == Distill(epochs=3)


def test_shrink_prunes_and_learns_from_what_it_was(folder: Path) -> None:
    result = run(folder, Distill(shrink=0.7, **QUICK))
    assert [record.step.name for record in result.records] == ["prune", "distill"]
    assert report(result).facts["loss"]


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ((Distill(**QUICK),), "There is no teacher: no step before this one changed the model"),
        ((PRUNE, Fuse(), Distill(**QUICK)), "There is no teacher"),
    ],
)
def test_without_a_teacher(folder: Path, steps: tuple[Pass, ...], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        run(folder, *steps)


def test_a_student_cannot_be_its_own_teacher(folder: Path) -> None:
    with pytest.raises(OptionError, match="The student is the teacher"):
        run(folder, Distill(teacher=str(folder / "teacher.onnx"), **QUICK))


def test_a_quantized_student_is_refused(folder: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="quantized"):
        run(folder, Quantize(), Distill(teacher=str(folder / "teacher.onnx"), **QUICK))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"feature": ("a",)}, "not of the form STUDENT=TEACHER"),
        ({"feature": ("a=",)}, "not of the form"),
        ({"alpha": 1.1}, "less than or equal to 1"),
        ({"shrink": 1.0}, "less than 1"),
        ({"temperature": 0.0}, "greater than 0"),
    ],
)
def test_options_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Distill(**options)


# recipes

RECIPE = """
version: 1
name: small
model: raw.onnx
data: {training: {source: train.npz}}
steps:
  - distill: {teacher: models/teacher.onnx, epochs: 1, batch_size: 64}
"""


@pytest.fixture
def recipe(folder: Path, tmp_path: Path) -> Path:
    """A recipe whose files are beside it."""
    (tmp_path / "models").mkdir()
    for name, place in (("raw.onnx", "."), ("train.npz", "."), ("teacher.onnx", "models")):
        (tmp_path / place / name).write_bytes((folder / name).read_bytes())
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    return path


def test_the_teacher_is_beside_the_recipe(
    recipe: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    result = run_recipe(recipe, output=Path("out"))
    assert result.manifest.steps[0].options["teacher"] == "teacher.onnx"
    locked = yaml.safe_load((Path("out") / "recipe.lock.yaml").read_text())
    path = Path("out") / locked["steps"][0]["distill"]["teacher"]
    assert path.resolve() == (recipe.parent / "models" / "teacher.onnx").resolve()


def test_what_runs_names_the_file(recipe: Path) -> None:
    job = resolve_recipe(load_recipe(recipe))
    document = yaml.safe_load(lock(job, recipe.parent / "deeper"))
    assert document["steps"][0]["distill"]["teacher"] == "../models/teacher.onnx"
