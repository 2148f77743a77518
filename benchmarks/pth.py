"""Reads tensors out of a PyTorch checkpoint of the format before 1.6, without PyTorch.

Such a file is four pickles (magic number, protocol, system information, the object) and the raw
storages behind them. Unpickling can run any code that the file names, so this reader admits the
few names that a dictionary of tensors needs and refuses everything else.
"""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

MAGIC_NUMBER = 0x1950A86A20F9469CFC6C
PROTOCOL_VERSION = 1001
_STORAGE_TYPES = {"FloatStorage": "<f4", "LongStorage": "<i8"}


@dataclass(frozen=True)
class _Tensor:
    """A tensor whose storage has not been read yet."""

    storage: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _TensorUnpickler(pickle.Unpickler):
    """Admits ordered dictionaries and tensors, nothing else."""

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file)
        self.dtypes: dict[str, np.dtype[Any]] = {}

    def find_class(self, module: str, name: str) -> Callable[..., Any] | str:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _rebuild
        if module == "torch" and name in _STORAGE_TYPES:
            return _STORAGE_TYPES[name]
        msg = f"the checkpoint names {module}.{name}, which no table of tensors needs"
        raise pickle.UnpicklingError(msg)

    def persistent_load(self, pid: Any) -> str:
        """Takes a storage reference: ("storage", type, key, location, size, view)."""
        _, dtype, key, _, _, view = pid
        if view is not None:
            msg = "storages that are views of other storages are not supported"
            raise pickle.UnpicklingError(msg)
        self.dtypes[key] = np.dtype(dtype)
        return str(key)


def _rebuild(
    storage: str, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], *_: Any
) -> _Tensor:
    return _Tensor(storage, offset, shape, strides)


def _plain(file: IO[bytes]) -> Any:
    """One pickle that holds builtin values only."""
    return _TensorUnpickler(file).load()


def _read_storages(file: IO[bytes], dtypes: dict[str, np.dtype[Any]]) -> dict[str, NDArray[Any]]:
    storages = {}
    for key in _plain(file):
        size = int(np.frombuffer(file.read(8), "<i8")[0])
        dtype = dtypes[key]
        storages[key] = np.frombuffer(file.read(size * dtype.itemsize), dtype)
    return storages


def _array(tensor: _Tensor, storages: dict[str, NDArray[Any]]) -> NDArray[Any]:
    flat = storages[tensor.storage][tensor.offset :]
    strides = tuple(stride * flat.itemsize for stride in tensor.strides)
    view = np.lib.stride_tricks.as_strided(flat, tensor.shape, strides)
    return np.ascontiguousarray(view).reshape(tensor.shape)


def load_tensors(path: Path) -> dict[str, NDArray[Any]]:
    """Returns the tensors of a checkpoint by name.

    Args:
        path: A file written by ``torch.save(model.state_dict(), path)`` before PyTorch 1.6.

    Raises:
        pickle.UnpicklingError: The file is something else, or names anything but tensors.
    """
    with path.open("rb") as file:
        if (_plain(file), _plain(file)) != (MAGIC_NUMBER, PROTOCOL_VERSION):
            msg = f"{path} is not a PyTorch checkpoint of the format before 1.6"
            raise pickle.UnpicklingError(msg)
        _plain(file)  # byte order and integer sizes of the writer; little-endian ever since
        unpickler = _TensorUnpickler(file)
        tensors = unpickler.load()
        storages = _read_storages(file, unpickler.dtypes)
    return {name: _array(tensor, storages) for name, tensor in tensors.items()}
