"""The placement linter: which nodes fall back and why, and what hangs together."""

from __future__ import annotations

import json

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from slimctl.core.target import Target
from slimctl.graph.save import serialize
from slimctl.targets import load_target, target_names
from slimctl.targets.check import check_placement
from slimctl.targets.partition import partitions, transitions
from slimctl.targets.placement import PlacementReport
from tests.targets.graphs import Pairs, convolution, network, to_ir


def check(model: ir.Model, name: str) -> PlacementReport:
    return check_placement(model, load_target(name))


def broken(report: PlacementReport) -> dict[str, tuple[str, tuple[str, ...]]]:
    """Nodes and effect by rule."""
    return {g.problem.rule: (g.problem.effect, g.nodes) for g in report.groups()}


# float models


def test_open_sizes_fall_back_where_models_are_compiled() -> None:
    report = check(network("N"), "qnn-htp")
    assert len(report.fallbacks) == len(report.nodes) == 12
    assert "static-shapes" in broken(report)
    assert (report.partitions, report.macs_share) == (0, 0.0)


def test_sizes_may_be_given() -> None:
    report = check_placement(network("N"), load_target("qnn-htp"), {"N": 1})
    assert (report.fallbacks, report.partitions, report.macs_share) == ((), 1, 1.0)
    assert broken(report)["float-as-half"][0] == "advice"  # runs all the same


def test_partitions_and_their_borders() -> None:
    report = check(network(1), "xnnpack")
    fallen = {node.name for node in report.fallbacks}
    assert fallen == {"add", "r2", "flat"}  # a Relu behind a Conv is computed along
    assert (report.partitions, report.transitions) == (3, 5)
    assert report.macs_share == 1.0


def test_share_of_multiplications() -> None:
    report = check(network(1), "nnapi")
    assert {node.name for node in report.fallbacks} == {"t"}  # ConvTranspose
    conv = 8 * 64 * 9 * (3 + 8 + 8)
    deconv, gemm = 8 * 16 * 4 * 4, 4 * 5
    assert (report.macs, report.macs_taken) == (conv + deconv + gemm, conv + gemm)


def test_constants_are_computed_beforehand() -> None:
    nodes = [
        helper.make_node("Shape", ["x"], ["size"], "shape"),
        helper.make_node("Gather", ["size", "first"], ["n"], "gather"),
        helper.make_node("Concat", ["n", "rest"], ["to"], "concat", axis=0),
        helper.make_node("Reshape", ["x", "to"], ["y"], "reshape"),
    ]
    constants = {"first": np.array([0]), "rest": np.array([-1])}
    fixed = check(to_ir(nodes, {"x": [2, 3, 4]}, ["y"], constants), "qnn-htp")
    assert ([node.name for node in fixed.nodes], fixed.folded) == (["reshape"], 3)
    open_size = check(to_ir(nodes, {"x": ["N", 3, 4]}, ["y"], constants), "qnn-htp")
    assert (len(open_size.nodes), open_size.folded) == (4, 0)


def test_custom_operators_fall_back_everywhere() -> None:
    nodes = [
        helper.make_node("Frobnicate", ["x"], ["f"], "frob", domain="com.example"),
        helper.make_node("Relu", ["f"], ["y"], "relu"),
    ]
    model = to_ir(nodes, {"x": [1, 3]}, ["y"])
    for name in target_names():
        frob = check(model, name).nodes[0]
        assert (frob.operator, frob.taken) == ("com.example:Frobnicate", False)


def branches() -> ir.Model:
    """An If whose branches hold an Erf and an Abs."""
    value = helper.make_tensor_value_info
    bodies = [
        helper.make_graph(
            [helper.make_node(op, ["x"], [op], op.lower())],
            f"{op}_body",
            [],
            [value(op, TensorProto.FLOAT, [2])],
        )
        for op in ("Erf", "Abs")
    ]
    node = helper.make_node("If", ["c"], ["y"], "if", then_branch=bodies[0], else_branch=bodies[1])
    graph = helper.make_graph(
        [node],
        "main",
        [value("x", TensorProto.FLOAT, [2]), value("c", TensorProto.BOOL, [])],
        [value("y", TensorProto.FLOAT, [2])],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    return ir.from_proto(proto)


def test_bodies_are_checked_too() -> None:
    report = check(branches(), "qnn-htp")
    assert {(n.name, n.graph, n.taken) for n in report.nodes} == {
        ("if", "", False),
        ("erf", "Erf_body", False),
        ("abs", "Abs_body", True),
    }
    assert set(broken(report)) == {"operator", "control-flow"}
    whole = check(branches(), "tensorrt")
    assert (whole.fallbacks, whole.partitions, whole.transitions) == ((), 1, 0)


def test_types_of_the_interface() -> None:
    node = helper.make_node("Relu", ["x"], ["y"], "relu")
    model = to_ir([node], {"x": [1]}, ["y"], kind=TensorProto.BFLOAT16)
    report = check(model, "vitisai")
    assert set(report.interface) == {"x", "y"}
    assert report.interface["x"].found == "it is bfloat16"
    assert report.violations == len(report.fallbacks) + 2


# quantized models


def test_a_quantized_convolution_is_taken_as_one() -> None:
    report = check(convolution().model(), "qnn-htp")
    assert (report.fallbacks, report.partitions, report.groups()) == ((), 1, [])


@pytest.mark.parametrize(
    ("name", "changes", "rule"),
    [
        ("qnn-htp", {"activation": np.asarray(0, np.int8)}, "activation-types"),
        ("qnn-htp", {"channels": 1}, "channels-of-conv"),
        ("nnapi", {"activation": np.asarray(0, np.int8)}, "activation-types"),
        ("tensorrt", {}, "activation-types"),
        ("tensorrt", {"activation": np.asarray(0, np.int8)}, "float-bias"),
        ("vitisai", {"activation": np.asarray(0, np.int8), "scale": 0.1}, "power-of-two"),
        ("openvino", {"activation": np.asarray(0, np.uint16)}, "activation-types"),
        ("coreml", {}, "no-integers"),
    ],
)
def test_a_broken_rule_takes_the_pairs_along(name: str, changes: dict, rule: str) -> None:
    report = check(convolution(**changes).model(), name)
    effect, nodes = broken(report)[rule]
    assert effect == "fallback"
    assert nodes
    taken = {node.name: node.taken for node in report.nodes}
    assert not taken["Conv"] or name in ("tensorrt", "openvino")  # there the Q falls back itself


def test_integers_on_cuda() -> None:
    per_channel = check(convolution().model(), "cuda")
    assert broken(per_channel)["pair-types"] == ("fallback", ("b_DQ",))  # int32
    assert len(per_channel.fallbacks) == 1
    without_bias = check(convolution(bias=None).model(), "cuda")
    assert without_bias.fallbacks == ()
    assert broken(without_bias)["no-integer-kernels"][0] == "advice"


def test_what_the_cpu_computes_in_float_is_said() -> None:
    signed = convolution(activation=np.asarray(0, np.int8), weight=np.uint8).model()
    report = check(signed, "cpu")
    assert report.fallbacks == ()
    assert broken(report)["signed-pair"] == ("float", ("Conv",))


def test_a_shared_dq_is_of_no_use_to_xnnpack() -> None:
    build = convolution()
    build.nodes.append(helper.make_node("Identity", ["x_d"], ["other"], "other"))
    report = check(build.model(), "xnnpack")
    assert "own-dq" in broken(report)
    assert check(convolution().model(), "xnnpack").fallbacks == ()


def test_a_half_quantized_node_computes_in_float() -> None:
    build = Pairs()
    build.operator("Sigmoid", [build.quantize("x")])
    build.nodes.append(helper.make_node("Relu", ["y"], ["y_d"], "relu"))
    report = check(build.model(), "qnn-htp")
    assert report.fallbacks == ()
    assert broken(report)["whole-pairs"] == ("float", ("Sigmoid",))


def test_an_operator_without_integer_form_between_pairs() -> None:
    build = Pairs(activation=np.asarray(0, np.int8))
    build.operator("Erf", [build.quantize("x")])
    build.quantize("y", "sy", "zy")
    report = check(build.model(), "tensorrt")
    assert report.fallbacks == ()
    assert broken(report)["float-between-pairs"] == ("float", ("Erf",))
    assert not check(build.model(), "xnnpack").nodes[2].taken


# reports


def test_report_is_json_and_the_model_stays_as_it_is() -> None:
    model = network("N")
    before = serialize(model)
    report = check(model, "qnn-htp")
    document = json.loads(json.dumps(report.to_dict()))
    assert document["fallbacks"] == 12
    assert document["problems"][0]["document"].startswith("https://")
    assert len(document["placements"]) == document["nodes"]
    assert serialize(model) == before


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_partitions_run_as_one(data: st.DataObject) -> None:
    """No path between two nodes of a partition leaves it; the count is what was numbered."""
    count = data.draw(st.integers(1, 9))
    nodes = []
    for index in range(count):
        sources = data.draw(st.sets(st.integers(-1, index - 1), min_size=1, max_size=3))
        names = ["x" if source < 0 else f"v{source}" for source in sorted(sources)]
        nodes.append(helper.make_node("Sum", names, [f"v{index}"], f"n{index}"))
    model = to_ir(nodes, {"x": [1]}, [f"v{count - 1}"])
    order = list(model.graph)
    taken = {node: data.draw(st.booleans()) for node in order}
    groups = partitions(order, taken)
    assert set(groups) == {node for node in order if taken[node]}
    assert sorted(set(groups.values())) == list(range(len(set(groups.values()))))

    def reaches(start: ir.Node, group: int, outside: bool) -> bool:
        for user in (u for value in start.outputs for u in value.consumers()):
            if groups.get(user) == group and outside:
                return True
            if reaches(user, group, outside or groups.get(user) != group):
                return True
        return False

    assert not any(reaches(node, group, False) for node, group in groups.items())
    crossing = sum(
        any(taken[user] != taken[node] for user in node.outputs[0].consumers()) for node in order
    )
    assert transitions(order, taken) == crossing


@pytest.mark.parametrize("name", target_names())
def test_every_target_judges_every_kind_of_model(name: str) -> None:
    target = load_target(name)
    assert isinstance(target, Target)
    for model in (network("N"), network(1), convolution().model(), branches()):
        report = check_placement(model, target)
        assert all(node.problems for node in report.fallbacks)
        assert {node.taken for node in report.nodes if node.partition is not None} <= {True}
