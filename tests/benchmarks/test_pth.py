from __future__ import annotations

import io
import os
import pickle
import sys
from collections import OrderedDict
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from benchmarks.pth import MAGIC_NUMBER, PROTOCOL_VERSION, load_tensors


class _Storage:
    """Stands for a storage, which a checkpoint writes as a persistent id."""

    def __init__(self, kind: type, key: str, values: np.ndarray[Any, Any]) -> None:
        self.kind, self.key, self.values = kind, key, values


class _Writer(pickle.Pickler):
    """Writes what torch.save wrote before 1.6."""

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, _Storage):
            return ("storage", obj.kind, obj.key, "cpu", len(obj.values), None)
        return None


@pytest.fixture
def torch_names(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Modules that pickle takes for torch's, so that names are written as torch writes them."""

    def rebuild(*_: Any) -> None:
        """Is never called: only its name is written."""

    kinds = {name: type(name, (), {"__module__": "torch"}) for name in ("FloatStorage",)}
    rebuild.__module__, rebuild.__qualname__ = "torch._utils", "_rebuild_tensor_v2"
    torch, utils = ModuleType("torch"), ModuleType("torch._utils")
    for name, kind in kinds.items():
        setattr(torch, name, kind)
    setattr(torch, "_utils", utils)  # noqa: B010 - a module type has no such attribute
    setattr(utils, "_rebuild_tensor_v2", rebuild)  # noqa: B010 - the same
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "torch._utils", utils)
    return {**kinds, "rebuild": rebuild}


def _checkpoint(contents: Any, storages: list[_Storage]) -> bytes:
    stream = io.BytesIO()
    for header in (MAGIC_NUMBER, PROTOCOL_VERSION, {"little_endian": True}):
        stream.write(pickle.dumps(header, protocol=2))
    _Writer(stream, protocol=2).dump(contents)
    stream.write(pickle.dumps([storage.key for storage in storages], protocol=2))
    for storage in storages:
        stream.write(len(storage.values).to_bytes(8, "little"))
        stream.write(storage.values.tobytes())
    return stream.getvalue()


class _Tensor:
    def __init__(self, rebuild: Any, *arguments: Any) -> None:
        self.rebuild, self.arguments = rebuild, arguments

    def __reduce__(self) -> Any:
        return self.rebuild, self.arguments


def test_tensors_come_back_with_offset_and_strides(
    tmp_path: Path, torch_names: dict[str, Any]
) -> None:
    values = np.arange(8, dtype=np.float32)
    storage = _Storage(torch_names["FloatStorage"], "7", values)
    hooks: OrderedDict[str, Any] = OrderedDict()
    rebuild = torch_names["rebuild"]
    contents = OrderedDict(
        plain=_Tensor(rebuild, storage, 2, (2, 3), (3, 1), False, hooks),
        transposed=_Tensor(rebuild, storage, 0, (2, 2), (1, 2), False, hooks),
    )
    path = tmp_path / "weights.pth"
    path.write_bytes(_checkpoint(contents, [storage]))

    tensors = load_tensors(path)

    np.testing.assert_array_equal(tensors["plain"], [[2, 3, 4], [5, 6, 7]])
    np.testing.assert_array_equal(tensors["transposed"], [[0, 2], [1, 3]])


class _Hostile:
    def __reduce__(self) -> Any:
        return os.mkdir, ("owned",)


def test_code_in_a_checkpoint_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "weights.pth"
    path.write_bytes(_checkpoint(OrderedDict(weight=_Hostile()), []))

    with pytest.raises(pickle.UnpicklingError, match="mkdir"):
        load_tensors(path)

    assert not (tmp_path / "owned").exists()


def test_code_in_a_header_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "weights.pth"
    path.write_bytes(pickle.dumps(_Hostile(), protocol=2))

    with pytest.raises(pickle.UnpicklingError, match="mkdir"):
        load_tensors(path)

    assert not (tmp_path / "owned").exists()


def test_another_pickle_is_named_as_such(tmp_path: Path) -> None:
    path = tmp_path / "weights.pth"
    path.write_bytes(pickle.dumps(1) + pickle.dumps(2))
    with pytest.raises(pickle.UnpicklingError, match="not a PyTorch checkpoint"):
        load_tensors(path)
