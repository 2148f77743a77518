"""Writes quantized weights into the graph: as MatMulNBits, or behind DequantizeLinear.

Nodes keep their names and outputs. A matrix is stored once, beside the constant that it replaces.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

import ml_dtypes
import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from slimctl.graph.edit import NameScope, add_initializer, const_array, set_provenance
from slimctl.numerics.blocks import Blocks, in_blocks, pack, signed
from slimctl.passes._weights_layers import Layer, Shared

CONTRIB: Final = "com.microsoft"

StoredType = Literal["int2", "uint2", "int4", "uint4", "int8", "uint8"]

_DTYPES: Final[Mapping[str, Any]] = {
    "int2": ml_dtypes.int2,
    "uint2": ml_dtypes.uint2,
    "int4": ml_dtypes.int4,
    "uint4": ml_dtypes.uint4,
    "int8": np.int8,
    "uint8": np.uint8,
}
_BIAS: Final = 2


class Constants(NamedTuple):
    """A quantized matrix in the graph.

    Attributes:
        codes: The codes.
        scale: The scales.
        zero_point: None where the operator's default is meant.
    """

    codes: ir.Value
    scale: ir.Value
    zero_point: ir.Value | None


class Product(NamedTuple):
    """A node that multiplies, and nothing else.

    Attributes:
        node: Its first input is the data, [..., inputs].
        bias: One number per output, added to the product; None if there is none.
    """

    node: ir.Node
    bias: ir.Value | None


class Editor:
    """Adds nodes and constants under names of their own.

    Args:
        model: Is changed.
        names: Scope of the model.
        creator: Name of the pass.
    """

    def __init__(self, model: ir.Model, names: NameScope, creator: str) -> None:
        self.model, self.names, self.creator = model, names, creator

    def constant(self, graph: ir.Graph, base: str, array: NDArray[Any]) -> ir.Value:
        """A new initializer."""
        return add_initializer(graph, self.names.fresh(base), array)

    def before(
        self,
        node: ir.Node,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        attributes: Mapping[str, int | list[int]] | None = None,
    ) -> ir.Node:
        """A new node in front of another."""
        made = ir.Node(
            "",
            op_type,
            inputs,
            ir.convenience.convert_attributes(attributes or {}),
            name=self.names.fresh_node(f"{node.name}_{op_type}"),
        )
        made.outputs[0].name = self.names.fresh(f"{made.name}_output")
        set_provenance(made, self.creator)
        graph_of(node).insert_before(node, made)
        return made

    def become(
        self,
        node: ir.Node,
        operator: tuple[str, str],
        inputs: Sequence[ir.Value | None],
        attributes: Mapping[str, int],
    ) -> None:
        """Gives a node another operator; its name and its output stay."""
        node.domain, node.op_type = operator
        node.resize_inputs(len(inputs))
        for place, value in enumerate(inputs):
            node.replace_input_with(place, value)
        node.attributes.clear()
        for attribute in ir.convenience.convert_attributes(dict(attributes)):
            node.attributes.add(attribute)
        if node.domain:
            self.model.opset_imports.setdefault(node.domain, 1)
        set_provenance(node, self.creator)

    def plain_product(self, node: ir.Node, outputs: int) -> Product:
        """Takes a Gemm apart; nodes in front of it transpose the data, or multiply."""
        if node.op_type != "Gemm":
            return Product(node, None)
        data, beta = node.inputs[0], _float(node, "beta")
        if _int(node, "transA"):
            turned = self.before(node, "Transpose", [data], {"perm": [1, 0]})
            data = turned.outputs[0]
            node.replace_input_with(0, data)
        added = node.inputs[_BIAS] if len(node.inputs) > _BIAS else None
        if added is None:
            return Product(node, None)
        bias = const_array(added)
        if bias is not None and bias.shape[-1:] in ((), (bias.size,)):
            flat = np.broadcast_to(bias.reshape(-1), (outputs,)) * bias.dtype.type(beta)
            return Product(node, self.constant(graph_of(node), f"{node.name}_bias", flat))
        product = self.before(node, "MatMul", [data, node.inputs[1]])
        product.outputs[0].type = node.outputs[0].type
        self.become(node, ("", "Add"), [product.outputs[0], self._times(node, added, beta)], {})
        return Product(product, None)

    def _times(self, node: ir.Node, value: ir.Value, factor: float) -> ir.Value:
        if factor == 1.0:
            return value
        kind = np.float32 if node.outputs[0].dtype != ir.DataType.FLOAT16 else np.float16
        beta = self.constant(graph_of(node), f"{node.name}_beta", np.array(factor, kind))
        return self.before(node, "Mul", [value, beta]).outputs[0]


def _int(node: ir.Node, name: str) -> int:
    attribute = node.attributes.get(name)
    return 0 if attribute is None else attribute.as_int()


def _float(node: ir.Node, name: str) -> float:
    attribute = node.attributes.get(name)
    return 1.0 if attribute is None else attribute.as_float()


def graph_of(node: ir.Node) -> ir.Graph:
    """The graph in which a node stands."""
    assert isinstance(node.graph, ir.Graph), "a node of a model"
    return node.graph


def home_of(value: ir.Value) -> ir.Graph:
    """The graph in which a constant lives."""
    node = value.producer()
    graph = value.graph if node is None else node.graph
    assert isinstance(graph, ir.Graph), "a constant of a model"
    return graph


def write_kernels(shared: Shared, blocks: Blocks, accuracy_level: int, editor: Editor) -> None:
    """MatMulNBits and GatherBlockQuantized, which share constants."""
    constants = _packed(shared, blocks, editor)
    table: ir.Value | None = None
    for layer in shared.layers:
        if layer.is_table:
            if shared.products and table is None:
                table = _as_rows(layer, constants.codes, editor)
            _look_up(layer, constants._replace(codes=table or constants.codes), blocks, editor)
        else:
            _multiply(layer, constants, blocks, accuracy_level, editor)


def _packed(shared: Shared, blocks: Blocks, editor: Editor) -> Constants:
    """Codes [outputs, blocks, bytes] as MatMulNBits wants them, or [rows, bytes] for a table."""
    grid, base, home = blocks.grid, shared.storage.value.name, home_of(shared.storage.value)
    codes = in_blocks(blocks.codes, blocks.block) if shared.products else blocks.codes
    scale, zero_point = blocks.parameters
    zero = None
    if not grid.symmetric:
        whole = np.array_equal(np.rint(zero_point), zero_point)
        stored = pack(zero_point.astype(np.uint8), grid.bits) if whole else zero_point
        zero = stored if whole else stored.astype(grid.dtype)
    return Constants(
        editor.constant(home, f"{base}_{grid.bits}bit", pack(codes, grid.bits)),
        editor.constant(home, f"{base}_scale", scale.astype(grid.dtype)),
        None if zero is None else editor.constant(home, f"{base}_zero_point", zero),
    )


def _as_rows(layer: Layer, codes: ir.Value, editor: Editor) -> ir.Value:
    """Codes that a product keeps, seen as rows of a table."""
    shape = editor.constant(graph_of(layer.node), f"{codes.name}_rows", np.array([0, -1]))
    return editor.before(layer.node, "Reshape", [codes, shape]).outputs[0]


def _look_up(layer: Layer, constants: Constants, blocks: Blocks, editor: Editor) -> None:
    codes, scale, zero_point = constants
    inputs = [codes, layer.node.inputs[1], scale]
    attributes = {
        "bits": blocks.grid.bits,
        "block_size": blocks.block,
        "gather_axis": 0,
        "quantize_axis": 1,
    }
    inputs += [] if zero_point is None else [zero_point]
    editor.become(layer.node, (CONTRIB, "GatherBlockQuantized"), inputs, attributes)


def _multiply(
    layer: Layer, constants: Constants, blocks: Blocks, accuracy_level: int, editor: Editor
) -> None:
    outputs, columns = blocks.codes.shape
    node, bias = editor.plain_product(layer.node, outputs)
    inputs: list[ir.Value | None] = [node.inputs[0], *constants]
    if bias is not None:
        inputs += [None, bias]  # between them an input that is out of use
    attributes = {
        "K": columns,
        "N": outputs,
        "bits": blocks.grid.bits,
        "block_size": blocks.block,
    }
    if accuracy_level:  # 0 is the default, and few providers know the attribute
        attributes["accuracy_level"] = accuracy_level
    while inputs[-1] is None:
        inputs.pop()
    editor.become(node, (CONTRIB, "MatMulNBits"), inputs, attributes)


def write_standard(shared: Shared, blocks: Blocks, stored: StoredType, editor: Editor) -> None:
    """DequantizeLinear in front of every product, behind every look-up.

    onnxruntime fuses it into a product if it has one reader, so each product gets its own. It
    cannot load a model in which it would fuse constants of another graph (1.32: "Missing required
    weight"), so every body of an If or Loop that reads the matrix gets its own.
    """
    homes: dict[ir.Graph, Constants] = {}
    for layer in shared.layers:
        home = graph_of(layer.node)
        if home not in homes:
            homes[home] = _unpacked(shared, blocks, stored, editor, home)
        if layer.is_table:
            _restore_rows(layer, homes[home], blocks.block, editor)
        else:
            _restore(layer, homes[home], blocks, editor)


def _unpacked(
    shared: Shared, blocks: Blocks, stored: StoredType, editor: Editor, home: ir.Graph
) -> Constants:
    """Codes and parameters as [inputs, outputs] for products; one scale per output as [outputs]."""
    grid, base, dtype = blocks.grid, shared.storage.value.name, _DTYPES[stored]
    turned = bool(shared.products)
    is_signed = not stored.startswith("u")

    def laid(array: NDArray[Any]) -> NDArray[Any]:
        if not turned:
            return array
        return array[:, 0] if array.shape[1] == 1 else np.ascontiguousarray(array.T)

    def code(array: NDArray[Any]) -> NDArray[Any]:
        whole = array.astype(np.uint8)
        return signed(whole, grid, dtype) if is_signed else whole.astype(dtype)

    codes = code(blocks.codes)
    scale, zero_point = blocks.parameters
    needless = grid.symmetric and is_signed
    return Constants(
        editor.constant(
            home, f"{base}_{stored}", np.ascontiguousarray(codes.T) if turned else codes
        ),
        editor.constant(home, f"{base}_scale", laid(scale.astype(grid.dtype))),
        None if needless else editor.constant(home, f"{base}_zero_point", laid(code(zero_point))),
    )


def _restore(layer: Layer, constants: Constants, blocks: Blocks, editor: Editor) -> None:
    outputs, count = blocks.parameters.scale.shape
    node, bias = editor.plain_product(layer.node, outputs)
    axes = {"axis": 0, "block_size": blocks.block} if count > 1 else {"axis": 1}
    present = [value for value in constants if value is not None]
    restored = editor.before(node, "DequantizeLinear", present, axes).outputs[0]
    inputs = [node.inputs[0], restored]
    if bias is None:
        editor.become(node, ("", "MatMul"), inputs, {})
    else:
        editor.become(node, ("", "Gemm"), [*inputs, bias], {})


def _restore_rows(layer: Layer, constants: Constants, block: int, editor: Editor) -> None:
    """Rows are restored once they are looked up, not the whole table in every run."""
    rows = [
        editor.before(layer.node, "Gather", [value, layer.node.inputs[1]], {"axis": 0}).outputs[0]
        for value in constants
        if value is not None
    ]
    axes = {"axis": -1, "block_size": block}
    editor.become(layer.node, ("", "DequantizeLinear"), rows, axes)
