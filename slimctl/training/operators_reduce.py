"""Reductions over axes. The axes are an input, as from operator set 18 on."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from slimctl.training.operator import Call, Operator, Results, only

Axes: TypeAlias = tuple[int, ...]


def _reduction(reduce: Callable[[Tensor, Axes, bool], Tensor]) -> Operator:
    def run(call: Call, x: Tensor, axes: Tensor | None = None) -> Tensor:
        listed = () if axes is None else tuple(axes.tolist())
        if not listed and call.attribute("noop_with_empty_axes", 0):
            return reduce(x.unsqueeze(0), (0,), False)  # each element by itself
        # torch reads no axes as all of them, or as none, depending on the function.
        return reduce(x, listed or tuple(range(x.ndim)), bool(call.attribute("keepdims", 1)))

    return Operator(run, numbers=(1,))


def _sum(x: Tensor, axes: Axes, keep: bool) -> Tensor:
    return x.sum(axes, keepdim=keep, dtype=x.dtype)  # torch would make small integers large


def _prod(x: Tensor, axes: Axes, keep: bool) -> Tensor:
    for axis in sorted((axis % x.ndim for axis in axes), reverse=True):
        x = x.prod(axis, keepdim=keep, dtype=x.dtype)
    return x


def _l1(x: Tensor, axes: Axes, keep: bool) -> Tensor:
    return _sum(x.abs(), axes, keep)


def _l2(x: Tensor, axes: Axes, keep: bool) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(x, 2, axes, keepdim=keep)
    return norm


def _sum_square(x: Tensor, axes: Axes, keep: bool) -> Tensor:
    return _sum(x.square(), axes, keep)


def _log_sum(x: Tensor, axes: Axes, keep: bool) -> Tensor:
    return _sum(x, axes, keep).log()


def _arg(select: Callable[..., Tensor]) -> Operator:
    def run(call: Call, x: Tensor) -> Results:
        return select(x, call.attribute("axis", 0), keepdim=bool(call.attribute("keepdims", 1)))

    return Operator(run, only(select_last_index=(0,)))


def _top_k(call: Call, x: Tensor, k: Tensor) -> Results:
    axis, largest = call.attribute("axis", -1), bool(call.attribute("largest", 1))
    values, indices = torch.topk(x, int(k), axis, largest)
    return values, indices


OPERATORS = {
    "ArgMax": _arg(torch.argmax),
    "ArgMin": _arg(torch.argmin),
    "ReduceL1": _reduction(_l1),
    "ReduceL2": _reduction(_l2),
    "ReduceLogSum": _reduction(_log_sum),
    "ReduceLogSumExp": _reduction(torch.logsumexp),
    "ReduceMax": _reduction(torch.amax),
    "ReduceMean": _reduction(torch.mean),
    "ReduceMin": _reduction(torch.amin),
    "ReduceProd": _reduction(_prod),
    "ReduceSum": _reduction(_sum),
    "ReduceSumSquare": _reduction(_sum_square),
    "TopK": Operator(_top_k, outputs=2, numbers=(1,)),
}
