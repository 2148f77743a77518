"""From a file to a protobuf message that is known to be a complete, consistent model.

Everything a malformed or hostile file can get wrong is found here, by name, before the message
becomes a graph. Nothing is ever unpickled or executed.
"""

from __future__ import annotations

import errno
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import onnx
import onnx_ir as ir

from slimctl.core.errors import ModelLoadError, UnsupportedModelError
from slimctl.graph._external import check_external
from slimctl.graph._protobuf import PROTOBUF_LIMIT, parse
from slimctl.graph._sparse import dense_tensor

_EXPORT = "export the model to ONNX first, then give the .onnx file"
_AGAIN = "copy or download the file again, or export the model again"


class _Format(NamedTuple):
    """A file format that people take for ONNX, by its first bytes."""

    offset: int
    magic: bytes
    name: str
    fix: str


_TORCH = "torch.onnx.export(model, example_inputs, 'model.onnx') makes an ONNX file of it"
_FORMATS = (
    _Format(0, b"version https://git-lfs", "a Git LFS pointer", "run 'git lfs pull'"),
    _Format(0, b"PK\x03\x04", "a zip archive; PyTorch checkpoints are such archives", _TORCH),
    _Format(0, b"\x80\x02", "a Python pickle, such as an old PyTorch checkpoint", _TORCH),
    _Format(0, b"\x80\x03", "a Python pickle", _TORCH),
    _Format(0, b"\x80\x04", "a Python pickle", _TORCH),
    _Format(0, b"\x80\x05", "a Python pickle", _TORCH),
    _Format(8, b"{", "a safetensors file: weights without a graph", _EXPORT),
    _Format(0, b"GGUF", "a GGUF file", _EXPORT),
    _Format(0, b"\x89HDF", "an HDF5 file, such as a Keras model", _EXPORT),
    _Format(4, b"TFL3", "a TensorFlow Lite model", _EXPORT),
    _Format(4, b"ORTM", "onnxruntime's ORT format", "give the .onnx file it was made from"),
    _Format(0, b"\x89PNG", "a PNG image", "give the .onnx file"),
    _Format(0, b"\xff\xd8\xff", "a JPEG image", "give the .onnx file"),
    _Format(0, b"\x1f\x8b", "a gzip archive", "unpack it first"),
)
_HEAD_BYTES = 512


def read_proto(path: Path) -> onnx.ModelProto:
    """Reads and checks a model file.

    Raises:
        ModelLoadError: Not a readable, complete, consistent and safe model.
        UnsupportedModelError: A valid model that needs something we do not have.
    """
    proto = _parse(path, _read(path))
    _check_head(path, proto)
    names: Counter[tuple[str, str, str]] = Counter(
        (function.domain, function.name, function.overload) for function in proto.functions
    )
    for (domain, name, _), count in names.items():
        if count > 1:
            raise ModelLoadError(path, f"Function '{domain}.{name}' is defined twice", fix=_AGAIN)
    _Checker(path).check(proto)
    return proto


def _read(path: Path) -> bytes:
    try:
        if not path.exists():
            raise ModelLoadError(path, "There is no such file", fix="check the path")
        if path.is_dir():
            raise ModelLoadError(path, "This is a folder", fix="give the .onnx file inside it")
        if not path.is_file():
            raise ModelLoadError(path, "This is not a regular file", fix="give an .onnx file")
        if path.stat().st_size > PROTOBUF_LIMIT:
            raise _oversized(path)
        return path.read_bytes()
    except OSError as error:
        fix = "give yourself permission to read it" if error.errno == errno.EACCES else ""
        raise ModelLoadError(
            path, f"The file cannot be read: {error.strerror or error}", fix=fix
        ) from error


def _oversized(path: Path) -> ModelLoadError:
    with path.open("rb") as stream:
        recognized = _recognize(stream.read(_HEAD_BYTES))
    if recognized:
        return ModelLoadError(path, f"This is {recognized[0]}", fix=recognized[1])
    return ModelLoadError(
        path,
        "The file exceeds 2 GiB, the limit of one ONNX file",
        fix="store the weights as external data (save_as_external_data=True)",
    )


def _recognize(head: bytes) -> tuple[str, str] | None:
    """What a file that is no ONNX model is instead, and what to do about it."""
    for known in _FORMATS:
        if head[known.offset :].startswith(known.magic):
            return known.name, known.fix
    if head.lstrip()[:1] == b"<":
        return "a web page or XML, perhaps a failed download", "download the model again"
    try:
        text = head.decode("utf-8")
    except UnicodeDecodeError:
        return None
    readable = bool(text) and all(letter.isprintable() or letter.isspace() for letter in text)
    return ("a text file", "give the binary .onnx file") if readable else None


def _parse(path: Path, data: bytes) -> onnx.ModelProto:
    if not data:
        raise ModelLoadError(path, "The file is empty", fix=_AGAIN)
    proto = parse(data)
    if proto is not None:
        return proto
    if recognized := _recognize(data[:_HEAD_BYTES]):
        raise ModelLoadError(path, f"This is no ONNX model but {recognized[0]}", fix=recognized[1])
    raise ModelLoadError(path, "This is no ONNX model, or a truncated or damaged one", fix=_AGAIN)


def _check_head(path: Path, proto: onnx.ModelProto) -> None:
    if not proto.graph.node:
        raise ModelLoadError(path, "The model holds no operators", fix=_AGAIN)
    if not proto.graph.output:
        raise ModelLoadError(path, "The model has no outputs; it may be truncated", fix=_AGAIN)
    if not proto.opset_import:
        raise ModelLoadError(
            path, "The model states no operator set; it may be truncated", fix=_AGAIN
        )
    if not 1 <= proto.ir_version <= onnx.IR_VERSION:
        raise _unknown_version(path, "IR version", proto.ir_version, onnx.IR_VERSION)
    newest = onnx.defs.onnx_opset_version()
    for opset in proto.opset_import:
        if opset.domain in ("", "ai.onnx") and not 1 <= opset.version <= newest:
            raise _unknown_version(path, "operator set", opset.version, newest)


def _unknown_version(path: Path, kind: str, found: int, newest: int) -> ModelLoadError:
    return ModelLoadError(
        path,
        f"The model uses {kind} {found}; known are 1 to {newest}",
        fix="export it for an older version, or update the packages onnx and onnxruntime",
    )


def _subgraphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


class _Checker:
    """Walks a model once: names in every scope, tensors, external data."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def check(self, proto: onnx.ModelProto) -> None:
        self._graph(proto.graph, frozenset())
        for function in proto.functions:
            self._nodes(function.node, set(function.input), frozenset(), function.output)

    def _error(self, what: str) -> ModelLoadError:
        return ModelLoadError(self._path, what, fix="export the model again; this one is invalid")

    def _graph(self, graph: onnx.GraphProto, outer: frozenset[str]) -> None:
        inputs = [value.name for value in graph.input]
        self._unique(inputs, "input")
        graph.initializer.extend(self._dense(sparse) for sparse in graph.sparse_initializer)
        graph.ClearField("sparse_initializer")
        for tensor in graph.initializer:
            self._tensor(tensor)
        constants = [tensor.name for tensor in graph.initializer]
        self._unique(constants, "initializer")
        outputs = [value.name for value in graph.output]
        self._unique(outputs, "output")
        self._nodes(graph.node, {*inputs, *constants}, outer, outputs)

    def _unique(self, names: Sequence[str], kind: str) -> None:
        if "" in names:
            raise self._error(f"An {kind} has no name")
        for name, count in Counter(names).items():
            if count > 1:
                raise self._error(f"The name '{name}' belongs to {count} {kind}s")

    def _nodes(
        self,
        nodes: Sequence[onnx.NodeProto],
        defined: set[str],
        outer: frozenset[str],
        outputs: Iterable[str],
    ) -> None:
        makers: dict[str, str] = dict.fromkeys(defined, "an input or initializer")
        for node in nodes:
            for name in filter(None, node.output):
                if name in makers:
                    raise self._error(
                        f"The tensor '{name}' is defined twice: by {makers[name]} and by"
                        f" {_called(node)}"
                    )
                makers[name] = _called(node)
        visible = outer | makers.keys()
        for node in nodes:
            self._node(node, visible)
        for name in outputs:
            if name not in makers:
                raise self._error(f"Nothing produces the output '{name}'")

    def _node(self, node: onnx.NodeProto, visible: frozenset[str]) -> None:
        if not node.op_type:
            raise self._error(f"The node '{node.name}' names no operator")
        for name in filter(None, node.input):
            if name not in visible:
                raise self._error(
                    f"Nothing produces the tensor '{name}', which {_called(node)} reads"
                )
        for attribute in node.attribute:
            self._attribute(node, attribute)
        for graph in _subgraphs(node):
            self._graph(graph, visible)

    def _attribute(self, node: onnx.NodeProto, attribute: onnx.AttributeProto) -> None:
        if attribute.HasField("sparse_tensor") and node.op_type == "Constant":
            dense = self._dense(attribute.sparse_tensor)
            attribute.Clear()
            attribute.CopyFrom(onnx.helper.make_attribute("value", dense))
        elif attribute.HasField("sparse_tensor") or attribute.sparse_tensors:
            raise UnsupportedModelError(
                f"The attribute '{attribute.name}' is a sparse tensor",
                where=f"{self._path}, {_called(node)}",
                fix="export the model with dense tensors",
            )
        if attribute.HasField("t"):
            self._tensor(attribute.t)
        for tensor in attribute.tensors:
            self._tensor(tensor)

    def _dense(self, sparse: onnx.SparseTensorProto) -> onnx.TensorProto:
        """The ordinary tensor that a sparse one stands for; onnx-ir has no sparse tensors."""
        for part in (sparse.values, sparse.indices):
            self._tensor(part)
        try:
            return dense_tensor(sparse)
        except (ValueError, IndexError, TypeError) as error:
            raise self._error(
                f"The sparse tensor '{sparse.values.name}' contradicts itself: {error}"
            ) from error

    def _tensor(self, tensor: onnx.TensorProto) -> None:
        kind = self._data_type(tensor)
        if any(dim < 0 for dim in tensor.dims):
            raise self._error(f"The tensor '{tensor.name}' has sizes {list(tensor.dims)}")
        count = math.prod(tensor.dims)
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            check_external(tensor, _bytes(count, kind), self._path)
            return
        found, wanted, unit = _stored(tensor, kind, count)
        if found != wanted:
            raise self._error(
                f"The tensor '{tensor.name}' of shape {list(tensor.dims)} and type {kind.name}"
                f" needs {wanted} {unit}, but holds {found}"
            )

    def _data_type(self, tensor: onnx.TensorProto) -> ir.DataType:
        if tensor.data_type not in _DATA_TYPES:
            raise UnsupportedModelError(
                f"The tensor '{tensor.name}' has the unknown data type {tensor.data_type}",
                where=str(self._path),
                fix="export the model with types that the installed package onnx knows",
            )
        return ir.DataType(tensor.data_type)


def _called(node: onnx.NodeProto) -> str:
    return f"the {node.op_type} node '{node.name}'" if node.name else f"a {node.op_type} node"


def _bytes(count: int, kind: ir.DataType) -> int:
    return -(-count * kind.bitwidth // 8) if kind != ir.DataType.STRING else 0


_DATA_TYPES = {kind.value for kind in ir.DataType} - {ir.DataType.UNDEFINED.value}
_FIELDS = {
    ir.DataType.FLOAT: "float_data",
    ir.DataType.COMPLEX64: "float_data",
    ir.DataType.DOUBLE: "double_data",
    ir.DataType.COMPLEX128: "double_data",
    ir.DataType.INT64: "int64_data",
    ir.DataType.UINT32: "uint64_data",
    ir.DataType.UINT64: "uint64_data",
    ir.DataType.STRING: "string_data",
}
"""Where onnx.proto keeps values that are not raw bytes; all other types use int32_data."""

_PAIRS = (ir.DataType.COMPLEX64, ir.DataType.COMPLEX128)
_PACKED = {2: 4, 4: 2}  # values per entry of int32_data, by bit width


def _stored(tensor: onnx.TensorProto, kind: ir.DataType, count: int) -> tuple[int, int, str]:
    """Entries found, entries wanted, and what they are."""
    if tensor.HasField("raw_data"):
        return len(tensor.raw_data), _bytes(count, kind), "bytes"
    found = len(getattr(tensor, _FIELDS.get(kind, "int32_data")))
    per_entry = _PACKED.get(kind.bitwidth, 1) if kind != ir.DataType.STRING else 1
    wanted = 2 * count if kind in _PAIRS else -(-count // per_entry)
    return found, wanted, "values"
