"""The manifest: what a result is, what it was made from, how, and how good it is.

Everything but the block ``run`` is decided by the inputs, the recipe and the versions: the same
again gives the same bytes. ``manifest_hash`` covers exactly that part. What differs from run to run
(times, the host, measured latency) stands in ``run``.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
)

from slimctl.core.errors import OutputError
from slimctl.core.files import sha256_of_file

_DISTRIBUTIONS = ("numpy", "onnx", "onnx-ir", "onnxruntime")
_UNHASHED = frozenset({"run", "manifest_hash"})


class ManifestPart(BaseModel):
    """Base of every part: immutable, and nothing unknown is accepted."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class FileEntry(ManifestPart):
    """One file of the artifact.

    Attributes:
        name: Name relative to the manifest.
        sha256: Hash of its bytes.
        size_bytes: Its size.
    """

    name: str
    sha256: str
    size_bytes: int

    @classmethod
    def of(cls, path: Path) -> Self:
        """The entry of a file on disk."""
        return cls(name=path.name, sha256=sha256_of_file(path), size_bytes=path.stat().st_size)


class ModelFacts(ManifestPart):
    """A model.

    Attributes:
        content_hash: Hash of graph, attributes and weights, however they are stored.
        size_bytes: Bytes of its files.
        weight_bytes: Bytes of its weights.
        nodes: Number of nodes, subgraphs included.
        opset: Version of the default operator set.
        dtype_bytes: Bytes of its weights by data type; empty in manifests that are older than this
            field, which would break their seal if it were written.
    """

    content_hash: str
    size_bytes: int
    weight_bytes: int
    nodes: int
    opset: int
    dtype_bytes: dict[str, int] = Field(default_factory=dict)

    @model_serializer(mode="wrap")
    def _without_nothing(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = serialize(self)
        if not self.dtype_bytes:
            del fields["dtype_bytes"]
        return fields


class SourceFacts(ModelFacts):
    """The model that everything was made from.

    Attributes:
        files: Its files.
    """

    files: tuple[FileEntry, ...]


class SkippedEntry(ManifestPart):
    """A candidate that a step left alone.

    Attributes:
        node: Its name.
        reason: Why.
    """

    node: str
    reason: str


class StepFacts(ManifestPart):
    """One step.

    Attributes:
        name: Of the pass.
        effect: What the pass does to the function that the model computes.
        options: Every option.
        changed: Number of changes by what was changed.
        skipped: Candidates that were left alone.
        notes: Sentences, of the pass and of the checks.
        warnings: Sentences of the pass that must not be missed.
        facts: What the pass reports.
        weight_bytes: Bytes of all weights afterwards.
        nodes: Number of nodes afterwards.
        sqnr_db: Distance to the original on a few samples; None without data.
        metric: The metric afterwards; None when none is measured.
        exact_error: What an EXACT step changed, relative to the largest output.
    """

    name: str
    effect: str
    options: dict[str, Any]
    changed: dict[str, int]
    skipped: tuple[SkippedEntry, ...]
    notes: tuple[str, ...]
    warnings: tuple[str, ...] = ()
    facts: dict[str, Any]
    weight_bytes: int
    nodes: int
    sqnr_db: float | None
    metric: float | None
    exact_error: float | None


class GateFacts(ManifestPart):
    """One bound and what was found.

    Attributes:
        gate: Its name.
        bound: What was asked for.
        found: What was measured; None when it could not be.
        passed: Whether it held.
        message: One sentence.
    """

    gate: str
    bound: float
    found: float | None
    passed: bool
    message: str


class Results(ManifestPart):
    """The result against the original.

    Attributes:
        size_ratio: Bytes of the result's files as a share of the original's.
        sqnr_db: Distance of the worst output; None without data.
        sqnr_samples: Number of samples it was measured on.
        metric: Name of the metric; None when none was measured.
        metric_original: Its value for the original.
        metric_result: Its value for the result.
        gates: Bounds.
    """

    size_ratio: float
    sqnr_db: float | None = None
    sqnr_samples: int = 0
    metric: str | None = None
    metric_original: float | None = None
    metric_result: float | None = None
    gates: tuple[GateFacts, ...] = ()


class Run(ManifestPart):
    """What differs from run to run.

    Attributes:
        started: When, UTC, ISO 8601.
        host: Name of the machine.
        platform: Its system and processor.
        threads: Threads that were asked for; 0 when onnxruntime decided.
        seconds: Durations by what took them.
        notes: What the user should know about this run, in sentences.
        latency: Measured latencies, JSON types.
        nodes: What the gate ``verify`` saw as JSON types: ``layers`` and ``faults``.
        gates: Bounds on what differs from run to run, with what was found.
        files: Files made for people, with their hashes.
    """

    started: str
    host: str
    platform: str
    threads: int = 0
    seconds: dict[str, float] = Field(default_factory=dict)
    notes: tuple[str, ...] = ()
    latency: dict[str, Any] | None = None
    nodes: dict[str, Any] | None = None
    gates: tuple[GateFacts, ...] = ()
    files: tuple[FileEntry, ...] = ()


class Manifest(ManifestPart):
    """Everything about one artifact; see the module.

    Attributes:
        version: Of this format.
        name: Of the artifact.
        versions: Of slimctl and of the libraries that decide the result.
        source: The original model.
        model: The result.
        files: The result's files.
        target: What it was compressed for.
        seed: Of everything random.
        steps: What was done.
        calibration: The data that passes looked at, and what was collected from them.
        training: The data that the model learned from.
        evaluation: The data that the result was judged with.
        uncalibrated: The calibration data were random: accuracy means nothing.
        results: The result against the original.
        manifest_hash: Hash of everything above.
        run: What differs from run to run.
    """

    version: Literal[1] = 1
    name: str
    versions: dict[str, str]
    source: SourceFacts
    model: ModelFacts
    files: tuple[FileEntry, ...] = ()
    target: str
    seed: int
    steps: tuple[StepFacts, ...]
    calibration: dict[str, Any] | None = None
    training: dict[str, Any] | None = None
    evaluation: dict[str, Any] | None = None
    uncalibrated: bool = False
    results: Results
    manifest_hash: str = ""
    run: Run

    def sealed(self, files: Sequence[FileEntry]) -> Manifest:
        """The manifest of an artifact that consists of these files."""
        listed = self.model_copy(update={"files": tuple(files)})
        return listed.model_copy(update={"manifest_hash": listed.computed_hash()})

    def computed_hash(self) -> str:
        """Hash of everything that the inputs decide."""
        document = {key: item for key, item in self.document().items() if key not in _UNHASHED}
        canonical = json.dumps(document, sort_keys=True, ensure_ascii=False, allow_nan=False)
        return hashlib.sha256(canonical.encode()).hexdigest()

    def document(self) -> dict[str, Any]:
        """The manifest as strict JSON types."""
        plain = json_types(self.model_dump())
        assert isinstance(plain, dict)
        return plain

    def to_json(self) -> str:
        """The manifest's file. The order of keys is that of the classes above."""
        return json.dumps(self.document(), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def read_manifest(path: Path) -> Manifest:
    """Reads a manifest and checks that it is whole.

    Raises:
        OutputError: Not a manifest, or changed since it was written.
    """
    fix = "make the artifact again"
    try:
        manifest = Manifest.model_validate_json(path.read_bytes())
    except OSError as error:
        raise OutputError(path, f"Cannot read the manifest: {error.strerror}", fix=fix) from error
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]["msg"]
        raise OutputError(path, f"Not a manifest: {problem}", fix=fix) from error
    if manifest.computed_hash() != manifest.manifest_hash:
        raise OutputError(path, "The manifest was changed after it was written", fix=fix)
    return manifest


def json_types(value: Any) -> Any:
    """A value as JSON knows it: numpy scalars and tuples converted, infinities and NaN as text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # "inf", "-inf", "nan": pydantic and Python read them back
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): json_types(item) for key, item in value.items()}
    if hasattr(value, "tolist"):  # numpy arrays and scalars
        return json_types(value.tolist())
    return [json_types(item) for item in value]


def installed_versions() -> dict[str, str]:
    """Versions of slimctl and of the libraries that decide a result."""
    from importlib.metadata import version

    from slimctl import __version__

    return {"slimctl": __version__, **{name: version(name) for name in _DISTRIBUTIONS}}
