"""Random graphs: what every mode of quantization holds for each of them."""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings

from slimctl.core.errors import PassFailedError
from slimctl.passes.quantize import Quantize
from slimctl.recipe.run import run_passes
from slimctl.recipe.schema import DataSpec
from tests.modes.growing import graphs
from tests.modes.networks import Network, build, networks
from tests.modes.noise import Steps
from tests.modes.promises import Placed, complaints, placed

INT8 = Steps(weights=127, activations=255, rounded="all")
DYNAMIC = Steps(weights=127, activations=255, rounded="layers")
HALF = Steps(weights=1024, activations=1024, rounded="all", relative=True)
NOTHING_DB = -200.0


class Mode(NamedTuple):
    """One way to quantize.

    Attributes:
        options: Of the quantize pass.
        job: What the oracle calls it.
        steps: How coarse it is.
        data: Calibration samples are given.
        promised_db: What it keeps by leaving layers in float.
    """

    options: dict[str, Any]
    job: str
    steps: Steps
    data: bool = False
    promised_db: float = NOTHING_DB


def _weights(kind: str, form: str, block: int, steps: int) -> Mode:
    options = {"mode": "weight-only", "weight_type": kind, "format": form, "block_size": block}
    return Mode(options, "weight_only", Steps(weights=steps))


MODES = {
    "static": Mode({}, "quant_static", INT8, data=True, promised_db=14.0),
    "static, all": Mode({"calibration": "minmax", "min_sqnr": 0}, "quant_static", INT8, data=True),
    "dynamic": Mode({"mode": "dynamic"}, "quant_dynamic", DYNAMIC, data=True, promised_db=19.0),
    "dynamic, all": Mode({"mode": "dynamic", "conv": True}, "quant_dynamic", DYNAMIC),
    "int4": _weights("int4", "nbits", 32, 7),
    "int4 qdq": _weights("int4", "qdq", 16, 7),
    "int8": _weights("int8", "nbits", 0, 127),
    "int8 qdq": _weights("int8", "qdq", 64, 127),
    "fp16": Mode({"mode": "fp16"}, "fp16", HALF, data=True),
    "fp16, no data": Mode({"mode": "fp16"}, "fp16", HALF),
    "bf16": Mode({"mode": "bf16"}, "bf16", Steps(weights=128, relative=True)),
}


def compressed(case: Placed, mode: Mode, name: str) -> Path | None:
    """The result, as a user gets it; None for a model without layers."""
    samples = case.folder / "samples"
    if not samples.exists():
        samples.mkdir()
        for index, feeds in enumerate(case.feeds("calibration")):
            np.savez(samples / f"{index}.npz", **feeds)
    output = case.folder / name
    try:
        run_passes(
            case.model,
            [Quantize.model_validate(mode.options)],
            output=output,
            calibration=DataSpec(source=str(samples)) if mode.data else None,
            threads=1,
            use_cache=False,
        )
    except PassFailedError as error:
        assert "Nothing in this model can be quantized" in error.what
        return None
    return output


def check(network: Network, mode: Mode) -> None:
    """Every promise for one model."""
    onnx.checker.check_model(network.proto, full_check=True)
    with tempfile.TemporaryDirectory() as folder:
        case = placed(network, Path(folder))
        output = compressed(case, mode, "one.onnx")
        again = compressed(case, mode, "two.onnx")
        if output is None or again is None:
            assert output is again
            return
        found = list(complaints(case, output, mode.job, mode.steps, mode.promised_db))
        assert not found, found
        assert output.read_bytes() == again.read_bytes()


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_every_mode_keeps_its_promises(mode: Mode) -> None:
    @settings(
        max_examples=12,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(network=networks())
    def holds(network: Network) -> None:
        check(network, mode)

    holds()


def _random(seed: int) -> Network:
    rng = random.Random(seed)
    return build(rng.randrange)


def test_what_graphs_are_made_of() -> None:
    operators: Counter[str] = Counter()
    opsets, listed, shared = set(), 0, 0
    for seed in range(300):
        proto = _random(seed).proto
        nodes = [node for graph in graphs(proto.graph) for node in graph.node]
        operators.update(node.op_type for node in nodes)
        opsets.add(proto.opset_import[0].version)
        stored = {item.name for item in proto.graph.initializer}
        listed += any(item.name in stored for item in proto.graph.input)
        readers = Counter(name for node in nodes for name in node.input if name[:1] == "w")
        shared += max(readers.values()) > 1
    assert opsets == set(range(9, 24))
    assert len(operators) >= 60
    assert min(operators[kind] for kind in ("If", "Loop", "Constant", "LSTM", "Conv")) >= 20
    assert min(listed, shared) >= 30


def test_a_broken_result_is_noticed(tmp_path: Path) -> None:
    """Scales twice as large, an output that is stated differently, other inputs."""
    mode = MODES["static, all"]
    case = placed(_random(3), tmp_path)
    output = compressed(case, mode, "out.onnx")
    assert output is not None

    def found() -> list[str]:
        return list(complaints(case, output, mode.job, mode.steps, mode.promised_db))

    assert found() == []
    model = onnx.load(output)
    for item in model.graph.initializer:
        if item.name.endswith("_scale"):
            array = 2 * onnx.numpy_helper.to_array(item)
            item.CopyFrom(onnx.numpy_helper.from_array(array, item.name))
    onnx.save(model, output)
    assert any("dB at ORT_DISABLE_ALL" in problem for problem in found())
    model.graph.output[0].type.tensor_type.shape.dim[0].dim_param = "other"
    onnx.save(model, output)
    assert any("not stated as it was" in problem for problem in found())
