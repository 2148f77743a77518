"""Small results to store: an artifact folder as a run makes it."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from slimctl.pipeline.artifact import write_artifact
from slimctl.pipeline.manifest import (
    FileEntry,
    GateFacts,
    Manifest,
    ModelFacts,
    Results,
    Run,
    SourceFacts,
    StepFacts,
)

WIDTH = 20_000
"""Values of one weight: 80 kB, more than the smallest piece."""


def weight(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(WIDTH).astype(np.float32)


def model(seeds: Sequence[int], *, note: str = "") -> onnx.ModelProto:
    """A chain of additions with one weight for each seed."""
    names = [f"w{index}" for index in range(len(seeds))]
    graph = helper.make_graph(
        [
            helper.make_node("Add", ["x" if not index else f"y{index - 1}", name], [f"y{index}"])
            for index, name in enumerate(names)
        ],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [WIDTH])],
        [helper.make_tensor_value_info(f"y{len(seeds) - 1}", TensorProto.FLOAT, [WIDTH])],
        [numpy_helper.from_array(weight(s), n) for s, n in zip(seeds, names, strict=True)],
        doc_string=note,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def step(name: str, options: Mapping[str, Any], *, metric: float | None = None) -> StepFacts:
    return StepFacts(
        name=name,
        effect="approximate",
        options=dict(options),
        changed={},
        skipped=(),
        notes=(),
        facts={},
        weight_bytes=4 * WIDTH,
        nodes=1,
        sqnr_db=30.0,
        metric=metric,
        exact_error=None,
    )


SOURCE = FileEntry(name="source.onnx", sha256="s" * 64, size_bytes=4 * WIDTH)
_FACTS: dict[str, Any] = {
    "content_hash": "c" * 64,
    "size_bytes": 4 * WIDTH,
    "weight_bytes": 4 * WIDTH,
    "nodes": 1,
    "opset": 17,
}


def manifest(**changes: Any) -> Manifest:
    passed = changes.pop("passed", True)
    gate = GateFacts(gate="size", bound=0.5, found=0.4, passed=passed, message="0.4 of the size")
    given: dict[str, Any] = {
        "name": "net",
        "versions": {"slimctl": "1.0", "numpy": "2.0"},
        "source": SourceFacts(**_FACTS, files=(SOURCE,)),
        "model": ModelFacts(**_FACTS),
        "target": "cpu",
        "seed": 0,
        "steps": (step("fuse", {}, metric=0.9), step("prune", {"sparsity": 0.3}, metric=0.8)),
        "results": Results(
            size_ratio=0.4,
            sqnr_db=30.0,
            sqnr_samples=8,
            metric="top1",
            metric_original=0.9,
            metric_result=0.8,
            gates=(gate,),
        ),
        "run": Run(started="now", host="here", platform="p"),
    }
    return Manifest(**{**given, **changes})


def artifact(
    folder: Path,
    seeds: Sequence[int] = (1, 2),
    *,
    external: bool = False,
    note: str = "",
    lock: str = "version: 1\n",
    **changes: Any,
) -> list[Path]:
    """Writes an artifact folder; its files."""
    work = folder.parent / f"{folder.name}-work"
    work.mkdir(parents=True)
    onnx.save(
        model(seeds, note=note),
        work / "model.onnx",
        save_as_external_data=external,
        location="model.onnx.data",
        size_threshold=16,
    )
    files = sorted(work.iterdir())
    made = write_artifact(files, manifest(**changes), folder, work, lock=lock)
    shutil.rmtree(work)
    return list(made.files)
