"""bfloat16: stored on the CPU, computed elsewhere.

onnxruntime's CPU provider has no bfloat16 kernels, so a graph that computes in bfloat16 is run here
as what it stands for: every operator in float32, every result rounded to bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from slimctl.core.contract import Feeds
from slimctl.core.target import Target
from slimctl.evaluate.metrics import sqnr_db
from slimctl.graph.opset import raise_opset
from slimctl.graph.session import open_session, run
from slimctl.passes.convert_float import ConvertFloat
from slimctl.recipe.run import run_passes
from slimctl.targets import load_target
from tests.passes.test_convert_float import (
    FULL,
    Converted,
    build,
    conv_model,
    convert,
    island,
    normal,
)

__all__ = ["convert"]  # a fixture

BRAIN = ir.DataType.BFLOAT16


def gpu() -> Target:
    return load_target("cpu").model_copy(
        update={"name": "gpu", "provider": "CUDAExecutionProvider"}
    )


def emulated(model: ir.Model) -> onnx.ModelProto:
    """The same in float32, results rounded to bfloat16 one by one. Main graph only."""
    proto = onnx.shape_inference.infer_shapes(ir.to_proto(model))
    infos = (*proto.graph.value_info, *proto.graph.output)
    narrow = {i.name for i in infos if i.type.tensor_type.elem_type == TensorProto.BFLOAT16}
    nodes = list(proto.graph.node)
    del proto.graph.node[:]
    for node in nodes:
        proto.graph.node.extend(_rounded(node, narrow))
    for item in proto.graph.initializer:
        if item.data_type == TensorProto.BFLOAT16:
            array = numpy_helper.to_array(item).astype(np.float32)
            item.CopyFrom(numpy_helper.from_array(array, item.name))
    del proto.graph.value_info[:]
    return proto


def _rounded(node: onnx.NodeProto, narrow: set[str]) -> Iterator[onnx.NodeProto]:
    for attribute in node.attribute:
        if node.op_type == "Cast" and attribute.i == TensorProto.BFLOAT16:
            attribute.i = TensorProto.FLOAT
    written = [name for name in node.output if name in narrow]
    for name in written:
        node.output[list(node.output).index(name)] = f"{name}_exact"
    yield node
    for name in written:
        yield helper.make_node("Cast", [f"{name}_exact"], [f"{name}_bits"], to=TensorProto.BFLOAT16)
        yield helper.make_node("Cast", [f"{name}_bits"], [name], to=TensorProto.FLOAT)


def quality(result: Converted, feeds: Feeds) -> float:
    expected = run(open_session(result.before, threads=1), feeds)
    found = run(open_session(ir.from_proto(emulated(result.model)), threads=1), feeds)
    return min(sqnr_db(expected[name], found[name]) for name in expected)


def test_on_the_cpu_weights_are_stored_and_values_are_not(
    convert: Callable[..., Converted],
) -> None:
    text = (
        "g (float[2,64] x) => (float[2,64] y) { a = MatMul(x, w) b = Add(a, t) y = MatMul(b, w) }"
    )
    result = convert(build(text, w=normal(64, 64), t=normal(64)), kind="bf16")
    stored = {name: v.dtype for name, v in result.model.graph.initializers.items()}
    assert stored == {"w": BRAIN, "t": FULL}  # a small one is not worth a Cast
    assert result.casts() == {FULL: 1}
    assert result.report.changed == {"constant": 1}
    assert "no bfloat16 kernels" in result.report.notes[0]
    assert result.sqnr({"x": normal(2, 64, seed=1)}) > 45.0


def test_what_is_excluded_keeps_its_weights(convert: Callable[..., Converted]) -> None:
    text = "g (float[2,64] x) => (float[2,64] y) { a = MatMul(x, w) y = MatMul(a, v) }"
    model = build(text, w=normal(64, 64), v=normal(64, 64))
    result = convert(model, kind="bf16", exclude=("MatMul_y",))
    assert result.model.graph.initializers["v"].dtype == FULL
    assert result.model.graph.initializers["w"].dtype == BRAIN


def test_elsewhere_it_is_computed(convert: Callable[..., Converted]) -> None:
    model = raise_opset(conv_model(), 22)
    result = convert(model, kind="bf16", target=gpu())
    assert result.report.changed == {"Conv": 1, "Flatten": 1, "Gemm": 1, "Relu": 1}
    assert result.casts() == {BRAIN: 1, FULL: 1}
    assert quality(result, {"x": normal(2, 3, 8, 8, seed=1)}) > 40.0


def test_its_range_is_that_of_float32(convert: Callable[..., Converted]) -> None:
    """What float16 keeps in float32 for its range needs nothing of the kind here."""
    result = convert(raise_opset(island(), 22), kind="bf16", target=gpu())
    assert not result.full()
    assert quality(result, {"x": normal(2, 16, seed=1)}) > 35.0


def test_the_lowest_float32_is_clamped(convert: Callable[..., Converted]) -> None:
    """It would round to minus infinity."""
    text = """g (float[3,8] x, bool[3,8] m) => (float[3,8] y) {
        h = MatMul(x, w) s = Where(m, h, lowest) p = Softmax(s) y = MatMul(p, w)
    }"""
    model = build(text, 22, w=normal(8, 8), lowest=float(np.finfo(np.float32).min))
    result = convert(model, kind="bf16", target=gpu())
    assert result.report.facts["clamped"] == ["lowest"]
    assert np.isfinite(result.model.graph.initializers["lowest"].const_value.numpy().astype(float))
    assert quality(result, {"x": normal(3, 8), "m": np.zeros((3, 8), bool)}) > -200.0


def test_operator_sets() -> None:
    model = conv_model()
    assert ConvertFloat(kind="fp16").minimum_opset(model, gpu()) == 0
    assert ConvertFloat(kind="bf16").minimum_opset(model, load_target("cpu")) == 13
    assert ConvertFloat(kind="bf16").minimum_opset(model, gpu()) == 22


def test_the_pipeline_says_that_it_could_not_run_it(tmp_path: Path) -> None:
    source, output, profile = tmp_path / "m.onnx", tmp_path / "out.onnx", tmp_path / "gpu.yaml"
    ir.save(conv_model(), source)
    profile.write_text(_profile(), encoding="utf-8")
    step: Any = ConvertFloat(kind="bf16")
    result = run_passes(source, [step], output=output, target=str(profile))
    (record,) = result.records
    assert any("not checked by running it" in note for note in record.notes)
    onnx.checker.check_model(str(output), full_check=True)


def _profile() -> str:
    text = (Path(load_target.__code__.co_filename).parent / "cpu.yaml").read_text(encoding="utf-8")
    return text.replace("CPUExecutionProvider", "CUDAExecutionProvider")


@pytest.mark.parametrize("kind", ["fp16", "bf16"])
def test_on_the_cpu_the_pipeline_runs_both(kind: Any, tmp_path: Path) -> None:
    source, output = tmp_path / "m.onnx", tmp_path / "out.onnx"
    text = "g (float[2,64] x) => (float[2,64] y) { a = MatMul(x, w) y = Relu(a) }"
    ir.save(build(text, w=normal(64, 64)), source)
    result = run_passes(source, [ConvertFloat(kind=kind)], output=output)
    assert not any("not checked" in note for note in result.records[0].notes)
    assert output.stat().st_size < 0.6 * source.stat().st_size
