"""Weights of 4 bits in blocks, computed in float: what ``--mode weight-only`` writes by default."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, ClassVar, Final

import onnx_ir as ir

from slimctl.core.target import Target
from slimctl.graph.edit import NameScope, all_nodes, remove_dead
from slimctl.graph.select import Selection
from slimctl.numerics.blocks import (
    Blocks,
    Grid,
    in_blocks,
    round_blocks,
    searched_parameters,
)
from slimctl.passes._precision import Carrier, Kind, Layers
from slimctl.passes._weights_layers import Shared, Wanted, block_for, find, recognize
from slimctl.passes._weights_write import Editor, write_kernels

if TYPE_CHECKING:
    from slimctl.passes._attempt import Work

_BITS: Final = 4
_BLOCK: Final = 32
_WANTED: Final = Wanted(_BLOCK, _BITS, kernels=True, embeddings=False)
_ANY_LEVEL: Final = 0
"""MatMulNBits computes in the type of the model."""


class Int4(Kind):
    """Weights of 4 bits, activations in float: onnxruntime's MatMulNBits."""

    name: ClassVar[str] = "int4"
    meaning: ClassVar[str] = f"weights of 4 bits in blocks of {_BLOCK}, computed in float"
    stored_bits: ClassVar[float] = (
        _BITS + (32 + _BITS) / _BLOCK
    )  # a scale and a zero point per block
    multiplied_bits: ClassVar[int] = 32 * 32
    carrier: ClassVar[Carrier] = "real"

    def against(self, layer: str, layers: Layers) -> str:
        """Matrices only, and not in front of training."""
        if "qat" in layers.work.context.later:
            return "training has no weights in blocks"
        found = recognize(layers.nodes[layer], _WANTED)
        if isinstance(found, str):
            return found
        block = block_for(found.storage, _WANTED)
        return block if isinstance(block, str) else ""

    def keeps_itself(self, target: Target) -> bool:
        """It is an operator of its own."""
        del target
        return True

    def write(self, model: ir.Model, layers: Collection[str], work: Work) -> None:
        """Writes MatMulNBits. What codes a matrix gets does not depend on the other layers."""
        rest = {n.name: "another precision" for n in all_nodes(model) if n.name not in layers}
        selection = Selection(reasons={name: why for name, why in rest.items() if name})
        matrices, _ = find(model, _WANTED, selection)
        editor = Editor(model, NameScope(model), "quantize-static")
        for shared in matrices:
            stored = shared.storage
            key = (self.name, stored.value.name, stored.transposed, stored.factor)
            if key not in work.blocks:
                work.blocks[key] = _rounded(shared)
            write_kernels(shared, work.blocks[key], _ANY_LEVEL, editor)
        remove_dead(model)


def _rounded(shared: Shared) -> Blocks:
    """To nearest, with the parameters of least squared error."""
    grid, matrix = Grid(_BITS, False, shared.storage.dtype), shared.storage.matrix()
    parameters = searched_parameters(in_blocks(matrix, shared.block), grid)
    return round_blocks(matrix, parameters, shared.block, grid)
