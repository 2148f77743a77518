"""The command tree. Help is drawn from a static table; a command's module is loaded when it runs.

typer builds on the parser that it vendors (0.29), so nothing here imports click.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, cast

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from slimctl import __version__
from slimctl.core.registry import BUILT_IN

if TYPE_CHECKING:
    # The parser's own types have no public name in typer.
    Command = Any

SETTINGS = {"help_option_names": ["-h", "--help"]}


class Listed(NamedTuple):
    """A command that is not a pass.

    Attributes:
        place: ``package.module:attribute``, a function or a ``typer.Typer``.
        summary: One line for help, so that help needs no import; a test compares it with the
            docstring.
        panel: Heading under which help lists it.
    """

    place: str
    summary: str
    panel: str


_CHECK = "Look and check"
_CHAIN = "Recipes and targets"
_LEDGER = "Versions"
_PASSES = "Compress"

COMMANDS: dict[str, Listed] = {
    "run": Listed(
        "slimctl.cli.run_command:run", "Run a recipe: the whole chain, gates included.", _CHAIN
    ),
    "import": Listed(
        "slimctl.cli.import_command:import_",
        "Make an ONNX model from a torch network, compared with it.",
        _CHAIN,
    ),
    "export": Listed(
        "slimctl.cli.export_command:export",
        "Write an artifact for ORT format, Triton, genai or as a zip.",
        _CHAIN,
    ),
    "report": Listed(
        "slimctl.cli.report_command:report",
        "Write an artifact's page, with versions and measurements.",
        _CHECK,
    ),
    "recipe": Listed(
        "slimctl.cli.recipe_command:app", "Presets, validation and schema of recipes.", _CHAIN
    ),
    "target": Listed("slimctl.cli.target_command:app", "Execution-provider profiles.", _CHAIN),
    "inspect": Listed(
        "slimctl.cli.inspect_command:inspect",
        "Show operators, shapes, parameters, MACs and bytes of a model.",
        _CHECK,
    ),
    "verify": Listed(
        "slimctl.cli.verify_command:verify",
        "Verify a model against its original, node by node.",
        _CHECK,
    ),
    "sensitivity": Listed(
        "slimctl.cli.sensitivity_command:sensitivity",
        "Rank layers by what they cost at each precision or sparsity.",
        _CHECK,
    ),
    "eval": Listed(
        "slimctl.cli.eval_command:evaluate", "Measure a metric on labeled data.", _CHECK
    ),
    "bench": Listed(
        "slimctl.cli.bench_command:bench", "Measure latency, memory, bounds and load.", _CHECK
    ),
    "history": Listed(
        "slimctl.cli.history_command:history", "Show the versions of a result.", _LEDGER
    ),
    "diff": Listed(
        "slimctl.cli.diff_command:diff",
        "Compare two versions: what went in, what came out.",
        _LEDGER,
    ),
    "rollback": Listed(
        "slimctl.cli.ledger_command:rollback", "Make an earlier version the current one.", _LEDGER
    ),
    "promote": Listed(
        "slimctl.cli.ledger_command:promote", "Give a version a label such as production.", _LEDGER
    ),
    "checkout": Listed(
        "slimctl.cli.ledger_command:checkout", "Take the files of a version out.", _LEDGER
    ),
    "gc": Listed(
        "slimctl.cli.ledger_command:collect", "Remove what no kept version needs.", _LEDGER
    ),
    "doctor": Listed(
        "slimctl.cli.doctor_command:doctor",
        "Show versions, providers, CPU features and extras.",
        _CHECK,
    ),
}


class _Deferred(TyperCommand):
    """A command's line in help; the command itself is loaded on demand."""

    def __init__(self, name: str, summary: str, panel: str, load: Callable[[], Command]) -> None:
        super().__init__(name, short_help=summary, rich_help_panel=panel)
        self.load = load


class LazyGroup(TyperGroup):
    """The root: knows every command's name and summary, loads the one that is called."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = dict(_passes()) | {
            name: _Deferred(name, entry.summary, entry.panel, _loader(name, entry.place))
            for name, entry in COMMANDS.items()
        }

    def resolve_command(
        self, ctx: Any, args: list[str]
    ) -> tuple[str | None, Command | None, list[str]]:
        """The real command for a name, its module imported."""
        name, command, rest = super().resolve_command(ctx, args)
        return name, command.load() if isinstance(command, _Deferred) else command, rest

    def get_help_option(self, ctx: Any) -> Any:
        """The ``--help`` switch, off unless given."""
        return _switched_off(super().get_help_option(ctx))

    def load(self, name: str) -> Command:
        """The real command of a name, for tests and for the generated reference."""
        return cast(_Deferred, self.commands[name]).load()


def _passes() -> dict[str, Command]:
    def loader(name: str) -> Callable[[], Command]:
        def load() -> Command:
            from slimctl.cli.pass_command import build_command

            return build_command(name)

        return load

    return {
        name: _Deferred(name, f"{entry.summary}.", _PASSES, loader(name))
        for name, entry in BUILT_IN.items()
        if entry.command
    }


def _loader(name: str, place: str) -> Callable[[], Command]:
    def load() -> Command:
        module, _, attribute = place.partition(":")
        found = getattr(import_module(module), attribute)
        if isinstance(found, typer.Typer):
            return _tidied(get_command(found))
        return as_command(found, name)

    return load


def markup() -> Literal["rich"] | None:
    """How help is drawn: in panels on a terminal, as plain text elsewhere."""
    return "rich" if sys.stdout.isatty() else None


def _switched_off(parameter: Any) -> Any:
    """A switch whose value is False and not None when it is absent.

    typer sends None through pydantic, which costs every command 60 ms.
    """
    parameter.default = False
    parameter.metavar = ""
    return parameter


def _tidied(command: Command) -> Command:
    """The command with nothing where help would call a switch a ``<bool>``."""
    for parameter in command.params:
        if getattr(parameter, "is_bool_flag", False):
            parameter.metavar = ""
    for child in getattr(command, "commands", {}).values():
        _tidied(child)
    return command


def as_command(function: Callable[..., Any], name: str) -> Command:
    """A command from a function: its signature holds the options, its docstring the help."""
    app = new_app()
    app.command(name)(function)
    return _tidied(get_command(app))


def new_app(**settings: Any) -> typer.Typer:
    """A typer application with the settings that every part of the tree shares."""
    return typer.Typer(
        add_completion=False, rich_markup_mode=markup(), context_settings=SETTINGS, **settings
    )


def help_without_command(context: typer.Context) -> None:
    """Prints the help of a group that was called without a command."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"slimctl {__version__}")
        raise typer.Exit


def _root(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Compress ONNX models: small and fast, checked, measured, packaged."""
    del version
    help_without_command(context)


def root_command() -> LazyGroup:
    """The root of the command tree, shell completion included."""
    app = typer.Typer(
        name="slimctl", cls=LazyGroup, rich_markup_mode=markup(), context_settings=SETTINGS
    )
    app.callback(invoke_without_command=True)(_root)
    root = _tidied(get_command(app))
    for parameter in root.params:
        _switched_off(parameter)
    return cast(LazyGroup, root)
