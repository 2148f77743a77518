"""Operators that read and write elements by their indices."""

from __future__ import annotations

import torch
from torch import Tensor

from slimctl.training.operator import Call, Operator, only


def _from_front(indices: Tensor, size: int) -> Tensor:
    """Indices that count from the end, counted from the front."""
    return torch.where(indices < 0, indices + size, indices).long()


def _gather(call: Call, x: Tensor, indices: Tensor) -> Tensor:
    """Indices of any shape take the place of the axis."""
    axis = call.attribute("axis", 0) % x.ndim
    places = _from_front(indices, x.shape[axis])
    found = x.index_select(axis, places.reshape(-1))
    return found.reshape((*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :]))


def _gather_elements(call: Call, x: Tensor, indices: Tensor) -> Tensor:
    axis = call.attribute("axis", 0)
    return torch.gather(x, axis, _from_front(indices, x.shape[axis]))


def _gather_nd(call: Call, x: Tensor, indices: Tensor) -> Tensor:
    """The last axis of the indices runs over the first axes of x."""
    del call
    return x[indices.long().unbind(-1)]


def _scatter_elements(call: Call, x: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    axis = call.attribute("axis", 0)
    places = _from_front(indices, x.shape[axis])
    if call.attribute("reduction", "none") == "add":
        return torch.scatter_add(x, axis, places, updates)
    return torch.scatter(x, axis, places, updates)


def _scatter_nd(call: Call, x: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    added = call.attribute("reduction", "none") == "add"
    return x.index_put(indices.long().unbind(-1), updates, accumulate=added)


def _slice(call: Call, x: Tensor, *bounds: Tensor | None) -> Tensor:
    """Bounds: starts, ends, and optionally axes and steps."""
    del call
    columns = [None if bound is None else bound.tolist() for bound in (*bounds, None, None)]
    starts, ends, axes, steps = columns[:4]
    assert starts is not None and ends is not None, "both are given"
    count = len(starts)
    for start, end, axis, step in zip(
        starts, ends, axes or range(count), steps or [1] * count, strict=True
    ):
        x = _positions(x, axis, range(x.shape[axis])[start:end:step])
    return x


def _positions(x: Tensor, axis: int, chosen: range) -> Tensor:
    if chosen.step == 1:
        return x.narrow(axis, chosen.start, len(chosen))
    return x.index_select(axis, torch.tensor(chosen, dtype=torch.int64, device=x.device))


def _trilu(call: Call, x: Tensor, diagonal: Tensor | None = None) -> Tensor:
    k = 0 if diagonal is None else int(diagonal)
    return torch.triu(x, k) if call.attribute("upper", 1) else torch.tril(x, k)


def _cum_sum(call: Call, x: Tensor, axis: Tensor) -> Tensor:
    """Optionally from the end, and without the element itself."""
    place = int(axis)
    turned = x.flip(place) if call.attribute("reverse", 0) else x
    total = turned.cumsum(place, dtype=x.dtype)
    if call.attribute("exclusive", 0):
        total = total - turned
    return total.flip(place) if call.attribute("reverse", 0) else total


_REDUCTIONS = only(reduction=("none", "add"))

OPERATORS = {
    "CumSum": Operator(_cum_sum, numbers=(1,)),
    "Gather": Operator(_gather),
    "GatherElements": Operator(_gather_elements),
    "GatherND": Operator(_gather_nd, only(batch_dims=(0,))),
    "ScatterElements": Operator(_scatter_elements, _REDUCTIONS),
    "ScatterND": Operator(_scatter_nd, _REDUCTIONS),
    "Slice": Operator(_slice, numbers=(1, 2, 3, 4)),
    "Trilu": Operator(_trilu, numbers=(1,)),
}
