"""How long ``slimctl quantize`` takes and how much memory, next to onnxruntime's quantizer.

Whole commands, from starting Python to the file on disk: slimctl with KL calibration and bias
correction against ``quantize_static`` with its preparation, and against nothing but running the
pictures through the float network.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

from benchmarks.artifacts import Artifacts
from benchmarks.harness import Measurement, Report, interleaved, ratio
from benchmarks.workload import NETWORKS

ROUNDS = 3
FEW, MANY = 16, 256
NETWORK_NAMES = ("efficientnet-lite0", "resnet-50")

Taken = dict[str, list[Measurement]]

OURS = "slimctl kl"
MINMAX = "onnxruntime MinMax"
ENTROPY = "onnxruntime Entropy"
FLOOR = "inference alone"


def _rounds(artifacts: Artifacts, network: str) -> Taken:
    output = artifacts.workload.folder / "speed.onnx"

    def theirs(method: str) -> Callable[[], Measurement]:
        return lambda: artifacts.measure_onnxruntime(network, method, output=output)

    subjects = {
        OURS: lambda: artifacts.measure_ours(network, "kl", output=output),
        MINMAX: theirs("MinMax"),
        ENTROPY: theirs("Entropy"),
        FLOOR: theirs("inference"),
    }
    return interleaved(subjects, ROUNDS)


def _table(report: Report, network: str, taken: Taken) -> None:
    ours = [one.wall_s for one in taken[OURS]]
    rows = [
        (
            name,
            f"{median(one.wall_s for one in results):.2f}",
            f"{median(one.cpu_s for one in results):.2f}",
            f"{max(one.peak_mb for one in results):.0f}",
            f"{ratio(ours, [one.wall_s for one in results]):.2f}",
        )
        for name, results in taken.items()
    ]
    heading = f"{NETWORKS[network].title}, 64 pictures, median of {ROUNDS} interleaved rounds"
    report.table(heading, ("command", "wall s", "CPU s", "peak MiB", "ours / it"), rows)


def _memory(artifacts: Artifacts, network: str, taken: Taken, report: Report) -> float:
    """Peak memory by number of pictures; returns how much ours grows from the least to the most."""
    output = artifacts.workload.folder / "memory.onnx"

    def minmax(count: int) -> Measurement:
        return artifacts.measure_onnxruntime(network, "MinMax", output=output, count=count)

    def ours(count: int) -> Measurement:
        return artifacts.measure_ours(network, "kl", output=output, count=count)

    rows, peaks = [], {}
    for name, subject in ((OURS, ours), (MINMAX, minmax)):
        middle = max(one.peak_mb for one in taken[name])  # its 64 pictures are measured already
        peaks[name] = [subject(FEW).peak_mb, middle, subject(MANY).peak_mb]
        rows.append((name, *(f"{peak:.0f}" for peak in peaks[name])))
    columns = ("peak MiB", f"{FEW} pictures", "64 pictures", f"{MANY} pictures")
    report.table(f"{NETWORKS[network].title}, memory", columns, rows)
    return peaks[OURS][-1] / peaks[OURS][0]


def _check(report: Report, network: str, taken: Taken, growth: float) -> None:
    wall = {name: [one.wall_s for one in results] for name, results in taken.items()}
    title = NETWORKS[network].title
    for other, limit in ((MINMAX, 1.5), (ENTROPY, 0.35)):
        found = ratio(wall[OURS], wall[other])
        promise = f"{title}: wall time at most {limit}x {other}"
        report.check(promise, f"{found:.2f}x", kept=found <= limit)
    peak = max(one.peak_mb for one in taken[OURS])
    limit = 450.0
    if network == "resnet-50":
        limit = max(one.peak_mb for one in taken[MINMAX])
    report.check(f"{title}: peak at most {limit:.0f} MiB", f"{peak:.0f} MiB", kept=peak <= limit)
    promise = f"{title}: peak at {MANY} pictures at most 1.1x that at {FEW}"
    report.check(promise, f"{growth:.2f}x", kept=growth <= 1.1)


def run(artifacts: Artifacts) -> Report:
    """Measures and writes nothing; the caller does."""
    report = Report("calibration_speed", "Calibration: time and memory of the whole command")
    report.text(
        "onnxruntime: quantize_static, per channel, QUInt8 activations, with quant_pre_process.",
        "Its Entropy keeps every activation of every picture; it is left out above 64 pictures.",
    )
    results = {network: _rounds(artifacts, network) for network in NETWORK_NAMES}
    for network, taken in results.items():
        _table(report, network, taken)
    growth = {
        network: _memory(artifacts, network, taken, report) for network, taken in results.items()
    }
    for network, taken in results.items():
        _check(report, network, taken, growth[network])
    return report
