"""The profiles as data: complete, documented, and enough for a target that nobody has seen."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
import yaml
from pydantic import ValidationError

from slimctl.core.errors import ConfigError
from slimctl.core.rules import Demand, Rule
from slimctl.core.target import Target
from slimctl.targets import load_target, target_names
from slimctl.targets.check import check_placement
from slimctl.targets.demands import _CHECKS, _NEED_DEFAULTS
from tests.targets.graphs import network

NAMES = [
    *("coreml", "cpu", "cpu-arm64", "cpu-avx2", "cuda", "directml", "nnapi"),
    *("openvino", "qnn-htp", "tensorrt", "vitisai", "xnnpack"),
]


def test_all_targets_are_there() -> None:
    assert target_names() == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_rule_says_why_what_helps_and_where_it_is_written(name: str) -> None:
    target = load_target(name)
    assert target.name == name
    assert target.documents
    names = [rule.name for rule in target.rules]
    assert len(set(names)) == len(names)
    for part in (*target.rules, target.operators):
        assert part.fix
        assert part.document.startswith(("https://", "onnxruntime/"))


@pytest.mark.parametrize("name", NAMES)
def test_profiles_name_operators_that_exist(name: str) -> None:
    target = load_target(name)
    lists = [target.operators.names, target.integer_operators, target.weighted, target.absorbing]
    named = {operator for listed in lists for operator in listed}
    named |= {operator for rule in target.rules for operator in rule.operators} - {"*"}
    known = {schema.name for schema in onnx.defs.get_all_schemas()}
    known |= {"ImageScaler", "SimplifiedLayerNormalization"}  # experimental, and registered
    assert {operator for operator in named if ":" not in operator} - known == set()
    assert {operator.split(":")[0] for operator in named if ":" in operator} <= {"com.microsoft"}


@pytest.mark.parametrize("name", NAMES)
def test_a_table_holds_what_the_quantizer_makes_integer(name: str) -> None:
    """An operator that may be quantized must not fall back where it is left in float."""
    target = load_target(name)
    if target.operators.installed or name == "vitisai":  # there float is the CPU's
        return
    assert target.integer_operators <= set(target.operators.names)


def test_every_demand_is_checked() -> None:
    assert set(Demand.model_fields) == set(_CHECKS) | set(_NEED_DEFAULTS)


def test_a_new_target_is_one_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    rule = {
        "name": "no-pooling",
        "operators": ["MaxPool"],
        "require": {"never": True},
        "reason": "it has no pooling unit",
        "fix": "use strides",
        "document": "https://example.com/rules",
    }
    profile = {"extends": "tensorrt", "name": "mine", "title": "Mine", "rules": [rule]}
    file.write_text(yaml.safe_dump(profile), encoding="utf-8")
    report = check_placement(network(), load_target(str(file)))
    assert [(node.name, node.problems[0].fix) for node in report.fallbacks] == [
        ("pool", "use strides")
    ]
    assert report.partitions == 2


def test_profiles_must_not_extend_each_other_in_circles(tmp_path: Path) -> None:
    one, two = tmp_path / "one.yaml", tmp_path / "two.yaml"
    one.write_text(f"extends: {two}\n", encoding="utf-8")
    two.write_text(f"extends: {one}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="extends itself"):
        load_target(str(one))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"require": {}}, "demands nothing"),
        ({"require": {"colors": True}}, "colors"),
        ({"fix": ""}, "fix"),
        ({"document": ""}, "document"),
    ],
)
def test_rules_that_say_nothing_are_refused(change: dict[str, object], complaint: str) -> None:
    rule = load_target("qnn-htp").rules[0].model_dump() | change
    with pytest.raises(ValidationError, match=complaint):
        Rule.model_validate(rule)


def test_demands_in_words() -> None:
    demand = Demand.model_validate(
        {
            "static_shapes": True,
            "quantized": False,
            "weight_axes": [],
            "type_pairs": [["uint8", "int8"]],
            "output_scale": {"uint8": {"scale": 0.00390625, "zero_point": 0}},
            "attributes": {"mode": ["linear"]},
        }
    )
    assert str(demand) == (
        "quantized: no; type pairs: uint8 x int8; weight axes: none; output scale: uint8 scale "
        "0.00390625 zero point 0; static shapes; attributes: mode linear"
    )


def test_rules_decide_for_the_quantizer() -> None:
    qnn, tensorrt = load_target("qnn-htp"), load_target("tensorrt")
    assert qnn.weight_axis("Conv", 0) == 0
    assert qnn.weight_axis("ConvTranspose", 1) == 1
    assert qnn.weight_axis("MatMul", 1) is None
    assert tensorrt.weight_axis("ConvTranspose", 1) == 0
    assert load_target("cpu").weight_axis("ConvTranspose", 1) == 1
    assert qnn.weight_type_of("MatMul", "int8") == "uint8"
    assert qnn.weight_type_of("Conv", "int8") == "int8"
    assert isinstance(qnn, Target)
