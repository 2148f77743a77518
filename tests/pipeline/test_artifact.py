from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from slimctl.core import files
from slimctl.core.errors import OutputError
from slimctl.graph.session import open_session, run
from slimctl.pipeline import artifact
from slimctl.pipeline.artifact import (
    check_artifact_output,
    is_file_output,
    manifest_path,
    read_artifact,
    workspace,
    write_artifact,
)
from slimctl.pipeline.manifest import Manifest, ModelFacts, Results, Run, SourceFacts

FACTS = {"content_hash": "c", "size_bytes": 10, "weight_bytes": 8, "nodes": 2, "opset": 17}


@pytest.fixture
def manifest() -> Manifest:
    run = Run(started="now", host="<b>here</b>", platform="p")
    entry = {"name": "source.onnx", "sha256": "s", "size_bytes": 10}
    return Manifest(
        name="m<script>",
        versions={"slimctl": "1"},
        source=SourceFacts.model_validate({**FACTS, "files": [entry]}),
        model=ModelFacts(**FACTS),
        target="cpu",
        seed=0,
        steps=(),
        results=Results(size_ratio=0.5),
        run=run,
    )


def save_add(folder: Path, value: float, *, external: bool = False) -> list[Path]:
    """y = x + value, as the last step leaves it."""
    folder.mkdir(parents=True)
    constant = numpy_helper.from_array(np.full(600, value, np.float32), "c")
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "c"], ["y"], name="add")],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [600])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [600])],
        [constant],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    path = folder / "model.onnx"
    onnx.save(
        model, path, save_as_external_data=external, location="model.onnx.data", size_threshold=16
    )
    return [path, folder / "model.onnx.data"] if external else [path]


@pytest.fixture
def write(manifest: Manifest) -> Callable[..., artifact.Artifact]:
    """Writes the model that adds a value."""

    def call(
        output: Path, value: float, *, external: bool = False, lock: str | None = None
    ) -> artifact.Artifact:
        with workspace(output) as folder:
            made = save_add(folder / "step", value, external=external)
            return write_artifact(made, manifest, output, folder, lock=lock)

    return call


def added(path: Path) -> float:
    """What the model adds."""
    return float(run(open_session(path, threads=1), {"x": np.zeros(600, np.float32)})["y"][0])


def names(folder: Path) -> list[str]:
    return sorted(item.name for item in folder.iterdir())


Write = Callable[..., artifact.Artifact]


def test_a_file_has_its_manifest_beside_it(tmp_path: Path, write: Write) -> None:
    made = write(tmp_path / "x.onnx", 2)
    assert names(tmp_path) == ["x.manifest.json", "x.onnx"]
    assert added(made.model) == 2
    found = read_artifact(tmp_path / "x.onnx")
    assert found.manifest == made.manifest
    assert [entry.name for entry in found.manifest.files] == ["x.onnx"]


def test_a_folder_is_the_full_artifact(tmp_path: Path, write: Write) -> None:
    made = write(tmp_path / "out", 2, lock="version: 1\n")
    expected = ["manifest.json", "model.onnx", "recipe.lock.yaml", "report.html"]
    assert names(tmp_path / "out") == expected
    assert names(tmp_path) == ["out"]
    assert added(made.model) == 2
    document = json.loads((tmp_path / "out" / "manifest.json").read_bytes())
    assert [entry["name"] for entry in document["files"]] == ["model.onnx"]
    assert [entry["name"] for entry in document["run"]["files"]] == expected[2:]
    assert read_artifact(tmp_path / "out").manifest == made.manifest


def test_an_existing_folder_is_replaced_as_a_whole(tmp_path: Path, write: Write) -> None:
    write(tmp_path / "out", 2, external=True)
    write(tmp_path / "out", 3)
    assert names(tmp_path / "out") == ["manifest.json", "model.onnx", "report.html"]
    assert names(tmp_path) == ["out"]
    assert added(tmp_path / "out" / "model.onnx") == 3


def test_a_folder_is_replaced_where_the_system_cannot_exchange(
    tmp_path: Path, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_exchange", lambda first, second: False)
    write(tmp_path / "out", 2)
    write(tmp_path / "out", 3)
    assert names(tmp_path) == ["out"]
    assert added(tmp_path / "out" / "model.onnx") == 3


@pytest.mark.parametrize("output", ["x.onnx", "out"])
def test_weights_apart_stay_beside_the_model(tmp_path: Path, write: Write, output: str) -> None:
    made = write(tmp_path / output, 2, external=True)
    moved = tmp_path / "elsewhere"
    made.model.parent.rename(moved) if output == "out" else moved.mkdir()
    if output == "x.onnx":
        for item in tmp_path.glob("x.*"):
            item.rename(moved / item.name)
    assert added(moved / made.model.name) == 2
    assert len(made.manifest.files) == 2


def test_weights_of_a_replaced_file_are_removed_last(tmp_path: Path, write: Write) -> None:
    first = write(tmp_path / "x.onnx", 2, external=True)
    stranger = tmp_path / "x.onnx.other.data"
    stranger.write_bytes(b"mine")
    second = write(tmp_path / "x.onnx", 3, external=True)
    old, new = (made.manifest.files[1].name for made in (first, second))
    assert old != new
    assert names(tmp_path) == sorted(["x.manifest.json", "x.onnx", new, "x.onnx.other.data"])
    assert added(tmp_path / "x.onnx") == 3


def test_the_same_weights_survive_being_written_again(tmp_path: Path, write: Write) -> None:
    write(tmp_path / "x.onnx", 2, external=True)
    write(tmp_path / "x.onnx", 2, external=True)
    assert added(tmp_path / "x.onnx") == 2
    assert len(names(tmp_path)) == 3


def test_a_model_that_is_not_the_manifests_is_noticed(tmp_path: Path, write: Write) -> None:
    write(tmp_path / "x.onnx", 2)
    manifest = (tmp_path / "x.manifest.json").read_bytes()
    write(tmp_path / "x.onnx", 3)
    (tmp_path / "x.manifest.json").write_bytes(manifest)  # as a kill between the two would
    with pytest.raises(OutputError, match="not the one that the manifest describes"):
        read_artifact(tmp_path / "x.onnx")


def test_missing_weights_are_noticed(tmp_path: Path, write: Write) -> None:
    made = write(tmp_path / "x.onnx", 2, external=True)
    made.files[1].unlink()
    with pytest.raises(OutputError, match="not the one"):
        read_artifact(tmp_path / "x.onnx")


class TestWhatMayBeReplaced:
    def test_nothing_without_force(self, tmp_path: Path, write: Write) -> None:
        write(tmp_path / "x.onnx", 2)
        write(tmp_path / "out", 2)
        for output in (tmp_path / "x.onnx", tmp_path / "out"):
            with pytest.raises(OutputError, match="exists already"):
                check_artifact_output(output, force=False)
            check_artifact_output(output, force=True)

    def test_nor_a_manifest_alone(self, tmp_path: Path) -> None:
        (tmp_path / "x.manifest.json").write_text("{}")
        with pytest.raises(OutputError, match="exists already"):
            check_artifact_output(tmp_path / "x.onnx", force=False)

    def test_an_empty_folder_always(self, tmp_path: Path) -> None:
        (tmp_path / "out").mkdir()
        check_artifact_output(tmp_path / "out", force=False)

    def test_a_folder_with_other_things_never(self, tmp_path: Path) -> None:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "thesis.tex").write_text("ten years of work")
        with pytest.raises(OutputError, match="no part of an artifact"):
            check_artifact_output(tmp_path / "out", force=True)

    def test_an_artifact_with_other_things_in_it_never(self, tmp_path: Path, write: Write) -> None:
        write(tmp_path / "out", 2)
        (tmp_path / "out" / "thesis.tex").write_text("ten years of work")
        with pytest.raises(OutputError, match=r"thesis\.tex"):
            check_artifact_output(tmp_path / "out", force=True)

    def test_a_file_in_the_place_of_a_folder_never(self, tmp_path: Path) -> None:
        (tmp_path / "out").write_text("a file")
        with pytest.raises(OutputError, match="no part of an artifact"):
            check_artifact_output(tmp_path / "out", force=True)

    def test_the_folder_above_must_exist(self, tmp_path: Path) -> None:
        with pytest.raises(OutputError, match="does not exist"):
            check_artifact_output(tmp_path / "no" / "x.onnx", force=False)


def test_file_or_folder() -> None:
    assert is_file_output(Path("a/x.onnx"))
    assert is_file_output(Path("x.ONNX"))
    assert not is_file_output(Path("out"))
    assert not is_file_output(Path("v1.2"))
    assert manifest_path(Path("a/x.onnx")) == Path("a/x.manifest.json")
    assert manifest_path(Path("a/out")) == Path("a/out/manifest.json")


def full_disk(*_: Any, **__: Any) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("output", ["x.onnx", "out"])
@pytest.mark.parametrize("failing", ["write_text", "rename"])
def test_a_full_disk_leaves_the_old_output(
    tmp_path: Path, write: Write, monkeypatch: pytest.MonkeyPatch, output: str, failing: str
) -> None:
    write(tmp_path / output, 2)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with monkeypatch.context() as patch:
        patch.setattr(Path, failing, full_disk)
        with pytest.raises(OutputError, match="No space left") as caught:
            write(tmp_path / output, 3)
    assert caught.value.exit_code == 2
    assert "free some space" in caught.value.fix
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


LIMITED = """
import resource, signal, sys
from pathlib import Path
from typing import ClassVar
from slimctl.core.contract import Effect, Pass, PassReport
from slimctl.core.errors import SlimctlError
from slimctl.recipe.run import run_passes

class Keep(Pass):
    name: ClassVar[str] = "keep"
    summary: ClassVar[str] = "Changes nothing and says otherwise"
    effect: ClassVar[Effect] = Effect.EXACT

    def apply(self, model, context):
        return PassReport(changed={"nothing": 1})

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # then a write beyond the limit fails with EFBIG
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    run_passes(Path(sys.argv[1]), [Keep()], output=Path(sys.argv[2]))
except SlimctlError as error:
    print(error)
    sys.exit(error.exit_code)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits of file sizes are POSIX's")
def test_a_real_limit_ends_with_exit_code_2_and_no_files(tmp_path: Path) -> None:
    model = save_add(tmp_path / "in", 1)[0]
    data = onnx.load(model)
    big = numpy_helper.from_array(np.ones((600, 600), np.float32), "big")
    data.graph.initializer.append(big)
    data.graph.node.append(helper.make_node("MatMul", ["y", "big"], ["z"], name="matmul"))
    data.graph.output[0].name = "z"
    onnx.save(data, model)
    (tmp_path / "out").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(LIMITED), str(model), str(tmp_path / "out/x.onnx")],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "SLIMCTL_CACHE": str(tmp_path)},
    )
    assert done.returncode == 2, done.stderr
    assert "File too large" in done.stdout
    assert names(tmp_path / "out") == []


@pytest.mark.parametrize("external", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("output", ["x.onnx", "out"])
def test_an_end_between_any_two_renames_leaves_a_whole_model(
    tmp_path: Path,
    write: Write,
    monkeypatch: pytest.MonkeyPatch,
    output: str,
    external: tuple[bool, bool],
) -> None:
    target = tmp_path / output
    moments = 0
    while True:
        write(target, 2, external=external[0])
        published: list[Path] = []

        def stop(
            staged: Path, place: Path, published: list[Path] = published, moment: int = moments
        ) -> None:
            if len(published) == moment:
                raise KeyboardInterrupt
            files.publish(staged, place)
            published.append(place)

        with monkeypatch.context() as patch:
            patch.setattr(artifact, "publish", stop)
            try:
                write(target, 3, external=external[1])
            except KeyboardInterrupt:
                model = target if output == "x.onnx" else target / "model.onnx"
                assert added(model) == (3 if model in published else 2)
                moments += 1
                continue
        break
    assert moments == (1 if output == "out" else 2 + external[1])
    assert added(read_artifact(target).model) == 3


@pytest.mark.parametrize("name", ["x.txt", "model.onx", "model.pt"])
def test_an_output_that_is_neither_model_nor_folder_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="neither"):
        check_artifact_output(tmp_path / name, force=False)


@pytest.mark.parametrize("name", ["v1.2", "x.onnx", "X.ONNX", "folder"])
def test_outputs_that_are_models_or_folders(name: str, tmp_path: Path) -> None:
    check_artifact_output(tmp_path / name, force=False)
