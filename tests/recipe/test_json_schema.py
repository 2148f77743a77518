from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from slimctl.core.registry import pass_names
from slimctl.recipe.json_schema import recipe_json_schema


def references(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        if "$ref" in node:
            yield node["$ref"]
        for value in node.values():
            yield from references(value)
    elif isinstance(node, list):
        for value in node:
            yield from references(value)


def steps(schema: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = schema["$defs"]["StepSpec"]["anyOf"]
    return found


def test_every_pass_is_a_step_alone_and_with_options() -> None:
    names, *objects = steps(recipe_json_schema())
    assert names["enum"] == pass_names()
    assert [step["required"] for step in objects] == [[name] for name in pass_names()]
    assert all(step["additionalProperties"] is False for step in objects)


def test_options_come_from_the_class() -> None:
    shrink = next(s for s in steps(recipe_json_schema()) if s.get("required") == ["shrink"])
    options = shrink["properties"]["shrink"]["anyOf"][0]
    grid = options["properties"]["grid"]
    assert grid["description"] == "Distance of the values."
    assert grid["anyOf"][0] == {"exclusiveMinimum": 0, "maximum": 10, "type": "number"}
    assert options["properties"]["mode"]["enum"] == ["near", "down"]
    assert options["additionalProperties"] is False


def test_the_gate_verify_bounds_something() -> None:
    gate = recipe_json_schema()["$defs"]["VerifyGate"]
    assert gate["minProperties"] == 1
    assert gate["additionalProperties"] is False
    assert list(gate["properties"]) == [
        *("max_step_difference", "min_sqnr", "max_metric_drop", "max_faults")
    ]


def test_every_reference_leads_somewhere() -> None:
    schema = recipe_json_schema()
    for reference in references(schema):
        node: Any = schema
        for key in reference.removeprefix("#/").split("/"):
            node = node[key]
        assert node


def test_it_is_json_and_says_what_is_required() -> None:
    schema = json.loads(json.dumps(recipe_json_schema(), allow_nan=False))
    assert schema["required"] == ["version", "name", "steps"]
    assert schema["additionalProperties"] is False
    assert all("description" in field for field in schema["properties"].values())
