"""Between numpy and torch. Half precision becomes single: gradients would underflow in it."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray
from torch import Tensor

TYPES: dict[ir.DataType, torch.dtype] = {
    ir.DataType.BFLOAT16: torch.float32,
    ir.DataType.BOOL: torch.bool,
    ir.DataType.DOUBLE: torch.float64,
    ir.DataType.FLOAT: torch.float32,
    ir.DataType.FLOAT16: torch.float32,
    ir.DataType.INT16: torch.int16,
    ir.DataType.INT32: torch.int32,
    ir.DataType.INT64: torch.int64,
    ir.DataType.INT8: torch.int8,
    ir.DataType.UINT8: torch.uint8,
}
"""Types that tensors of a graph may have, and what they have in torch."""


def to_torch(array: NDArray[Any]) -> Tensor:
    """A copy of an array of one of :data:`TYPES`."""
    kind = TYPES[ir.DataType.from_numpy(array.dtype)]
    half = array.dtype.itemsize == 2 and kind is torch.float32
    return torch.from_numpy(np.array(array, np.float32 if half else array.dtype))


def to_numpy(tensor: Tensor) -> NDArray[Any]:
    """The values of a tensor; they lie where the tensor has them."""
    array: NDArray[Any] = tensor.detach().numpy()
    return array
