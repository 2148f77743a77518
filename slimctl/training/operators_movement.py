"""Operators that move elements: joining, cutting, reshaping, padding."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from slimctl.training.operator import Call, Operator, Results, only
from slimctl.training.windows import padded

_ALL = 1 << 30
"""As many outputs as the node has."""


def _concat(call: Call, *operands: Tensor) -> Tensor:
    return torch.cat(operands, call.attribute("axis"))


def _split(call: Call, x: Tensor, sizes: Tensor | None = None) -> Results:
    """Without sizes, parts are alike and the last ones may be smaller."""
    axis = call.attribute("axis", 0)
    if sizes is not None:
        return torch.split_with_sizes(x, sizes.tolist(), axis)
    size, count = x.shape[axis], call.attribute("num_outputs", len(call.node.outputs))
    part = -(-size // count)
    sizes_alike = [max(min(part, size - part * index), 0) for index in range(count)]
    return torch.split_with_sizes(x, sizes_alike, axis)


def _reshape(call: Call, x: Tensor, shape: Tensor) -> Tensor:
    sizes = shape.tolist()
    if not call.attribute("allowzero", 0):
        sizes = [size or x.shape[axis] for axis, size in enumerate(sizes)]
    return x.reshape(sizes)


def _flatten(call: Call, x: Tensor) -> Tensor:
    axis = call.attribute("axis", 1)
    axis = axis + x.ndim if axis < 0 else axis
    return x.reshape(x.shape[:axis].numel(), x.shape[axis:].numel())


def _transpose(call: Call, x: Tensor) -> Tensor:
    return x.permute(tuple(call.attribute("perm", tuple(reversed(range(x.ndim))))))


def _squeeze(call: Call, x: Tensor, axes: Tensor | None = None) -> Tensor:
    del call
    return x.squeeze() if axes is None else x.squeeze(tuple(axes.tolist()))


def _unsqueeze(call: Call, x: Tensor, axes: Tensor) -> Tensor:
    """Axes are counted in the result."""
    del call
    rank = x.ndim + axes.numel()
    for axis in sorted(axis % rank for axis in axes.reshape(-1).tolist()):
        x = x.unsqueeze(axis)
    return x


def _expand(call: Call, x: Tensor, shape: Tensor) -> Tensor:
    del call
    sizes = np.broadcast_shapes(x.shape, tuple(shape.tolist()))
    return x.expand(sizes)


def _tile(call: Call, x: Tensor, repeats: Tensor) -> Tensor:
    del call
    return x.repeat(repeats.tolist())


def _identity(call: Call, x: Tensor, *others: Tensor | None) -> Tensor:
    del call, others
    return x


def _pad(
    call: Call, x: Tensor, pads: Tensor, value: Tensor | None = None, axes: Tensor | None = None
) -> Tensor:
    places = list(range(x.ndim)) if axes is None else [axis % x.ndim for axis in axes.tolist()]
    begins, ends = [0] * x.ndim, [0] * x.ndim
    for place, begin, end in zip(places, *pads.reshape(2, -1).tolist(), strict=True):
        begins[place], ends[place] = begin, end
    mode = call.attribute("mode", "constant")
    if mode == "constant":
        return padded(x, begins, ends, 0.0 if value is None else value.item())
    return _pad_with_own(x, begins, ends, mode)


def _pad_with_own(x: Tensor, begins: Sequence[int], ends: Sequence[int], mode: str) -> Tensor:
    """Pads with elements of the tensor, axis by axis, then cuts off where pads are negative."""
    for axis, (begin, end) in enumerate(zip(begins, ends, strict=True)):
        before = np.arange(x.shape[axis])[max(-begin, 0) : x.shape[axis] - max(-end, 0)]
        indices = np.pad(before, (max(begin, 0), max(end, 0)), mode)  # type: ignore[call-overload]  # a text, of those that the table allows
        if begin or end:
            x = x.index_select(axis, torch.from_numpy(indices).to(x.device))
    return x


def _depth_to_space(call: Call, x: Tensor) -> Tensor:
    """[N, C*b*b, H, W] -> [N, C, H*b, W*b]"""
    n, depth, h, w = x.shape
    b = call.attribute("blocksize")
    c = depth // (b * b)
    if call.attribute("mode", "DCR") == "DCR":
        parts = x.reshape(n, b, b, c, h, w).permute(0, 3, 4, 1, 5, 2)
    else:
        parts = x.reshape(n, c, b, b, h, w).permute(0, 1, 4, 2, 5, 3)
    return parts.reshape(n, c, h * b, w * b)  # from [N, C, H, b, W, b]


def _space_to_depth(call: Call, x: Tensor) -> Tensor:
    """[N, C, H*b, W*b] -> [N, b*b*C, H, W]"""
    n, c, high, wide = x.shape
    b = call.attribute("blocksize")
    parts = x.reshape(n, c, high // b, b, wide // b, b).permute(0, 3, 5, 1, 2, 4)
    return parts.reshape(n, b * b * c, high // b, wide // b)


OPERATORS = {
    "Concat": Operator(_concat),
    "DepthToSpace": Operator(_depth_to_space),
    "Dropout": Operator(_identity),
    "Expand": Operator(_expand, numbers=(1,)),
    "Flatten": Operator(_flatten),
    "Identity": Operator(_identity),
    "Pad": Operator(_pad, only(mode=("constant", "reflect", "edge", "wrap")), numbers=(1, 2, 3)),
    "Reshape": Operator(_reshape, numbers=(1,)),
    "SpaceToDepth": Operator(_space_to_depth),
    "Split": Operator(_split, outputs=_ALL, numbers=(1,)),
    "Squeeze": Operator(_squeeze, numbers=(1,)),
    "Tile": Operator(_tile, numbers=(1,)),
    "Transpose": Operator(_transpose),
    "Unsqueeze": Operator(_unsqueeze, numbers=(1,)),
}
