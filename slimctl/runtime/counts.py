"""What is counted at the output of a quantized node while it runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass
class Counts:
    """Sums over all runs of one node.

    Attributes:
        elements: Codes at the output.
        at_low: Codes at the lower end of the type.
        at_high: Codes at the upper end.
        overflowed: Accumulators outside int32.
        device_differs: Codes that the device's arithmetic makes different from exact arithmetic.
        device_steps: The largest such difference, in quantization steps.
        low: Least code of each channel, [channels].
        high: Largest code of each channel, [channels].
        lowest: Least code of the type.
        highest: Largest code of the type.
    """

    elements: int = 0
    at_low: int = 0
    at_high: int = 0
    overflowed: int = 0
    device_differs: int = 0
    device_steps: int = 0
    low: NDArray[Any] | None = field(default=None, repr=False)
    high: NDArray[Any] | None = field(default=None, repr=False)
    lowest: int = 0
    highest: int = 0

    def add(self, codes: NDArray[Any], channel_axis: int | None) -> None:
        """Counts the codes of one output."""
        limits = np.iinfo(codes.dtype)
        self.lowest, self.highest = int(limits.min), int(limits.max)
        self.elements += codes.size
        self.at_low += int(np.count_nonzero(codes == limits.min))
        self.at_high += int(np.count_nonzero(codes == limits.max))
        if not codes.size:
            return
        axis = channel_axis if channel_axis is not None and codes.ndim > channel_axis else None
        others = None if axis is None else tuple(i for i in range(codes.ndim) if i != axis)
        low, high = np.atleast_1d(codes.min(axis=others)), np.atleast_1d(codes.max(axis=others))
        if self.low is not None and self.high is not None and self.low.shape == low.shape:
            low, high = np.minimum(self.low, low), np.maximum(self.high, high)
        self.low, self.high = low, high

    def add_device(self, exact: NDArray[Any], device: NDArray[Any]) -> None:
        """Counts where a device computes other codes."""
        steps = np.abs(exact.astype(np.int64) - device.astype(np.int64))
        self.device_differs += int(np.count_nonzero(steps))
        self.device_steps = max(self.device_steps, int(steps.max(initial=0)))

    @property
    def dead_channels(self) -> int:
        """Channels that had one code in all runs."""
        if self.low is None or self.high is None or self.low.size < 2:
            return 0
        return int(np.count_nonzero(self.low == self.high))

    @property
    def used_range(self) -> float:
        """Part of the type's range between the least and the largest code, from 0 to 1."""
        if self.low is None or self.high is None:
            return 0.0
        return (int(self.high.max()) - int(self.low.min())) / (self.highest - self.lowest)
