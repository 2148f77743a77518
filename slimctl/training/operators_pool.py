"""Pooling over windows and over everything."""

from __future__ import annotations

import math

from torch import Tensor
from torch.nn import functional

from slimctl.training.operator import Call, Operator, any_of, only
from slimctl.training.windows import Window, padded, window_of

_MAXIMA = {1: functional.max_pool1d, 2: functional.max_pool2d, 3: functional.max_pool3d}
_AVERAGES = {1: functional.avg_pool1d, 2: functional.avg_pool2d, 3: functional.avg_pool3d}


def _spatial(call: Call) -> str:
    rank = len(call.attribute("kernel_shape"))
    return "" if rank in _MAXIMA else f"it has {rank} spatial axes"


def _undilated(call: Call) -> str:
    return "it is dilated" if set(call.attribute("dilations", ())) - {1} else ""


def _rest(call: Call, window: Window, x: Tensor) -> tuple[int, ...]:
    """Elements that the last window needs behind the padding, where sizes are rounded up.

    A window that would begin in the padding behind the input does not count.
    """
    if not call.attribute("ceil_mode", 0):
        return (0,) * len(window.kernel)
    found = []
    for axis, span in enumerate(window.spans):
        begin, end, stride = window.begins[axis], window.ends[axis], window.strides[axis]
        size = x.shape[2 + axis]
        steps = -(-(begin + size + end - span) // stride)
        if steps * stride >= begin + size:
            steps -= 1
        found.append(max(steps * stride + span - (begin + size + end), 0))
    return tuple(found)


def _max_pool(call: Call, x: Tensor) -> Tensor:
    """[N, C, ...]"""
    window = window_of(call, call.attribute("kernel_shape"), x.shape[2:])
    ends = [e + r for e, r in zip(window.ends, _rest(call, window, x), strict=True)]
    wide = padded(x, window.begins, ends, -math.inf)
    return _MAXIMA[len(window.kernel)](wide, window.kernel, window.strides, 0, window.dilations)


def _average_pool(call: Call, x: Tensor) -> Tensor:
    """[N, C, ...]; divided by the elements that count."""
    window = window_of(call, call.attribute("kernel_shape"), x.shape[2:])
    rest = _rest(call, window, x)
    pool = _AVERAGES[len(window.kernel)]
    if not any((*window.begins, *window.ends, *rest)):
        return pool(x, window.kernel, window.strides)
    counted = x.new_ones((1, 1, *x.shape[2:]))
    value = 1.0 if call.attribute("count_include_pad", 0) else 0.0
    counted = padded(padded(counted, window.begins, window.ends, value), (0,) * len(rest), rest)
    ends = [e + r for e, r in zip(window.ends, rest, strict=True)]
    wide = padded(x, window.begins, ends)
    return pool(wide, window.kernel, window.strides) / pool(counted, window.kernel, window.strides)


def _spatial_axes(x: Tensor) -> tuple[int, ...]:
    return tuple(range(2, x.ndim))


def _global_average_pool(call: Call, x: Tensor) -> Tensor:
    del call
    return x.mean(_spatial_axes(x), keepdim=True)


def _global_max_pool(call: Call, x: Tensor) -> Tensor:
    del call
    return x.amax(_spatial_axes(x), keepdim=True)


OPERATORS = {
    "AveragePool": Operator(_average_pool, any_of(_spatial, _undilated)),
    "GlobalAveragePool": Operator(_global_average_pool),
    "GlobalMaxPool": Operator(_global_max_pool),
    "MaxPool": Operator(_max_pool, any_of(_spatial, only(storage_order=(0,)))),
}
