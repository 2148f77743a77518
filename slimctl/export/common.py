"""What all kinds share: the artifact is checked first, the result takes its place in one rename.

A kind is a frozen pydantic model whose fields are its options::

    @register
    class Zip(Export):
        name = "zip"
        summary = "A zip with checksums and SBOM"

        def write(self, artifact: Artifact, target: Path) -> Sequence[str]: ...
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict

from slimctl.core.errors import ModelExecutionError, OutputError
from slimctl.core.files import check_output, publish, staging_folder
from slimctl.graph.edit import interface
from slimctl.graph.session import run
from slimctl.pipeline.artifact import Artifact, manifest_path, read_artifact
from slimctl.pipeline.manifest import FileEntry, Manifest
from slimctl.pipeline.probe import random_candidates

if TYPE_CHECKING:
    import onnx_ir as ir
    import onnxruntime as ort

    from slimctl.core.contract import Feeds


class Export(BaseModel):
    """Base of all kinds.

    A subclass sets the class attributes, declares its options as fields with a description, and
    implements :meth:`write`.

    Attributes:
        name: What users type.
        summary: One line without a period.
        suffix: Of the one file that it writes; empty for kinds that write a folder.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    name: ClassVar[str]
    summary: ClassVar[str]
    suffix: ClassVar[str] = ""

    def place(self, artifact: Artifact, output: Path) -> Path:
        """What is written and replaced as a whole: the output, or a folder in it."""
        del artifact
        return output

    def write(self, artifact: Artifact, target: Path) -> Sequence[str]:
        """Writes the result.

        Args:
            artifact: Its files are those of its manifest.
            target: A file or folder that does not exist yet; its parent does.

        Returns:
            What users should know, in sentences.

        Raises:
            SlimctlError: The artifact cannot be had in this form.
            OSError: It cannot be written.
        """
        raise NotImplementedError


_KINDS: dict[str, type[Export]] = {}
_Kind = TypeVar("_Kind", bound=type[Export])


def register(kind: _Kind) -> _Kind:
    """Makes a kind known by its name."""
    _KINDS[kind.name] = kind
    return kind


def registered() -> Mapping[str, type[Export]]:
    """The kinds whose modules were imported."""
    return _KINDS


class Exported(NamedTuple):
    """A result on disk.

    Attributes:
        output: What was asked for.
        files: All files; names in a folder are relative to it.
        notes: What users should know, in sentences.
    """

    output: Path
    files: tuple[FileEntry, ...]
    notes: tuple[str, ...]


def export_artifact(path: Path, kind: Export, output: Path, *, force: bool = False) -> Exported:
    """Writes an artifact in another form.

    Args:
        path: An artifact's folder, or an ``.onnx`` file with its manifest beside it.
        kind: The form, with its options.
        output: A file or folder, as the kind has it.
        force: Replace what is there.

    Raises:
        OutputError: The artifact is incomplete or was changed; the output exists or cannot be
            written. What was there before still is.
        SlimctlError: The artifact cannot be had in this form.
    """
    artifact = checked_artifact(path)
    _check_form(kind, output)
    place = kind.place(artifact, output)
    root = place if output.is_dir() else output
    check_output(root, force=force)
    with staging_folder(root) as folder:
        staged = folder / root.name
        target = staged / place.relative_to(root)
        target.parent.mkdir(parents=True, exist_ok=True)
        notes = kind.write(artifact, target)
        _refuse_strangers(root, staged)
        inside = root.relative_to(output) if staged.is_dir() else Path(root.name)
        files = tuple(_entries(staged, inside))
        publish(staged, root)
    return Exported(output, files, (*notes, *_cautions(artifact.manifest)))


def _cautions(manifest: Manifest) -> Iterator[str]:
    """What must not be forgotten about an artifact that leaves the house."""
    if manifest.uncalibrated:
        yield "the artifact is uncalibrated: its data were random, and its accuracy means nothing"
    for gate in (*manifest.results.gates, *manifest.run.gates):
        if not gate.passed:
            yield f"a gate of the artifact failed: {gate.message}"


def checked_artifact(path: Path) -> Artifact:
    """Reads an artifact; its files are those that its manifest describes.

    Raises:
        OutputError: There is no manifest, a file is missing or was changed, or the manifest names
            a file elsewhere.
    """
    if not manifest_path(path).is_file():
        raise OutputError(
            manifest_path(path),
            "Only artifacts are exported, and there is no manifest",
            fix=f"name what slimctl wrote; 'slimctl fuse {path.name} -o DIR' makes an artifact"
            " of a model as it is",
        )
    artifact = read_artifact(path)
    listed = (*artifact.manifest.files, *artifact.manifest.run.files)
    outside = next((entry.name for entry in listed if Path(entry.name).name != entry.name), None)
    if outside is not None:
        raise OutputError(
            manifest_path(path),
            f"The manifest names '{outside}', which does not lie beside it",
            fix="make the artifact again",
        )
    return artifact


def model_files(artifact: Artifact) -> tuple[Path, ...]:
    """The model and the files that its weights lie in."""
    return tuple(artifact.model.with_name(entry.name) for entry in artifact.manifest.files)


def copy_model(artifact: Artifact, folder: Path, name: str = "model.onnx") -> Path:
    """Copies a model under another name; files of weights keep theirs, which the model knows."""
    model, *weights = model_files(artifact)
    for file in weights:
        shutil.copyfile(file, folder / file.name)
    shutil.copyfile(model, folder / name)
    return folder / name


def plain_name(text: str) -> str:
    """A name that file systems, servers and archives all take."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", text).strip("._-") or "model"


def first_that_runs(session: ort.InferenceSession, model: ir.Model) -> tuple[Feeds, Feeds] | None:
    """Random inputs that a model takes and its outputs; None when none of those tried fits."""
    for feeds in random_candidates(interface(model), seed=0):
        try:
            return feeds, run(session, feeds)
        except ModelExecutionError:
            continue  # another size may fit
    return None


def _check_form(kind: Export, output: Path) -> None:
    """A file where a folder is written, or the other way round, is most likely a slip.

    Raises:
        OutputError: With the right form.
    """
    if kind.suffix and (output.suffix.lower() != kind.suffix or output.is_dir()):
        raise OutputError(
            output,
            f"--for {kind.name} writes one {kind.suffix} file",
            fix=f"write -o {output.stem or 'model'}{kind.suffix}",
        )
    # A folder may be called v1.2; x.ort or model.onnx is meant to be a file.
    if not kind.suffix and output.suffix[1:].isalpha() and not output.is_dir():
        raise OutputError(
            output,
            f"--for {kind.name} writes a folder, and '{output.suffix}' looks like a file",
            fix=f"write -o {output.stem}/",
        )


def _refuse_strangers(root: Path, staged: Path) -> None:
    """Even with --force nothing is removed but what an earlier export wrote.

    Raises:
        OutputError: The output holds a file that the new one does not.
    """
    if not root.is_dir():
        return
    new = {file.relative_to(staged) for file in staged.rglob("*")}
    for file in sorted(root.rglob("*")):
        # Names of weight files hold their hash: those of an earlier export are other ones.
        if file.relative_to(root) not in new and file.suffix != ".data":
            raise OutputError(
                file,
                "It would be removed with the output that it lies in, and is no part of an export",
                fix="choose another -o, or remove it yourself",
            )


def _entries(staged: Path, name: Path) -> Iterator[FileEntry]:
    """A staged file, or all files of a staged folder, by the name that it will have."""
    for file in sorted([staged] if staged.is_file() else staged.rglob("*")):
        if file.is_file():
            shown = (name / file.relative_to(staged)).as_posix()
            yield FileEntry.of(file).model_copy(update={"name": shown})
