"""Sizes, types, and tensors made from them."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor

from slimctl.training.operator import Call, Operator
from slimctl.training.tensors import TYPES, to_torch


def _shape(call: Call, x: Tensor) -> Tensor:
    sizes = list(x.shape)[call.attribute("start", 0) : call.attribute("end", x.ndim)]
    return torch.tensor(sizes, dtype=torch.int64)


def _size(call: Call, x: Tensor) -> Tensor:
    del call
    return torch.tensor(x.numel())


def _constant_of_shape(call: Call, shape: Tensor) -> Tensor:
    stored = call.attribute("value")
    value = torch.zeros(1) if stored is None else to_torch(stored.numpy())
    return value.reshape(()).expand(shape.tolist())


def _range(call: Call, start: Tensor, limit: Tensor, delta: Tensor) -> Tensor:
    del call
    bounds: list[Any] = [start.item(), limit.item(), delta.item()]
    return torch.arange(*bounds, dtype=start.dtype)


def _cast(call: Call, x: Tensor) -> Tensor:
    return x.to(TYPES[ir.DataType(call.attribute("to"))])


def _castable(call: Call) -> str:
    kind = ir.DataType(call.attribute("to"))
    return "" if kind in TYPES else f"it makes {kind.name} of its input"


def _cast_like(call: Call, x: Tensor, like: Tensor) -> Tensor:
    del call
    return x.to(like.dtype)


OPERATORS = {
    "Cast": Operator(_cast, _castable),
    "CastLike": Operator(_cast_like),
    "ConstantOfShape": Operator(_constant_of_shape, numbers=(0,)),
    "Range": Operator(_range, numbers=(0, 1, 2)),
    "Shape": Operator(_shape),
    "Size": Operator(_size),
}
