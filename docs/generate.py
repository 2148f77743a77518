"""Writes the reference pages from the code: commands, passes, targets, metrics, recipe schema.

``python docs/generate.py`` writes them, ``python docs/generate.py --check`` fails when they are
out of step with the code.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
REFERENCE = ROOT / "docs" / "reference"
NOTICE = "<!-- Written by docs/generate.py from the code: change the code, then run it. -->"

if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from slimctl.cli.derive import (  # noqa: E402
    bounds,
    choices,
    default_value,
    flags,
    pass_fields,
    unset,
)
from slimctl.cli.group import root_command  # noqa: E402
from slimctl.cli.words import setting  # noqa: E402
from slimctl.core.registry import BUILT_IN, find_pass  # noqa: E402
from slimctl.core.rules import Demand, OperatorTable, Rule  # noqa: E402
from slimctl.evaluate.metrics import metric_kinds, options_of  # noqa: E402
from slimctl.evaluate.metrics.function import FunctionMetric  # noqa: E402
from slimctl.recipe.json_schema import recipe_json_schema  # noqa: E402
from slimctl.targets import load_target, target_names  # noqa: E402


def pages() -> dict[str, str]:
    """Every page by file name."""
    return {
        "commands.md": _page("Commands", commands_page()),
        "passes.md": _page("Passes", passes_page()),
        "targets.md": _page("Targets", targets_page()),
        "metrics.md": _page("Metrics", metrics_page()),
        "recipe-schema.json": json.dumps(recipe_json_schema(), indent=2) + "\n",
    }


def _page(title: str, lines: Iterator[str]) -> str:
    return "\n".join([NOTICE, "", f"# {title}", "", *lines]).rstrip() + "\n"


def commands_page() -> Iterator[str]:
    """One section per command, in the order of `slimctl --help`."""
    root = root_command()
    yield from (str(root.help), "")
    yield from _parameters(root)
    yield from (
        "Exit codes: 0 fine; 1 a gate or verification failed; 2 the input or the environment is at "
        "fault, with what to change; 3 an internal error, with where its traceback was saved. "
        "Results go to stdout, progress and messages to stderr.",
        "",
    )
    for name in root.commands:
        yield from _command(("slimctl", name), root.load(name))


def _command(path: Sequence[str], command: Any) -> Iterator[str]:
    children = getattr(command, "commands", {})
    usage = [*path, "COMMAND"] if children else [*path, *_usage(command.params)]
    yield from (f"{'#' * len(path)} {' '.join(path)}", "", command.help, "")
    yield from ("```", " ".join(usage), "```", "")
    yield from _parameters(command)
    for name, child in children.items():
        yield from _command((*path, name), child)


def _usage(parameters: Sequence[Any]) -> Iterator[str]:
    for parameter in parameters:
        if parameter.param_type_name == "argument":
            yield parameter.metavar if parameter.required else f"[{parameter.metavar}]"
    if any(parameter.param_type_name == "option" for parameter in parameters):
        yield "[OPTIONS]"


def _parameters(command: Any) -> Iterator[str]:
    rows = [
        (_spelling(parameter), _default(parameter), parameter.help) for parameter in command.params
    ]
    if rows:
        yield from _table(("", "default", "meaning"), rows)


def _spelling(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return f"`{parameter.metavar}`"
    names = ", ".join(f"`{name}`" for name in parameter.opts)
    if parameter.secondary_opts:
        names += " / " + ", ".join(f"`{name}`" for name in parameter.secondary_opts)
    return f"{names} `{parameter.metavar}`" if parameter.metavar else names


def _default(parameter: Any) -> str:
    if parameter.required:
        return "required"
    if isinstance(parameter.show_default, str):
        return str(parameter.show_default)
    if not parameter.show_default or parameter.default is None or parameter.default is False:
        return ""
    if parameter.default is True and parameter.secondary_opts:
        return str(parameter.opts[0]).lstrip("-")
    return setting(parameter.default)


def passes_page() -> Iterator[str]:
    """One section per built-in pass."""
    yield from (
        "A pass is a step of a recipe; those marked so are commands as well. Third-party passes "
        "are found through the entry-point group `slimctl.passes`.",
        "",
    )
    for name, entry in BUILT_IN.items():
        kind = find_pass(name)
        optional = "uses calibration data if given" if kind.uses_data else "needs no data"
        data = "needs calibration data" if kind.needs_data else optional
        command = f"command `slimctl {name}`" if entry.command else "recipe step only"
        yield from (f"## {name}", "", f"{kind.summary}.", "")
        yield from (f"Effect: {kind.effect.value}; {data}; {command}.", "")
        rows = [
            (f"`{key}`", _field_type(field), _field_default(field), _meaning(key, field, kind))
            for key, field in kind.model_fields.items()
        ]
        if rows:
            yield from _table(("option", "values", "default", "meaning"), rows)
        else:
            yield from ("It has no options.", "")


def _field_type(field: Any) -> str:
    if found := choices(field):
        return ", ".join(f"`{word}`" for word in found)
    if limits := bounds(field):
        return f"`{limits}`"
    text = str(field.annotation).removeprefix("<class '").removesuffix("'>")
    return {
        "bool": "yes or no",
        "bool | None": "yes or no",
        "tuple[str, ...]": "list of texts",
        "str": "text",
    }.get(text, text)


def _field_default(field: Any) -> str:
    value = default_value(field)
    if value is None:
        return "required" if field.is_required() else unset(field)
    return setting(value)


def _meaning(name: str, field: Any, kind: Any) -> str:
    spelled = flags(name, field)
    usual = ["--" + name.replace("_", "-")]
    if name in pass_fields(kind) and spelled[0].partition("/")[0] not in usual:
        return f"{field.description} On the command line: `{spelled[0]}`."
    return str(field.description)


def targets_page() -> Iterator[str]:
    """One section per built-in target."""
    yield from (
        "A target sets the defaults of the passes. A file of your own in the same form works too: "
        "`--target mine.yaml`.",
        "",
    )
    for name in target_names():
        target = load_target(name)
        yield from (f"## {name}", "", f"{target.title}.", "")
        rows = [
            (f"`{key}`", setting(getattr(target, key)), field.description or "")
            for key, field in type(target).model_fields.items()
            if key not in ("name", "title", "rules", "operators")
        ]
        yield from _table(("setting", "value", "meaning"), rows)
        yield from _operators(target.operators)
        yield from _rules(target.rules)
    yield from _demands()


def _demands() -> Iterator[str]:
    rows = [(f"`{key}`", field.description or "") for key, field in Demand.model_fields.items()]
    yield from ("## What a rule can require", "")
    yield from _table(("demand", "meaning"), rows)


def _operators(table: OperatorTable) -> Iterator[str]:
    names = "those the installed onnxruntime has kernels for" if table.installed else ""
    listed = ", ".join(f"`{name}`" for name in table.names)
    yield from (f"Operators: {names or listed}. From {_link(table.document)}.", "")
    if table.newest_opset is not None:
        older = "".join(f", {name} {version}" for name, version in table.newest_versions.items())
        yield from (f"Newest versions with kernels: opset {table.newest_opset}{older}.", "")


def _rules(rules: Sequence[Rule]) -> Iterator[str]:
    rows = [
        (
            rule.name,
            setting(rule.operators) + ("" if rule.applies_to == "all" else f" ({rule.applies_to})"),
            str(rule.require),
            rule.effect,
            f"{rule.reason}. {rule.fix[0].upper()}{rule.fix[1:]}.",
            _link(rule.document),
        )
        for rule in rules
    ]
    if rows:
        yield from _table(("rule", "operators", "wants", "else", "why, what helps", "from"), rows)


_METRICS = """\
A metric is written `name`, or `name:OUTPUT` when the model has several outputs that could be meant,
or `name?option=value&option=value`, or `name:OUTPUT?option=value`; in a shell, in quotes. So
`slimctl eval MODEL --data SOURCE --metric "ctc-cer?layout=tnc"`, and the same text in recipes.

Labels are the array `labels` of `.npz` files, the folders of pictures, or what `module:function`
yields behind the inputs. Axis 0 counts samples; each may have a label of any shape.

Values come with a 95 % interval: the metric is computed of 2,000 draws of as many samples, with
replacement, and the 2.5th and 97.5th percentiles of it are the ends (percentile bootstrap; Efron &
Tibshirani, 1993). It says how far other samples of the same kind would move the value. With
`--against` the same samples are drawn for both models; the difference is called *significant* when
the p-value is below 5 %, else *within noise*. Where a sample is a hit or a miss the p-value is that
of McNemar's exact test, else of the paired bootstrap. Where all samples have the same record the
interval has no width."""

_NEEDS = {
    "labels": "needs labels",
    "reference": "needs the model behind `--against`",
    "nothing": "uses labels if there are any",
}


def metrics_page() -> Iterator[str]:
    """One section per metric."""
    yield from (_METRICS, "")
    for name, kind in metric_kinds().items():
        yield from (f"## {name}", "", f"{kind.summary}. {kind.reads}", "")
        yield from (f"{kind.direction.capitalize()} is better; {_NEEDS[kind.needs]}.", "")
        rows = [
            (f"`{option}`", _field_type(field), _option_default(field), str(field.description))
            for option, field in kind.model_fields.items()
            if option in options_of(kind)
        ]
        if rows:
            yield from _table(("option", "values", "default", "meaning"), rows)
    own = FunctionMetric
    yield from (f"## {own.name}", "", f"{own.summary}. {own.reads}", "")
    yield from (f"It {_NEEDS[own.needs]}.", "")


def _option_default(field: Any) -> str:
    return "none" if field.default == "" else setting(field.default)


def _link(document: str) -> str:
    return f"<{document}>" if document.startswith("https://") else f"`{document}`"


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(headings)} |"
    yield f"|{'|'.join('---' for _ in headings)}|"
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"
    yield ""


def main() -> int:
    """Writes or checks the pages; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="fail when a page is out of step")
    check = parser.parse_args().check
    REFERENCE.mkdir(parents=True, exist_ok=True)
    stale = []
    for name, text in pages().items():
        file = REFERENCE / name
        if not file.is_file() or file.read_text(encoding="utf-8") != text:
            stale.append(name)
            if not check:
                file.write_text(text, encoding="utf-8")
    if check and stale:
        print(f"out of step with the code: {', '.join(stale)}; run python docs/generate.py")
        return 1
    print(
        f"{'checked' if check else 'written'}: {', '.join(pages()) if check else ', '.join(stale)}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
