"""ORT format: what onnxruntime's mobile and reduced builds load, and the operators they need.

Follows ``onnxruntime.tools.convert_onnx_models_to_ort`` of onnxruntime 1.32 with its style Fixed:
the optimized graph is written by onnxruntime itself, and the configuration file is the one that
``--include_ops_by_config`` of its build script reads.
https://onnxruntime.ai/docs/performance/model-optimizations/ort-format-models.html
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from pydantic import Field

from slimctl.core.errors import ModelExecutionError
from slimctl.export.common import Export, first_that_runs, plain_name, register
from slimctl.graph.load import load_model
from slimctl.graph.session import (
    Level,
    Platform,
    Products,
    open_session,
    required_operators,
    run,
    save_ort_format,
)

if TYPE_CHECKING:
    import onnxruntime as ort

    from slimctl.pipeline.artifact import Artifact

_ARM_TARGETS = frozenset({"cpu-arm64", "coreml", "nnapi", "qnn-htp", "xnnpack"})
"""Targets whose devices have ARM processors: phones, tablets, Apple and Snapdragon computers."""


@register
class OrtFormat(Export):
    """``NAME.ort`` and ``NAME.required_operators.config`` in a folder."""

    name = "ort-format"
    summary = "ORT format for mobile and reduced builds of onnxruntime"

    level: Level = Field(
        Level.ALL, description="How much onnxruntime rewrites the graph before it is written."
    )
    platform: Platform | None = Field(
        None,
        description="Processor that it is for: arm keeps int8 activations int8, amd64 may use a "
        "layout that no other processor has kernels for.",
        json_schema_extra={"unset": "what the artifact's target runs on, else any"},
    )

    def write(self, artifact: Artifact, target: Path) -> Sequence[str]:
        """Converts, and compares the written file with the graph that was written."""
        target.mkdir()
        name = plain_name(artifact.manifest.name)
        platform = self.platform or _platform_of(artifact.manifest.target)
        written = target / f"{name}.ort"
        session = save_ort_format(artifact.model, written, level=self.level, platform=platform)
        notes = [
            f"the graph is optimized for processors: {platform}",
            *_check(session, artifact, written),
        ]
        text = "".join(_configuration(written.name, required_operators(written)))
        (target / f"{name}.required_operators.config").write_text(text, encoding="utf-8")
        return notes


def _platform_of(target: str) -> Platform:
    return Platform.ARM if target in _ARM_TARGETS else Platform.ANY


def _check(session: ort.InferenceSession, artifact: Artifact, written: Path) -> Iterator[str]:
    """Runs the file beside the graph it was written from: the same graph gives the same bits.

    Raises:
        ModelExecutionError: The file does not load, or computes something else.
    """
    again = open_session(written, threads=1, products=Products.NATIVE)
    found = first_that_runs(session, load_model(artifact.model))
    if found is None:
        yield "outputs were not compared: no random input fits the model"
        return
    feeds, expected = found
    for name, value in run(again, feeds).items():
        if not _equal(value, expected[name]):
            raise ModelExecutionError(
                f"Output '{name}' of the written file differs from the artifact's",
                where=written.name,
                fix="try --level basic, and report the model",
            )
    yield "outputs are those of the artifact, compared on one random input"


def _equal(one: object, other: object) -> bool:
    a, b = np.asarray(one), np.asarray(other)
    return bool(np.array_equal(a, b, equal_nan=a.dtype.kind == "f"))


def _configuration(
    name: str, operators: Mapping[str, Mapping[int, Collection[str]]]
) -> Iterator[str]:
    """Lines ``domain;version;operator,operator``."""
    yield f"# Generated from model/s:\n# - {name}\n"
    for domain in sorted(operators):
        for version in sorted(operators[domain]):
            if names := operators[domain][version]:
                yield f"{domain};{version};{','.join(sorted(names))}\n"
