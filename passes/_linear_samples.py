"""What linear layers read and write, as rows of matrices, at some positions of each sample.

A convolution is a matrix product at every position: row ``x`` holds what the kernel sees there, row
``y`` what it writes. A few positions of each image say as much about the weights as all of them do
(He et al., "Channel Pruning for Accelerating Very Deep Neural Networks", ICCV 2017, section 3.1,
take ten per image), so memory does not grow with the size of the images.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from slimctl.passes._layers import Layer, linear_input, output_axis, recognize

Rows = NDArray[np.float32]


@dataclass(frozen=True)
class LinearLayer:
    """A Conv, Gemm or MatMul with constant weights, seen as ``y = W x + b`` at each position.

    Attributes:
        layer: The node and its weights.
        groups: Independent parts of the channels; [groups, outputs, inputs] is the matrix.
        kernel: Size of the kernel, empty for Gemm and MatMul.
        strides: As the kernel.
        dilations: As the kernel.
        pads: Begins, then ends.
    """

    layer: Layer
    groups: int
    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    pads: tuple[int, ...]

    @property
    def name(self) -> str:
        """Name of the node."""
        return self.layer.node.name or ""

    @property
    def data(self) -> str:
        """Name of the tensor that is read."""
        return self.layer.data.name or ""

    @property
    def output(self) -> str:
        """Name of the tensor that is written."""
        return self.layer.output.name or ""

    def matrix(self, weight: NDArray[Any] | None = None) -> NDArray[np.float64]:
        """The weight as [groups, outputs of a group, inputs of a group times kernel]."""
        array = (self.layer.weight() if weight is None else weight).astype(np.float64)
        if self.layer.node.op_type != "Conv":
            rows = array if output_axis(self.layer.node, 2) == 0 else array.T
            return rows[None]
        return array.reshape(self.groups, array.shape[0] // self.groups, -1)

    def weight_of(self, matrix: NDArray[np.float64]) -> NDArray[Any]:
        """The inverse of :meth:`matrix`, in the type of the weight."""
        current = self.layer.weight()
        if self.layer.node.op_type != "Conv":
            rows = matrix[0] if output_axis(self.layer.node, 2) == 0 else matrix[0].T
            return np.asarray(rows, current.dtype)
        return np.asarray(matrix.reshape(current.shape), current.dtype)

    def positions(
        self, written: Sequence[int], count: int, seed: Sequence[int]
    ) -> NDArray[np.int64]:
        """Some positions of an output, evenly drawn, the same for the same seed; [count, axes]."""
        axes = self._position_axes(written)
        total = math.prod(axes)
        drawn = np.random.default_rng(seed).permutation(total)[: min(count, total)]
        return np.stack(np.unravel_index(np.sort(drawn), axes), axis=1)

    def _position_axes(self, written: Sequence[int]) -> tuple[int, ...]:
        """Sizes of all axes of an output but the channels."""
        if self.layer.node.op_type == "Conv":
            return (written[0], *written[2:])
        return tuple(written[:-1])

    def written(self, y: NDArray[Any], positions: NDArray[np.int64]) -> Rows:
        """Outputs at positions, [positions, groups, outputs of a group]."""
        convolved = self.layer.node.op_type == "Conv"
        rows: Rows = (np.moveaxis(y, 1, -1) if convolved else y)[tuple(positions.T)]
        return rows.reshape(len(positions), self.groups, -1).astype(np.float32, copy=False)

    def read(self, x: NDArray[Any], positions: NDArray[np.int64]) -> Rows:
        """What the weights see at positions, [positions, groups, inputs of a group * kernel]."""
        if self.layer.node.op_type == "Gemm" and self._transposed():
            x = x.T
        if self.layer.node.op_type != "Conv":
            plain: Rows = x[tuple(positions.T)][:, None, :]
            return plain.astype(np.float32, copy=False)
        rank = len(self.kernel)
        pads = list(zip(self.pads[:rank], self.pads[rank:], strict=True))
        padded = np.pad(x, [(0, 0), (0, 0), *pads]) if any(self.pads) else x
        channels = padded.shape[1]
        grid = np.meshgrid(
            *(np.arange(k) * d for k, d in zip(self.kernel, self.dilations, strict=True)),
            indexing="ij",
        )
        places = [
            positions[:, 1 + axis, None] * self.strides[axis] + grid[axis].reshape(1, -1)
            for axis in range(rank)
        ]  # each [positions, taps]
        seen = np.moveaxis(padded, 1, -1)[(positions[:, :1], *places)]  # [positions, taps, C]
        rows: Rows = np.moveaxis(seen, -1, 1).reshape(len(positions), channels, -1)
        return rows.reshape(len(positions), self.groups, -1).astype(np.float32, copy=False)

    def _transposed(self) -> bool:
        attribute = self.layer.node.attributes.get("transA")
        return attribute is not None and bool(attribute.as_int())


def linear_layer(node: ir.Node) -> LinearLayer | str:
    """The layer as matrices, or the reason why it cannot be seen as such."""
    layer = recognize(node)
    if isinstance(layer, str):
        return layer
    if node.op_type == "ConvTranspose":
        return "several positions of a transposed convolution overlap"
    if node.op_type == "MatMul" and layer.weight().ndim > 2:
        return "its weight is a stack of matrices"
    spec = linear_input(layer)
    if spec.auto_pad not in ("NOTSET", "VALID"):
        return "auto_pad leaves the padding to the shape"
    return LinearLayer(layer, layer.groups, spec.kernel, spec.strides, spec.dilations, spec.pads)
