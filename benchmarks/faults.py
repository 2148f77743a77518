"""Faults planted into quantized networks, one at a time: does ``verify`` name the node?"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir

from benchmarks.artifacts import Artifacts
from benchmarks.harness import Report
from benchmarks.planted import FAULTS, SEVERAL, SPATIAL, SQUARE, names_of
from slimctl.core.contract import Feeds
from slimctl.evaluate.verification import Verification, verify_model
from slimctl.graph.edit import clone_model
from slimctl.graph.load import load_model

NETWORKS = ("mobilenet-v2", "orientation")
SAMPLES = 2


def run(artifacts: Artifacts) -> Report:
    """Plants every fault at a convolution in the middle of each network."""
    report = Report("faults", "Planted faults that verify names")
    report.text(
        f"Each fault is planted into one convolution of a sound int8 network; {SAMPLES} runs are",
        "looked at. 'rank' is the place of that convolution among the faults that are reported;",
        "'named' counts the nodes that are reported as wrong.",
    )
    for network in NETWORKS:
        _network(report, artifacts, network)
    return report


def _network(report: Report, artifacts: Artifacts, network: str) -> None:
    made = artifacts.ours(network, "kl").path
    assert made is not None
    reference = load_model(artifacts.workload.model(network))
    sound, samples = load_model(made), _samples(artifacts.workload.calibration(network, 16))
    before = verify_model(sound, samples, reference=reference)
    rows = []
    found = planted = 0
    for name, fault in FAULTS.items():
        place = _place(sound, name)
        if not place:
            rows.append((name, "", "", "", "no convolution that it fits"))
            continue
        planted += 1
        model = clone_model(sound)
        names = names_of(model, place)
        fault(model, place)
        after = verify_model(model, samples, reference=reference)
        rank = _rank(after, names)
        found += rank == 1
        rows.append((name, place, str(rank or "-"), str(_named(after)), _reason(after, names)))
    report.table(network, ("fault", "planted at", "rank", "named", "what verify says"), rows)
    promise = f"{network}: nothing is wrong with the sound network"
    report.check(promise, str(_named(before)), kept=not before.faults)
    promise = f"{network}: every fault is named first"
    report.check(promise, f"{found} of {planted}", kept=found == planted)
    report.text()


def _samples(data: Path) -> list[Feeds]:
    with np.load(data) as arrays:
        return [{name: arrays[name][i : i + 1] for name in arrays.files} for i in range(SAMPLES)]


def _place(model: ir.Model, fault: str) -> str:
    """The convolution in the middle of those that a fault fits; empty without one."""
    found = [node for node in model.graph if node.op_type == "Conv" and _fits(node, fault)]
    return found[len(found) // 2].name or "" if found else ""


def _fits(node: ir.Node, fault: str) -> bool:
    restorer = None if node.inputs[1] is None else node.inputs[1].producer()
    quantized = restorer is not None and restorer.op_type == "DequantizeLinear"
    shape = None if restorer is None or restorer.inputs[0] is None else restorer.inputs[0].shape
    if not quantized or shape is None or len(node.inputs) < 3:
        return False
    sizes: Sequence[int] = shape.numpy()
    if fault in SQUARE:
        return sizes[0] == sizes[1]
    return not (fault in SPATIAL and sizes[-1] == 1) and not (fault in SEVERAL and sizes[1] == 1)


def _rank(found: Verification, names: set[str]) -> int:
    """Place of a node among the nodes reported as wrong, from 1; 0 if it is not reported."""
    nodes = list(dict.fromkeys(fault.node for fault in found.faults))
    return next((index for index, node in enumerate(nodes, start=1) if node in names), 0)


def _named(found: Verification) -> int:
    return len({fault.node for fault in found.faults})


def _reason(found: Verification, names: set[str]) -> str:
    reasons = (fault.reason for fault in found.faults if fault.node in names)
    return next(reasons, "nothing")[:76]
