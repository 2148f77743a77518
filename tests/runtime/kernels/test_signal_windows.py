"""Windows of signal processing and the mel matrix."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto

from tests.runtime.kernels.one_node import ours
from tests.runtime.kernels.special_values import assert_same

WINDOWS = ["HannWindow", "HammingWindow", "BlackmanWindow"]
NEAR_ZERO = 3e-7
"""onnxruntime computes windows in float32, where their ends are not quite 0."""


@pytest.mark.parametrize("op_type", WINDOWS)
@pytest.mark.parametrize("periodic", [0, 1])
@pytest.mark.parametrize("size", [0, 1, 2, 3, 8, 400])
def test_windows(op_type: str, periodic: int, size: int) -> None:
    node = {"opset": 17, "periodic": periodic, "rtol": 1e-5, "atol": NEAR_ZERO}
    for count in (np.array(size), np.array(size, np.int32)):
        assert_same(op_type, [count], **node)
        assert_same(op_type, [count], output_datatype=TensorProto.DOUBLE, **node)


@pytest.mark.parametrize(
    ("op_type", "function"),
    [("HannWindow", np.hanning), ("BlackmanWindow", np.blackman)],
)
def test_symmetric_windows_are_those_of_numpy(op_type: str, function: np.ufunc) -> None:
    node = {"opset": 17, "periodic": 0, "output_datatype": TensorProto.DOUBLE}
    (found,) = ours(op_type, [np.array(17)], **node)
    np.testing.assert_allclose(found, function(17), rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("kind", ["FLOAT16", "BFLOAT16", "INT32", "UINT8"])
def test_windows_of_other_types(kind: str) -> None:
    (found,) = ours(
        "HannWindow", [np.array(4)], opset=17, output_datatype=getattr(TensorProto, kind)
    )
    whole = kind in ("INT32", "UINT8")
    expected = [0, 0, 1, 0] if whole else [0, 0.5, 1, 0.5]
    assert found.astype(np.float64).tolist() == expected


MEL = {
    "speech": (40, 512, 16000, 0, 8000),
    "few bands": (8, 16, 8192, 0, 4096),
    "bands in one bin": (4, 16, 8000, 20, 4000),
    "many bands": (128, 1024, 22050, 30, 11025),
    "odd length": (10, 33, 8000, 100.5, 3900),
}


@pytest.mark.parametrize("case", MEL.values(), ids=MEL)
@pytest.mark.parametrize("kind", ["FLOAT", "DOUBLE"])
def test_mel_weights(case: tuple[float, ...], kind: str) -> None:
    bands, length, rate, low, high = case
    counts = [np.array(value, np.int64) for value in (bands, length, rate)]
    edges = [np.array(value, np.float32) for value in (low, high)]
    node = {"opset": 17, "output_datatype": getattr(TensorProto, kind)}
    assert_same("MelWeightMatrix", [*counts, *edges], rtol=1e-6, atol=1e-7, **node)
