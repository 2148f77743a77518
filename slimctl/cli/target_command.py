"""``slimctl target list``, ``slimctl target show`` and ``slimctl target check``."""

from __future__ import annotations

from typing import Annotated

import typer

from slimctl.cli import words
from slimctl.cli.group import help_without_command, new_app
from slimctl.cli.options import Json, complete_target
from slimctl.cli.output import Output
from slimctl.cli.table import Facts, Table
from slimctl.cli.target_check_command import check_model

app = new_app(help="Execution-provider profiles.")
app.command("check")(check_model)


@app.callback(invoke_without_command=True)
def _group(context: typer.Context) -> None:
    """Execution-provider profiles."""
    help_without_command(context)


@app.command("list")
def list_targets(json: Json = False) -> None:
    """List the profiles that ship with slimctl."""
    from slimctl.targets import load_target, target_names

    targets = [load_target(name) for name in target_names()]
    Output(json=json).result(
        {
            "targets": [
                {"name": target.name, "title": target.title, "provider": target.provider}
                for target in targets
            ]
        },
        [
            Table(
                ("name", "for", "provider"),
                [(target.name, target.title, target.provider) for target in targets],
            )
        ],
    )


@app.command("show")
def show_target(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help="A profile's name or YAML file.", autocompletion=complete_target
        ),
    ],
    json: Json = False,
) -> None:
    """Show what a profile decides."""
    from slimctl.targets import load_target

    target = load_target(name)
    fields = type(target).model_fields
    Output(json=json).result(
        target.model_dump(mode="json"),
        [
            Facts({"name": target.name, "for": target.title}),
            Table(
                ("setting", "meaning", "value"),
                [
                    (key, field.description or "", words.setting(getattr(target, key)))
                    for key, field in fields.items()
                    if key not in ("name", "title", "rules", "operators")
                ],
            ),
            Table(
                ("rule", "operators", "wants", "what helps"),
                [
                    (
                        rule.name,
                        words.setting(rule.operators),
                        str(rule.require),
                        rule.fix,
                    )
                    for rule in target.rules
                ],
                title="Rules",
            ),
        ],
    )
