"""Writes artifacts so that a kill at any moment leaves the old output or the new one.

A folder (``-o DIR/``) is made aside and takes its place in one rename: it is always whole.

A file (``-o x.onnx``) has its manifest beside it, and two files cannot be renamed at once. The
order is: weights (under a name that holds their hash, so the old model keeps its own), then the
model, then the manifest. A kill in between leaves a whole new model beside the old manifest. The
manifest carries the model's hash, so :func:`read_artifact` sees that they do not belong together;
writing again repairs it.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from slimctl.core.errors import OutputError
from slimctl.core.files import check_output, output_error, publish, sha256_of_file
from slimctl.passes._plan import Plan
from slimctl.pipeline.manifest import FileEntry, Manifest, read_manifest

if TYPE_CHECKING:
    import onnx

MODEL_NAME = "model.onnx"
WEIGHTS_NAME = "model.onnx.data"
MANIFEST_NAME = "manifest.json"
LOCK_NAME = "recipe.lock.yaml"
REPORT_NAME = "report.html"
PLAN_NAME = "plan.yaml"


class Artifact(NamedTuple):
    """A result on disk.

    Attributes:
        path: The ``.onnx`` file or the folder.
        model: The ``.onnx`` file.
        manifest: What the manifest says.
        files: All files.
    """

    path: Path
    model: Path
    manifest: Manifest
    files: tuple[Path, ...]


_SUFFIX = ".onnx"


def is_file_output(output: Path) -> bool:
    """Whether an output is a single ``.onnx`` file; everything else is a folder."""
    return output.suffix.lower() == _SUFFIX and not output.is_dir()


def manifest_path(output: Path) -> Path:
    """Where the manifest of an output is: ``x.onnx`` has ``x.manifest.json`` beside it."""
    if is_file_output(output):
        return output.with_name(output.stem + ".manifest.json")
    return output / MANIFEST_NAME


def check_artifact_output(output: Path, *, force: bool) -> None:
    """Refuses an output that cannot or must not be written, before any work is done.

    An existing folder is replaced as a whole. So even with ``force`` nothing may be in it but what
    an artifact consists of: slimctl removes no files of the user's.

    Raises:
        OutputError: With the remedy.
    """
    # A folder may be called v1.2; x.txt or model.onx is most likely meant to be a file.
    if output.suffix[1:].isalpha() and not is_file_output(output) and not output.is_dir():
        raise OutputError(
            output,
            f"An output is a {_SUFFIX} file or a folder, and '{output.suffix}' is neither",
            fix=f"write -o {output.with_suffix(_SUFFIX).name}, or -o {output.stem}/",
        )
    if is_file_output(output):
        check_output(output, force=force)
        check_output(manifest_path(output), force=force)
        return
    empty = output.is_dir() and not any(output.iterdir())
    check_output(output, force=force or empty)
    stranger = _stranger_in(output)
    if stranger is not None:
        raise OutputError(
            output,
            f"'{stranger.name}' in the output is no part of an artifact, so nothing is replaced",
            fix="choose another -o, or remove it yourself",
        )


def _stranger_in(output: Path) -> Path | None:
    """The first thing that replacing the output would destroy and that is not slimctl's."""
    if not output.exists():
        return None
    if not output.is_dir():
        return output
    own = {MODEL_NAME, WEIGHTS_NAME, MANIFEST_NAME, LOCK_NAME, REPORT_NAME, PLAN_NAME}
    return next((item for item in sorted(output.iterdir()) if item.name not in own), None)


@contextmanager
def workspace(output: Path | None) -> Iterator[Path]:
    """A temporary folder for the work, on the output's file system; removed at the end.

    Raises:
        OutputError: The folder cannot be made.
    """
    parent = None if output is None else output.absolute().parent
    try:
        folder = tempfile.TemporaryDirectory(dir=parent, prefix=".slimctl-")
    except OSError as error:
        raise output_error(output or Path(tempfile.gettempdir()), error) from error
    with folder as name:
        yield Path(name)


def write_artifact(
    model_files: Sequence[Path],
    manifest: Manifest,
    output: Path,
    staging: Path,
    *,
    lock: str | None = None,
) -> Artifact:
    """Puts a result in its place.

    Args:
        model_files: The model, and its weights if they are apart; copied or moved.
        manifest: Of the result, without its files.
        output: An ``.onnx`` file or a folder.
        staging: A folder on the output's file system, removed by the caller.
        lock: Text of the recipe's lock file, for folders.

    Raises:
        OutputError: It cannot be written; what was there before still is.
    """
    try:
        if is_file_output(output):
            return _write_file(model_files, manifest, output, staging)
        return _write_folder(model_files, manifest, output, staging, lock)
    except OSError as error:
        raise output_error(output, error) from error


def _write_folder(
    model_files: Sequence[Path], manifest: Manifest, output: Path, staging: Path, lock: str | None
) -> Artifact:
    from slimctl.report.html import render

    folder = staging / "artifact"
    folder.mkdir()
    staged = _staged(model_files, folder, MODEL_NAME)
    sealed = manifest.sealed([FileEntry.of(file) for file in staged])
    texts = {REPORT_NAME: render(sealed.document())}
    if lock is not None:
        texts[LOCK_NAME] = lock
    if (plan := _plan_of(manifest)) is not None:
        texts[PLAN_NAME] = plan.text()
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    sealed = _with_run_files(sealed, [FileEntry.of(folder / name) for name in sorted(texts)])
    (folder / MANIFEST_NAME).write_text(sealed.to_json(), encoding="utf-8")
    publish(folder, output)
    files = sorted(output.iterdir())
    return Artifact(output, output / MODEL_NAME, sealed, tuple(files))


def with_page(artifact: Artifact, page: str) -> Artifact:
    """An artifact folder with another page, which its manifest then names.

    Args:
        artifact: A folder that nobody else looks at yet.
        page: Its report.

    Raises:
        OutputError: It cannot be written.
    """
    report, text = artifact.path / REPORT_NAME, manifest_path(artifact.path)
    try:
        report.write_text(page, encoding="utf-8")
        others = [entry for entry in artifact.manifest.run.files if entry.name != REPORT_NAME]
        files = sorted([*others, FileEntry.of(report)], key=lambda entry: entry.name)
        manifest = _with_run_files(artifact.manifest, files)
        text.write_text(manifest.to_json(), encoding="utf-8")
    except OSError as error:
        raise output_error(artifact.path, error) from error
    return artifact._replace(manifest=manifest)


def _with_run_files(manifest: Manifest, files: Sequence[FileEntry]) -> Manifest:
    return manifest.model_copy(
        update={"run": manifest.run.model_copy(update={"files": tuple(files)})}
    )


def _write_file(
    model_files: Sequence[Path], manifest: Manifest, output: Path, staging: Path
) -> Artifact:
    folder = staging / "artifact"
    folder.mkdir()
    staged = _staged(model_files, folder, output.name)
    staged = _with_hashed_weights(staged)
    sealed = manifest.sealed([FileEntry.of(file) for file in staged])
    text = folder / manifest_path(output).name
    text.write_text(sealed.to_json(), encoding="utf-8")
    outdated = _weights_of_old(output)
    model, *weights = staged
    texts = [text]
    if (plan := _plan_of(manifest)) is not None:
        texts.append(folder / f"{output.stem}.{PLAN_NAME}")
        texts[-1].write_text(plan.text(), encoding="utf-8")
    for file in (*weights, model, *texts):
        publish(file, output.with_name(file.name))
    for old in outdated - {output.with_name(file.name) for file in weights}:
        old.unlink(missing_ok=True)
    files = [output.with_name(file.name) for file in (model, *weights, *texts)]
    return Artifact(output, output, sealed, tuple(files))


def _plan_of(manifest: Manifest) -> Plan | None:
    """Which precision each layer has, where a step chose among them."""
    plans = [step.facts["plan"] for step in manifest.steps if "plan" in step.facts]
    return Plan.model_validate(plans[-1]) if plans else None


def _staged(model_files: Sequence[Path], folder: Path, name: str) -> list[Path]:
    """The model and its weights under the artifact's names.

    Raises:
        OSError: A file cannot be moved.
    """
    model, *weights = model_files
    renamed = {file.name: name + file.name.removeprefix(model.name) for file in weights}
    target = folder / name
    model.rename(target)
    moved = [file.rename(folder / renamed[file.name]) for file in weights]
    _relocate_weights(target, renamed)
    return [target, *moved]


def _with_hashed_weights(staged: Sequence[Path]) -> list[Path]:
    """Weights under a name that holds their hash; see the module."""
    model, *weights = staged
    renamed = {
        file.name: f"{file.stem}.{sha256_of_file(file)[:12]}{file.suffix}" for file in weights
    }
    moved = [file.rename(file.with_name(renamed[file.name])) for file in weights]
    _relocate_weights(model, renamed)
    return [model, *moved]


def _relocate_weights(model: Path, renamed: dict[str, str]) -> None:
    """Makes a model file refer to its weights by their new names."""
    if all(old == new for old, new in renamed.items()):
        return
    import onnx

    proto = onnx.load(model, load_external_data=False)
    for tensor in _initializers(proto.graph):
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = renamed.get(entry.value, entry.value)
    model.write_bytes(proto.SerializeToString(deterministic=True))


def _initializers(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    """Initializers of a graph and of all graphs within; a saved model has no weights elsewhere."""
    yield from graph.initializer
    for node in graph.node:
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                yield from _initializers(inner)


def _weights_of_old(output: Path) -> set[Path]:
    """Weight files of the output that is about to be replaced, as its manifest names them."""
    try:
        document = json.loads(manifest_path(output).read_bytes())
        names = [entry["name"] for entry in document["files"]]
    except (OSError, ValueError, LookupError, TypeError):
        return set()  # no manifest, or not ours: then nothing is known to be ours to remove
    prefix = f"{output.name}."
    own = (name for name in names if name.startswith(prefix) and "/" not in name)
    return {output.with_name(name) for name in own}


def read_artifact(path: Path) -> Artifact:
    """Reads an artifact and checks that its files are those of its manifest.

    Args:
        path: An ``.onnx`` file with its manifest beside it, or an artifact folder.

    Raises:
        OutputError: A file is missing, or model and manifest do not belong together.
    """
    manifest = read_manifest(manifest_path(path))
    folder = manifest_path(path).parent
    for entry in manifest.files:
        file = folder / entry.name
        if not file.is_file() or sha256_of_file(file) != entry.sha256:
            raise OutputError(
                file,
                "The file is not the one that the manifest describes",
                fix="make the artifact again; an earlier run may have been interrupted",
            )
    files = tuple(folder / entry.name for entry in manifest.files)
    return Artifact(path, files[0], manifest, (*files, manifest_path(path)))
