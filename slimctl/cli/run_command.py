"""``slimctl run``: a recipe from end to end."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from slimctl.cli.options import Force, Json, Quiet, UseCache, Verbose, optional, output_option
from slimctl.cli.output import Output

if TYPE_CHECKING:
    from slimctl.recipe.run import RunResult

RecipeName: TypeAlias = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE",
        help="A recipe file, or the name of a preset from 'slimctl recipe list'.",
        show_default=False,
    ),
]
Overrides: TypeAlias = Annotated[
    list[str] | None,
    optional(
        "--set",
        "KEY=VALUE",
        "Change one value of the recipe, such as model=m.onnx or steps.1.calibration=kl; "
        "steps count from 0; repeatable.",
    ),
]


def run(
    recipe: RecipeName,
    *,
    overrides: Overrides = None,
    output: Annotated[
        Path | None,
        output_option(
            "PATH",
            "Output: a file x.onnx, or a folder for the full artifact.",
            shown="where the recipe says",
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Print the recipe with every default resolved, and stop."),
    ] = False,
    keep_failed: Annotated[
        bool,
        typer.Option("--keep-failed", help="Write the result even if a gate fails."),
    ] = False,
    junit_file: Annotated[
        Path | None,
        optional("--junit", "FILE", "Write the gates as JUnit XML, also when one fails."),
    ] = None,
    summary_file: Annotated[
        Path | None,
        optional("--summary", "FILE", "Write a summary in Markdown, also when a gate fails."),
    ] = None,
    cache: UseCache = True,
    force: Force = False,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Run a recipe: the whole chain, gates included."""
    from slimctl.cli.summary import run_blocks, run_document
    from slimctl.core.files import check_output
    from slimctl.recipe.run import run_recipe

    said = Output(json=json, quiet=quiet)
    if dry_run:
        show_plan(said, recipe, overrides or [])
        return
    for path in (junit_file, summary_file):
        if path is not None:
            check_output(path, force=True)
    result = run_recipe(
        recipe,
        overrides or [],
        output=output,
        force=force,
        keep_failed=keep_failed,
        use_cache=cache,
        progress=said.progress(),
    )
    said.result(run_document(result), list(run_blocks(result, everything=verbose)))
    publish(result, recipe, junit_file, summary_file)
    result.raise_for_gates()


def publish(
    result: RunResult, recipe: str, junit_file: Path | None, summary_file: Path | None
) -> None:
    """Tells continuous integration: files where asked for, annotations where GitHub runs it.

    Raises:
        OutputError: A file cannot be written.
    """
    from slimctl.core.files import write_atomic
    from slimctl.report import ci

    document = result.manifest.document()
    if junit_file is not None:
        seconds = result.manifest.run.seconds.get("total", 0.0)
        text = ci.junit(result.manifest.name, result.gates, seconds)
        write_atomic(junit_file, text.encode())
    if summary_file is not None:
        write_atomic(summary_file, ci.summary(document, result.gates).encode())
    if os.environ.get("GITHUB_ACTIONS") == "true":
        for line in ci.workflow_commands(recipe, document, result.gates):
            # Workflow commands are read from either stream, and stdout may hold a document.
            print(line, file=sys.stderr, flush=True)


def show_plan(said: Output, recipe: str, overrides: Sequence[str]) -> None:
    """Prints what a recipe would run, as a recipe in which nothing is left open."""
    import yaml

    from slimctl.recipe.resolve import lock
    from slimctl.recipe.run import plan_recipe

    text = lock(plan_recipe(recipe, overrides), Path.cwd())
    said.result(yaml.safe_load(text), [text.rstrip("\n")])
