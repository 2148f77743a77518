"""Every promise, broken once by a pass made for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper

from slimctl.core.contract import Effect, Pass
from slimctl.core.errors import PassContractError
from slimctl.data.sources import open_source
from slimctl.graph.edit import add_initializer, interface
from slimctl.graph.load import load_model
from slimctl.pipeline.run import PipelineResult

MakePass = Callable[..., Pass]
RunChain = Callable[..., PipelineResult]
SetWeight = Callable[[ir.Model, str, np.ndarray], None]


def weight(model: ir.Model, name: str) -> np.ndarray:
    tensor = model.graph.initializers[name].const_value
    assert tensor is not None
    return tensor.numpy()


def node(model: ir.Model, name: str) -> ir.Node:
    return next(found for found in model.graph if found.name == name)


def test_a_renamed_output_breaks_the_interface(make_pass: MakePass, run_chain: RunChain) -> None:
    def rename(model: ir.Model, _: Any) -> None:
        model.graph.outputs[0].name = "z"

    with pytest.raises(PassContractError, match="stay as they are") as caught:
        run_chain(make_pass(rename))
    assert "output 'y' was FLOAT ['N', 5] and is 'z'" in caught.value.message
    assert caught.value.where == "step 1 (edit)"


def test_a_fixed_batch_breaks_the_interface(make_pass: MakePass, run_chain: RunChain) -> None:
    def fix(model: ir.Model, _: Any) -> None:
        model.graph.inputs[0].shape = ir.Shape([1, 3, 8, 8])

    with pytest.raises(PassContractError, match="input 'x'"):
        run_chain(make_pass(fix))


def test_an_additional_output_breaks_the_interface(
    make_pass: MakePass, run_chain: RunChain
) -> None:
    def add(model: ir.Model, _: Any) -> None:
        model.graph.outputs.append(node(model, "relu").outputs[0])

    with pytest.raises(PassContractError, match="there were 1 outputs and are 2"):
        run_chain(make_pass(add))


def test_an_interface_pass_may_change_it(make_pass: MakePass, run_chain: RunChain) -> None:
    def rename(model: ir.Model, _: Any) -> None:
        model.graph.outputs[0].name = "z"

    done = run_chain(make_pass(rename, effect=Effect.INTERFACE), make_pass(changed={}))
    assert [output.name for output in done.model.graph.outputs] == ["z"]


def test_an_interface_pass_must_leave_a_model_that_loads(
    make_pass: MakePass, run_chain: RunChain
) -> None:
    def spoil(model: ir.Model, _: Any) -> None:
        node(model, "relu").domain = "nobody.has.this"
        model.graph.opset_imports["nobody.has.this"] = 1

    with pytest.raises(PassContractError, match="loads and runs"):
        run_chain(make_pass(spoil, effect=Effect.INTERFACE))


def test_the_onnx_checker_is_asked(make_pass: MakePass, run_chain: RunChain) -> None:
    def spoil(model: ir.Model, _: Any) -> None:
        node(model, "conv").attributes["no_such_attribute"] = ir.AttrInt64("no_such_attribute", 1)

    with pytest.raises(PassContractError, match="ONNX checker") as caught:
        run_chain(make_pass(spoil))
    assert "no_such_attribute" in caught.value.message


def test_shape_inference_is_asked(
    make_pass: MakePass, run_chain: RunChain, set_weight: SetWeight
) -> None:
    def spoil(model: ir.Model, _: Any) -> None:
        model.graph.initializers["g"].shape = ir.Shape([7, 5])
        set_weight(model, "g", np.ones((7, 5), np.float32))

    with pytest.raises(PassContractError):
        run_chain(make_pass(spoil, effect=Effect.APPROXIMATE))


def test_what_onnxruntime_refuses_is_found_and_the_node_is_named(
    make_pass: MakePass, run_chain: RunChain
) -> None:
    def spoil(model: ir.Model, _: Any) -> None:
        target = node(model, "relu")
        target.domain, target.op_type = "nobody.has.this", "Mystery"
        model.graph.opset_imports["nobody.has.this"] = 1

    with pytest.raises(PassContractError, match="onnxruntime loads and runs") as caught:
        run_chain(make_pass(spoil))
    assert "Mystery" in caught.value.message
    assert "optimization level all" in caught.value.message


def test_nan_in_the_outputs_is_found(
    make_pass: MakePass, run_chain: RunChain, set_weight: SetWeight
) -> None:
    def spoil(model: ir.Model, _: Any) -> None:
        set_weight(model, "b", np.full(5, np.nan, np.float32))

    with pytest.raises(PassContractError, match="'y' holds NaN"):
        run_chain(make_pass(spoil, effect=Effect.APPROXIMATE))


def test_nan_that_was_there_before_is_nobodys_fault(
    make_pass: MakePass, run_chain: RunChain, tmp_path: Path
) -> None:
    path = tmp_path / "log.onnx"
    graph = helper.make_graph(
        [helper.make_node("Log", ["x"], ["y"], name="log")],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 64])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 64])],
    )
    opsets = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), path)
    assert run_chain(make_pass(), model=path).records[0].exact_error == 0.0


def test_an_exact_claim_is_tested_and_the_place_is_named(
    make_pass: MakePass, run_chain: RunChain, set_weight: SetWeight
) -> None:
    def spoil(model: ir.Model, _: Any) -> None:
        set_weight(model, "w", weight(model, "w") * np.float32(1.001))

    with pytest.raises(PassContractError, match="EXACT pass keeps the function") as caught:
        run_chain(make_pass(spoil))
    assert "they part at tensor 'c' of node 'conv'" in caught.value.message


def test_an_approximate_pass_may_do_the_same(
    make_pass: MakePass, run_chain: RunChain, set_weight: SetWeight
) -> None:
    def spoil(model: ir.Model, _: Any) -> None:
        set_weight(model, "w", weight(model, "w") * np.float32(1.001))

    record = run_chain(make_pass(spoil, effect=Effect.APPROXIMATE)).records[0]
    assert record.exact_error is None


def test_reordered_sums_are_exact(
    make_pass: MakePass, run_chain: RunChain, set_weight: SetWeight
) -> None:
    def reorder(model: ir.Model, _: Any) -> None:
        order = np.random.default_rng(0).permutation(8)
        set_weight(model, "w", weight(model, "w")[order])
        set_weight(model, "g", weight(model, "g")[order])

    error = run_chain(make_pass(reorder)).records[0].exact_error
    assert error is not None
    assert error < 1e-6


def save(path: Path, *nodes: onnx.NodeProto, opsets: tuple[str, ...] = ()) -> Path:
    graph = helper.make_graph(
        list(nodes),
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 16])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 16])],
    )
    imports = [helper.make_opsetid("", 17), *(helper.make_opsetid(name, 1) for name in opsets)]
    onnx.save(helper.make_model(graph, opset_imports=imports, ir_version=8), path)
    return path


def test_a_model_with_operators_of_ones_own_is_not_blamed_on_the_pass(
    make_pass: MakePass, run_chain: RunChain, tmp_path: Path
) -> None:
    mystery = helper.make_node("Mystery", ["x"], ["y"], name="m", domain="my.own")
    model = save(tmp_path / "own.onnx", mystery, opsets=("my.own",))
    record = run_chain(make_pass(), model=model).records[0]
    assert any("not checked by running" in note for note in record.notes)
    assert record.exact_error is None


def test_what_the_checker_had_against_the_original_becomes_a_note(
    make_pass: MakePass, run_chain: RunChain, tmp_path: Path
) -> None:
    # onnxruntime does not mind a wrong declared shape of an intermediate tensor; the checker does.
    path = save(
        tmp_path / "wrong.onnx",
        helper.make_node("Relu", ["x"], ["t"], name="relu"),
        helper.make_node("Neg", ["t"], ["y"], name="neg"),
    )
    model = onnx.load(path)
    model.graph.node[0].attribute.append(helper.make_attribute("consumed_inputs", [0]))
    onnx.save(model, path)

    def keep(model: ir.Model, _: Any) -> None:
        del model

    record = run_chain(make_pass(keep), model=path).records[0]
    assert any("checker rejects the model, as it did before" in note for note in record.notes)


def test_an_output_of_a_wrong_rank_is_the_fault_of_the_model(
    make_pass: MakePass, run_chain: RunChain, tmp_path: Path
) -> None:
    """Exporters state it; inference does not see it before Reshape of operator set 14."""
    text = """<ir_version: 6, opset_import: ["": 12]>
    g (float[2,3,4] x) => (float[2,n] y) {
        s = Shape(x) h = Neg(x) y = Reshape(h, s)
    }"""
    path = tmp_path / "wrong.onnx"
    onnx.save(onnx.parser.parse_model(text), path)
    onnx.checker.check_model(str(path), full_check=True)

    def keep(model: ir.Model, _: Any) -> None:
        del model

    record = run_chain(make_pass(keep, minimum_opset=lambda *_: 14), model=path).records[0]
    assert any("checker rejects the model, as it did before" in note for note in record.notes)
    assert not any(tmp_path.rglob("raised*"))


def test_a_true_shape_that_contradicts_a_wrong_output_is_the_fault_of_the_model(
    make_pass: MakePass, run_chain: RunChain, tmp_path: Path
) -> None:
    """The output is given by a new node, of which its rank can be told."""
    text = """<ir_version: 6, opset_import: ["": 12]>
    g (float[2,3,4] x) => (float[2,n] y) {
        s = Shape(x) h = Neg(x) y = Reshape(h, s)
    }"""
    path = tmp_path / "wrong.onnx"
    onnx.save(onnx.parser.parse_model(text), path)

    def append(model: ir.Model, _: Any) -> None:
        (old,) = model.graph.outputs
        sizes = add_initializer(model.graph, "sizes", np.array([2, 3, 4]))
        again = ir.Node("", "Reshape", [old, sizes], name="again")
        again.outputs[0].type, again.outputs[0].shape = old.type, old.shape
        old.name, again.outputs[0].name = "inner", "y"
        model.graph.append(again)
        model.graph.outputs[0] = again.outputs[0]

    record = run_chain(make_pass(append), model=path).records[0]
    assert any("checker rejects the model, as it did before" in note for note in record.notes)


def test_an_output_of_a_wrong_rank_excuses_no_other_operator_set(
    make_pass: MakePass, run_chain: RunChain
) -> None:
    """A step that raises the operator set is judged by what it did to a valid model."""

    def misstate(model: ir.Model, _: Any) -> None:
        node(model, "relu").attributes["unheard"] = ir.AttrInt64("unheard", 1)

    with pytest.raises(PassContractError, match="ONNX checker"):
        run_chain(make_pass(misstate, minimum_opset=lambda *_: 21))


def test_optimizations_that_change_more_than_the_step_are_mentioned(
    make_pass: MakePass,
    run_chain: RunChain,
    set_weight: SetWeight,
    network: Path,
    tmp_path: Path,
) -> None:
    def pair(model: ir.Model, value: ir.Value, label: str) -> ir.Value:
        graph = model.graph
        scale = ir.Value(name=f"{label}_scale", const_value=ir.Tensor(np.float32(0.05)))
        zero = ir.Value(name=f"{label}_zero", const_value=ir.Tensor(np.uint8(128)))
        for constant in (scale, zero):
            graph.register_initializer(constant)
        users = list(value.uses())
        quantize = ir.node("QuantizeLinear", [value, scale, zero], name=f"{label}_q")
        restore = ir.node("DequantizeLinear", [quantize.outputs[0], scale, zero], name=f"{label}_d")
        for user, index in users:
            user.replace_input_with(index, restore.outputs[0])
        anchor = users[0].node
        graph.insert_before(anchor, [quantize, restore])
        return restore.outputs[0]

    def trap(model: ir.Model, _: Any) -> None:
        # Float weights between Q/DQ pairs: onnxruntime quantizes them by itself, with one scale.
        # The first input channel is silent in the data, so its huge weights change nothing else.
        array = weight(model, "w").copy()
        array[:, 0] *= 1000
        set_weight(model, "w", array)
        pair(model, model.graph.inputs[0], "x")
        pair(model, node(model, "conv").outputs[0], "c")

    quiet = np.random.default_rng(0).standard_normal((4, 3, 8, 8)).astype(np.float32)
    quiet[:, 0] = 0
    np.savez(tmp_path / "quiet.npz", x=quiet)
    source = open_source(
        str(tmp_path / "quiet.npz"), interface=interface(load_model(network)), batch_size=4
    )
    step = make_pass(trap, effect=Effect.APPROXIMATE)
    record = run_chain(step, data=source).records[0]
    assert any("optimizations change the result more" in note for note in record.notes)


def test_integer_inputs_of_unknown_length(
    make_pass: MakePass, run_chain: RunChain, tmp_path: Path
) -> None:
    path = tmp_path / "tokens.onnx"
    table = helper.make_tensor("table", TensorProto.FLOAT, [3, 4], np.arange(12.0))
    graph = helper.make_graph(
        [helper.make_node("Gather", ["table", "ids"], ["y"], name="gather")],
        "g",
        [helper.make_tensor_value_info("ids", TensorProto.INT64, ["batch", "length"])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", "length", 4])],
        [table],
    )
    opsets = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), path)
    record = run_chain(make_pass(), model=path).records[0]
    assert record.exact_error == 0.0
    assert record.notes == ()


def test_sizes_are_tried_until_one_fits(
    make_pass: MakePass, run_chain: RunChain, tmp_path: Path
) -> None:
    # Only a length of 256 can be added to a constant of 256.
    path = tmp_path / "frames.onnx"
    window = helper.make_tensor("window", TensorProto.FLOAT, [256], np.ones(256))
    graph = helper.make_graph(
        [helper.make_node("Mul", ["x", "window"], ["y"], name="mul")],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", "T"])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", "T"])],
        [window],
    )
    opsets = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), path)
    done = run_chain(make_pass(), model=path)
    assert done.records[0].exact_error == 0.0
    assert done.probes.all[0]["x"].shape == (1, 256)
