"""Outputs that are put together count part by part."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import numpy_helper

from slimctl.evaluate.parts import in_parts, output_parts
from slimctl.evaluate.probing import Errors

_HEAD = """
    boxes = Conv <kernel_shape = [1, 1]> (x, wb)
    logits = Conv <kernel_shape = [1, 1]> (x, ws)
    scores = Sigmoid (logits)
"""


def _model(body: str, output: str, opset: int = 17) -> ir.Model:
    text = f"""<ir_version: 8, opset_import: ["": {opset}]>
    g (float[N, 3, 4, 4] x, float[N, 3, 2, 2] z) => ({output})
    <int64[3] flat = {{0, 0, -1}}, int64[2] row = {{0, -1}}> {{ {body} }}"""
    proto = onnx.parser.parse_model(text)
    for name, channels in (("wb", 4), ("ws", 2)):
        weight = np.ones((channels, 3, 1, 1), np.float32)
        proto.graph.initializer.append(numpy_helper.from_array(weight, name))
    return ir.from_proto(proto)


_CASES = {
    "channels": (f"{_HEAD} y = Concat <axis = 1> (boxes, scores)", "float[N, 6, 4, 4] y", 1),
    "a negative axis": (
        f"{_HEAD} b = Transpose <perm = [0, 2, 3, 1]> (boxes)"
        "s = Transpose <perm = [0, 2, 3, 1]> (scores) y = Concat <axis = -1> (b, s)",
        "float[N, 4, 4, 6] y",
        3,
    ),
    "anchors as rows": (
        f"{_HEAD} c = Concat <axis = 1> (boxes, scores) r = Reshape (c, flat)"
        "y = Transpose <perm = [0, 2, 1]> (r)",
        "float[N, 16, 6] y",
        2,
    ),
    "anchors of two sizes": (
        f"{_HEAD} c = Concat <axis = 1> (boxes, scores) r = Reshape (c, flat)"
        "b2 = Conv <kernel_shape = [1, 1]> (z, wb) l2 = Conv <kernel_shape = [1, 1]> (z, ws)"
        "s2 = Sigmoid (l2) c2 = Concat <axis = 1> (b2, s2) r2 = Reshape (c2, flat)"
        "y = Concat <axis = 2> (r, r2)",
        "float[N, 6, 20] y",
        1,
    ),
    "scores without a Sigmoid": (
        "boxes = Conv <kernel_shape = [1, 1]> (x, wb) s = Conv <kernel_shape = [1, 1]> (x, ws)"
        "y = Concat <axis = 1> (boxes, s)",
        "float[N, 6, 4, 4] y",
        1,
    ),
}


@pytest.mark.parametrize("case", sorted(_CASES))
def test_parts_of(case: str) -> None:
    body, output, axis = _CASES[case]
    (parts,) = output_parts(_model(body, output)).values()
    colons = ":, " * axis
    assert [part.name for part in parts] == [f"y[{colons}0:4]", f"y[{colons}4:6]"]
    shape = [int(s) if s.strip().isdigit() else 2 for s in output[6:-3].split(",")]
    array = np.arange(np.prod(shape)).reshape(shape)
    boxes, scores = in_parts({"y": parts}, {"y": array}).values()
    np.testing.assert_array_equal(np.concatenate([boxes, scores], axis), array)
    assert boxes.shape[axis] == 4


@pytest.mark.parametrize(
    ("body", "output"),
    [
        (f"{_HEAD} c = Concat <axis = 1> (boxes, scores) y = Relu (c)", "float[N, 6, 4, 4] y"),
        (f"{_HEAD} y = Concat <axis = 0> (boxes, boxes)", "float[M, 4, 4, 4] y"),
        (f"{_HEAD} y = Identity (boxes)", "float[N, 4, 4, 4] y"),
        (
            f"{_HEAD} c = Concat <axis = 1> (boxes, scores) y = Reshape (c, row)",
            "float[N, 96] y",
        ),
    ],
)
def test_one_part(body: str, output: str) -> None:
    assert output_parts(_model(body, output)) == {}


def test_an_error_that_boxes_hide_is_seen() -> None:
    body, output, _ = _CASES["channels"]
    parts = output_parts(_model(body, output))
    random = np.random.default_rng(0)
    boxes, scores = 100 * random.standard_normal((1, 4, 4, 4)), random.random((1, 2, 4, 4))
    expected = np.concatenate([boxes, scores], 1).astype("f")
    found = np.concatenate([boxes, np.full_like(scores, 0.5)], 1).astype("f")
    whole, apart = Errors(), Errors(parts)
    for errors in (whole, apart):
        errors.add({"y": expected}, {"y": found})
    assert whole.loss().worst.db > 45
    assert apart.loss().worst.db == pytest.approx(
        10 * np.log10(np.square(scores).sum() / np.square(scores - 0.5).sum()), abs=1e-3
    )
