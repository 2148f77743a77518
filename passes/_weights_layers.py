"""Which layers get weights in blocks, how they keep them, and why others do not."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from slimctl.core.contract import Skipped
from slimctl.graph.edit import all_graphs, const_array
from slimctl.graph.select import Selection
from slimctl.numerics.blocks import Matrix

_DATA, _WEIGHT = 0, 1
_BYTE: Final = 8
_TYPES: Final = (np.dtype(np.float32), np.dtype(np.float16))
_SMALLEST_BLOCK: Final = 16
_LARGEST_BLOCK: Final = {2: 256}
"""Of onnxruntime's kernels for MatMulNBits, by bits; there is none for 4 and 8 bits."""

_WITHOUT_KERNEL: Final = {
    "Conv": "convolution",
    "ConvTranspose": "convolution",
    "LSTM": "LSTM",
    "GRU": "GRU",
    "RNN": "RNN",
}
"""Operators with weights that onnxruntime computes in float only, by what they are called."""


class Storage(NamedTuple):
    """Which matrix a layer reads.

    Attributes:
        value: The constant that holds it.
        transposed: It is stored as [outputs, inputs].
        factor: What it is multiplied with, ``alpha`` of Gemm.
    """

    value: ir.Value
    transposed: bool
    factor: float = 1.0

    def matrix(self) -> Matrix:
        """[outputs, inputs], float32."""
        array = const_array(self.value)
        assert array is not None, "checked when the layer was found"
        found = (array if self.transposed else array.T).astype(np.float32, copy=False)
        return found if self.factor == 1.0 else found * np.float32(self.factor)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type in which the model keeps it, and so its scales."""
        array = const_array(self.value)
        assert array is not None, "checked when the layer was found"
        return array.dtype


@dataclass(frozen=True)
class Layer:
    """A MatMul, a Gemm or a Gather with a constant matrix.

    Attributes:
        node: The node.
        storage: Its matrix; for Gather [rows of the table, width].
    """

    node: ir.Node
    storage: Storage

    @property
    def is_table(self) -> bool:
        """Rows are looked up, not multiplied."""
        return self.node.op_type == "Gather"

    @property
    def data(self) -> ir.Value:
        """The activation that a product reads."""
        value = self.node.inputs[_DATA]
        assert value is not None, "checked when the layer was found"
        return value


@dataclass(frozen=True)
class Shared:
    """Layers that read the same matrix; it is quantized and stored once.

    Attributes:
        storage: The matrix.
        layers: In the order of the graph.
        block: Inputs per block.
    """

    storage: Storage
    layers: tuple[Layer, ...]
    block: int

    @property
    def name(self) -> str:
        """Name of the first node."""
        return self.layers[0].node.name or ""

    @property
    def products(self) -> list[Layer]:
        """Those that multiply."""
        return [layer for layer in self.layers if not layer.is_table]

    @property
    def has_table(self) -> bool:
        """Whether rows of it are looked up."""
        return any(layer.is_table for layer in self.layers)


class Wanted(NamedTuple):
    """What is asked for.

    Attributes:
        block: Inputs per block, 0 for one block per output.
        bits: Bits per weight.
        kernels: Blocks must suit the kernels of MatMulNBits and GatherBlockQuantized.
        embeddings: Tables are wanted, too.
    """

    block: int
    bits: int
    kernels: bool
    embeddings: bool


def find(
    model: ir.Model, wanted: Wanted, selection: Selection
) -> tuple[list[Shared], list[Skipped]]:
    """Matrices to quantize in the order of their first layer, and what is left alone."""
    skipped: list[Skipped] = []
    found: dict[Storage, list[Layer]] = defaultdict(list)
    for node in _candidates(model, wanted):
        layer = selection.reason_against(node) or recognize(node, wanted)
        if isinstance(layer, str):
            skipped.append(Skipped(node.name or "", layer))
        else:
            found[layer.storage].append(layer)
    shared = []
    tied = _tied(found)
    skipped += _without_gain(tied)
    for storage, layers in tied.items():
        if not layers:
            continue
        block = block_for(storage, wanted)
        if isinstance(block, str):
            skipped += [Skipped(layer.node.name or "", block) for layer in layers]
        else:
            shared += _of_one_layout(Shared(storage, tuple(layers), block), wanted)
    return shared, skipped


def _of_one_layout(shared: Shared, wanted: Wanted) -> list[Shared]:
    """Rows of a table are stored without gaps, and the standard operators want it transposed."""
    products = tuple(shared.products)
    if not products or not shared.has_table:
        return [shared]
    if wanted.kernels and shared.storage.matrix().shape[1] % shared.block == 0:
        return [shared]
    tables = tuple(layer for layer in shared.layers if layer.is_table)
    return [replace(shared, layers=products), replace(shared, layers=tables)]


def _candidates(model: ir.Model, wanted: Wanted) -> Iterator[ir.Node]:
    for graph in all_graphs(model):
        for node in graph:
            if node.domain not in ("", "ai.onnx"):
                continue
            if node.op_type in ("MatMul", "Gemm", *_WITHOUT_KERNEL) or (
                wanted.embeddings and node.op_type == "Gather" and _is_float_table(node)
            ):
                yield node


def _is_float_table(node: ir.Node) -> bool:
    """Gathers of sizes and positions are everywhere; they are no candidates."""
    array = const_array(node.inputs[_DATA])
    return array is not None and array.dtype.kind == "f" and array.ndim > 1


def recognize(node: ir.Node, wanted: Wanted) -> Layer | str:
    """The layer, or the reason why its weight stays."""
    if node.op_type in _WITHOUT_KERNEL:
        return f"onnxruntime has no {_WITHOUT_KERNEL[node.op_type]} with weights in blocks"
    storage = _table(node) if node.op_type == "Gather" else _factor(node)
    if isinstance(storage, str):
        return storage
    array = const_array(storage.value)
    assert array is not None, "a constant"
    reason = _reason_against(array, storage.factor)
    if reason is None and node.op_type == "Gather":
        reason = _reason_against_table(node, array, wanted)
    return reason or Layer(node, storage)


def _table(node: ir.Node) -> Storage | str:
    value = node.inputs[_DATA]
    assert value is not None, "a float table"
    if _int(node, "axis") != 0:
        return "it does not look up rows: its axis is not the first"
    return Storage(value, True)


def _reason_against_table(node: ir.Node, array: NDArray[Any], wanted: Wanted) -> str | None:
    width, index = array.shape[1], node.inputs[1]
    if wanted.kernels:
        if width * wanted.bits % _BYTE:
            return f"rows of {width} {wanted.bits}-bit codes do not fill whole bytes"
        return None
    if wanted.bits < _BYTE:
        return f"the standard Gather takes no {wanted.bits}-bit codes; the format nbits has one"
    blocks = wanted.block and -(-width // wanted.block) > 1
    if not blocks and (index is None or index.shape is None or not index.shape.rank()):
        return "it may look up a single row: one scale and no axis"
    return None


def _factor(node: ir.Node) -> Storage | str:
    """The matrix on the right of a product."""
    value = node.inputs[_WEIGHT] if len(node.inputs) > _WEIGHT else None
    if value is None or node.inputs[_DATA] is None:
        return "an input is missing"
    turned = bool(_int(node, "transB"))
    array = const_array(value)
    if array is None and (inner := _transposed(value)) is not None:
        value, turned, array = inner, not turned, const_array(inner)
    if array is None:
        left = const_array(node.inputs[_DATA]) is not None
        return (
            "the constant is the left factor: kernels want it on the right"
            if left
            else "the weight is computed at run time"
        )
    alpha = node.attributes.get("alpha")
    return Storage(value, turned, 1.0 if alpha is None else alpha.as_float())


def _transposed(value: ir.Value) -> ir.Value | None:
    """The constant that a value is the transpose of."""
    node = value.producer()
    if node is None or node.op_type != "Transpose" or node.domain:
        return None
    source = node.inputs[0]
    array = const_array(source)
    order = node.attributes.get("perm")
    if array is None or array.ndim != 2 or (order and list(order.as_ints()) != [1, 0]):
        return None
    return source


def _int(node: ir.Node, name: str) -> int:
    attribute = node.attributes.get(name)
    return 0 if attribute is None else attribute.as_int()


def _reason_against(array: NDArray[Any], factor: float) -> str | None:
    if array.dtype not in _TYPES:
        return f"the weight is {array.dtype}, not float32 or float16"
    if array.ndim != 2:
        return f"the weight has {array.ndim} dimensions: kernels take a matrix"
    if array.size == 0:
        return "the weight is empty"
    largest = max(abs(float(array.max())), abs(float(array.min()))) * abs(factor)
    if not largest <= np.finfo(array.dtype).max:  # also false for NaN
        return "the weight holds NaN or infinite values"
    return None


def _tied(found: dict[Storage, list[Layer]]) -> dict[Storage, list[Layer]]:
    """A table that equals the matrix of a product shares it; exporters store the transpose."""
    tables = [key for key, layers in found.items() if layers[0].is_table]
    merged = dict(found)
    for table in tables:
        for other in list(merged):
            if other == table or other.factor != 1.0 or merged[other][0].is_table:
                continue
            left, right = table.matrix(), other.matrix()
            if left.shape == right.shape and np.array_equal(left, right):
                merged[table] = [*merged[table], *merged.pop(other)]
    return merged


def _without_gain(found: dict[Storage, list[Layer]]) -> Iterator[Skipped]:
    """Takes out tables that stay in float anyway because others read them; says which."""
    ours = {layer.node for layers in found.values() for layer in layers}
    for storage, layers in found.items():
        others = [node.name for node in _readers(storage.value) if node not in ours]
        for layer in [layer for layer in layers if layer.is_table and others]:
            layers.remove(layer)
            yield Skipped(layer.node.name or "", f"'{others[0]}' needs the table in float")


def _readers(value: ir.Value) -> Iterator[ir.Node]:
    """Nodes that read a constant, or its transpose."""
    for node in (use.node for use in value.uses()):
        if node.op_type == "Transpose" and not node.domain:
            yield from (use.node for use in node.outputs[0].uses())
        else:
            yield node


def block_for(storage: Storage, wanted: Wanted) -> int | str:
    """Inputs per block, no more than there are; or why there is none."""
    inputs = int(storage.matrix().shape[1])
    enough = max(1 << (inputs - 1).bit_length(), _SMALLEST_BLOCK)
    block = min(wanted.block or enough, enough)
    if not wanted.block and not wanted.kernels:
        block = inputs
    largest = _LARGEST_BLOCK.get(wanted.bits, block)
    if wanted.kernels and block > largest:
        return f"{wanted.bits}-bit kernels take blocks of at most {largest} inputs"
    blocks: int = -(-inputs // block)
    stored = (blocks * block if wanted.kernels else inputs) * wanted.bits / _BYTE
    if stored + blocks * storage.dtype.itemsize >= inputs * storage.dtype.itemsize:
        return f"with {inputs} inputs per output it would not get smaller"
    return block
