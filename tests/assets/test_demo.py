"""The demo's recipe on fewer pages, and the table that it prints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from demo.__main__ import RECIPE, table
from demo.pages import write_pages
from slimctl.recipe.run import run_recipe

pytestmark = pytest.mark.xdist_group("demo")  # run once


@pytest.fixture(scope="module")
def lines(
    asset: Callable[[str], Path],
    fonts: list[Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> list[str]:
    folder = tmp_path_factory.mktemp("demo")
    write_pages(folder / "calibration", 8, 1, fonts)
    write_pages(folder / "evaluation", 8, 2, fonts)
    changes = {
        "model": asset("orientation"),
        "data.calibration.source": folder / "calibration",
        "data.evaluation.source": folder / "evaluation",
    }
    result = run_recipe(
        RECIPE,
        [f"{key}={value}" for key, value in changes.items()],
        output=folder / "result",
        keep_failed=True,  # the latency gate must not decide a test
        use_cache=False,
    )
    assert {gate.gate for gate in result.failed_gates} <= {"latency"}
    return list(table(result.manifest.document()))


def test_table_has_every_row(lines: list[str]) -> None:
    names = [line.split("|")[1].strip() for line in lines[2:]]
    assert names == ["size", "top-1 of 8 pages", "SQNR", "P50 latency", "calibration time"]


def test_sizes_are_those_of_the_files(lines: list[str]) -> None:
    assert "6.78 MB" in lines[2]


def test_every_page_is_read_before_and_after(lines: list[str]) -> None:
    assert lines[3].count("100.0%") == 2
