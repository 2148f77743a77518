"""Judges what a tool made of a public bug report, independently of slimctl.

``violations(case, produced, job)`` compares a produced file with the float original of the case in
onnxruntime and returns what is wrong, one sentence each; an empty list is a pass. Only onnx, numpy
and onnxruntime are used: the oracle must not share code with what it judges.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import numpy_helper

from tests.exact import exact_session

HERE = Path(__file__).parent
INTEGER_TYPES = {
    onnx.TensorProto.INT8,
    onnx.TensorProto.UINT8,
    onnx.TensorProto.INT4,
    onnx.TensorProto.UINT4,
}
SCALES = {
    # where an operator reads the scales of weights
    "QuantizeLinear": (1,),
    "DequantizeLinear": (1,),
    "MatMulNBits": (2,),
    "GatherBlockQuantized": (2,),
    "Mul": (0, 1),
    "DynamicQuantizeLSTM": (8, 10),
}
INTEGER_LAYERS = {"MatMulInteger": 1, "ConvInteger": 1, "DynamicQuantizeLSTM": 1, "MatMulNBits": 1}
FLOORS = {
    "quant_static": "sqnr",
    "quant_dynamic": "sqnr",
    "quant_dynamic_conv": "sqnr",
    "weight_only": "sqnr_int4",
    "fp16": "sqnr_fp16",
}
Arrays = list[np.ndarray]

ort.set_default_logger_severity(4)


@dataclass(frozen=True)
class Case:
    """One bug report.

    Attributes:
        id: Its number here.
        check: What must hold, see ``CHECKS`` and ``README.md``.
        text: Symptom, cause and what is right.
    """

    id: str
    check: dict[str, Any]
    text: dict[str, str]

    @property
    def model(self) -> Path:
        """The float model."""
        return HERE / "data" / f"{self.id}.onnx"

    def feeds(self, kind: str) -> list[dict[str, np.ndarray]]:
        """Samples of one kind: ``calibration`` or ``evaluation``."""
        with np.load(HERE / "data" / f"{self.id}.npz", allow_pickle=False) as data:
            names = [str(name) for name in data["names"]]
            count = int(data["n_calib" if kind == "calibration" else "n_eval"])
            return [
                {name: data[f"{kind[0]}{i}_{j}"] for j, name in enumerate(names)}
                for i in range(count)
            ]

    def actions(self) -> set[str]:
        """Commands that must survive this case, without their arguments."""
        return {action.split(":")[0] for action in self.check.get("action", "").split(",")}


def cases(action: str) -> list[Case]:
    """All cases that name an action."""
    entries = json.loads((HERE / "manifest.json").read_text(encoding="utf-8"))
    found = [Case(entry["id"], entry["check"], entry) for entry in entries]
    return [case for case in found if action in case.actions()]


def sqnr(reference: np.ndarray, other: np.ndarray) -> float:
    """Signal to quantization noise in dB; 200 when equal, -200 without a signal."""
    a, b = reference.astype(np.float64).ravel(), other.astype(np.float64).ravel()
    noise, signal = float(((a - b) ** 2).sum()), float((a**2).sum())
    if noise == 0:
        return 200.0
    return -200.0 if signal == 0 else 10 * float(np.log10(signal / noise))


@dataclass
class Evidence:
    """A produced model beside its original, run on the evaluation samples."""

    case: Case
    job: str
    model: onnx.ModelProto
    session: ort.InferenceSession
    reference: list[Arrays]  # [sample][output]
    optimized: list[Arrays]
    plain: list[Arrays]  # with onnxruntime's optimizations off
    names: list[str]

    def initializers(self) -> dict[str, onnx.TensorProto]:
        return {item.name: item for graph in self.graphs() for item in graph.initializer}

    def nodes(self) -> Iterator[onnx.NodeProto]:
        """All nodes, those in branches and loops included."""
        for graph in self.graphs():
            yield from graph.node

    def graphs(self) -> Iterator[onnx.GraphProto]:
        """The main graph, and what is within it."""
        waiting = [self.model.graph]
        while waiting:
            graph = waiting.pop()
            yield graph
            waiting += [a.g for node in graph.node for a in node.attribute if a.HasField("g")]

    def integer_weights(self) -> Iterator[tuple[str, int, np.ndarray]]:
        """Name, axis and scales of every integer initializer that a DequantizeLinear reads."""
        stored = self.initializers()
        for node in self.nodes():
            if node.op_type != "DequantizeLinear" or node.input[0] not in stored:
                continue
            if stored[node.input[0]].data_type in INTEGER_TYPES:
                axis = next((a.i for a in node.attribute if a.name == "axis"), 1)
                yield node.input[0], axis, numpy_helper.to_array(stored[node.input[1]])


def _session(path: Path, *, optimize: bool) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    if not optimize:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return exact_session(path, options)


def _run(session: ort.InferenceSession, feeds: list[dict[str, np.ndarray]]) -> list[Arrays]:
    wanted = {item.name for item in session.get_inputs()}
    return [session.run(None, {k: v for k, v in feed.items() if k in wanted}) for feed in feeds]


def violations(case: Case, produced: Path, job: str) -> list[str]:
    """What is wrong with a produced file.

    Args:
        case: The bug report.
        produced: The file that the tool wrote.
        job: ``quant_static``, ``quant_dynamic``, ``quant_dynamic_conv`` (convolutions as well),
            ``weight_only``, ``fp16``, ``fuse`` or ``prune``.
    """
    feeds = case.feeds("evaluation")
    original = _session(case.model, optimize=True)
    session = _session(produced, optimize=True)
    evidence = Evidence(
        case,
        job,
        onnx.load(produced),
        session,
        _run(original, feeds),
        _run(session, feeds),
        _run(_session(produced, optimize=False), feeds),
        [item.name for item in original.get_outputs()],
    )
    return [problem for check in CHECKS for problem in check(evidence)]


def _interface(e: Evidence) -> Iterator[str]:
    names = [item.name for item in e.session.get_outputs()]
    if names != e.names:
        yield f"outputs are {names}, not {e.names}"
    inputs = [item.name for item in e.session.get_inputs()]
    if "inputs" in e.case.check and inputs != e.case.check["inputs"]:
        yield f"inputs are {inputs}, not {e.case.check['inputs']}"
    for ours, theirs in zip(e.reference, e.optimized, strict=True):
        shapes = [
            (a.shape, b.shape) for a, b in zip(ours, theirs, strict=True) if a.shape != b.shape
        ]
        if shapes:
            yield f"output shapes differ: {shapes}"


def _finite(e: Evidence) -> Iterator[str]:
    for outputs in (*e.optimized, *e.plain):
        for name, array in zip(e.names, outputs, strict=True):
            if not np.isfinite(array.astype(np.float64)).all():
                yield f"{name} holds NaN or Inf"


def _without(array: np.ndarray, rows: list[int]) -> np.ndarray:
    return np.delete(array, rows, 1) if rows else array


def _quality(e: Evidence) -> Iterator[str]:
    floor = e.case.check.get(FLOORS.get(e.job, ""))
    if floor is None:
        return
    for index, name in enumerate(e.names):
        ignored = e.case.check.get("ignore_rows", {}).get(name, [])
        for level, produced in (("on", e.optimized), ("off", e.plain)):
            ours, theirs = (
                np.concatenate([_without(o[index], ignored).ravel() for o in outputs])
                for outputs in (e.reference, produced)
            )
            found = sqnr(ours, theirs)
            if found < floor:
                yield f"{name}: {found:.1f} dB with optimizations {level}, wanted {floor}"


def _channel_values(e: Evidence) -> Iterator[str]:
    for name, channels in e.case.check.get("channel_value", {}).items():
        for channel, value in channels.items():
            outputs = [o[e.names.index(name)][:, int(channel)] for o in e.optimized]
            error = max(float(np.abs(o - value).max()) for o in outputs)
            if error > e.case.check["tol"]:
                yield f"{name} channel {channel} is off by {error:.3g}"


def _scale_inputs(e: Evidence) -> Iterator[tuple[str, str]]:
    """Nodes and the names of the scales that they read.

    A product is one of scales when its other factor is what DynamicQuantizeLinear chose.
    """
    chosen = {n.output[1] for n in e.nodes() if n.op_type == "DynamicQuantizeLinear"}
    for node in e.nodes():
        if node.op_type == "Mul" and not chosen & set(node.input):
            continue
        for index in SCALES.get(node.op_type, ()):
            yield node.name, node.input[index]


def _scales(e: Evidence) -> Iterator[str]:
    stored = e.initializers()
    for node, name in _scale_inputs(e):
        if name in stored:
            scale = numpy_helper.to_array(stored[name]).astype(np.float64)
            if not (np.isfinite(scale).all() and (scale > 0).all()):
                yield f"{node}: a scale is not finite and positive"


def _integer_layers(e: Evidence) -> Iterator[str]:
    """Where convolutions may be integers and where only weights are, something has to be."""
    if e.job not in ("quant_dynamic_conv", "weight_only"):
        return
    stored = e.initializers()
    layers = [
        node
        for node in e.nodes()
        if node.op_type in INTEGER_LAYERS and node.input[INTEGER_LAYERS[node.op_type]] in stored
    ]
    count = len(layers) + (len(list(e.integer_weights())) if e.job == "weight_only" else 0)
    if count < e.case.check.get("int8_weights", 1):
        yield f"{count} layers have integer weights"


def _weights(e: Evidence) -> Iterator[str]:
    if e.job != "quant_static":
        return
    weights = {name: (axis, scale) for name, axis, scale in e.integer_weights()}
    if len(weights) < e.case.check.get("int8_weights", 1):
        yield f"{len(weights)} weights are stored as integers"
    original = {i.name: i for i in onnx.load(e.case.model).graph.initializer}
    for name, axis in e.case.check.get("axis", {}).items():
        found = [item for stored, item in weights.items() if stored.split("_quantized")[0] == name]
        if not found:
            yield f"{name} is not stored as an integer"
            continue
        if found[0][0] % len(original[name].dims) != axis:
            yield f"{name} is quantized along axis {found[0][0]}, not {axis}"
        wanted = e.case.check.get("n_scales", {}).get(name)
        if wanted is not None and found[0][1].size != wanted:
            yield f"{name} has {found[0][1].size} scales, not {wanted}"


def _opset(e: Evidence) -> Iterator[str]:
    opset = next(o.version for o in e.model.opset_import if o.domain in ("", "ai.onnx"))
    if e.job != "fuse" and opset < e.case.check.get("min_opset", 0):
        yield f"opset is {opset}"


def _fused(e: Evidence) -> Iterator[str]:
    if e.job != "fuse":
        return
    difference = max(
        float(np.abs(a.astype(np.float64) - b).max())
        for ours, theirs in zip(e.reference, e.optimized, strict=True)
        for a, b in zip(ours, theirs, strict=True)
    )
    if difference > e.case.check.get("max_abs", 1e-4):
        yield f"outputs differ by {difference:.2g}"
    left = sum(node.op_type == "BatchNormalization" for node in e.model.graph.node)
    if left != e.case.check.get("bn_left", left):
        yield f"{left} BatchNormalization left, wanted {e.case.check['bn_left']}"


def _nonzero(e: Evidence) -> Iterator[str]:
    if e.case.check.get("nonzero") and not any(o.any() for outputs in e.optimized for o in outputs):
        yield "all outputs are zero"


def _pruned(e: Evidence) -> Iterator[str]:
    if e.job != "prune":
        return

    def parameters(model: onnx.ModelProto) -> int:
        return sum(int(np.prod(item.dims)) for item in model.graph.initializer)

    ratio = parameters(e.model) / parameters(onnx.load(e.case.model))
    if ratio > 0.97:
        yield f"{ratio:.0%} of the parameters are left: not pruned"
    stored = e.initializers()
    for node in e.model.graph.node:
        group = next((a.i for a in node.attribute if a.name == "group"), 1)
        if node.op_type == "Conv" and stored[node.input[1]].dims[0] % group:
            yield f"{node.name}: {group} groups do not divide its output channels"


CHECKS: tuple[Callable[[Evidence], Iterator[str]], ...] = (
    _interface,
    _finite,
    _quality,
    _channel_values,
    _scales,
    _integer_layers,
    _weights,
    _opset,
    _fused,
    _nonzero,
    _pruned,
)
