"""Ranges that a provider finds too short are widened as onnxruntime's own tools do it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from onnxruntime.quantization.quant_utils import compute_scale_zp

from slimctl.graph.edit import const_array
from slimctl.passes.quantize_static import QuantizeStatic
from slimctl.targets import load_target

TEXT = """
<ir_version: 8, opset_import: ["" : 17]>
g (float[1,2,4,4] x) => (float[1,2,4,4] y)
<float[2,2,1,1] w = {1.0, 0.5, -0.25, 1.0}>
{ y = Conv(x, w) }
"""


@pytest.mark.parametrize("target", ["qnn-htp", "cpu"])
@pytest.mark.parametrize("size", [1e-6, 1e-3])
def test_short_ranges_are_widened_where_the_target_asks_for_it(
    target: str, size: float, plain_context: Callable[..., Any]
) -> None:
    model = ir.from_onnx_text(TEXT)
    model.graph[0].name = "conv"
    x = size * np.random.default_rng(0).uniform(-1, 1, (1, 2, 4, 4)).astype(np.float32)
    context = plain_context([{"x": x}], ir.from_onnx_text(TEXT), target=load_target(target))
    QuantizeStatic(min_sqnr=0).resolve(context.target).apply(model, context)
    first = next(node for node in model.graph if node.op_type == "QuantizeLinear")
    low, high = (np.asarray(end, np.float32) for end in (x.min(), x.max()))
    least = 1e-4 if target == "qnn-htp" else None
    levels = np.array(0, np.uint8), np.array(255, np.uint8)
    zero_point, scale = compute_scale_zp(low, high, *levels, min_real_range=least)
    found = [const_array(value) for value in first.inputs[1:]]
    assert found[0] == pytest.approx(float(scale), rel=1e-6)
    assert found[1] == int(zero_point)
