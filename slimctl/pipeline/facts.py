"""Turns what a run found into the parts of a manifest."""

from __future__ import annotations

import platform
import socket
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

import onnx_ir as ir

from slimctl.graph.edit import all_nodes
from slimctl.graph.save import content_hash, initializer_values, weight_bytes
from slimctl.pipeline.manifest import (
    FileEntry,
    ModelFacts,
    Run,
    SkippedEntry,
    SourceFacts,
    StepFacts,
    json_types,
)
from slimctl.pipeline.run import StepRecord

_DECIBEL_DIGITS = 3
_BLOCK_BYTES = 1 << 24
_METRIC_DIGITS = 6


def model_files(path: Path) -> list[Path]:
    """A model's file and the files that its weights lie in. The model was loaded before."""
    if not _mentions(path, b"location"):  # the key of every reference to another file
        return [path]
    model = ir.load(path)
    apart = {
        Path(tensor.path) for tensor in _tensors(model) if isinstance(tensor, ir.ExternalTensor)
    }
    return [path, *sorted(apart)]


def _mentions(path: Path, word: bytes) -> bool:
    """Whether a file holds some bytes; read in blocks, a map would have all of it in memory."""
    tail = b""
    with path.open("rb") as stream:
        while block := stream.read(_BLOCK_BYTES):
            if word in tail + block:
                return True
            tail = block[1 - len(word) :]
    return False


def _tensors(model: ir.Model) -> Iterator[ir.TensorProtocol | None]:
    yield from (value.const_value for value in initializer_values(model))
    for node in all_nodes(model):
        for attribute in node.attributes.values():
            if attribute.type == ir.AttributeType.TENSOR:
                yield attribute.as_tensor()


def total_bytes(files: Sequence[Path]) -> int:
    """Bytes of some files together."""
    return sum(file.stat().st_size for file in files)


def model_facts(model: ir.Model, size_bytes: int) -> ModelFacts:
    """A model for the manifest."""
    return ModelFacts(
        content_hash=content_hash(model),
        size_bytes=size_bytes,
        weight_bytes=weight_bytes(model),
        nodes=sum(1 for _ in all_nodes(model)),
        opset=model.opset_imports.get("", 0),
        dtype_bytes=dtype_bytes(model),
    )


_DTYPE_NAMES = {"float": "float32", "double": "float64"}


def dtype_bytes(model: ir.Model) -> dict[str, int]:
    """Bytes of all initializers by data type; one that several nodes share counts once."""
    found: dict[str, int] = {}
    for value in initializer_values(model):
        if (tensor := value.const_value) is not None and tensor.nbytes:
            spelled = tensor.dtype.name.lower()
            name = _DTYPE_NAMES.get(spelled, spelled)
            found[name] = found.get(name, 0) + tensor.nbytes
    return dict(sorted(found.items()))


def source_facts(model: ir.Model, files: Sequence[Path]) -> SourceFacts:
    """The original for the manifest."""
    facts = model_facts(model, total_bytes(files))
    return SourceFacts(**facts.model_dump(), files=tuple(FileEntry.of(file) for file in files))


def step_facts(record: StepRecord) -> StepFacts:
    """One step for the manifest."""
    step, report = record.step, record.report
    return StepFacts(
        name=step.name,
        effect=step.actual_effect().value,
        options=step.model_dump(mode="json"),
        changed=dict(report.changed),
        skipped=tuple(SkippedEntry(node=node, reason=why) for node, why in report.skipped),
        notes=(*report.notes, *record.notes),
        warnings=tuple(report.warnings),
        facts=json_types(report.facts),
        weight_bytes=record.weight_bytes,
        nodes=record.nodes,
        sqnr_db=decibel(record.sqnr_db),
        metric=metric_value(record.metric),
        exact_error=None if record.exact_error is None else float(f"{record.exact_error:.1e}"),
    )


def decibel(value: float | None) -> float | None:
    """A ratio in dB with the digits that mean something."""
    return None if value is None else round(value, _DECIBEL_DIGITS)


def metric_value(value: float | None) -> float | None:
    """A metric with the digits that mean something."""
    return None if value is None else round(value, _METRIC_DIGITS)


def this_run(threads: int) -> Run:
    """The machine and the moment."""
    return Run(
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        host=socket.gethostname(),
        platform=f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        threads=threads,
    )
