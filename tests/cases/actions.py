"""The actions that cases name, taken the way that users take them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from slimctl.core.contract import Pass
from slimctl.passes.prune import Prune
from slimctl.passes.quantize import Quantize
from slimctl.recipe.run import RunResult, run_passes
from slimctl.recipe.schema import DataSpec
from tests.cases.oracle import Case


def output_in(folder: Path) -> Path:
    """Where an action leaves its result."""
    return folder / "out.onnx"


def act(
    case: Case, step: Pass, folder: Path, *, data: bool = True, target: str = "cpu", **source: Any
) -> RunResult:
    """Runs one step on the model of a case.

    Args:
        case: The bug report.
        step: What is done.
        folder: An existing one; see :func:`output_in`.
        data: The calibration samples are given.
        target: Execution provider.
        source: Options of the calibration data.
    """
    calibration = DataSpec(source=_samples(case, folder), **source) if data else None
    return run_passes(
        case.model,
        [step],
        output=output_in(folder),
        target=target,
        calibration=calibration,
        use_cache=False,
    )


def _samples(case: Case, folder: Path) -> str:
    """The calibration samples as a folder of npz files."""
    source = folder / "calibration"
    source.mkdir()
    for index, feeds in enumerate(case.feeds("calibration")):
        np.savez(source / f"{index}.npz", **feeds)
    return str(source)


def argument(case: Case, action: str, name: str) -> int | None:
    """What the case says behind an action: 512 in ``weight_only:block=512``."""
    for item in case.check["action"].split(","):
        head, _, rest = item.partition(":")
        if head == action and rest.startswith(f"{name}="):
            return int(rest.removeprefix(f"{name}="))
    return None


def static(method: str) -> Quantize:
    """Static quantization with one way to choose ranges."""
    return Quantize.model_validate({"calibration": method})


def weight_only(case: Case, form: str, kind: str) -> Quantize:
    """Weight-only quantization in the blocks that the case asks for."""
    options = {"format": form, "weight_type": kind}
    block = argument(case, "weight_only", "block")
    if block is not None:
        options["block_size"] = str(block)
    return Quantize.model_validate({"mode": "weight-only", **options})


def pruning(structure: str) -> Prune:
    """Half of everything goes."""
    return Prune.model_validate(
        {"structure": structure, "sparsity": 0.5, "round_to": 1, "min_channels": 1}
    )
