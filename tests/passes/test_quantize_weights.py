"""Weight-only quantization: what is stored, what is computed from it, what is left alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import numpy_helper
from pydantic import ValidationError

from slimctl.core.contract import Feeds, PassReport, Skipped
from slimctl.evaluate.metrics import sqnr_db
from slimctl.graph.edit import all_nodes
from slimctl.graph.opset import raise_opset
from slimctl.graph.session import Level, open_session, optimized, run
from slimctl.passes.quantize_weights import QuantizeWeights
from slimctl.recipe.run import run_passes
from slimctl.targets import load_target

TYPES = ["int2", "uint2", "int4", "uint4", "int8", "uint8"]
FLOORS = {"2": 4.0, "4": 15.0, "8": 38.0}
TARGET = load_target("cpu")


def model_of(
    graph: str, arrays: dict[str, np.ndarray], opset: int = 17, kind: str = "float"
) -> ir.Model:
    """A model from ONNX text; nodes are named after what they compute."""
    text = f'<ir_version: 8, opset_import: ["": {opset}]> g {graph.replace("float", kind)}'
    proto = onnx.parser.parse_model(text)
    for name, array in arrays.items():
        narrow = kind == "float16" and array.dtype == np.float32
        stored = array.astype(np.float16) if narrow else array
        proto.graph.initializer.append(numpy_helper.from_array(stored, name))
    for node in proto.graph.node:
        node.name = f"{node.op_type}_{node.output[0]}"
    return ir.from_proto(proto)


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 1, shape).astype(np.float32)


def quantized(
    model: ir.Model,
    plain_context: Callable[..., Any],
    feeds: list[Feeds] | None = None,
    **options: Any,
) -> tuple[ir.Model, PassReport]:
    """The result of the pass, raised to the opset that it needs as the pipeline does."""
    step = QuantizeWeights(**options)
    result = raise_opset(model, step.minimum_opset(model, TARGET)).clone()
    context = plain_context(feeds or [], model)
    context.has_data = bool(feeds)
    report = step.apply(result, context)
    return result, report


def codes(array: np.ndarray, bits: int) -> np.ndarray:
    """Codes of packed bytes along the last axis, bit by bit."""
    parts = [(array >> (bits * place)) & (2**bits - 1) for place in range(8 // bits)]
    return np.stack(parts, axis=-1).reshape(*array.shape[:-1], -1)


def restored(node: ir.Node) -> np.ndarray:
    """What MatMulNBits multiplies with, [K, N], after its documentation."""
    attributes = {name: value.value for name, value in node.attributes.items()}
    bits, block, k = attributes["bits"], attributes["block_size"], attributes["K"]
    stored, scale, *rest = [None if v is None else v.const_value.numpy() for v in node.inputs[1:4]]
    whole = codes(stored, bits).astype(np.float64)  # [N, blocks, block]
    zero = np.full(scale.shape, 2.0 ** (bits - 1))
    if rest and rest[0] is not None:
        floats = rest[0].dtype.kind == "f"
        zero = rest[0] if floats else codes(rest[0], bits)[:, : scale.shape[1]]
    values = (whole - zero[..., None]) * scale.astype(np.float64)[..., None]
    assert values.shape[-1] == block
    return values.reshape(len(values), -1)[:, :k].T


def outputs(model: ir.Model, feeds: Feeds, level: Level = Level.ALL) -> np.ndarray:
    (found,) = run(open_session(model, level=level, threads=1), feeds).values()
    return found


def nodes(model: ir.Model, op_type: str) -> list[ir.Node]:
    return [node for node in all_nodes(model) if node.op_type == op_type]


def product(k: int = 96, n: int = 24, opset: int = 17, kind: str = "float") -> ir.Model:
    text = f"(float[M,{k}] x) => (float[M,{n}] y) {{ y = MatMul(x, w) }}"
    return model_of(text, {"w": normal(0, k, n)}, opset, kind)


@pytest.mark.parametrize("kind", ["float", "float16"])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("weight_type", TYPES)
@pytest.mark.parametrize("sizes", [(16, 96), (32, 100), (64, 61), (256, 640), (0, 100)])
def test_onnxruntime_computes_with_the_stored_weights(
    weight_type: str, symmetric: bool, sizes: tuple[int, int], kind: str, plain_context: Any
) -> None:
    block, k = sizes
    model = product(k, kind=kind)
    result, report = quantized(
        model, plain_context, weight_type=weight_type, block_size=block, symmetric=symmetric
    )
    assert report.changed == {"MatMul": 1}
    (node,) = nodes(result, "MatMulNBits")
    assert node.name == "MatMul_y"
    weight = restored(node)
    (floor,) = (value for bits, value in FLOORS.items() if bits in weight_type)
    assert sqnr_db(normal(0, k, 24), weight.astype(np.float32)) > floor - 1.5 * (block == 0)
    x = normal(1, 5, k).astype(np.float16 if kind == "float16" else np.float32)
    expected = x.astype(np.float64) @ weight
    for level in (Level.DISABLED, Level.ALL):
        found = outputs(result, {"x": x}, level)
        assert found.dtype == x.dtype
        np.testing.assert_allclose(
            found, expected, atol=(3e-2 if kind == "float16" else 1e-4), rtol=2e-3
        )


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("weight_type", TYPES)
@pytest.mark.parametrize(("block", "k"), [(16, 96), (32, 100), (0, 100)])
def test_standard_operators_compute_the_same(
    weight_type: str, symmetric: bool, block: int, k: int, plain_context: Any
) -> None:
    options = {"weight_type": weight_type, "block_size": block, "symmetric": symmetric}
    model = product(k)
    kernels, _ = quantized(model, plain_context, **options)
    standard, report = quantized(model, plain_context, format="qdq", **options)
    assert [node.op_type for node in all_nodes(standard)] == ["DequantizeLinear", "MatMul"]
    assert nodes(standard, "MatMul")[0].name == "MatMul_y"
    x = {"x": normal(1, 5, k)}
    wanted = x["x"].astype(np.float64) @ restored(nodes(kernels, "MatMulNBits")[0])
    if block or k <= 128:  # blocks of the same weights
        np.testing.assert_allclose(outputs(standard, x, Level.DISABLED), wanted, atol=1e-3)
    # onnxruntime fuses it, and rounds activations to 8 bits.
    assert [node.op_type for node in all_nodes(optimized(standard))] == ["MatMulNBits"]
    assert sqnr_db(wanted.astype(np.float32), outputs(standard, x)) > 35
    assert any("accuracy_level" in note for note in report.notes)


@pytest.mark.parametrize("form", ["nbits", "qdq"])
@pytest.mark.parametrize(
    ("attributes", "bias"),
    [
        ("", None),
        ("<transB=1>", normal(5, 24)),
        ("<transA=1, alpha=0.5, beta=2.0>", normal(5, 1, 24)),
        ("<transA=1, transB=1, beta=3.0>", np.float32([1.5])),
        ("<alpha=-2.0>", normal(5, 6, 1)),
        ("<beta=0.5>", "computed"),
    ],
)
def test_gemm(attributes: str, bias: Any, form: str, plain_context: Any) -> None:
    shape = "6,K" if "transA" not in attributes else "K,6"
    weight = normal(0, 24, 64) if "transB" in attributes else normal(0, 64, 24)
    arrays = {"w": weight}
    third = ""
    prefix = ""
    if isinstance(bias, str):
        third, prefix = ", c", "c = Exp(z)"
    elif bias is not None:
        third, arrays["c"] = ", c", bias
    text = (
        f"(float[{shape.replace('K', '64')}] x, float[6,24] z) => (float[6,24] y) "
        f"{{ {prefix} y = Gemm{attributes}(x, w{third}) }}"
    )
    model = model_of(text, arrays)
    result, report = quantized(model, plain_context, weight_type="int8", format=form)
    assert report.changed == {"Gemm": 1}
    x = normal(1, *((64, 6) if "transA" in attributes else (6, 64)))
    feeds = {"x": x, "z": normal(2, 6, 24)}
    wanted = outputs(model, feeds)
    for level in (Level.DISABLED, Level.ALL):
        assert sqnr_db(wanted, outputs(result, feeds, level)) > 35
    assert not nodes(result, "Gemm") or form == "qdq"
    assert any(node.name == "Gemm_y" for node in all_nodes(result))


def test_shared_weights_are_stored_once(plain_context: Any) -> None:
    text = """(float[M,64] x) => (float[M,64] y) {
        a = MatMul(x, w) b = Tanh(a) c = MatMul(b, w) d = Tanh(c) y = MatMul(d, w) }"""
    model = model_of(text, {"w": normal(0, 64, 64) / 8})
    for form, op_type in (("nbits", "MatMulNBits"), ("qdq", "DequantizeLinear")):
        result, report = quantized(model, plain_context, format=form)
        assert report.changed == {"MatMul": 3}
        assert len(result.graph.initializers) == 3
        assert len(nodes(result, op_type)) == 3  # DequantizeLinear: one per reader, else no fusion
        x = {"x": normal(1, 4, 64)}
        assert sqnr_db(outputs(model, x), outputs(result, x)) > 12


def test_weights_in_branches_and_loops(plain_context: Any) -> None:
    text = """(float[4,32] x, bool flag, int64 count) => (float[4,32] y) {
        z = If(flag) <
            then_branch = t () => (float[4,32] p) { p = MatMul(x, w) },
            else_branch = e () => (float[4,32] q) { u = Neg(x) q = MatMul(u, v) }>
        y = Loop(count, flag, z) <body = b (int64 i, bool go, float[4,32] s)
            => (bool on, float[4,32] r) { on = Identity(go) m = MatMul(s, w) r = Tanh(m) }>
        }"""
    model = model_of(text, {"w": normal(0, 32, 32) / 6, "v": normal(1, 32, 32)})
    for form in ("nbits", "qdq"):
        result, report = quantized(model, plain_context, weight_type="int8", format=form)
        assert report.changed == {"MatMul": 3}
        for flag in (True, False):
            feeds = {"x": normal(2, 4, 32), "flag": np.array(flag), "count": np.array(3)}
            for level in (Level.DISABLED, Level.ALL):
                assert sqnr_db(outputs(model, feeds), outputs(result, feeds, level)) > 30


TABLE = """(int64[B,S] i) => (float[B,S,{n}] y) {{ a = Gather(table, i) y = MatMul(a, w) }}"""


@pytest.mark.parametrize("weight_type", TYPES)
@pytest.mark.parametrize("width", [64, 40])
@pytest.mark.parametrize("kind", ["float", "float16"])
def test_tables(weight_type: str, width: int, kind: str, plain_context: Any) -> None:
    arrays = {"table": normal(0, 50, width), "w": normal(1, width, 8)}
    model = model_of(TABLE.format(n=8), arrays, kind=kind)
    result, report = quantized(model, plain_context, weight_type=weight_type)
    assert report.changed == {"Gather": 1, "MatMul": 1}
    feeds = {"i": np.array([[0, 49, 3], [7, 7, -1]])}
    (floor,) = (value for bits, value in FLOORS.items() if bits in weight_type)
    for level in (Level.DISABLED, Level.ALL):
        found = outputs(result, feeds, level)
        assert sqnr_db(outputs(model, feeds), found) > floor - 4
    kept, report = quantized(model, plain_context, weight_type=weight_type, embeddings=False)
    assert report.changed == {"MatMul": 1}
    assert len(nodes(kept, "Gather")) == 1


@pytest.mark.parametrize("block", [32, 0])
@pytest.mark.parametrize("weight_type", ["int8", "uint8"])
def test_standard_tables_restore_only_the_rows_that_are_read(
    weight_type: str, block: int, plain_context: Any
) -> None:
    text = "(int64[B,S] i) => (float[B,S,40] y) { y = Gather(table, i) }"
    model = model_of(text, {"table": normal(0, 50, 40)})
    options = {"weight_type": weight_type, "block_size": block, "format": "qdq"}
    result, report = quantized(model, plain_context, **options)
    assert report.changed == {"Gather": 1}
    assert all(node.op_type == "Gather" for node in list(all_nodes(result))[:-1])
    feeds = {"i": np.array([[0, 49, 3], [7, 7, -1]])}
    for level in (Level.DISABLED, Level.ALL):
        assert sqnr_db(outputs(model, feeds), outputs(result, feeds, level)) > 38


def test_narrow_codes_have_no_standard_table(plain_context: Any) -> None:
    model = model_of(TABLE.format(n=8), {"table": normal(0, 50, 64), "w": normal(1, 64, 8)})
    _, report = quantized(model, plain_context, weight_type="int4", format="qdq")
    assert report.changed == {"MatMul": 1}
    reason = "the standard Gather takes no 4-bit codes; the format nbits has one"
    assert report.skipped == (Skipped("Gather_a", reason),)


@pytest.mark.parametrize("form", ["transposed", "gemm", "copy"])
@pytest.mark.parametrize("algorithm", ["rtn", "hqq", "gptq"])
def test_tied_weights_are_stored_once(form: str, algorithm: str, plain_context: Any) -> None:
    last = {
        "transposed": "t = Transpose<perm=[1,0]>(table) y = MatMul(a, t)",
        "gemm": "y = Gemm<transB=1>(a, table)",
        "copy": "y = MatMul(a, copy)",
    }[form]
    text = f"(int64[S] i) => (float[S,50] y) {{ a = Gather(table, i) {last} }}"
    table = normal(0, 50, 64)
    arrays = {"table": table} | ({"copy": np.ascontiguousarray(table.T)} if form == "copy" else {})
    model = model_of(text, arrays)
    feeds = {"i": np.array([0, 49, 3])}
    result, report = quantized(model, plain_context, [feeds], algorithm=algorithm)
    assert sum(report.changed.values()) == 2
    big = [v for v in result.graph.initializers.values() if v.const_value.nbytes >= 50 * 32]
    assert len(big) == 1
    assert not nodes(result, "Transpose")
    assert report.facts["bytes_after"] == 50 * (32 + 8 + 1)
    for level in (Level.DISABLED, Level.ALL):
        assert sqnr_db(outputs(model, feeds), outputs(result, feeds, level)) > 14
    if algorithm == "gptq":
        assert "nearest is best for rows" in report.notes[1]


def test_a_table_that_is_needed_in_float_stays(plain_context: Any) -> None:
    text = """(int64[S] i) => (float[S,50] y) {
        a = Gather(table, i) t = Transpose<perm=[1,0]>(table) y = MatMul(a, t) }"""
    model = model_of(text, {"table": normal(0, 50, 64)})
    result, report = quantized(model, plain_context, exclude=("op:MatMul",))
    assert not report.changed
    assert report.skipped == (
        Skipped("MatMul_y", "excluded by 'op:MatMul'"),
        Skipped("Gather_a", "'MatMul_y' needs the table in float"),
    )
    assert len(result.graph.initializers) == 1


@pytest.mark.parametrize(
    ("options", "opset"),
    [
        ({}, 0),
        ({"format": "qdq"}, 21),
        ({"format": "qdq", "weight_type": "int8"}, 21),
        ({"format": "qdq", "weight_type": "int8", "block_size": 0}, 21),
        ({"format": "qdq", "weight_type": "int8", "block_size": 0, "embeddings": False}, 13),
        ({"format": "qdq", "weight_type": "uint2"}, 25),
        ({"format": "qdq", "exclude": ("*",)}, 0),
    ],
)
def test_the_opset_is_raised_no_further_than_needed(options: dict[str, Any], opset: int) -> None:
    model = model_of(TABLE.format(n=8), {"table": normal(0, 50, 64), "w": normal(1, 64, 8)})
    assert QuantizeWeights(**options).minimum_opset(model, TARGET) == opset


def test_what_cannot_be_stored_once_is_stored_twice(plain_context: Any) -> None:
    text = "(int64[S] i) => (float[S,50] y) { a = Gather(table, i) y = Gemm<transB=1>(a, table) }"
    feeds = {"i": np.array([0, 49, 3])}
    for width, options in ((64, {"format": "qdq"}), (40, {"format": "nbits"})):
        model = model_of(text, {"table": normal(0, 50, width)})
        result, report = quantized(model, plain_context, weight_type="int8", **options)
        assert sum(report.changed.values()) == 2
        assert sqnr_db(outputs(model, feeds), outputs(result, feeds, Level.DISABLED)) > 38


def test_every_layer_left_alone_has_a_reason(plain_context: Any) -> None:
    text = """(float[2,3,64] x, float[2,64,64] z) => (float[2,3,8] y, float q, float[2,64,4] s) {
        a = MatMul(x, z) b = MatMul(a, stack) c = MatMul(left, z) d = MatMul(a, w)
        e = MatMul(b, bad) f = MatMul(d, narrow) v = MatMul(a, vector) h = ReduceSum(v)
        k = ReduceSum(c) q = Add(h, k) y = Identity(f) s = Conv(z, kernel) o = MatMul(e, w)
        j = MatMul(d, wide) }"""
    arrays = {
        "stack": normal(0, 2, 64, 64),
        "left": normal(1, 5, 64),
        "w": normal(2, 64, 8),
        "bad": np.full((64, 64), np.nan, np.float32),
        "narrow": normal(3, 8, 8)[:, :8],
        "vector": normal(4, 64),
        "kernel": normal(5, 64, 64, 61),
        "wide": normal(6, 8, 3).astype(np.float32),
    }
    text = text.replace("float q", "float[] q")
    model = model_of(text, arrays)
    _, report = quantized(model, plain_context, exclude=("*_o",), block_size=16)
    assert dict(report.skipped) == {
        "MatMul_a": "the weight is computed at run time",
        "MatMul_b": "the weight has 3 dimensions: kernels take a matrix",
        "MatMul_c": "the constant is the left factor: kernels want it on the right",
        "MatMul_e": "the weight holds NaN or infinite values",
        "MatMul_v": "the weight has 1 dimensions: kernels take a matrix",
        "MatMul_o": "excluded by '*_o'",
        "Conv_s": "onnxruntime has no convolution with weights in blocks",
    }
    assert report.changed == {"MatMul": 3}


def test_recurrent_layers_are_named(plain_context: Any) -> None:
    text = "(float[5,1,64] x) => (float[5,1,1,64] y) { y = LSTM<hidden_size=64>(x, w, r) }"
    model = model_of(text, {"w": normal(0, 1, 256, 64), "r": normal(1, 1, 256, 64)})
    _, report = quantized(model, plain_context)
    assert report.skipped == (Skipped("LSTM_y", "onnxruntime has no LSTM with weights in blocks"),)
    assert not report.changed


def test_what_would_not_get_smaller_stays(plain_context: Any) -> None:
    _, report = quantized(product(2, 5), plain_context)
    reason = "with 2 inputs per output it would not get smaller"
    assert report.skipped == (Skipped("MatMul_y", reason),)
    _, report = quantized(product(512, 5), plain_context, weight_type="int2", block_size=512)
    reason = "2-bit kernels take blocks of at most 256 inputs"
    assert report.skipped == (Skipped("MatMul_y", reason),)


def test_misspelled_patterns_are_reported(plain_context: Any) -> None:
    _, report = quantized(product(), plain_context, include=("op:MatMul", "nothing"))
    assert report.warnings == ("no node matches 'nothing'",)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"block_size": 48}, "48 is not 0 and not a power of two"),
        ({"block_size": 8}, "8 is not 0 and not a power of two"),
        ({"format": "qdq", "accuracy_level": 4}, "accuracy_level cannot be stored"),
        ({"algorithm": "hqq", "weight_type": "int4"}, "hqq moves zero points"),
        ({"algorithm": "hqq", "symmetric": True}, "hqq moves zero points"),
        ({"include": ("re:(",)}, "is not a regular expression"),
    ],
)
def test_impossible_options(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(Exception, match=complaint) as caught:
        QuantizeWeights(**options)
    assert isinstance(caught.value, ValidationError) or "include" in str(options)


def test_the_accuracy_level_is_stored_when_asked_for(plain_context: Any) -> None:
    plain, _ = quantized(product(128), plain_context)
    fast, _ = quantized(product(128), plain_context, accuracy_level=4)
    assert "accuracy_level" not in nodes(plain, "MatMulNBits")[0].attributes
    assert nodes(fast, "MatMulNBits")[0].attributes["accuracy_level"].as_int() == 4
    x = {"x": normal(1, 9, 128)}
    # Activations of 8 bits: some error, of about half a percent.
    assert 35 < sqnr_db(outputs(plain, x), outputs(fast, x)) < 60


def test_the_report_counts_bytes(plain_context: Any) -> None:
    _, report = quantized(product(128, 24), plain_context)
    after = 24 * (64 + 4 * 4 + 2)
    assert report.notes == (
        f"weights take {after:,} bytes instead of {128 * 24 * 4:,}: "
        f"{after * 8 / (128 * 24):.2f} bits each, scales and zero points included",
    )
    assert report.facts["bytes_after"] == after
    assert 18 < report.facts["weight_sqnr_db"]["MatMul_y"] < 25


@pytest.mark.parametrize("options", [{}, {"format": "qdq"}, {"algorithm": "hqq"}])
def test_through_the_pipeline(options: dict[str, Any], tmp_path: Path) -> None:
    model = model_of(TABLE.format(n=16), {"table": normal(0, 50, 64), "w": normal(1, 64, 16)})
    ir.save(model, tmp_path / "model.onnx")
    results = []
    for name in ("one.onnx", "two.onnx"):
        step = QuantizeWeights(**options)
        run_passes(tmp_path / "model.onnx", [step], output=tmp_path / name)
        results.append((tmp_path / name).read_bytes())
    assert results[0] == results[1]
    onnx.checker.check_model(onnx.load(tmp_path / "one.onnx"))
