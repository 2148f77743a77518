"""Tables of embeddings: rows stored as int8, restored behind the look-up."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import numpy_helper

from slimctl.core.contract import PassReport
from slimctl.core.target import Target
from slimctl.graph.opset import raise_opset
from slimctl.graph.session import Level, open_session, run
from slimctl.passes.quantize import Quantize
from slimctl.passes.quantize_embeddings import QuantizeEmbeddings
from slimctl.recipe.run import run_passes
from slimctl.recipe.schema import DataSpec
from slimctl.targets import load_target

TARGET = load_target("cpu")
_WIDTH = 12
_IDS = np.array([[0, 3, 49], [7, -1, 8]])
_LOOK_UP = """(int64[N, T] ids) => (float[N, T, 12] y) { y = Gather (table, ids) }"""


def _table(rows: int = 50) -> np.ndarray:
    columns = np.geomspace(0.01, 3.0, _WIDTH)  # one scale for all would lose the first
    return (np.random.default_rng(rows).standard_normal((rows, _WIDTH)) * columns).astype("f")


def _model(body: str, *, opset: int = 17, **tables: np.ndarray) -> ir.Model:
    proto = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": {opset}]> g {body}')
    for name, array in (tables or {"table": _table()}).items():
        proto.graph.initializer.append(numpy_helper.from_array(array, name))
    for node in proto.graph.node:
        node.name = f"{node.op_type}_{node.output[0]}"
    return ir.from_proto(proto)


def _applied(
    model: ir.Model, plain_context: Callable[..., Any], target: Target = TARGET, **options: Any
) -> tuple[ir.Model, PassReport]:
    step = QuantizeEmbeddings(**options)
    result = raise_opset(model, step.minimum_opset(model, target)).clone()
    context = plain_context([], model)
    context.target = target
    return result, step.apply(result, context)


def _outputs(model: ir.Model, level: Level = Level.DISABLED, **feeds: np.ndarray) -> list[Any]:
    return list(run(open_session(model, level=level), feeds).values())


@pytest.mark.parametrize("level", list(Level))
@pytest.mark.parametrize("opset", [9, 13, 21])
def test_rows_are_those_of_the_rounded_table(
    opset: int, level: Level, plain_context: Callable[..., Any]
) -> None:
    model = _model(_LOOK_UP, opset=opset)
    result, report = _applied(model, plain_context)
    table = _table()
    scale = np.abs(table).max(axis=0) / np.float32(127)
    expected = (np.rint(table / scale) * scale)[_IDS]
    (found,) = _outputs(result, level, ids=_IDS)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert report.changed == {"Gather": 1}
    assert [node.op_type for node in result.graph] == ["Gather", "DequantizeLinear"]
    assert {v.dtype for v in result.graph.initializers.values()} == {
        ir.DataType.INT8,
        ir.DataType.FLOAT,
    }
    fact = report.facts["table"]
    assert (fact["before"], fact["after"]) == (50 * 12 * 4, 50 * 12 + 12 * 4)
    noise = np.square(np.rint(table / scale) * scale - table).sum()
    assert fact["sqnr_db"] == pytest.approx(10 * np.log10(np.square(table).sum() / noise), 1e-3)


def test_a_single_row(plain_context: Callable[..., Any]) -> None:
    model = _model("(int64 ids) => (float[12] y) { y = Gather (table, ids) }")
    result, _ = _applied(model, plain_context)
    for level in Level:
        (found,) = _outputs(result, level, ids=np.array(3))
        np.testing.assert_allclose(found, _table()[3], atol=3.0 / 127)


def test_a_table_of_two_readers_is_stored_once(plain_context: Callable[..., Any]) -> None:
    model = _model(
        "(int64[N, T] ids, bool c) => (float[N, T, 12] y, float[N, T, 12] z) {"
        "  y = Gather (table, ids)"
        "  z = If (c) <then_branch = a () => (float[N, T, 12] u) { u = Gather (table, ids) },"
        "              else_branch = b () => (float[N, T, 12] v) { v = Neg (y) }>"
        "}"
    )
    result, report = _applied(model, plain_context)
    assert report.changed == {"Gather": 2}
    assert len(result.graph.initializers) == 2
    first, second = _outputs(result, Level.ALL, ids=_IDS, c=np.array(True))
    np.testing.assert_array_equal(first, second)


_REASONS = {
    "product": (
        "(int64[N, T] ids, float[M, 12] h) => (float[N, T, 12] y, float[M, 50] z) {"
        "  y = Gather (table, ids) t = Transpose <perm = [1, 0]> (table) z = MatMul (h, t) }",
        {},
        "'Transpose_t' (Transpose) reads the same table",
    ),
    "columns": (
        "(int64[N] ids) => (float[50, N] y) { y = Gather <axis = -1> (table, ids) }",
        {},
        "its axis is not the first",
    ),
    "few": (_LOOK_UP, {"table": _table(7)}, "7 rows are so few"),
    "half": (
        _LOOK_UP.replace("float[", "float16["),
        {"table": _table().astype(np.float16)},
        "float16",
    ),
}


@pytest.mark.parametrize("case", sorted(_REASONS))
def test_left_alone(case: str, plain_context: Callable[..., Any]) -> None:
    body, tables, reason = _REASONS[case]
    model = _model(body, **tables)
    result, report = _applied(model, plain_context)
    assert not report.changed
    assert [reason in skipped.reason for skipped in report.skipped] == [True]
    assert "DequantizeLinear" not in {node.op_type for node in result.graph}


def test_targets_without_it_keep_the_table(plain_context: Callable[..., Any]) -> None:
    model = _model(_LOOK_UP, opset=11)
    result, report = _applied(model, plain_context, load_target("qnn-htp"))
    assert "qnn-htp" in report.skipped[0].reason
    assert result.opset_imports[""] == 11


def test_exclude(plain_context: Callable[..., Any]) -> None:
    result, report = _applied(_model(_LOOK_UP), plain_context, exclude=("Gather_*",))
    assert report.skipped[0].reason == "excluded by 'Gather_*'"
    assert len(result.graph) == 1


_ENCODER = """(int64[N, T] ids) => (float[N, T, 8] y) {
    words = Gather (table, ids)
    places = Gather (positions, ids)
    x = Add (words, places)
    h = MatMul (x, w)
    r = Relu (h)
    y = MatMul (r, v)
}"""


def _encoder() -> ir.Model:
    random = np.random.default_rng(1)
    return _model(
        _ENCODER,
        table=_table(50),
        positions=_table(60),
        w=random.standard_normal((12, 16)).astype("f"),
        v=random.standard_normal((16, 8)).astype("f"),
    )


@pytest.mark.parametrize("mode", ["static", "dynamic"])
@pytest.mark.parametrize("embeddings", [None, False])
def test_every_mode_of_integers_stores_tables(
    mode: Literal["static", "dynamic"], embeddings: bool | None, tmp_path: Path
) -> None:
    source, data, output = (tmp_path / name for name in ("m.onnx", "ids.npz", "q.onnx"))
    model = _encoder()
    ir.save(model, source)
    np.savez(data, ids=np.random.default_rng(2).integers(0, 50, (24, 6)))
    steps = [Quantize(mode=mode, min_sqnr=0.0, embeddings=embeddings)]
    run_passes(source, steps, output=output, calibration=DataSpec(source=str(data)))
    result = ir.load(output)
    tables = [n for n in result.graph if n.op_type == "Gather" and n.inputs[0].is_initializer()]
    wanted = ir.DataType.FLOAT if embeddings is False else ir.DataType.INT8
    assert [node.inputs[0].dtype for node in tables] == [wanted, wanted]
    expected = _outputs(model, ids=_IDS[:1])[0]
    for level in Level:
        noise = np.square(_outputs(result, level, ids=_IDS[:1])[0] - expected).sum()
        assert 10 * np.log10(np.square(expected).sum() / noise) > 20


def test_weights_only_and_half_precision_have_their_own_way() -> None:
    names = {type(step).name for step in Quantize(mode="weight-only").expand()}
    assert "quantize-embeddings" not in names
    with pytest.raises(ValueError, match="embeddings has no meaning for mode fp16"):
        Quantize(mode="fp16", embeddings=True)
