"""Command-line options from a class: a field is declared once and becomes its option.

The class is a pass, or a kind of export.

A field's name becomes the option's, its description the help, its bounds and default are shown.
``json_schema_extra`` may hold ``{"flags": ["--per-channel/--per-tensor"]}`` for another spelling,
``{"metavar": "PATTERN=SHARE"}``, ``{"unset": "not set"}`` to say what no value means, and
``{"cli": False}`` for a field that only recipes set. Values reach the pass as text: it converts
and checks them, so that the command line and recipes have one rule.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from enum import StrEnum
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import annotated_types
import typer
from pydantic import ValidationError

from slimctl.cli.options import completes
from slimctl.core.errors import ConfigError, OptionError, nearest

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

    from slimctl.core.contract import Pass
    from slimctl.export.common import Export

    _Declared = TypeVar("_Declared", Pass, Export)

TARGET_DECIDES = "the target decides"


def pass_fields(kind: type[Pass | Export]) -> dict[str, FieldInfo]:
    """The fields of a class that are options of its command."""
    return {
        name: field
        for name, field in kind.model_fields.items()
        if extra(field).get("cli", True) is not False
    }


def pass_parameters(kind: type[Pass | Export]) -> list[inspect.Parameter]:
    """Keyword parameters for typer, one per field."""
    return [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=default_value(field),
            annotation=_annotation(name, field, panel=kind.name.capitalize()),
        )
        for name, field in pass_fields(kind).items()
    ]


def build_pass(kind: type[_Declared], values: Mapping[str, object]) -> _Declared:
    """An instance from option values; None leaves a field to its default.

    Raises:
        OptionError: A value does not fit its field; names the option and its bounds.
        ConfigError: The values do not fit each other.
    """
    given = {name: values[name] for name in pass_fields(kind) if values.get(name) is not None}
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        raise _option_error(kind, error) from error


def extra(field: FieldInfo) -> Mapping[str, Any]:
    """What a field's ``json_schema_extra`` says."""
    found = field.json_schema_extra
    return found if isinstance(found, Mapping) else {}


def unset(field: FieldInfo) -> str:
    """What stands for a default that is not a value."""
    return str(extra(field).get("unset", TARGET_DECIDES))


def flags(name: str, field: FieldInfo) -> list[str]:
    """Spellings of a field's option, ``--yes/--no`` pairs for booleans."""
    if spelled := extra(field).get("flags"):
        return list(spelled)
    option = "--" + name.replace("_", "-")
    return [f"{option}/--no-{option[2:]}"] if _core_type(field) is bool else [option]


def bounds(field: FieldInfo) -> str:
    """Bounds of a number in mathematical notation, such as ``0 < x <= 100``; empty without any."""
    low = high = ""
    for item in field.metadata:
        match item:
            case annotated_types.Ge(ge=value):
                low = f"{value} <= "
            case annotated_types.Gt(gt=value):
                low = f"{value} < "
            case annotated_types.Le(le=value):
                high = f" <= {value}"
            case annotated_types.Lt(lt=value):
                high = f" < {value}"
    return f"{low}x{high}" if low or high else ""


def default_value(field: FieldInfo) -> bool | str | list[str] | None:
    """A field's default as it is typed on a command line; None when there is none."""
    value = None if field.is_required() else field.get_default(call_default_factory=True)
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, Sequence):
        return [str(item) for item in value]
    return str(value)


def choices(field: FieldInfo) -> tuple[str, ...]:
    """The words a field, or each item of it, may be; empty when it takes anything else as well."""
    core = _core_type(field)
    if get_origin(core) is tuple:
        core = get_args(core)[0]
    if isinstance(core, type) and issubclass(core, StrEnum):
        return tuple(core)
    words = get_args(core) if get_origin(core) is Literal else ()
    return words if all(isinstance(word, str) for word in words) else ()


def _core_type(field: FieldInfo) -> Any:
    """The field's type without ``| None``."""
    annotation = field.annotation
    if get_origin(annotation) in (Union, UnionType):
        kinds = [kind for kind in get_args(annotation) if kind is not NoneType]
        return kinds[0] if len(kinds) == 1 else Any
    return annotation


def _annotation(name: str, field: FieldInfo, *, panel: str) -> Any:
    settings: dict[str, Any] = {
        "help": _help(field),
        "show_default": unset(field)
        if default_value(field) is None
        else bool(default_value(field)),
        "rich_help_panel": panel,
    }
    core = _core_type(field)
    if core is bool:
        return Annotated[bool | None, typer.Option(*flags(name, field), **settings)]
    words = choices(field)
    settings["metavar"] = extra(field).get("metavar") or "|".join(words) or _metavar(core)
    settings["autocompletion"] = completes(words)
    option = typer.Option(*flags(name, field), **settings)
    return Annotated[list[str] | None if get_origin(core) is tuple else str | None, option]


def _help(field: FieldInfo) -> str:
    text = field.description or ""
    return f"{text} Bounds: {bounds(field)}." if bounds(field) else text


def _metavar(core: Any) -> str:
    return {int: "N", float: "NUMBER", tuple[str, ...]: "PATTERN"}.get(core, "VALUE")


def _option_error(kind: type[Pass | Export], error: ValidationError) -> ConfigError:
    problem = error.errors(include_url=False)[0]
    place, message = problem["loc"], problem["msg"].removeprefix("Value error, ")
    field = kind.model_fields.get(str(place[0])) if place else None
    if field is None:
        return ConfigError(f"The options of '{kind.name}' do not fit each other: {message}")
    option = flags(str(place[0]), field)[0].partition("/")[0]
    return OptionError(
        option,
        f"The value '{problem['input']}' cannot be used: {message}",
        fix=_remedy(field, problem["input"]),
    )


def _remedy(field: FieldInfo, value: object) -> str:
    if words := choices(field):
        return nearest(str(value), words)
    limits = bounds(field)
    return f"give a value with {limits}" if limits else "give a value of the kind that help shows"
