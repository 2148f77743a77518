"""How fast each int8 artifact runs in onnxruntime: one picture, one thread, all in turn."""

from __future__ import annotations

from benchmarks.artifacts import Artifact, Artifacts, peer_note
from benchmarks.harness import Report
from benchmarks.peers import PEERS
from benchmarks.workload import NETWORKS
from slimctl.evaluate.benchmark import BenchResult, benchmark, speedup

ROUNDS = 30
NETWORK_NAMES = ("efficientnet-lite0", "mobilenet-v2", "resnet-50")
EQUAL = 0.97  # sessions of the same file differ by up to 3 %: their memory lies differently

OURS = "slimctl"
FLOAT = "float"


def _subjects(artifacts: Artifacts, network: str) -> dict[str, Artifact]:
    return {
        FLOAT: Artifact(artifacts.workload.model(network)),
        OURS: artifacts.ours(network),
        "onnxruntime MinMax": artifacts.onnxruntime(network, "MinMax"),
        **{name: artifacts.peer(network, name) for name in PEERS},
    }


def _measure(artifacts: Artifacts, network: str) -> dict[str, BenchResult]:
    subjects = _subjects(artifacts, network)
    paths = {name: one.path for name, one in subjects.items() if one.path is not None}
    feeds = {NETWORKS[network].input_name: artifacts.workload.evaluation_array(network)[:1]}
    results = benchmark(list(paths.values()), feeds, threads=1, rounds=ROUNDS, memory=False)
    return dict(zip(paths, results, strict=True))


def _row(name: str, artifact: Artifact, taken: dict[str, BenchResult]) -> tuple[str, ...]:
    if artifact.path is None:
        return name, artifact.missing, "", "", ""
    result, gain = taken[name], speedup(taken[FLOAT], taken[name])
    size = artifact.path.stat().st_size / 1e6
    interval = f"{gain.value:.2f}x ({gain.low:.2f}-{gain.high:.2f})"
    return name, f"{result.p50:.2f}", f"{result.p90:.2f}", interval, f"{size:.1f}"


def _check(report: Report, network: str, taken: dict[str, BenchResult]) -> None:
    others = {name: result for name, result in taken.items() if name not in (FLOAT, OURS)}
    fastest = min(others, key=lambda name: others[name].p50)
    gain = speedup(taken[fastest], taken[OURS])
    promise = f"{NETWORKS[network].title}: no slower than the fastest other ({fastest})"
    found = f"{gain.value:.2f}x as fast ({gain.low:.2f}-{gain.high:.2f})"
    report.check(promise, found, kept=gain.value >= EQUAL)
    report.text()


def run(artifacts: Artifacts) -> Report:
    """Latency of the float network, of slimctl's default artifact and of the others'."""
    report = Report("latency", "Latency: onnxruntime, 1 thread, batch of 1")
    report.text(peer_note(), f"{ROUNDS} interleaved rounds; intervals are at 95 % confidence.")
    columns = ("artifact", "P50 ms", "P90 ms", "faster than float", "MB")
    for network in NETWORK_NAMES:
        taken = _measure(artifacts, network)
        subjects = _subjects(artifacts, network)
        rows = [_row(name, artifact, taken) for name, artifact in subjects.items()]
        report.table(NETWORKS[network].title, columns, rows)
        _check(report, network, taken)
    return report
