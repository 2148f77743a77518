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
    ir.DataType.INT4: torch.int8,
    ir.DataType.INT64: torch.int64,
    ir.DataType.INT8: torch.int8,
    ir.DataType.UINT16: torch.int32,
    ir.DataType.UINT4: torch.uint8,
    ir.DataType.UINT8: torch.uint8,
}
"""Types that tensors of a graph may have, and what they have in torch: a type that holds them."""

_HELD: dict[torch.dtype, type[np.generic]] = {
    torch.float32: np.float32,
    torch.int8: np.int8,
    torch.int32: np.int32,
    torch.uint8: np.uint8,
}
"""Those that stand for narrower ones, too."""


def to_torch(array: NDArray[Any]) -> Tensor:
    """A copy of an array of one of :data:`TYPES`."""
    kind = TYPES[ir.DataType.from_numpy(array.dtype)]
    return torch.from_numpy(np.array(array, _HELD.get(kind, array.dtype)))


def to_numpy(tensor: Tensor) -> NDArray[Any]:
    """The values of a tensor; they lie where the tensor has them."""
    array: NDArray[Any] = tensor.detach().numpy()
    return array
