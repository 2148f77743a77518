"""Where kernels of convolutions and pools lie on their input."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional

from slimctl.training.operator import Call


@dataclass(frozen=True)
class Window:
    """A kernel that slides over the spatial axes; one entry per axis.

    Attributes:
        kernel: Its size.
        strides: Steps.
        dilations: Distances between its taps.
        begins: Padding before the first element.
        ends: Padding behind the last.
    """

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    begins: tuple[int, ...]
    ends: tuple[int, ...]

    @property
    def spans(self) -> tuple[int, ...]:
        """From the first tap to the last, both included."""
        return tuple((k - 1) * d + 1 for k, d in zip(self.kernel, self.dilations, strict=True))

    @property
    def padding(self) -> tuple[int, ...] | None:
        """Padding that both sides have alike; None where they differ."""
        return self.begins if self.begins == self.ends else None


def window_of(call: Call, kernel: Sequence[int], sizes: Sequence[int]) -> Window:
    """The window of a node.

    Args:
        call: Of Conv, MaxPool, AveragePool.
        kernel: Its size.
        sizes: Of the spatial axes of the input; ``auto_pad`` depends on them.
    """
    rank = len(kernel)
    strides = tuple(call.attribute("strides", (1,) * rank))
    dilations = tuple(call.attribute("dilations", (1,) * rank))
    pads = tuple(call.attribute("pads", (0,) * 2 * rank))
    window = Window(tuple(kernel), strides, dilations, pads[:rank], pads[rank:])
    auto_pad = call.attribute("auto_pad", "NOTSET")
    if auto_pad not in ("SAME_UPPER", "SAME_LOWER"):
        return window
    # As many positions as strides fit into the input.
    totals = [
        max((-(-size // stride) - 1) * stride + span - size, 0)
        for size, stride, span in zip(sizes, strides, window.spans, strict=True)
    ]
    begins, ends = halves(totals, more_behind=auto_pad == "SAME_UPPER")
    return Window(window.kernel, strides, dilations, begins, ends)


def halves(totals: Sequence[int], *, more_behind: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Padding on both sides; where it is odd, one side gets more."""
    small, large = tuple(t // 2 for t in totals), tuple(t - t // 2 for t in totals)
    return (small, large) if more_behind else (large, small)


def padded(x: Tensor, begins: Sequence[int], ends: Sequence[int], value: float = 0.0) -> Tensor:
    """Pads the last axes; negative numbers cut off."""
    if not any((*begins, *ends)):
        return x
    # torch wants the last axis first
    pairs = [n for pair in zip(reversed(begins), reversed(ends), strict=True) for n in pair]
    return functional.pad(x, pairs, value=value)
