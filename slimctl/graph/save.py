"""Writing models: files, bytes, and a hash of what a model is."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from slimctl.core.errors import UnsupportedModelError
from slimctl.graph._protobuf import PROTOBUF_LIMIT, to_bytes
from slimctl.graph.edit import all_graphs, dimensions

EXTERNAL_THRESHOLD = 1 << 30
"""Weights above this many bytes go to a file of their own; protobuf's limit is 2 GiB."""

PASSING_THRESHOLD = 1 << 27
"""The same for files between two steps: weights apart are streamed, and onnxruntime maps them;
inside the model they are in memory thrice while it is written, and again while it is loaded."""

_INLINE_BYTES = 1024  # tensors up to this size stay in the model file: shapes, axes, scales
_BLOCK_BYTES = 1 << 24


def initializer_values(model: ir.Model) -> Iterator[ir.Value]:
    """Every initializer of every graph that holds data."""
    for graph in all_graphs(model):
        for value in graph.initializers.values():
            if value.const_value is not None:
                yield value


def weight_bytes(model: ir.Model) -> int:
    """Bytes of all initializers; one that several nodes share counts once."""
    tensors = (value.const_value for value in initializer_values(model))
    return sum(tensor.nbytes for tensor in tensors if tensor)


def parameter_count(model: ir.Model) -> int:
    """Elements of all initializers; one that several nodes share counts once."""
    tensors = (value.const_value for value in initializer_values(model))
    return sum(tensor.size for tensor in tensors if tensor)


def stated_values(model: ir.Model) -> frozenset[str]:
    """Names of the tensors in between whose type a model states."""
    return frozenset(
        value.name
        for graph in all_graphs(model)
        for node in graph
        for value in node.outputs
        if value.name and value.type is not None
    )


def save_model(
    model: ir.Model,
    path: Path,
    *,
    most_inline: int = PROTOBUF_LIMIT,
    stated: Collection[str] | None = None,
) -> list[Path]:
    """Writes a model that needs no other file than those returned. Equal models, equal bytes.

    Weights go to ``<name>.onnx.data`` beside the model when they exceed
    :data:`EXTERNAL_THRESHOLD` bytes, or ``most_inline``. The folder must exist; existing files are
    overwritten, so callers write into a staging folder and publish from there.

    Args:
        model: The model.
        path: Its file.
        most_inline: Bytes of weights above which they lie beside it.
        stated: Tensors in between whose types and shapes are written, by name; None: all that are
            known. Whoever runs the model infers the others, and they can be a fifth of the file.

    Raises:
        OSError: A file cannot be written.
        UnsupportedModelError: The graph without its weights exceeds protobuf's limit.
    """
    if weight_bytes(model) <= min(most_inline, EXTERNAL_THRESHOLD):
        path.write_bytes(model_to_bytes(model, stated))
        return [path]
    data = path.with_name(path.name + ".data")
    with _external_in(model, data):
        path.write_bytes(serialize(model, stated))
    return [path, data]


def model_to_bytes(model: ir.Model, stated: Collection[str] | None = None) -> bytes:
    """The model as one protobuf message, weights included. ``stated`` is that of save_model.

    Raises:
        UnsupportedModelError: It would exceed protobuf's limit of 2 GiB.
    """
    if weight_bytes(model) > PROTOBUF_LIMIT:
        raise _too_large(model)
    with replaced_weights(model, in_memory):
        return serialize(model, stated)


def serialize(model: ir.Model, stated: Collection[str] | None = None) -> bytes:
    """The model as one protobuf message; references to files stay references.

    ``stated`` is that of :func:`save_model`.

    Raises:
        UnsupportedModelError: It would exceed protobuf's limit of 2 GiB.
    """
    proto = ir.serde.serialize_model(model)
    if stated is not None:
        _forget_inferred(proto.graph, frozenset(stated))
    _forget_made_up(proto.graph)
    data = to_bytes(proto)
    if data is None:
        raise _too_large(model)
    return data


def _forget_inferred(graph: onnx.GraphProto, stated: frozenset[str]) -> None:
    # What passes record about a tensor has no other place.
    kept = [info for info in graph.value_info if info.name in stated or info.metadata_props]
    del graph.value_info[:]
    graph.value_info.extend(kept)
    for branch in _branches(graph):
        _forget_inferred(branch, stated)


def _forget_made_up(graph: onnx.GraphProto) -> None:
    """Symbols that inference made up mean nothing to a reader, who might show them as names."""
    for info in graph.value_info:
        for dim in info.type.tensor_type.shape.dim:
            if dim.dim_param.startswith(MADE_UP):
                dim.Clear()
    for branch in _branches(graph):
        _forget_made_up(branch)


def _branches(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield attribute.g


def _too_large(model: ir.Model) -> UnsupportedModelError:
    return UnsupportedModelError(
        "The model does not fit into one protobuf message of 2 GiB",
        where=f"graph {model.graph.name}",
        fix="store the weights as external data",
    )


MADE_UP = "unk__"
"""What onnx's shape inference calls sizes that it knows nothing of."""

Replace = Callable[[ir.Value, ir.TensorProtocol], ir.TensorProtocol]


@contextmanager
def replaced_weights(model: ir.Model, replace: Replace) -> Iterator[None]:
    """Other tensors behind the initializers, for as long as the block lasts."""
    originals = [(value, value.const_value) for value in initializer_values(model)]
    try:
        for value, tensor in originals:
            if tensor is not None:
                value.const_value = replace(value, tensor)
        yield
    finally:
        for value, tensor in originals:
            value.const_value = tensor


def placeholder(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    """A tensor of the same type and shape that says its data are elsewhere."""
    return ir.ExternalTensor(
        "absent",
        0,
        tensor.nbytes,
        tensor.dtype,
        shape=ir.Shape(tensor.shape.numpy()),
        name=tensor.name or "",
    )


def is_large(tensor: ir.TensorProtocol) -> bool:
    """Whether a tensor is data (weights) rather than structure (shapes, axes, scales)."""
    return tensor.dtype != ir.DataType.STRING and tensor.nbytes > _INLINE_BYTES


def structure(model: ir.Model) -> onnx.ModelProto:
    """The model as a message without its weights: their types and shapes stay.

    What needs the graph but not the weights (shape inference) works on models of any size then.
    """

    def replace(value: ir.Value, tensor: ir.TensorProtocol) -> ir.TensorProtocol:
        del value
        return placeholder(tensor) if is_large(tensor) else tensor

    with replaced_weights(model, replace):
        return ir.serde.serialize_model(model)


def in_memory(value: ir.Value, tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    """A tensor that refers to no file."""
    if not isinstance(tensor, ir.ExternalTensor):
        return tensor
    return ir.Tensor(tensor.numpy(), dtype=tensor.dtype, name=value.name)


@contextmanager
def _external_in(model: ir.Model, data: Path) -> Iterator[None]:
    """Large initializers written to a file and referring to it."""
    with data.open("wb") as stream:

        def replace(value: ir.Value, tensor: ir.TensorProtocol) -> ir.TensorProtocol:
            if not is_large(tensor):
                return in_memory(value, tensor)
            offset = stream.tell()
            for block in _blocks(tensor):
                stream.write(block)
            return ir.ExternalTensor(
                data.name,
                offset,
                tensor.nbytes,
                tensor.dtype,
                shape=ir.Shape(tensor.shape.numpy()),
                name=value.name or "",
                base_dir=data.parent,
            )

        with replaced_weights(model, replace):
            yield


def _blocks(tensor: ir.TensorProtocol) -> Iterator[bytes | memoryview]:
    """The tensor's little-endian bytes in pieces, without a copy where its array allows."""
    if tensor.dtype.bitwidth < 8 or tensor.dtype == ir.DataType.STRING:
        yield tensor.tobytes()
        return
    array = np.ascontiguousarray(tensor.numpy()).reshape(-1).view(np.uint8)
    for start in range(0, array.size, _BLOCK_BYTES):
        yield array.data[start : start + _BLOCK_BYTES]


def content_hash(model: ir.Model) -> str:
    """Hexadecimal SHA-256 of what the model computes: graph, attributes, weights, names.

    Documentation, metadata, inferred shapes of intermediate tensors and the place where the weights
    lie do not count. Weights are streamed.
    """
    digest = hashlib.sha256()
    _add(digest, sorted(model.opset_imports.items()))
    _hash_graph(digest, model.graph)
    return digest.hexdigest()


def _add(digest: Any, *facts: object) -> None:
    # JSON keeps neighbors apart: ("ab", "c") and ("a", "bc") differ.
    digest.update(json.dumps(facts, default=str).encode())


def _hash_graph(digest: Any, graph: ir.Graph) -> None:
    _add(digest, "inputs", [_signature(value) for value in graph.inputs])
    for name in sorted(graph.initializers):
        _hash_tensor(digest, name, graph.initializers[name].const_value)
    for node in graph:
        _hash_node(digest, node)
    _add(digest, "outputs", [_signature(value) for value in graph.outputs])


def _signature(value: ir.Value) -> tuple[object, ...]:
    return (value.name, value.type, dimensions(value.shape))


def _hash_tensor(digest: Any, name: str, tensor: ir.TensorProtocol | None) -> None:
    if tensor is None:
        _add(digest, "absent", name)
        return
    _add(digest, "tensor", name, tensor.dtype.name, tensor.shape.numpy())
    if isinstance(tensor, ir.StringTensor):
        _add(digest, tensor.string_data())
        return
    for block in _blocks(tensor):
        digest.update(block)


def _hash_node(digest: Any, node: ir.Node) -> None:
    inputs = [value.name if value is not None else None for value in node.inputs]
    outputs = [value.name for value in node.outputs]
    _add(digest, node.domain, node.op_type, node.overload, node.name, inputs, outputs)
    for name in sorted(node.attributes):
        _hash_attribute(digest, node.attributes[name])


def _hash_attribute(digest: Any, attribute: ir.Attr) -> None:
    _add(digest, attribute.name, attribute.type, attribute.ref_attr_name)
    if attribute.is_ref():
        return
    if attribute.type == ir.AttributeType.TENSOR:
        _hash_tensor(digest, attribute.name, attribute.value)
    elif attribute.type == ir.AttributeType.TENSORS:
        for tensor in attribute.value:
            _hash_tensor(digest, attribute.name, tensor)
    elif attribute.type == ir.AttributeType.GRAPH:
        _hash_graph(digest, attribute.as_graph())
    elif attribute.type == ir.AttributeType.GRAPHS:
        for graph in attribute.as_graphs():
            _hash_graph(digest, graph)
    else:
        _add(digest, attribute.value)
