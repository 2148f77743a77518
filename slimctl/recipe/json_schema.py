"""The JSON schema of recipes, for editors: the options of every pass come from its class."""

from __future__ import annotations

from typing import Any

from slimctl.core.errors import ConfigError
from slimctl.core.registry import find_pass, pass_names
from slimctl.recipe.schema import Recipe

_DIALECT = "https://json-schema.org/draft/2020-12/schema"


def recipe_json_schema() -> dict[str, Any]:
    """A JSON schema that holds every known pass, installed plugins included.

    A plugin that cannot be imported keeps its place, with the reason as its description.
    """
    schema = Recipe.model_json_schema()
    names = pass_names()
    steps = [_step(name, schema["$defs"]) for name in names]
    schema["$defs"]["StepSpec"] = {
        "title": "Step",
        "description": "The name of a pass, alone or with its options.",
        "anyOf": [{"type": "string", "enum": names}, *steps],
    }
    return {"$schema": _DIALECT, **schema, "title": "slimctl recipe"}


def _step(name: str, definitions: dict[str, Any]) -> dict[str, Any]:
    try:
        kind = find_pass(name)
    except ConfigError as error:
        return _step_of(name, error.what, {"type": "object"})
    options = kind.model_json_schema(ref_template="#/$defs/{model}")
    definitions.update(options.pop("$defs", {}))
    options["title"] = f"Options of {name}"
    return _step_of(name, kind.summary, options)


def _step_of(name: str, description: str, options: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "description": description,
        "properties": {name: {"anyOf": [options, {"type": "null"}]}},
        "required": [name],
        "additionalProperties": False,
    }
