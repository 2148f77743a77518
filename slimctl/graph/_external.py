"""External data: weights in files beside the model.

A model file may come from anyone, and its tensors name files to read. Only files inside the
model's own folder are read, after every symbolic link is resolved.
"""

from __future__ import annotations

import mmap
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import NamedTuple

import numpy as np
import onnx
import onnx_ir as ir

from slimctl.core.errors import ModelLoadError

_TOGETHER = "keep the model and its data file in one folder, as they were exported"


class Place(NamedTuple):
    """Where a tensor's bytes lie."""

    file: Path
    offset: int
    length: int


def check_external(tensor: onnx.TensorProto, length: int, model: Path) -> Place:
    """The place of a tensor's bytes, if it is safe and complete.

    Args:
        tensor: With ``data_location`` EXTERNAL.
        length: Bytes that its shape and type need.
        model: The model file.

    Raises:
        ModelLoadError: The path leaves the model's folder, or the file is missing or too short.
    """
    entries = {entry.key: entry.value for entry in tensor.external_data}
    what = f"The tensor '{tensor.name}' lies in '{entries.get('location', '')}'"
    file = _resolve(entries.get("location", ""), model, what)
    try:
        offset = int(entries.get("offset") or 0)
        stated = int(entries.get("length") or length)
    except ValueError as error:
        raise ModelLoadError(model, f"{what} at no numeric place", fix=_TOGETHER) from error
    if stated != length or offset < 0:
        raise ModelLoadError(
            model,
            f"{what} with offset {offset} and length {stated}, but its shape needs {length} bytes",
            fix="export the model again; this one is invalid",
        )
    size = file.stat().st_size
    if offset + length > size:
        raise ModelLoadError(
            model,
            f"{what} up to byte {offset + length}, but that file has {size} bytes",
            fix="copy or download the data file again; it is truncated",
        )
    return Place(file, offset, length)


def _resolve(location: str, model: Path, what: str) -> Path:
    windows = PureWindowsPath(location)  # also splits at '/'
    absolute = PurePosixPath(location).is_absolute() or windows.drive or windows.root
    if not location or absolute or ".." in windows.parts or "\0" in location:
        raise ModelLoadError(
            model,
            f"{what}, which is not a plain path inside the model's folder",
            fix="do not use models that reach outside their folder; export it again if it is yours",
        )
    # A model that is itself a link (as in download caches) has its data beside it or its target.
    folders = {model.parent.resolve(), model.resolve().parent}
    file = (model.parent / location).resolve()
    if not any(file.is_relative_to(folder) for folder in folders):
        raise ModelLoadError(
            model,
            f"{what}, a link to '{file}' outside the model's folder",
            fix="replace the link by a copy of the file if you trust it",
        )
    if not file.is_file():
        raise ModelLoadError(model, f"{what}, but there is no such file", fix=_TOGETHER)
    return file


class ExternalReader:
    """Maps data files into memory, each once, and cuts tensors out of them.

    The arrays read from disk on first use and cost no memory of their own, so models of any size
    load. They stay valid when the file is replaced or deleted later.
    """

    def __init__(self, model: Path) -> None:
        self._model = model
        self._maps: dict[Path, mmap.mmap] = {}

    def tensor(self, tensor: ir.ExternalTensor) -> ir.TensorProtocol:
        """The tensor, backed by the mapped file. It must have passed :func:`check_external`."""
        name, shape, kind = tensor.name or "", tensor.shape, tensor.dtype
        if tensor.size == 0:
            return ir.Tensor(np.empty(shape.numpy(), kind.numpy()), dtype=kind, name=name)
        source = self._map(_resolve(str(tensor.location), self._model, f"The tensor '{name}'"))
        offset = tensor.offset or 0
        if kind.bitwidth < 8:
            packed = np.frombuffer(source, np.uint8, tensor.nbytes, offset)
            return ir.PackedTensor(packed, dtype=kind, shape=shape, name=name)
        flat = np.frombuffer(source, kind.numpy().newbyteorder("<"), tensor.size, offset)
        return ir.Tensor(flat.reshape(shape.numpy()), dtype=kind, name=name)

    def _map(self, file: Path) -> mmap.mmap:
        if file not in self._maps:
            try:
                with file.open("rb") as stream:
                    self._maps[file] = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
            except OSError as error:
                raise ModelLoadError(
                    self._model,
                    f"The data file '{file.name}' cannot be read: {error.strerror or error}",
                    fix="give yourself permission to read it",
                ) from error
        return self._maps[file]
