"""Curves of steps that trained."""

from __future__ import annotations

from typing import Any

from slimctl.report.html import render
from slimctl.report.training import training_section
from tests.report.documents import manifest
from tests.report.reader import Reader, read


def trained(**facts: Any) -> dict[str, Any]:
    """A manifest whose second step trained."""
    document = manifest()
    document["steps"][1] |= {"name": "distill", "facts": facts}
    return document


def dots(reader: Reader) -> list[tuple[float, float]]:
    return list(zip(map(float, reader.values("cx")), map(float, reader.values("cy")), strict=True))


def test_without_training_there_is_no_section() -> None:
    assert training_section(manifest()) is None


def test_loss_and_metric_have_a_chart_each() -> None:
    section = training_section(trained(loss=[2.0, 1.0], metric=[0.5, 0.8, 0.75], kept_epoch=1))
    reader = read(str(section))
    assert "2. distill: 2 epochs, loss 1; top1 0.5 before, 0.8 in epoch 1" in reader.text
    loss, metric = dots(reader)[:2], dots(reader)[2:]
    assert loss[0][1] < loss[1][1], "a loss that falls goes down on the page"
    assert len(metric) == 3 and metric[1][1] < metric[2][1] < metric[0][1]
    assert metric[0][0] < loss[0][0], "the metric begins before the first epoch"
    assert metric[1][0] < metric[2][0] == loss[1][0]


def test_a_metric_of_which_less_is_better_is_drawn_as_it_is_known() -> None:
    section = training_section(trained(loss=[1.0], metric=[-4.0, -2.0], kept_epoch=1))
    text = read(str(section)).text
    assert "4 before, 2 in epoch 1" in text and "-" not in text


def test_without_a_metric_there_is_one_chart() -> None:
    section = training_section(trained(loss=[3.0, 2.0, 1.5], metric=[], kept_epoch=3))
    reader = read(str(section))
    assert len(dots(reader)) == 3 and "weights were kept" not in reader.text


def test_the_page_of_an_artifact_has_it() -> None:
    page = render(trained(loss=[2.0, 1.0], metric=[], kept_epoch=2))
    assert "Training" in read(page).text and "line-0" in page
