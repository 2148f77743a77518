"""A small network with a residual block and a second output."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import numpy_helper

_BODY = """
<ir_version: 9, opset_import: ["" : 21]>
small (float[N,3,8,8] x) => (float[N,4] y, float[N,6,8,8] side) {
    a = Conv<pads=[1,1,1,1]>(x, w0)
    ra = Relu(a)
    b = Conv<pads=[1,1,1,1]>(ra, w1)
    rb = Relu(b)
    c = Conv<pads=[1,1,1,1]>(rb, w2)
    side = Add(c, ra)
    d = Conv<pads=[1,1,1,1]>(side, w3)
    rd = Relu(d)
    p = GlobalAveragePool(rd)
    f = Flatten(p)
    y = MatMul(f, w4)
}
"""
_SHAPES = {
    "w0": (6, 3, 3, 3),
    "w1": (6, 6, 3, 3),
    "w2": (6, 6, 3, 3),
    "w3": (6, 6, 3, 3),
    "w4": (6, 4),
}
LAYERS = ("conv0", "conv1", "conv2", "conv3", "head")


def small_network() -> onnx.ModelProto:
    """Layers are called as in LAYERS; one weight of conv1 is an outlier, which per-tensor int8
    weights cannot bear."""
    model = onnx.parser.parse_model(_BODY)
    random = np.random.default_rng(3)
    for name, shape in _SHAPES.items():
        weight = random.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))
        if name == "w1":
            weight[0, 0, 0, 0] = 40.0
        model.graph.initializer.append(numpy_helper.from_array(weight.astype(np.float32), name))
    names = iter(LAYERS)
    for node in model.graph.node:
        node.name = next(names) if node.op_type in ("Conv", "MatMul") else f"other_{node.output[0]}"
    return model
