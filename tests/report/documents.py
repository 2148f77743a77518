"""What commands print, small: documents that pages are made from."""

from __future__ import annotations

from typing import Any

RESULT, SOURCE = "aa" * 32, "bb" * 32
"""Hashes of the artifact's model and of the original."""


def manifest(**changes: Any) -> dict[str, Any]:
    source = {"name": "net.onnx", "sha256": SOURCE, "size_bytes": 6_000_000}
    model = {"content_hash": "c", "nodes": 2, "opset": 17}
    steps = [
        _step("fuse", 6_000_000, 200.0, 0.99),
        _step("quantize-static", 1_500_000, 21.0, 0.95),
        _step("bias-correction", 1_510_000, 24.5, 0.975),
    ]
    return {
        "name": "net",
        "versions": {"slimctl": "1"},
        "source": {
            **model,
            "size_bytes": 6_000_000,
            "weight_bytes": 5_900_000,
            "dtype_bytes": {"float32": 5_890_000, "int64": 10_000},
            "files": [source],
        },
        "model": {
            **model,
            "size_bytes": 1_500_000,
            "weight_bytes": 1_400_000,
            "dtype_bytes": {"float32": 100_000, "int32": 20_000, "int8": 1_280_000},
        },
        "files": [{"name": "model.onnx", "sha256": RESULT, "size_bytes": 1_500_000}],
        "target": "cpu",
        "seed": 0,
        "steps": steps,
        "calibration": {"source": "calib.npz", "samples": 4, "sha256": "cc" * 32},
        "evaluation": None,
        "uncalibrated": True,
        "results": {
            "size_ratio": 0.25,
            "sqnr_db": 24.5,
            "sqnr_samples": 4,
            "metric": "top1",
            "metric_original": 0.99,
            "metric_result": 0.975,
            "gates": [_gate("sqnr", passed=True), _gate("size", passed=False)],
        },
        "manifest_hash": "hash 3",
        "run": {
            "started": "2026-01-01T00:00:00+00:00",
            "notes": ["P50 3.21 ms"],
            "host": "here",
            "platform": "Linux",
            "gates": [],
            "latency": None,
            "files": [],
        },
        **changes,
    }


def _step(name: str, weight_bytes: int, sqnr_db: float, metric: float) -> dict[str, Any]:
    return {
        "name": name,
        "effect": "approximate",
        "options": {"calibration": "auto", "exclude": ["op:Softmax", "/backbone/stage0/conv/Conv"]},
        "changed": {"Conv": 3},
        "skipped": [{"node": "/backbone/stage0/conv/Conv", "reason": "its weights are shared"}],
        "notes": ["23 Q/DQ nodes fuse into 6 integer kernels"],
        "facts": {},
        "weight_bytes": weight_bytes,
        "nodes": 9,
        "sqnr_db": sqnr_db,
        "metric": metric,
        "exact_error": None,
    }


def _gate(name: str, *, passed: bool) -> dict[str, Any]:
    found = "24.5 found, and a sentence that is long enough to be wrapped on a phone"
    return {"gate": name, "bound": 0.3, "found": 0.4, "passed": passed, "message": found}


def history() -> dict[str, Any]:
    return {
        "store": "artifacts",
        "name": "net",
        "current": 3,
        "versions": [
            _version(1, 1_700_000, 0.981),
            _version(2, 1_200_000, 0.91, accepted=False),
            _version(3, 1_500_000, 0.975, current=True),
        ],
    }


def _version(
    number: int, size: int, metric: float | None, *, accepted: bool = True, current: bool = False
) -> dict[str, Any]:
    return {
        "version": number,
        "at": "2026-01-01T00:00:00+00:00",
        "accepted": accepted,
        "current": current,
        "labels": ["production"] if current else [],
        "has_files": accepted,
        "manifest_hash": f"hash {number}",
        "size_bytes": size,
        "sqnr_db": 20.0 + number,
        "metric": "top1",
        "metric_result": metric,
        "failed_gates": [] if accepted else ["accuracy"],
        "changes": [] if number == 1 else ["steps.1.calibration auto -> kl"],
    }


def bench(sha256: str = RESULT) -> dict[str, Any]:
    models = [_timed("artifacts/net/model.onnx", sha256, 2.0), _timed("net.onnx", SOURCE, 4.0)]
    node = {"op_type": "Conv", "bound": "compute", "attained": 0.5, "advice": "quantize"}
    return {
        "batch_size": 1,
        "threads": 0,
        "models": models,
        "speedup": {"value": 2.0, "low": 1.9, "high": 2.1},
        "verdict": {"outcome": "faster", "decided": True, "noise": 1, "reason": "it is"},
        "profile": {
            "advice": [{"action": "quantize", "share": 0.75, "nodes": 3}],
            "nodes": [
                {**node, "name": f"/backbone/stage{i}/conv/Conv", "seconds": 1e-3, "share": 0.2}
                | {"reason": "it computes in float"}
                for i in range(5)
            ],
        },
        "profile_against": {
            "advice": [],
            "nodes": [{"name": "/head/Gemm", "op_type": "Gemm", "seconds": 2e-3, "share": 1.0}],
        },
        "difference": {
            "words": "'artifacts/net/model.onnx' spends 5 ms in kernels, 'net.onnx' 2: 3 ms more",
            "kinds": [
                _kind("convolutions", 5e-3, 0.0, sure=True),
                _kind("Softmax", 1e-5, 1.1e-5, sure=False),
            ],
        },
        "machine": None,
        "load": None,
    }


def _kind(kind: str, seconds: float, against: float, *, sure: bool) -> dict[str, Any]:
    times = {"seconds": seconds, "against": against, "change": seconds - against}
    counts = {"operators": {"QLinearConv": 5}, "operators_against": {}}
    return {"kind": kind, **times, **counts, "noise": 1e-6, "sure": sure}


def _timed(name: str, sha256: str, scale: float) -> dict[str, Any]:
    numbers = {f"{key}_ms": scale for key in ("p50", "p90", "p99", "mean", "cpu", "load")}
    return numbers | {
        "model": name,
        "sha256": sha256,
        "runs": 90,
        "samples_per_second": 1000 / scale,
        "quantiles_ms": [scale * (1 + share / 100) for share in range(101)],
    }


def sensitivity(sha256: str = SOURCE) -> dict[str, Any]:
    found = [
        {
            "group": f"/backbone/stage{place}/conv/Conv",
            "place": place,
            "change": change,
            "direction": direction,
            "op_types": ["Conv"],
            "parameters": 4640 * (place + 1),
            "macs": 10_000,
            "sqnr_db": 20.0 + 5 * place + (10 if change == "int8" else 0),
            "low_db": 19.0 + 5 * place,
            "high_db": 31.0 + 5 * place,
            "samples": 4,
            "metric": None,
        }
        for direction in ("alone", "except")
        for change in ("int8", "int4")
        for place in range(6 if change == "int8" else 4)
    ]
    return {
        "setup": {
            "model": "net.onnx",
            "data": {"source": "calib.npz"},
            "target": "cpu",
            "fast": False,
            "metric": None,
        },
        "sha256": sha256,
        "samples": 16,
        "findings": found,
        "skipped": {"int4": [{"node": "/head/Gemm", "reason": "it has no constant weights"}]},
    }
