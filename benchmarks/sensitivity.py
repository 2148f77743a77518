"""The sensitivity scan beside the plain way: one whole session for each layer, on all samples.

Seconds are processor time of one thread, which a busy machine does not change much. Building the
variants is part of every way.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.artifacts import Artifacts
from benchmarks.harness import Report
from slimctl.evaluate.probing import Probing
from slimctl.recipe.schema import DataSpec
from slimctl.sensitivity.scan import Scanner
from slimctl.sensitivity.setup import Setup

NETWORKS = ("efficientnet-lite0", "mobilenet-v2")
SAMPLES = 64
SHARE, SHARE_FAST = 0.35, 0.05
RANKED, RANKED_FAST = 0.95, 0.80


def run(artifacts: Artifacts) -> Report:
    """int8 of every layer alone, by three ways."""
    report = Report("sensitivity", "Sensitivity scan: what each layer costs in int8")
    report.text(
        f"{SAMPLES} samples, one thread, processor time. 'whole sessions' opens each variant and",
        "runs it on all samples; 'scan' is the default of slimctl sensitivity: it restarts from",
        "kept tensors and stops sampling when the interval reaches 1.5 dB to either side. Ranks",
        "are compared by Spearman's correlation with the first row.",
    )
    for network in NETWORKS:
        _network(report, artifacts, network)
    return report


def _network(report: Report, artifacts: Artifacts, network: str) -> None:
    data = artifacts.workload.calibration(network, SAMPLES)
    setup = Setup(artifacts.workload.model(network), DataSpec(source=str(data)), threads=1)
    folder = str(artifacts.workload.folder / "cache")
    os.environ["SLIMCTL_CACHE"] = folder
    Scanner(setup)  # calibrates, and the others find it in the cache
    plain, plain_s = _timed(lambda: _whole(setup, data))
    found, found_s = _timed(lambda: _scanned(setup))
    fast, fast_s = _timed(lambda: _scanned(replace(setup, fast=True)))
    rows = []
    for name, values, seconds in (
        ("whole sessions", plain, plain_s),
        ("scan", found, found_s),
        ("scan --fast", fast, fast_s),
    ):
        rank = spearman(plain, values)
        rows.append((name, f"{seconds:.1f}", f"{seconds / plain_s:.3f}", f"{rank:.3f}"))
    report.table(f"{network}, {len(plain)} layers", ("way", "CPU s", "share", "ranks"), rows)
    for name, values, seconds, share, rank in (
        ("scan", found, found_s, SHARE, RANKED),
        ("scan --fast", fast, fast_s, SHARE_FAST, RANKED_FAST),
    ):
        part, same = seconds / plain_s, spearman(plain, values)
        promise = f"{network}, {name}: at most {share:g} of the time"
        report.check(promise, f"{part:.3f}", kept=part <= share)
        promise = f"{network}, {name}: ranks agree by {rank:g} or more"
        report.check(promise, f"{same:.3f}", kept=same >= rank)
    report.text()


def _timed(work: Callable[[], Sequence[float]]) -> tuple[Sequence[float], float]:
    start = time.process_time()
    found = work()
    return found, time.process_time() - start


def _whole(setup: Setup, data: Path) -> list[float]:
    scanner = Scanner(setup)
    with np.load(data) as stored:
        (name,) = (name for name in stored.files if name != "labels")
        feeds = [{name: row[None]} for row in stored[name]]
    probing = Probing(scanner.model, feeds, threads=1, cuts=0)
    change = scanner.changes["int8"]
    return [probing.loss(change.only([layer])).worst.db for layer in change.layers()]


def _scanned(setup: Setup) -> list[float]:
    scanner = Scanner(setup)
    return [scanner.run(task).sqnr_db for task in scanner.tasks()]


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Correlation of ranks; there are no ties among measured decibels."""
    one, other = (np.argsort(np.argsort(values)) for values in (first, second))
    return float(np.corrcoef(one, other)[0, 1])
