"""``slimctl recipe``: list, show, check, schema, init."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from slimctl.cli.group import help_without_command, new_app
from slimctl.cli.options import Force, Json
from slimctl.cli.output import Output, to_json
from slimctl.cli.run_command import Overrides, RecipeName
from slimctl.cli.table import Facts, Table

app = new_app(help="Presets, validation and schema of recipes.")


@app.callback(invoke_without_command=True)
def _group(context: typer.Context) -> None:
    """Presets, validation and schema of recipes."""
    help_without_command(context)


@app.command("list")
def list_presets(json: Json = False) -> None:
    """List the presets."""
    from slimctl.recipe.presets import presets

    found = presets()
    Output(json=json).result(
        {"presets": found},
        [
            Table(
                ("name", "steps", "for"),
                [(item.name, ", ".join(item.steps), item.description) for item in found],
            )
        ],
    )


@app.command("show")
def show_preset(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A preset's name.")],
    json: Json = False,
) -> None:
    """Show a preset."""
    import yaml

    from slimctl.recipe.presets import preset_text

    text = preset_text(name)
    Output(json=json).result(yaml.safe_load(text), [text.rstrip("\n")])


@app.command("check")
def check_recipe(recipe: RecipeName, *, overrides: Overrides = None, json: Json = False) -> None:
    """Check a recipe without running it; neither model nor data are opened."""
    from slimctl.recipe.parse import load_recipe
    from slimctl.recipe.presets import find_recipe
    from slimctl.recipe.resolve import explicit_steps, resolve_recipe

    path = find_recipe(recipe)
    job = resolve_recipe(load_recipe(path, overrides or []))
    steps = explicit_steps(job.steps)
    Output(json=json).result(
        {"recipe": path, "name": job.name, "target": job.target_name, "steps": steps},
        [
            Facts(
                {
                    "recipe": str(path),
                    "name": job.name,
                    "target": job.target_name,
                    "steps": ", ".join(step.name for step in job.steps),
                    "verdict": "valid",
                }
            )
        ],
    )


@app.command("schema")
def print_schema() -> None:
    """Print the JSON schema of recipes, for editors."""
    from slimctl.recipe.json_schema import recipe_json_schema

    typer.echo(to_json(recipe_json_schema()))


@app.command("init")
def init(
    preset: Annotated[
        str, typer.Argument(metavar="PRESET", help="The preset to start from.")
    ] = "int8-cpu",
    *,
    output: Annotated[
        Path,
        typer.Option(
            "-o", "--output", metavar="FILE", help="The recipe file to write.", readable=False
        ),
    ] = Path("recipe.yaml"),
    model: Annotated[
        str, typer.Option("--model", metavar="PATH", help="The model to compress.")
    ] = "model.onnx",
    calib: Annotated[
        str, typer.Option("--calib", metavar="SOURCE", help="The calibration data.")
    ] = "calib.npz",
    name: Annotated[
        str | None,
        typer.Option(
            "--name", metavar="NAME", help="Name of the result.", show_default="the model's name"
        ),
    ] = None,
    force: Force = False,
    json: Json = False,
) -> None:
    """Write a recipe to start from."""
    from slimctl.core.files import check_output, write_atomic
    from slimctl.recipe.presets import init_recipe

    check_output(output, force=force)
    text = init_recipe(preset, name=name or Path(model).stem, model=model, calibration=calib)
    write_atomic(output, text.encode())
    Output(json=json).result(
        {"recipe": output, "preset": preset},
        [f"wrote {output}; look through it, then: slimctl run {output}"],
    )
