from __future__ import annotations

from typing import Any

import pytest

from slimctl.report.sizes import dtype_section
from slimctl.report.steps import attribution_section
from tests.report.documents import manifest
from tests.report.reader import Reader, read


def widths(reader: Reader) -> list[str]:
    return [style.removeprefix("width:") for style in reader.values("style")]


def steps(**changes: list[Any]) -> list[dict[str, Any]]:
    """The steps of the manifest with other values of some keys."""
    made = [dict(step) for step in manifest()["steps"]]
    for key, values in changes.items():
        for step, value in zip(made, values, strict=True):
            step[key] = value
    return made


def test_each_step_has_what_it_changed() -> None:
    text = read(str(attribution_section(manifest()))).text
    assert "original5.9 MB1. fuse6 MB+1.7%2. quantize-static1.5 MB-75.0%" in text
    assert "1. fuseidentical2. quantize-static21.0 dB3. bias-correction24.5 dB+3.5 dB" in text
    assert "original0.991. fuse0.99as before2. quantize-static0.95-0.04" in text
    assert "3. bias-correction0.975+0.025" in text


def test_bars_are_as_long_as_their_numbers() -> None:
    found = widths(read(str(attribution_section(manifest()))))
    sizes, distances, changes = found[:4], found[4:7], found[7:]
    assert sizes == ["98.33%", "100.00%", "25.00%", "25.17%"]
    assert distances == ["100.00%", "35.00%", "40.83%"]  # of 60 dB
    assert changes == ["100.00%", "62.50%"]  # of 0.04; no bar for no change


def test_what_was_not_measured_is_not_drawn() -> None:
    results = {**manifest()["results"], "metric_original": None}
    bare = steps(sqnr_db=[None] * 3, metric=[None] * 3)
    text = read(str(attribution_section(manifest(steps=bare, results=results)))).text
    assert "No SQNR of single steps" in text and "No metric of single steps" in text
    assert "SQNR left" not in text and "Change of" not in text


def test_a_step_without_a_metric_is_passed_over() -> None:
    text = read(str(attribution_section(manifest(steps=steps(metric=[0.99, None, 0.98]))))).text
    assert "2. quantize-static-3. bias-correction0.98-0.01" in text


@pytest.mark.parametrize("value", ["inf", 200.0])
def test_a_model_that_is_identical(value: Any) -> None:
    one = steps(sqnr_db=[value, value, 20.0])
    reader = read(str(attribution_section(manifest(steps=one))))
    assert "2. quantize-staticidentical3. bias-correction20.0 dBoriginal" not in reader.text
    assert reader.text.count("identical") == 2
    assert "dB-" not in reader.text and "dB+" not in reader.text


def test_no_steps() -> None:
    assert attribution_section(manifest(steps=[])) is None


def test_data_types_share_one_scale() -> None:
    reader = read(str(dtype_section(manifest())))
    # float32, int8, int32, int64: the most bytes first, of 5.9 MB.
    assert widths(reader) == ["99.83%", "0.17%", "1.69%", "21.69%", "0.34%"]
    classes = [name for name in reader.values("class") if name.startswith("part-")]
    assert classes == ["part-0", "part-3", "part-0", "part-1", "part-2", *_keys(4)]
    assert "int81.28 MB" in reader.text.replace("-", "")


def _keys(count: int) -> list[str]:
    return [f"part-{index}" for index in range(count)]


def test_many_data_types() -> None:
    many = {f"type{index}": 100 - index for index in range(9)}
    model = {**manifest()["model"], "dtype_bytes": many}
    reader = read(str(dtype_section(manifest(model=model))))
    assert "others" in reader.text
    assert all(name in reader.text for name in many)  # the table has them all


def test_an_older_manifest_says_so() -> None:
    old = {key: dict(manifest()[key]) for key in ("source", "model")}
    for side in old.values():
        del side["dtype_bytes"]
    assert "older than this plot" in read(str(dtype_section(manifest(**old)))).text
