"""Quantized models of one run: each is made once, by the command that a user would type."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.harness import ROOT, CommandFailedError, Measurement, measure
from benchmarks.peers import PEERS
from benchmarks.workload import CALIBRATION_IMAGES, Workload

SLOW_PEERS = ("quark adaround",)
NOT_INSTALLED = "not installed"


@dataclass(frozen=True)
class Artifact:
    """A quantized model and what making it took, or why there is none."""

    path: Path | None
    taken: Measurement | None = None
    missing: str = ""


@dataclass(frozen=True)
class Artifacts:
    """Makes quantized models and remembers them.

    Attributes:
        workload: Networks and data.
        slow: Run the peers that take minutes as well.
    """

    workload: Workload
    slow: bool = False
    _made: dict[tuple[str, ...], Artifact] = field(default_factory=dict)

    def ours(self, network: str, method: str = "auto", *options: str) -> Artifact:
        """What ``slimctl quantize`` makes, by default with its bias correction."""
        key = ("slimctl", network, method, *options)
        if key not in self._made:
            path = self._path(key)
            taken = self.measure_ours(network, method, options=options, output=path)
            self._made[key] = Artifact(path, taken)
        return self._made[key]

    def measure_ours(
        self,
        network: str,
        method: str,
        *,
        output: Path,
        count: int = CALIBRATION_IMAGES,
        options: Sequence[str] = (),
    ) -> Measurement:
        """Runs ``slimctl quantize`` with nothing in its cache."""
        model, data = self.workload.model(network), self.workload.calibration(network, count)
        command = [sys.executable, "-m", "slimctl", "quantize", str(model), "--calib", str(data)]
        command += ["--calibration", method, *options, "--force", "-o", str(output)]
        with tempfile.TemporaryDirectory() as folder:
            return measure(command, {"SLIMCTL_CACHE": folder})

    def onnxruntime(self, network: str, method: str) -> Artifact:
        """What onnxruntime's ``quantize_static`` makes, see onnxruntime_quantize."""
        key = ("onnxruntime", network, method.replace(":", "-"))
        if key not in self._made:
            path = self._path(key)
            taken = self.measure_onnxruntime(network, method, output=path)
            self._made[key] = Artifact(path, taken)
        return self._made[key]

    def measure_onnxruntime(
        self, network: str, method: str, *, output: Path, count: int = CALIBRATION_IMAGES
    ) -> Measurement:
        """Runs ``quantize_static``, or ``inference``, over the calibration pictures."""
        files = [self.workload.model(network), self.workload.calibration(network, count), output]
        module = "benchmarks.onnxruntime_quantize"
        return measure([sys.executable, "-m", module, method, *files])

    def peer(self, network: str, name: str) -> Artifact:
        """What another quantizer makes, where it is installed."""
        key = ("peer", network, name.replace(" ", "-"))
        if key not in self._made:
            self._made[key] = self._run_peer(network, name, self._path(key))
        return self._made[key]

    def _run_peer(self, network: str, name: str, path: Path) -> Artifact:
        package, _ = PEERS[name]
        if package not in peer_versions():
            return Artifact(None, missing=NOT_INSTALLED)
        if name in SLOW_PEERS and not self.slow:
            return Artifact(None, missing="left out, see --slow")
        files = [self.workload.folded_model(network), self.workload.calibration(network), path]
        command = [os.environ["PEERS_PYTHON"], "-m", "benchmarks.peers", name]
        try:
            return Artifact(path, measure([*command, *files]))
        except CommandFailedError as error:
            return Artifact(None, missing=f"failed: {str(error).splitlines()[-1][:80]}")

    def _path(self, key: tuple[str, ...]) -> Path:
        return self.workload.folder / f"{'_'.join(key)}.onnx"


def peer_versions() -> dict[str, str]:
    """Versions of the peers in the environment of ``PEERS_PYTHON``; empty without it."""
    python = os.environ.get("PEERS_PYTHON")
    if not python:
        return {}
    command = [python, "-m", "benchmarks.peers"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    versions: dict[str, str] = json.loads(done.stdout)
    return versions


def peer_note() -> str:
    """One line for a report: which peers ran, or how to have them."""
    versions = peer_versions()
    if not versions:
        return "Other quantizers: none here; PEERS_PYTHON names a Python that has them (peers.py)."
    listed = ", ".join(f"{name} {number}" for name, number in versions.items())
    return f"Other quantizers, in an environment of their own: {listed}."
