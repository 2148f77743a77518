"""A model that another learns from: runs in onnxruntime; what it said can be kept on disk."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import IO, Self

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray
from torch import Tensor

from slimctl.core.cache import cache_folder
from slimctl.core.contract import Feeds
from slimctl.graph.edit import interface
from slimctl.graph.session import open_session, run, tapped
from slimctl.training.samples import Part, fixed_batch

_FREE_SHARE = 0.5
"""Of the space on the disk, at most: others write there as well."""

Rows = dict[str, NDArray[np.float32]]
"""What tensors hold, samples along axis 0."""


class Teacher:
    """Says what its tensors hold for the samples that a student sees.

    What it said is kept by number of the sample, in a file that has no name and so is gone when
    the process is, however that ends. Use it as a context manager.

    Attributes:
        asked: For how many samples it was asked.
        computed: For how many of them it ran.

    Args:
        model: Not changed.
        tensors: Names of what to say.
        inputs: Its input for each of the student's, by name.
        threads: Of onnxruntime; 0 leaves that to it.
        keep_bytes: What may lie on disk; 0 where samples look different each time.
    """

    def __init__(
        self,
        model: ir.Model,
        tensors: Sequence[str],
        inputs: Mapping[str, str],
        *,
        threads: int,
        keep_bytes: int,
    ) -> None:
        self._tensors = tuple(dict.fromkeys(tensors))
        tapped_model = tapped(model, self._tensors, only=True)
        self._session = open_session(tapped_model, threads=threads, memory_pattern=False)
        ports = interface(model).inputs
        self._types = {port.name: port.dtype.numpy() for port in ports if port.dtype is not None}
        asked_for = {value.name for value in tapped_model.graph.inputs}
        self._inputs = {ours: name for ours, name in inputs.items() if name in asked_for}
        self._fixed = fixed_batch({port.name: port.shape for port in ports})
        self._kept = _Kept(keep_bytes) if keep_bytes else None
        self.asked = self.computed = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._kept is not None:
            self._kept.close()

    def saved(self) -> str:
        """What keeping has saved, as a sentence."""
        text = f"the teacher ran on {self.computed} of the {self.asked} samples it was asked about"
        if self._kept is None:
            return text
        return f"{text}; {self._kept.bytes / 2**20:.1f} MiB of its outputs lay on disk"

    def __call__(self, part: Part) -> dict[str, Tensor]:
        """What its tensors hold, on the device of the samples.

        Raises:
            ModelExecutionError: onnxruntime refuses the samples; names the node.
        """
        self.asked += part.size
        device = next(iter(part.feeds.values())).device
        found = self._known(part)
        return {name: torch.from_numpy(array).to(device) for name, array in found.items()}

    def _known(self, part: Part) -> Rows:
        """From disk what is there; the rest is computed, and kept."""
        if self._kept is None or not _divisible(part):
            return self._computed(part, slice(None))
        there = np.array([row in self._kept for row in part.rows.tolist()])
        if not there.any():
            found = self._computed(part, slice(None))
            if all(len(array) == part.size for array in found.values()):
                self._kept.add(part.rows, found)
            return found
        old = self._kept.rows(part.rows[there])
        if there.all():
            return old
        new = self._computed(part, np.flatnonzero(~there))
        if any(array.shape[1:] != old[name].shape[1:] for name, array in new.items()):
            return self._computed(part, slice(None))
        self._kept.add(part.rows[~there], new)
        return {name: _woven(there, old[name], new[name]) for name in new}

    def _computed(self, part: Part, chosen: slice | NDArray[np.intp]) -> Rows:
        feeds = {
            name: part.feeds[ours].cpu().numpy()[chosen]
            if part.feeds[ours].ndim
            else part.feeds[ours].cpu().numpy()
            for ours, name in self._inputs.items()
        }
        feeds = {name: array.astype(self._types[name]) for name, array in feeds.items()}
        size = part.size if isinstance(chosen, slice) else len(chosen)
        self.computed += size
        if self._fixed is None or self._fixed == size:
            return _floats(run(self._session, feeds, self._tensors))
        pieces = [
            _floats(run(self._session, _filled_up(feeds, start, self._fixed), self._tensors))
            for start in range(0, size, self._fixed)
        ]
        return {
            name: np.concatenate([piece[name] for piece in pieces])[:size] for name in self._tensors
        }


def _divisible(part: Part) -> bool:
    return all(tensor.ndim and len(tensor) == part.size for tensor in part.feeds.values())


def _filled_up(feeds: Feeds, start: int, size: int) -> Feeds:
    """As many samples as the teacher takes at a time; the last is repeated where some lack."""
    found = {}
    for name, array in feeds.items():
        rows = np.minimum(np.arange(start, start + size), len(array) - 1)
        found[name] = array[rows]
    return found


def _floats(found: Feeds) -> Rows:
    return {name: np.ascontiguousarray(array, np.float32) for name, array in found.items()}


def _woven(
    there: NDArray[np.bool_], old: NDArray[np.float32], new: NDArray[np.float32]
) -> NDArray[np.float32]:
    woven = np.empty((len(there), *old.shape[1:]), np.float32)
    woven[there], woven[~there] = old, new
    return woven


class _Kept:
    """Rows of tensors in a file, one after the other.

    A file that is written to, not mapped: a full disk is an error that can be caught.
    """

    def __init__(self, most: int) -> None:
        folder = cache_folder() / "training"
        folder.mkdir(parents=True, exist_ok=True)
        self._most = min(most, int(shutil.disk_usage(folder).free * _FREE_SHARE))
        self._file: IO[bytes] = tempfile.TemporaryFile(  # noqa: SIM115 - closed by close()
            dir=folder, prefix="teacher-", buffering=0
        )
        self._places: dict[int, int] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self.bytes = 0

    def __contains__(self, row: int) -> bool:
        return row in self._places

    def close(self) -> None:
        self._file.close()

    def add(self, rows: NDArray[np.int64], found: Rows) -> None:
        """Keeps rows as long as there is room; those of another shape are not kept."""
        shapes = {name: array.shape[1:] for name, array in found.items()}
        self._shapes = self._shapes or shapes
        if shapes != self._shapes:
            return
        for index, row in enumerate(rows.tolist()):
            data = b"".join(array[index].tobytes() for array in found.values())
            if self.bytes + len(data) > self._most:
                return
            try:
                self._file.seek(self.bytes)
                written = self._file.write(data)
            except OSError:  # the disk is full: what does not fit is computed again
                self._most = self.bytes
                return
            if written != len(data):
                self._most = self.bytes
                return
            self._places[row] = self.bytes
            self.bytes += len(data)

    def rows(self, rows: NDArray[np.int64]) -> Rows:
        """Rows that are there, in the given order."""
        sizes = {name: int(np.prod(shape, dtype=np.int64)) for name, shape in self._shapes.items()}
        size = 4 * sum(sizes.values())
        flat = np.empty((len(rows), size // 4), np.float32)
        for index, row in enumerate(rows.tolist()):
            self._file.seek(self._places[row])
            flat[index] = np.frombuffer(self._file.read(size), np.float32)
        found, start = {}, 0
        for name, shape in self._shapes.items():
            part = flat[:, start : start + sizes[name]]
            found[name] = np.ascontiguousarray(part).reshape(len(rows), *shape)
            start += sizes[name]
        return found
