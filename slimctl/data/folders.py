"""Folders of array files and of ONNX test data: one batch per file or per set."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slimctl.core.contract import Feeds
from slimctl.core.errors import SampleError, SourceError
from slimctl.data.batch import Chunk
from slimctl.data.inputs import InputSpec, check_dtype, check_feeds, check_names, check_shape
from slimctl.data.npz import LABELS, ArrayFile, check_single_input, has_labels, input_names, reading

ARRAY_SUFFIXES = frozenset({".npz", ".npy"})

_DIGITS = re.compile(r"([0-9]+)")


def natural_key(path: Path) -> tuple[tuple[int, int | str], ...]:
    """Sorts ``b2`` before ``b10``."""
    # Splitting at digits makes every second part a number: like is compared with like.
    parts = _DIGITS.split(path.name)
    return tuple((i % 2, int(part) if i % 2 else part) for i, part in enumerate(parts))


def children(folder: Path) -> list[Path]:
    """Entries of a folder in natural order, hidden ones left out.

    Raises:
        SourceError: The folder cannot be read.
    """
    try:
        found = [path for path in folder.iterdir() if not path.name.startswith(".")]
    except OSError as error:
        raise SourceError(
            str(folder),
            f"The folder cannot be read: {error.strerror}",
            fix="give yourself permission to read and enter it",
        ) from error
    return sorted(found, key=natural_key)


def samples_in(feeds: Feeds) -> int | None:
    """Length of axis 0 when all arrays that have axes agree on it, else None."""
    lengths = {array.shape[0] for array in feeds.values() if array.ndim}
    return lengths.pop() if len(lengths) == 1 else None


def batch_chunk(
    feeds: Feeds, labels: NDArray[Any] | None, specs: Sequence[InputSpec], place: str
) -> Chunk:
    """A chunk from a batch that the user put together, already checked against the model.

    Where the arrays do not share axis 0, or have none, the batch counts as one sample.

    Raises:
        SampleError: There is not one label per sample.
    """
    size = samples_in(feeds)
    divisible = size is not None and fixed_axis_0(specs) is None
    count = 1 if size is None else size
    if labels is not None:
        labels = np.atleast_1d(labels)
        if len(labels) != count:
            raise SampleError(
                place,
                LABELS,
                found=f"{len(labels)} labels",
                wanted=f"{count}, one per sample",
                fix="save one label for each sample of the batch",
            )
    return Chunk(feeds, labels, place, count, divisible)


def fixed_axis_0(specs: Sequence[InputSpec]) -> int | None:
    """The first size that an input fixes for its axis 0, None when all take any number."""
    sizes = [spec.shape[0] for spec in specs if spec.shape]
    return next((size for size in sizes if isinstance(size, int)), None)


class BatchReader:
    """What readers of ready-made batches have in common."""

    batched = True
    mergeable = True
    sample_count: int | None = None
    labeled = False
    takes_images = False

    def __init__(self, specs: Sequence[InputSpec]) -> None:
        self._specs = specs
        self.fixed_batch = fixed_axis_0(specs)

    def facts(self) -> dict[str, Any]:
        """Nothing beyond the counts."""
        return {}

    def fingerprint(self, samples: int) -> str | None:
        """None: the arrays themselves are hashed."""
        del samples
        return None


class ArrayFolderReader(BatchReader):
    """A folder of ``.npz`` and ``.npy`` files, one batch each, in natural order of their names.

    Arrays have exactly the shape that the model takes; it may differ between files. All headers
    are checked at once, the values are read batch by batch.
    """

    kind = "array-folder"

    def __init__(self, folder: Path, specs: Sequence[InputSpec]) -> None:
        super().__init__(specs)
        paths = [path for path in children(folder) if path.suffix.lower() in ARRAY_SUFFIXES]
        self._files = [self._checked(path) for path in paths]
        self.labeled = self._all_or_none_labeled()
        self.sample_count = sum(self._size(file) for file in self._files)

    def _checked(self, path: Path) -> ArrayFile:
        if path.suffix.lower() == ".npy":
            check_single_input(path, self._specs)
        file = ArrayFile(path, self._specs[0].name if self._specs else "")
        check_names(input_names(file, self._specs), self._specs, str(path))
        for spec in self._specs:
            check_dtype(spec, file.headers[spec.name].dtype, str(path))
            check_shape(spec, file.headers[spec.name].shape, str(path))
        return file

    def _all_or_none_labeled(self) -> bool:
        unlabeled = [file for file in self._files if not has_labels(file, self._specs)]
        if unlabeled and len(unlabeled) < len(self._files):
            raise SourceError(
                str(unlabeled[0].path),
                f"This file has no array '{LABELS}', others of the folder have",
                fix="save labels in every file of the folder, or in none",
            )
        return not unlabeled

    def _size(self, file: ArrayFile) -> int:
        shapes = [file.headers[spec.name].shape for spec in self._specs]
        lengths = {shape[0] for shape in shapes if shape}
        return lengths.pop() if len(lengths) == 1 else 1

    def chunks(self) -> Iterator[Chunk]:
        """One chunk per file."""
        for file in self._files:
            feeds = {spec.name: file.read(spec.name) for spec in self._specs}
            labels = file.read(LABELS) if self.labeled else None
            yield batch_chunk(feeds, labels, self._specs, str(file.path))


def test_set_folders(folder: Path) -> list[Path]:
    """The ``test_data_set_*`` folders in a folder, or the folder itself if it is one."""
    if any(folder.glob("input_*.pb")):
        return [folder]
    return [
        path for path in children(folder) if path.name.startswith("test_data_set") and path.is_dir()
    ]


class TestSetReader(BatchReader):
    """ONNX test data: folders ``test_data_set_*`` with ``input_0.pb``, ``input_1.pb`` and so on.

    A tensor belongs to the input whose name it carries; if some carry no such name, the number of
    the file is the position among the inputs. Outputs in the folders are not used.
    """

    __test__ = False  # pytest would collect the class by its name
    kind = "test-data-sets"

    def __init__(self, folder: Path, specs: Sequence[InputSpec]) -> None:
        super().__init__(specs)
        self._sets = test_set_folders(folder)

    def chunks(self) -> Iterator[Chunk]:
        """One chunk per set."""
        for folder in self._sets:
            files = [path for path in children(folder) if _is_input(path)]
            feeds = self._named([_read_tensor(path) for path in files], str(folder))
            check_feeds(feeds, self._specs, str(folder))
            yield batch_chunk(feeds, None, self._specs, str(folder))

    def _named(self, tensors: list[tuple[str, NDArray[Any]]], place: str) -> Feeds:
        wanted = [spec.name for spec in self._specs]
        if {name for name, _ in tensors} == set(wanted):
            return dict(tensors)
        if len(tensors) == len(wanted):
            return {name: array for name, (_, array) in zip(wanted, tensors, strict=True)}
        missing = wanted[len(tensors)] if len(tensors) < len(wanted) else wanted[-1]
        raise SampleError(
            place,
            missing,
            found=f"{len(tensors)} files input_*.pb",
            wanted=f"{len(wanted)}, one for each of {_quoted(wanted)}",
            fix="write one input_N.pb per model input, in the model's order",
        )


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)


def _is_input(path: Path) -> bool:
    return path.name.startswith("input_") and path.suffix == ".pb"


def _read_tensor(path: Path) -> tuple[str, NDArray[Any]]:
    import onnx
    from google.protobuf.message import (  # type: ignore[import-untyped]  # ships no types
        DecodeError,
    )
    from onnx import numpy_helper

    tensor = onnx.TensorProto()
    try:
        with reading(str(path)):
            tensor.ParseFromString(path.read_bytes())
            return tensor.name, numpy_helper.to_array(tensor)
    except (DecodeError, TypeError) as error:
        raise SourceError(
            str(path),
            f"The file holds no ONNX tensor: {error}",
            fix="write it with onnx.numpy_helper.from_array(array).SerializeToString()",
        ) from error
