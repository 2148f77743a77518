"""What calibration found out, kept on disk under the hash of all that it depends on.

An entry is one file that is written beside its place and renamed, so that two processes never see
a part of it; the worst that can happen is that both do the work. A file that does not hold what it
should (its checksum is stored in it) is thrown away and made anew.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from slimctl.calibration.channels import ChannelAxis
from slimctl.calibration.collect import Statistics
from slimctl.calibration.histogram import FloatHistogram
from slimctl.core.cache import cache_folder, cache_key
from slimctl.core.contract import InputMean, LinearInput

_FORMAT: Final = 2  # raise it whenever entries of older versions must not be read
_LIMIT_BYTES: Final = 512 * 2**20
"""The least recently used entries go when all together take more than this."""

Arrays = dict[str, NDArray[Any]]


def statistics_key(*parts: str) -> str:
    """A name for an entry: the hash of everything that it depends on."""
    return cache_key(f"format {_FORMAT}", *parts)


class StatisticsCache:
    """Statistics by key, in a folder.

    A folder that cannot be written is no error: there is just nothing kept. ``problem`` then says
    why.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = (folder or cache_folder()) / "calibration"
        self.problem = ""

    def load(self, key: str) -> Statistics | None:
        """What was stored, or None when there is nothing usable."""
        path = self._path(key)
        try:
            content = path.read_bytes()
            os.utime(path)
        except OSError:
            return None
        try:
            return _unpack(content)
        except (ValueError, KeyError, IndexError, EOFError, zipfile.BadZipFile) as error:
            self.problem = f"a damaged cache entry was thrown away ({error})"
            path.unlink(missing_ok=True)
            return None

    def store(self, key: str, statistics: Statistics) -> None:
        """Keeps statistics, and forgets the oldest ones when there is too much."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._write(self._path(key), _pack(statistics))
            self._make_room()
        except OSError as error:
            self.problem = f"calibration results cannot be cached: {error.strerror or error}"

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.npz"

    def _write(self, path: Path, content: bytes) -> None:
        handle, name = tempfile.mkstemp(dir=self.folder, prefix=".writing-")
        try:
            with os.fdopen(handle, "wb") as stream:
                stream.write(content)
            os.replace(name, path)
        finally:
            Path(name).unlink(missing_ok=True)

    def _make_room(self) -> None:
        entries = []
        for path in self.folder.glob("*.npz"):
            try:
                status = path.stat()
            except FileNotFoundError:
                continue  # another process made room, too
            entries.append((status.st_mtime, status.st_size, path))
        used = 0
        for _, size, path in sorted(entries, reverse=True):
            used += size
            if used > _LIMIT_BYTES:
                path.unlink(missing_ok=True)


def _pack(statistics: Statistics) -> bytes:
    arrays: Arrays = {
        "tensors": np.array(list(statistics.histograms), np.str_),
        "layers": np.array([json.dumps(asdict(layer)) for layer in statistics.layers], np.str_),
        "means": np.array(list(statistics.means), np.str_),
        "channels": np.array([key.tensor for key in statistics.squares], np.str_),
        "channel_axes": np.array([key.axis for key in statistics.squares], np.int64),
    }
    for index, histogram in enumerate(statistics.histograms.values()):
        arrays |= {f"h{index}_{key}": value for key, value in histogram.to_arrays().items()}
    for index, mean in enumerate(statistics.means.values()):
        arrays |= {f"m{index}_{key}": v for key, v in mean._asdict().items() if v is not None}
    for index, square in enumerate(statistics.squares.values()):
        if square is not None:
            arrays[f"s{index}"] = square
    stream = io.BytesIO()
    np.savez(stream, allow_pickle=False, **arrays)
    content = stream.getvalue()
    return hashlib.sha256(content).digest() + content


def _unpack(content: bytes) -> Statistics:
    checksum, content = content[:32], content[32:]
    if hashlib.sha256(content).digest() != checksum:
        raise ValueError("its checksum is wrong")
    with np.load(io.BytesIO(content), allow_pickle=False) as stored:
        arrays = dict(stored)
    histograms = {
        str(name): FloatHistogram.from_arrays(_group(arrays, f"h{index}_"))
        for index, name in enumerate(arrays["tensors"])
    }
    means = {
        str(name): _mean(_group(arrays, f"m{index}_")) for index, name in enumerate(arrays["means"])
    }
    layers = tuple(_layer(json.loads(str(text))) for text in arrays["layers"])
    named = zip(arrays["channels"], arrays["channel_axes"], strict=True)
    squares = {
        ChannelAxis(str(name), int(axis)): arrays.get(f"s{index}")
        for index, (name, axis) in enumerate(named)
    }
    return Statistics(histograms, layers, means, squares)


def _layer(fields: dict[str, Any]) -> LinearInput:
    values: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()
    }
    return LinearInput(**values)


def _group(arrays: Mapping[str, NDArray[Any]], prefix: str) -> Arrays:
    return {
        key.removeprefix(prefix): value for key, value in arrays.items() if key.startswith(prefix)
    }


def _mean(arrays: Arrays) -> InputMean:
    return InputMean(arrays["first"], arrays.get("second"), arrays["both"])
