"""Pruning without training: accuracy beside Torch-Pruning, speed of what comes out, analysis time.

The two networks are trained once per machine (``benchmarks.fashion``) and kept beside the assets.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from benchmarks import pruning_models
from benchmarks.artifacts import Artifacts
from benchmarks.assets import cache_folder
from benchmarks.harness import ROOT, Report, interleaved
from benchmarks.workload import NETWORKS
from slimctl.evaluate.benchmark import benchmark, speedup
from slimctl.graph.channels import analyze, group_units
from slimctl.graph.load import load_model
from slimctl.graph.session import open_session
from slimctl.graph.session import run as run_session
from slimctl.graph.shapes import infer_shapes
from slimctl.passes.prune import Prune
from slimctl.passes.quantize import Quantize
from slimctl.recipe.run import run_passes
from slimctl.recipe.schema import DataSpec

SHARES = (0.8, 0.7, 0.6, 0.5, 0.4)
"""Of the multiply-accumulates that stay."""

FASHION = ("fashion-resnet", "fashion-mobilenet")
ROUNDS = 30
NODES = (1_000, 5_000, 25_000)
_WITHIN = 0.02


def _trained() -> Path:
    """The folder with the trained networks."""
    folder = cache_folder() / "fashion-networks"
    if not all((folder / f"{name}.onnx").exists() for name in FASHION):
        subprocess.run([sys.executable, "-m", "benchmarks.fashion", folder], cwd=ROOT, check=True)
    return folder


def _accuracy(model: Path, images: NDArray[np.float32], labels: NDArray[np.int64]) -> float:
    session = open_session(model)
    found = [
        run_session(session, {"image": images[start : start + 500]})["logits"].argmax(1)
        for start in range(0, len(images), 500)
    ]
    return float(np.mean(np.concatenate(found) == labels))


def _ours(model: Path, data: Path, share: float, output: Path, *, refit: bool) -> Path:
    run_passes(
        model,
        [Prune(target_macs=share, reconstruct=refit)],
        output=output,
        calibration=DataSpec(source=str(data)),
        force=True,
    )
    return output


def _theirs(folder: Path, name: str, output: Path) -> bool:
    python = os.environ.get("PEERS_PYTHON")
    if not python:
        return False
    command = [python, "-m", "benchmarks.torch_pruning_peer", str(folder / f"{name}.pt")]
    command += [str(output), *(f"{share:g}" for share in SHARES)]
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True)
    return done.returncode == 0


def _compare(report: Report, folder: Path, name: str, work: Path) -> None:
    data = folder / "fashion-calibration.npz"
    with np.load(folder / "fashion-evaluation.npz") as archive:
        images, labels = archive["image"], archive["label"]
    model = folder / f"{name}.onnx"
    full = _accuracy(model, images, labels)
    peer = _theirs(folder, name, work)
    rows, ahead = [], []
    half = 0.0
    for share in SHARES:
        plain = _accuracy(
            _ours(model, data, share, work / "plain.onnx", refit=False), images, labels
        )
        refit = _accuracy(
            _ours(model, data, share, work / "refit.onnx", refit=True), images, labels
        )
        other = _accuracy(work / f"{name}-{share:g}.onnx", images, labels) if peer else None
        half = refit if share == 0.5 else half
        ahead.append(other is None or refit > other)
        shown = "not here" if other is None else f"{other:.2%}"
        rows.append((f"{share:.0%}", f"{refit:.2%}", f"{plain:.2%}", shown))
    columns = ("MACs left", "slimctl", "without refitting", "Torch-Pruning")
    report.table(f"{name}: {full:.2%} of 10,000 test images before", columns, rows)
    found = f"{half:.2%}, {full - half:.2%} less"
    report.check("half the MACs within 2 points", found, kept=full - half <= _WITHIN)
    if peer:
        count = f"{sum(ahead)} of {len(ahead)}"
        report.check("ahead of Torch-Pruning at every ratio", count, kept=all(ahead))
    report.text()


def _speed(report: Report, artifacts: Artifacts, network: str, work: Path) -> None:
    model = artifacts.workload.model(network)
    data = artifacts.workload.calibration(network)
    half, small = work / "half.onnx", work / "half-int8.onnx"
    source = DataSpec(source=str(data))
    prune = Prune(target_macs=0.5, reconstruct=False)
    run_passes(model, [prune], output=half, calibration=source, force=True)
    run_passes(model, [prune, Quantize(min_sqnr=0)], output=small, calibration=source, force=True)
    feeds = {NETWORKS[network].input_name: artifacts.workload.evaluation_array(network)[:1]}
    results = benchmark([model, half, small], feeds, threads=1, rounds=ROUNDS, memory=False)
    for title, result, limit in (("half the MACs", results[1], 0.62), ("int8", results[2], 0.35)):
        share = 1 / speedup(results[0], result).value
        report.check(
            f"{NETWORKS[network].title}, {title}: P50 at most {limit:g}x",
            f"{share:.2f}x ({result.p50:.2f} of {results[0].p50:.2f} ms)",
            kept=share <= limit,
        )


def _chain(nodes: int) -> onnx.ModelProto:
    """A network of residual blocks with about so many nodes."""
    rng = np.random.default_rng(0)
    made, weights = [], []
    blocks = nodes // 5
    data = "x"
    for block in range(blocks):
        names = [f"w{block}a", f"w{block}b"]
        for name, shape in zip(names, ((64, 32, 1, 1), (32, 64, 1, 1)), strict=True):
            weights.append(
                numpy_helper.from_array(rng.standard_normal(shape).astype(np.float32), name)
            )
        made += [
            helper.make_node("Conv", [data, names[0]], [f"a{block}"], f"conv{block}a"),
            helper.make_node("Relu", [f"a{block}"], [f"b{block}"], f"relu{block}a"),
            helper.make_node("Conv", [f"b{block}", names[1]], [f"c{block}"], f"conv{block}b"),
            helper.make_node("Add", [f"c{block}", data], [f"d{block}"], f"add{block}"),
            helper.make_node("Relu", [f"d{block}"], [f"e{block}"], f"relu{block}b"),
        ]
        data = f"e{block}"
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        made,
        "chain",
        [value("x", TensorProto.FLOAT, ["N", 32, 8, 8])],
        [value(data, TensorProto.FLOAT, ["N", 32, 8, 8])],
        weights,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def _analysis(report: Report, work: Path) -> None:
    models = {}
    for nodes in NODES:
        path = work / f"chain-{nodes}.onnx"
        onnx.save(_chain(nodes), path)
        models[nodes] = load_model(path)
        infer_shapes(models[nodes])

    def timed(nodes: int) -> float:
        # As timeit does: Python's collector of cycles looks at more objects the more there are.
        gc.disable()
        start = time.perf_counter()
        group_units(analyze(models[nodes]))
        taken = time.perf_counter() - start
        gc.enable()
        return taken

    taken = interleaved({str(n): partial(timed, n) for n in NODES}, rounds=3)
    best = {nodes: min(taken[str(nodes)]) for nodes in NODES}
    report.table(
        "Analysis of coupled channels",
        ("nodes", "seconds", "microseconds per node"),
        [(f"{n:,}", f"{t:.2f}", f"{t / n * 1e6:.0f}") for n, t in best.items()],
    )
    report.check("5,000 nodes under 5 s", f"{best[5_000]:.2f} s", kept=best[5_000] < 5)
    grows = best[25_000] / best[5_000]
    report.check("linear in the nodes (5x nodes)", f"{grows:.1f}x the time", kept=grows < 6)


def run(artifacts: Artifacts) -> Report:
    """Accuracy, speed and analysis time of pruning."""
    report = Report("pruning", "Pruning without training")
    work = artifacts.workload.folder / "pruning"
    work.mkdir(exist_ok=True)
    folder = _trained()
    for name in FASHION:
        _compare(report, folder, name, work)
    for network in ("efficientnet-lite0", "mobilenet-v2"):
        _speed(report, artifacts, network, work)
    report.text()
    pruning_models.table(report, artifacts)
    report.text()
    _analysis(report, work)
    return report
