"""``slimctl sensitivity``: what it prints and writes, and what it refuses."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SCAN = ("sensitivity", "model.onnx", "--data", "calib.npz", "--threads", "1")


@pytest.mark.usefixtures("inputs")
def test_json_holds_every_finding(slimctl: Callable[..., Any]) -> None:
    ended = slimctl(*SCAN, "--options", "int8,fp16", "--converse", "--json", "-q")
    assert ended.code == 0
    document = json.loads(ended.stdout)
    seen = {(f["change"], f["direction"]) for f in document["findings"]}
    assert seen == {(c, d) for c in ("int8", "fp16") for d in ("alone", "except")}
    assert document["setup"]["changes"] == ["int8", "fp16"]


@pytest.mark.usefixtures("inputs")
def test_files_hold_what_is_printed(slimctl: Callable[..., Any]) -> None:
    document = json.loads(slimctl(*SCAN, "--json", "-q").stdout)
    ended = slimctl(*SCAN, "--csv", "found.csv", "--report", "found.html", "-q")
    assert ended.code == 0
    with Path("found.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["sqnr_db"]) for row in rows] == [
        finding["sqnr_db"] for finding in document["findings"]
    ]
    page = Path("found.html").read_text("utf-8")
    assert "<svg" in page
    assert "<script" not in page
    for finding in document["findings"]:
        assert finding["group"] in ended.stdout
        assert finding["group"] in page


@pytest.mark.usefixtures("inputs")
def test_a_second_scan_uses_the_first(slimctl: Callable[..., Any]) -> None:
    slimctl(*SCAN, "-q")
    assert "known from an earlier scan" in slimctl(*SCAN, "-q").stdout
    assert "known from an earlier scan" not in slimctl(*SCAN, "-q", "--no-resume").stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--options", "int7"), "Unknown change 'int7'"),
        (("--options", ","), "Nothing is to be tried"),
        (("--executor", "cloud"), "no executor"),
        (("--include", "nothing"), "leave no layer"),
        (("--fast", "--converse"), "leave --converse out"),
        (("--fast", "--metric", "top1"), "leave --metric out"),
        (("--metric", "top9"), "top9"),
        (("--csv", "model.onnx"), "exists already"),
    ],
)
@pytest.mark.usefixtures("inputs")
def test_what_is_refused(
    slimctl: Callable[..., Any], arguments: tuple[str, ...], said: str
) -> None:
    ended = slimctl(*SCAN, *arguments, "-q")
    assert ended.code == 2
    assert said in ended.stderr
    assert ended.stdout == ""


@pytest.mark.usefixtures("inputs")
def test_a_quantized_model_is_refused(slimctl: Callable[..., Any]) -> None:
    slimctl("quantize", "model.onnx", "--calib", "calib.npz", "-o", "small.onnx", "-q")
    ended = slimctl("sensitivity", "small.onnx", "--data", "calib.npz")
    assert ended.code == 2
    assert "quantized already" in ended.stderr
