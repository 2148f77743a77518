"""What every mode promises for every model, judged in onnx and onnxruntime alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, numpy_helper

from tests.cases.oracle import Case, sqnr, violations
from tests.exact import exact_session
from tests.modes.growing import FLOAT, graphs
from tests.modes.networks import Network
from tests.modes.noise import Steps, floors_db, joined

LEVELS = ("ORT_DISABLE_ALL", "ORT_ENABLE_BASIC", "ORT_ENABLE_EXTENDED", "ORT_ENABLE_ALL")
BIG = 256  # numbers of a weight beside which its scales are few
EXACT_DB = 60.0  # where no noise comes through, float32 kernels still differ
SILENT = 1e-20  # mean square of an output that is nothing but rounding
SMALL = {TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.INT8, TensorProto.UINT8}
SMALL |= {TensorProto.INT4, TensorProto.UINT4}


@dataclass(frozen=True)
class Placed(Case):
    """A random model in a folder, as the oracle of the bug reports wants it."""

    folder: Path = Path()
    network: Network | None = field(default=None, repr=False)

    @property
    def model(self) -> Path:
        return self.folder / "model.onnx"

    def feeds(self, kind: str) -> list[dict[str, np.ndarray]]:
        del kind  # what was not seen in calibration is another matter
        assert self.network is not None
        return self.network.feeds


def placed(network: Network, folder: Path) -> Placed:
    """Writes a model."""
    inputs = [item.name for item in network.proto.graph.input if item.name in network.feeds[0]]
    case = Placed("random", {"inputs": inputs, "int8_weights": 0}, {}, folder, network)
    onnx.save(network.proto, case.model)
    return case


def complaints(
    case: Placed, produced: Path, job: str, steps: Steps, promised_db: float
) -> Iterator[str]:
    """What a result breaks.

    Args:
        case: The float model.
        produced: The result.
        job: What the oracle calls it.
        steps: How coarse the mode is.
        promised_db: What the mode promises to keep by leaving layers in float.
    """
    model = onnx.load(produced)
    onnx.checker.check_model(model, full_check=True)
    yield from violations(case, produced, job)
    yield from _interface(case, model)
    yield from _quality(case, produced, steps, promised_db)
    yield from _size(case, model)


def _interface(case: Placed, model: onnx.ModelProto) -> Iterator[str]:
    """What the oracle does not look at: the stated types and sizes."""
    before = onnx.load(case.model).graph
    inputs = [item for item in before.input if item.name in case.check["inputs"]]
    stated = [*model.graph.input, *model.graph.output]
    for old, new in zip([*inputs, *before.output], stated, strict=True):
        if old.name != new.name or old.type != new.type:
            yield f"{old.name} is not stated as it was"


def _quality(case: Placed, produced: Path, steps: Steps, promised_db: float) -> Iterator[str]:
    feeds = case.feeds("")
    session = ort.InferenceSession(case.model)
    runs = [session.run(None, feed) for feed in feeds]
    reference = joined(runs)
    floors = floors_db(onnx.load(case.model), feeds, runs, steps)
    for level in LEVELS:
        options = ort.SessionOptions()
        options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, level)
        session = exact_session(produced, options)
        found = joined([session.run(None, feed) for feed in feeds])
        names = [item.name for item in session.get_outputs()]
        for name, ours, theirs, floor in zip(names, reference, found, floors, strict=True):
            wanted = min(max(floor, promised_db), EXACT_DB)
            if np.mean(ours.astype(np.float64) ** 2) < SILENT:
                continue
            if not np.isfinite(theirs).all():
                yield f"{name} is not finite at {level}"
            elif sqnr(ours, theirs) < wanted:
                yield f"{name}: {sqnr(ours, theirs):.1f} dB at {level}, wanted {wanted:.1f}"


def _size(case: Placed, model: onnx.ModelProto) -> Iterator[str]:
    """Where a big weight became small, the weights as a whole take fewer bytes.

    A weight that a loop or an excluded node reads as well has to be stored in float, too.
    """
    before, after = _stored(onnx.load(case.model)), _stored(model)
    small = [sorted(array.shape) for kind, array in after if kind in SMALL and array.size >= BIG]
    if not small:
        return
    sizes = [sum(_bytes(kind, array) for kind, array in each) for each in (before, after)]
    twice = [array for kind, array in after if kind == FLOAT and sorted(array.shape) in small]
    if sizes[1] - sum(array.nbytes // 2 for array in twice) >= sizes[0]:
        yield f"weights take {sizes[1]} bytes instead of {sizes[0]}"


def _bytes(kind: int, array: np.ndarray) -> int:
    half = kind in (TensorProto.INT4, TensorProto.UINT4)
    return (array.size + 1) // 2 if half else array.nbytes


def _stored(model: onnx.ModelProto) -> list[tuple[int, np.ndarray]]:
    """Type and values of all constants."""
    tensors = [item for graph in graphs(model.graph) for item in graph.initializer]
    for graph in graphs(model.graph):
        for node in graph.node:
            if node.op_type == "Constant":
                tensors += [a.t for a in node.attribute if a.HasField("t")]
    return [(item.data_type, numpy_helper.to_array(item)) for item in tensors]
