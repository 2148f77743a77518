from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

from benchmarks import harness, networks
from benchmarks.accuracy import sqnr_db
from benchmarks.harness import CommandFailedError, Report, interleaved, measure, ratio


def test_peak_memory_is_the_command_s_own() -> None:
    ballast = np.ones(100_000_000, np.uint8)
    small = measure([sys.executable, "-c", "pass"])
    large = measure([sys.executable, "-c", "x = b'1' * 200_000_000"])
    assert small.peak_mb < 50 < len(ballast) / 2**20  # this process is larger than that
    assert 185 < large.peak_mb - small.peak_mb < 200  # 200e6 bytes are 190.7 MiB
    assert large.wall_s > 0
    assert large.cpu_s > 0


def test_failing_command_says_what_it_said() -> None:
    with pytest.raises(CommandFailedError, match="no such luck"):
        measure([sys.executable, "-c", "raise SystemExit('no such luck')"])


def test_subjects_take_turns() -> None:
    order: list[str] = []
    subjects = {name: (lambda name=name: order.append(name)) for name in ("a", "b")}
    results = interleaved(subjects, 2)
    assert order == ["a", "b", "a", "b"]
    assert list(results) == ["a", "b"]


def test_ratio_is_taken_within_each_round() -> None:
    # The second round was ten times slower for both: the medians alone would say 0.5 / 11.
    assert ratio([1, 20, 3], [2, 40, 6]) == 0.5


def test_report_holds_tables_and_checks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    report = Report("thing", "A thing")
    report.table("Times", ("name", "ms"), [("one", "1.0"), ("eleven", "11.0")])
    report.check("fast", "11.0 ms", kept=False)

    text = report.write().read_text(encoding="utf-8")

    assert text == capsys.readouterr().out.rstrip("\n") + "\n"
    assert "name      ms\n------  ----\none      1.0\neleven  11.0\n\nMISSED  fast: 11.0 ms" in text
    assert f"numpy {np.__version__}" in text
    assert f"onnxruntime {ort.__version__}" in text


def test_sqnr_by_hand() -> None:
    reference = np.array([[3, 4]], np.float32)
    assert sqnr_db(reference, np.array([[3, 3.5]], np.float32)) == pytest.approx(20)  # 25 / 0.25


def test_activations_of_the_random_network_stay_sane() -> None:
    model = networks.resnet_50_shaped()
    session = ort.InferenceSession(model.SerializeToString())
    noise = np.random.default_rng(1).standard_normal((1, 3, 224, 224), np.float32)
    (logits,) = session.run(None, {"image": noise})
    assert logits.shape == (1, 1000)
    assert 0.3 < logits.std() < 3
