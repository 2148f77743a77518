"""Where the windows of convolutions and pools lie: numbers and arrays, no operators.

:func:`place_windows` says how much padding a kernel needs and how many windows there are;
:func:`padded` makes the array that they read; the functions after it are ways to read it. Spatial
axes are always the last ones. :mod:`slimctl.runtime.convolve` multiplies windows by weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product
from math import prod
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]
Sizes: TypeAlias = tuple[int, ...]
Index: TypeAlias = tuple[Any, ...]


@dataclass(frozen=True)
class Windows:
    """The windows of a kernel on spatial axes; every field has one number for each axis.

    Attributes:
        sizes: Of the input, without padding.
        kernel: Of one window, in taps.
        strides: From one window to the next.
        dilations: From one tap to the next.
        begins: Padding before the input.
        ends: Padding after it, as it was asked for. The last window may end before it (when the
            stride leaves a rest) or, with ceil_mode, after it.
        counts: Windows: the spatial shape of the output.
    """

    sizes: Sizes
    kernel: Sizes
    strides: Sizes
    dilations: Sizes
    begins: Sizes
    ends: Sizes
    counts: Sizes

    @cached_property
    def extents(self) -> Sizes:
        """What the windows cover together, padding included: the sizes of :func:`padded`."""
        covered = zip(self.counts, self.strides, self.kernel, self.dilations, strict=True)
        return tuple((count - 1) * s + _reach(k, d) for count, s, k, d in covered)

    @cached_property
    def is_pointwise(self) -> bool:
        """Whether every window is one element, and every element is a window."""
        return self.counts == self.sizes and set(self.kernel + self.strides) <= {1}


def place_windows(
    sizes: Sequence[int],
    kernel: Sequence[int],
    *,
    strides: Sequence[int] | None = None,
    dilations: Sequence[int] | None = None,
    pads: Sequence[int] | None = None,
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
) -> Windows:
    """Places the windows of a convolution or a pool.

    Args:
        sizes: Of the input's spatial axes.
        kernel: Taps on each axis.
        strides: 1 where it is None.
        dilations: 1 where it is None.
        pads: Before each axis, then after each axis; 0 where it is None. Used with NOTSET only.
        auto_pad: As in ONNX: NOTSET, VALID, SAME_UPPER, SAME_LOWER.
        ceil_mode: Whether a last window that goes beyond the padding counts.

    Raises:
        ValueError: The numbers do not fit each other, or a window does not fit the input.
    """
    return _placed(
        tuple(sizes),
        tuple(kernel),
        strides=tuple(strides or ()),
        dilations=tuple(dilations or ()),
        pads=tuple(pads or ()),
        auto_pad=auto_pad,
        ceil_mode=bool(ceil_mode),
    )


@lru_cache(maxsize=1024)  # a network places the same windows in every run
def _placed(
    sizes: Sizes,
    kernel: Sizes,
    *,
    strides: Sizes,
    dilations: Sizes,
    pads: Sizes,
    auto_pad: str,
    ceil_mode: bool,
) -> Windows:
    strides, dilations, reaches = _steps(len(sizes), kernel, strides, dilations)
    begins, ends = place_padding(sizes, reaches, strides, pads=pads, auto_pad=auto_pad)
    counts = tuple(
        _count(size, reach, stride, begin, end, ceil_mode=ceil_mode)
        for size, reach, stride, begin, end in zip(
            sizes, reaches, strides, begins, ends, strict=True
        )
    )
    return Windows(sizes, kernel, strides, dilations, begins, ends, counts)


def place_spread(
    counts: Sequence[int],
    kernel: Sequence[int],
    *,
    strides: Sequence[int] | None = None,
    dilations: Sequence[int] | None = None,
    pads: Sequence[int] | None = None,
    auto_pad: str = "NOTSET",
    extra: Sequence[int] | None = None,
    wanted: Sequence[int] | None = None,
) -> Windows:
    """Places the windows of a transposed convolution on its output.

    ``size = (count - 1) * stride + reach + extra - padding``: the padding is cut off. A wanted size
    sets the padding; SAME wants ``count * stride``. Zeros follow where the windows do not reach
    that far: onnxruntime 1.32 refuses such a size, and makes the output of SAME smaller.

    Args:
        counts: Sizes of the input's spatial axes: it has one element for each window.
        kernel: Taps on each axis.
        strides: 1 where it is None.
        dilations: 1 where it is None.
        pads: Cut off before each axis, then after each axis; used with NOTSET only.
        auto_pad: As in ONNX. The larger half of an odd padding is cut off at the end with
            SAME_UPPER, at the beginning otherwise (ONNX, ConvTranspose).
        extra: Added to the end of each axis: output_padding; 0 where it is None.
        wanted: Sizes of the output's spatial axes; from the padding where it is None.

    Returns:
        Windows on the output; ``sizes`` is its shape.
    """
    rank = len(counts)
    strides, dilations, reaches = _steps(rank, kernel, strides, dilations)
    added = zip(counts, strides, reaches, extra or (0,) * rank, strict=True)
    full = tuple((count - 1) * stride + reach + more for count, stride, reach, more in added)
    if auto_pad in ("SAME_UPPER", "SAME_LOWER") and not wanted:
        wanted = tuple(count * stride for count, stride in zip(counts, strides, strict=True))
    if wanted:
        sizes = tuple(wanted[-rank:])
        totals = [max(size - keep, 0) for size, keep in zip(full, sizes, strict=True)]
        begins, ends = _halves(totals, larger_first=auto_pad != "SAME_UPPER")
    else:
        begins, ends = place_padding(counts, reaches, strides, pads=pads, auto_pad=auto_pad)
        cut = zip(full, begins, ends, strict=True)
        sizes = tuple(size - begin - end for size, begin, end in cut)
    if min(sizes, default=1) < 0:
        raise ValueError(f"the padding cuts off more than the {list(full)} elements that there are")
    return Windows(sizes, tuple(kernel), strides, dilations, begins, ends, tuple(counts))


def place_padding(
    sizes: Sequence[int],
    reaches: Sequence[int],
    strides: Sequence[int],
    *,
    pads: Sequence[int] | None,
    auto_pad: str,
) -> tuple[Sizes, Sizes]:
    """Padding before and after each axis.

    SAME makes ceil(size / stride) windows; an odd padding has the larger half at the end (UPPER) or
    at the beginning (LOWER).

    Args:
        sizes: Of the input's spatial axes.
        reaches: Of a window on each axis, dilation included.
        strides: From one window to the next.
        pads: Before each axis, then after each axis; used with NOTSET only.
        auto_pad: As in ONNX.
    """
    rank = len(sizes)
    if auto_pad in ("SAME_UPPER", "SAME_LOWER"):
        totals = [
            max((-(-size // stride) - 1) * stride + reach - size, 0)
            for size, reach, stride in zip(sizes, reaches, strides, strict=True)
        ]
        return _halves(totals, larger_first=auto_pad == "SAME_LOWER")
    if auto_pad not in ("NOTSET", "VALID", ""):
        raise ValueError(f"auto_pad is '{auto_pad}'")
    if auto_pad == "VALID" or not pads:
        return (0,) * rank, (0,) * rank
    if len(pads) != 2 * rank or min(pads) < 0:
        raise ValueError(f"pads are {list(pads)}, not {2 * rank} numbers from 0 up")
    return tuple(pads[:rank]), tuple(pads[rank:])


def padded(x: Array, windows: Windows, value: Any = 0) -> Array:
    """The part of an array that windows cover, with a value where they go beyond it.

    Args:
        x: Spatial axes last; not changed.
        windows: On these axes.
        value: Of the padding: the zero point, minus infinity, ...

    Returns:
        Axes of the sizes ``windows.extents``. A view of the array if no padding is needed.
    """
    read = [
        min(size, extent - begin)  # a window may end before the input, or even before its beginning
        for size, extent, begin in zip(windows.sizes, windows.extents, windows.begins, strict=True)
    ]
    all_inside: Index = (..., *(slice(max(stop, 0)) for stop in read))
    inside = x[all_inside]
    if inside.shape[x.ndim - len(read) :] == windows.extents:
        return inside
    result = np.full((*x.shape[: x.ndim - len(read)], *windows.extents), value, x.dtype)
    begins = zip(windows.begins, read, strict=True)
    spot: Index = (..., *(slice(begin, begin + max(stop, 0)) for begin, stop in begins))
    result[spot] = inside
    return result


def window_view(x: Array, windows: Windows) -> Array:
    """All windows of a padded array, as a view that cannot be written to.

    Args:
        x: As :func:`padded` leaves it, of any strides.
        windows: On its last axes.

    Returns:
        [..., *counts, *kernel]: the axes before the spatial ones stay.
    """
    lead = x.ndim - len(windows.kernel)
    steps = x.strides[lead:]
    between = tuple(step * stride for step, stride in zip(steps, windows.strides, strict=True))
    within = tuple(step * dilation for step, dilation in zip(steps, windows.dilations, strict=True))
    return np.lib.stride_tricks.as_strided(
        x,
        (*x.shape[:lead], *windows.counts, *windows.kernel),
        (*x.strides[:lead], *between, *within),
        writeable=False,
    )


def tap_view(x: Array, windows: Windows) -> Array:
    """The same view with the taps before the windows: [..., *kernel, *counts]."""
    rank = len(windows.kernel)
    lead = x.ndim - rank
    axes = (*range(lead + rank, lead + 2 * rank), *range(lead, lead + rank))
    return window_view(x, windows).transpose(*range(lead), *axes)


def run_view(x: Array, windows: Windows) -> Array:
    """For strides of 1, a view of windows that are not cut at the end of a row.

    The windows of all rows are one run, with some between the rows that belong to none: a copy of
    the view copies long pieces. Only the rows are cut short: position ``[i, j]`` of the output is
    element ``i * extents[1] + j`` of the run.

    Args:
        x: As :func:`padded` leaves it, contiguous in its spatial axes.
        windows: On its last axes, with strides of 1.

    Returns:
        [..., *kernel, run].
    """
    assert set(windows.strides) <= {1}, "the windows of a run are neighbors"
    lead = x.ndim - len(windows.kernel)
    steps = x.strides[lead:]
    between = zip(windows.counts, steps, strict=True)
    run = 1 + sum((count - 1) * step // x.itemsize for count, step in between)
    within = (step * dilation for step, dilation in zip(steps, windows.dilations, strict=True))
    return np.lib.stride_tricks.as_strided(
        x,
        (*x.shape[:lead], *windows.kernel, run),
        (*x.strides[:lead], *within, x.itemsize),
        writeable=False,
    )


def taps(windows: Windows) -> Iterator[tuple[Sizes, Index]]:
    """For every tap of the kernel, its position and the index of what it sees in a padded array.

    ``x[index]`` is [..., *counts], a view.
    """
    for position in product(*map(range, windows.kernel)):
        yield position, (..., *map(_seen, position, *_per_axis(windows)))


def reduce_windows(x: Array, windows: Windows, function: np.ufunc, *, empty: Any) -> Array:
    """Combines the elements of each window by a function of two, one axis after the other.

    Args:
        x: Spatial axes last, sizes ``windows.sizes``.
        windows: On these axes.
        function: Associative and commutative: numpy.maximum, numpy.add.
        empty: What it does not change by: the value of the padding.

    Returns:
        [..., *counts]; the array itself if every window is one element.
    """
    result = padded(x, windows, empty)
    lead = x.ndim - len(windows.kernel)
    for axis, size in enumerate(windows.kernel):
        before = (slice(None),) * (lead + axis)
        first, *others = (result[(*before, axis_tap(windows, axis, tap))] for tap in range(size))
        result = first
        for number, other in enumerate(others):
            result = function(result, other, out=result if number else None)
    return result


def axis_tap(windows: Windows, axis: int, tap: int) -> slice:
    """What one tap of the kernel sees along one axis of a padded array."""
    return _seen(tap, windows.dilations[axis], windows.strides[axis], windows.counts[axis])


def tap_coordinates(windows: Windows, axis: int) -> Array:
    """Where the taps of all windows lie on one axis of the input: [kernel, counts].

    Negative numbers, and those from the size up, are padding.
    """
    taps = np.arange(windows.kernel[axis]) * windows.dilations[axis] - windows.begins[axis]
    return taps[:, None] + np.arange(windows.counts[axis]) * windows.strides[axis]


def columns(x: Array, windows: Windows) -> Array:
    """The windows of a padded array as columns of matrices: im2col.

    Args:
        x: [N, C, *extents], as :func:`padded` leaves it.
        windows: On its last axes.

    Returns:
        [N, C * taps, outputs], contiguous, so that ``weights.reshape(M, -1) @ columns`` is the
        convolution. A view if there is nothing to copy.
    """
    rows = x.shape[1] * prod(windows.kernel)
    return tap_view(x, windows).reshape(x.shape[0], rows, -1)


def _steps(
    rank: int,
    kernel: Sequence[int],
    strides: Sequence[int] | None,
    dilations: Sequence[int] | None,
) -> tuple[Sizes, Sizes, Sizes]:
    """Strides, dilations and reaches, checked."""
    strides, dilations = tuple(strides or (1,) * rank), tuple(dilations or (1,) * rank)
    if not len(kernel) == len(strides) == len(dilations) == rank:
        raise ValueError(
            f"kernel {list(kernel)}, strides {list(strides)} and dilations {list(dilations)} do not"
            f" have one number for each of the {rank} spatial axes"
        )
    if min((*kernel, *strides, *dilations), default=1) < 1:
        raise ValueError("kernel, strides and dilations must be positive")
    return strides, dilations, tuple(map(_reach, kernel, dilations))


def _halves(totals: Sequence[int], *, larger_first: bool) -> tuple[Sizes, Sizes]:
    smaller = tuple(total // 2 for total in totals)
    larger = tuple(total - total // 2 for total in totals)
    return (larger, smaller) if larger_first else (smaller, larger)


def _reach(taps: int, dilation: int) -> int:
    return (taps - 1) * dilation + 1


def _count(size: int, reach: int, stride: int, begin: int, end: int, *, ceil_mode: bool) -> int:
    """Windows on one axis."""
    room = begin + size + end - reach
    if room < 0:
        raise ValueError(f"a window of {reach} does not fit {size} elements and their padding")
    if not ceil_mode:
        return room // stride + 1
    count = -(-room // stride) + 1
    # the last window must begin inside the input or the padding before it
    return count - 1 if (count - 1) * stride >= size + begin else count


def _per_axis(windows: Windows) -> tuple[Sizes, Sizes, Sizes]:
    return windows.dilations, windows.strides, windows.counts


def _seen(tap: int, dilation: int, stride: int, count: int) -> slice:
    begin = tap * dilation
    return slice(begin, begin + (count - 1) * stride + 1, stride)
