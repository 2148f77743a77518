from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from slimctl.evaluate.profile import profile, read_profile
from slimctl.graph.session import Recording


def node_event(name: str, op_type: str, microseconds: int, *outputs: tuple[str, list[int]]):
    listed = [{kind: shape} for kind, shape in outputs]
    return {
        "cat": "Node",
        "name": f"{name}_kernel_time",
        "dur": microseconds,
        "args": {"op_name": op_type, "output_type_shape": listed},
    }


def run_event(microseconds: int):
    return {"cat": "Session", "name": "model_run", "dur": microseconds, "args": {}}


def graph(nodes, outputs=("y",)) -> ir.Model:
    weight = numpy_helper.from_array(np.ones((8, 4), np.float32), "w")
    proto = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 8])],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
        [weight],
    )
    return ir.from_proto(
        helper.make_model(proto, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    )


ORIGINAL = [
    helper.make_node("MatMul", ["x", "w"], ["h"], "mm"),
    helper.make_node("Relu", ["h"], ["r"], "relu"),
    helper.make_node("Sigmoid", ["r"], ["y"], "sigmoid"),
]
FUSED = [
    helper.make_node("FusedGemm", ["x", "w"], ["r"], "mm_fused", domain="com.microsoft"),
    helper.make_node("Sigmoid", ["r"], ["y"], ""),
]
SHAPE = ("float", [2, 4])


def recording(times=((5, 1), (30, 10), (20, 20), (10, 30))) -> Recording:
    """Four runs, of which the first is for warming up."""
    events = [{"cat": "Session", "name": "session_initialization", "dur": 99, "args": {}}]
    for first, second in times:
        events.append(node_event("mm_fused", "FusedGemm", first, SHAPE))
        events.append(node_event("Sigmoid_7", "Sigmoid", second, SHAPE))
        events.append({"cat": "Session", "name": "SequentialExecutor::Execute", "dur": 1})
        events.append(run_event(first + second + 10))
    return Recording(graph(FUSED), events)


def test_times_are_medians_over_runs_that_count():
    found = read_profile(recording(), graph(ORIGINAL), skip=1)
    assert found.runs == 3
    assert [node.seconds for node in found.nodes] == pytest.approx([20e-6, 20e-6])
    assert [node.share for node in found.nodes] == pytest.approx([0.5, 0.5])
    assert found.kernels == pytest.approx(40e-6)
    assert found.run == pytest.approx(50e-6)
    assert found.unmatched == 0.0


def test_costs_follow_the_shapes_of_the_run():
    matrix, sigmoid = read_profile(recording(), graph(ORIGINAL)).nodes
    assert matrix.cost.macs == 2 * 8 * 4
    assert matrix.cost.weight_bytes == 8 * 4 * 4
    assert matrix.cost.activation_bytes == (2 * 8 + 2 * 4) * 4
    assert sigmoid.cost.activation_bytes == 2 * 2 * 4 * 4


def test_fused_nodes_cover_those_of_the_model():
    matrix, sigmoid = read_profile(recording(), graph(ORIGINAL)).nodes
    assert matrix.covers == ("mm", "relu")
    assert sigmoid.covers == ("sigmoid",)
    assert sigmoid.name == "Sigmoid_1"  # it has none of its own


def test_other_layouts_are_found_by_name():
    """Blocked convolutions have new outputs, and the name of the old one."""
    blocked = [
        helper.make_node("Conv", ["x", "w"], ["r1"], "h_nchwc", activation="Relu"),
        helper.make_node("ReorderOutput", ["r1"], ["r"], "ReorderOutput"),
        helper.make_node("Sigmoid", ["r"], ["s1"], "sigmoid_token_4"),
        helper.make_node("ReorderOutput", ["s1"], ["y"], "ReorderOutput_token_5"),
    ]
    events = [node_event(n.name, n.op_type, 1, SHAPE) for n in blocked] + [run_event(9)]
    found = read_profile(Recording(graph(blocked), events), graph(ORIGINAL))
    assert [node.covers for node in found.nodes] == [("mm", "relu"), (), ("sigmoid",), ()]


def test_bodies_of_loops_are_named_as_unmatched():
    """Their operators come between those of the main graph, once for each turn."""
    events = [
        node_event("mm_fused", "FusedGemm", 10, SHAPE),
        node_event("inner", "Add", 30, SHAPE),
        node_event("inner", "Add", 30, SHAPE),
        node_event("s", "Sigmoid", 20, SHAPE),
        run_event(100),
    ]
    named = [FUSED[0], helper.make_node("Sigmoid", ["r"], ["y"], "s")]
    found = read_profile(Recording(graph(named), events), graph(ORIGINAL))
    assert [node.seconds for node in found.nodes] == pytest.approx([10e-6, 20e-6])
    assert found.kernels == pytest.approx(90e-6)


def test_a_node_that_ran_several_times_gets_the_sum():
    named = [FUSED[0], helper.make_node("Sigmoid", ["r"], ["y"], "s")]
    events = [node_event("s", "Sigmoid", 20, SHAPE)] * 3 + [run_event(100)]
    found = read_profile(Recording(graph(named), events), graph(ORIGINAL))
    assert [(node.name, node.seconds) for node in found.nodes] == [("s", pytest.approx(60e-6))]


def test_profile_of_a_real_model(chain):
    found = profile(chain(), {"x": np.ones((3, 8), np.float32)}, threads=1, runs=3)
    assert found.runs == 3
    covered = [name for node in found.nodes for name in node.covers]
    assert sorted(covered) == sorted(node.name for node in chain().graph)
    assert sum(node.share for node in found.nodes) == pytest.approx(1.0)
    products = [node for node in found.nodes if node.cost.macs]
    assert {node.cost.macs for node in products} == {3 * 8 * 8}
    assert all(node.seconds >= 0 for node in found.nodes) and found.unmatched == 0
