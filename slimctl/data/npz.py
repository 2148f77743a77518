"""Arrays in ``.npz`` and ``.npy`` files, read row by row.

A ``.npz`` file is a zip archive of ``.npy`` members. numpy reads a member whole; here its rows
are read from the (possibly compressed) stream one after the other, so that memory does not grow
with the number of samples. Memory maps would not help: their pages count as resident memory.
"""

from __future__ import annotations

import math
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from enum import Enum
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.lib import format as npy_format
from numpy.typing import NDArray

from slimctl.core.errors import OptionError, SampleError, SourceError
from slimctl.data.batch import Chunk
from slimctl.data.inputs import (
    InputSpec,
    check_dtype,
    check_names,
    fits_after_axis_0,
    shape_remedy,
    shape_text,
)

LABELS = "labels"
"""Name of the array that holds labels, unless the model has an input of that name."""

_READ_ERRORS = (
    OSError,
    EOFError,
    ValueError,  # malformed headers
    zipfile.BadZipFile,
    zlib.error,
    NotImplementedError,  # unknown compression
    RuntimeError,  # encrypted archive
)


@contextmanager
def reading(place: str) -> Iterator[None]:
    """Turns what goes wrong while reading a file into a SourceError."""
    try:
        yield
    except PermissionError as error:
        raise SourceError(
            place, "No permission to read it", fix="give yourself read permission"
        ) from error
    except _READ_ERRORS as error:
        raise SourceError(
            place,
            f"The file cannot be read; it is truncated or damaged: {error}",
            fix="write or copy the file again",
        ) from error


class Header(NamedTuple):
    """What a ``.npy`` header says."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    fortran_order: bool

    @property
    def size_bytes(self) -> int:
        """Size of the values."""
        return math.prod(self.shape) * self.dtype.itemsize


def _read_header(stream: IO[bytes]) -> Header:
    version = npy_format.read_magic(stream)
    read = (
        npy_format.read_array_header_1_0 if version == (1, 0) else npy_format.read_array_header_2_0
    )
    shape, fortran_order, dtype = read(stream)
    # For one axis or none the two orders are the same.
    return Header(shape, dtype, fortran_order and len(shape) > 1)


class ArrayFile:
    """The arrays of one ``.npz`` or ``.npy`` file.

    Args:
        path: The file.
        name: Name of the only array of a ``.npy`` file, which has none itself.

    Raises:
        SourceError: The file is unreadable, truncated, or holds pickled objects.
    """

    def __init__(self, path: Path, name: str) -> None:
        self.path = path
        self._is_archive = path.suffix.lower() == ".npz"
        self._members = {name: ""}
        with reading(str(path)):
            if self._is_archive:
                with zipfile.ZipFile(path) as archive:
                    members = [m for m in archive.namelist() if m.endswith(".npy")]
                self._members = {member.removesuffix(".npy"): member for member in members}
        self.headers = {name: self._header(name) for name in self._members}

    def _header(self, name: str) -> Header:
        with ExitStack() as stack, reading(str(self.path)):
            stream, available = self._open(name, stack)
            header = _read_header(stream)
            held = available - stream.tell()
        if header.dtype.hasobject:
            raise SourceError(
                str(self.path),
                f"Array '{name}' holds pickled Python objects, which are not loaded:"
                " they can run code",
                fix="save one numeric array with equal rows, or a folder with one file per batch",
            )
        if held < header.size_bytes:
            raise SourceError(
                str(self.path),
                f"The file is truncated: array '{name}' should have {header.size_bytes} bytes"
                f" and has {held}",
                fix="write or copy the file again",
            )
        return header

    def _open(self, name: str, stack: ExitStack) -> tuple[IO[bytes], int]:
        """The stream of one array and the number of bytes in it."""
        if not self._is_archive:
            return stack.enter_context(self.path.open("rb")), self.path.stat().st_size
        archive = stack.enter_context(zipfile.ZipFile(self.path))
        member = archive.getinfo(self._members[name])
        return stack.enter_context(archive.open(member)), member.file_size

    def read(self, name: str) -> NDArray[Any]:
        """One whole array, in native byte order."""
        with ExitStack() as stack, reading(str(self.path)):
            stream, _ = self._open(name, stack)
            array: NDArray[Any] = npy_format.read_array(stream, allow_pickle=False)
        return _native(array)

    def rows(self, name: str) -> Iterator[NDArray[Any]]:
        """The entries along axis 0, one after the other, each of shape ``shape[1:]``.

        An array in Fortran order keeps each row scattered over the whole file; it is read whole.
        """
        header = self.headers[name]
        if header.fortran_order:
            yield from (np.ascontiguousarray(row) for row in self.read(name))
            return
        shape = header.shape[1:]
        row_bytes = math.prod(shape) * header.dtype.itemsize
        with ExitStack() as stack:
            with reading(str(self.path)):
                stream, _ = self._open(name, stack)
                _read_header(stream)
            for _ in range(header.shape[0]):
                with reading(str(self.path)):
                    data = read_exactly(stream, row_bytes)
                yield _native(np.frombuffer(data, header.dtype).reshape(shape))


def read_exactly(stream: IO[bytes], count: int) -> bytes:
    """The next bytes of a stream.

    Raises:
        EOFError: There are fewer.
    """
    data = stream.read(count)
    if len(data) < count:
        raise EOFError(f"{count} bytes expected, {len(data)} found")
    return data


def _native(array: NDArray[Any]) -> NDArray[Any]:
    if array.dtype.isnative:
        return array
    return array.astype(array.dtype.newbyteorder("="))


class RowLayout(Enum):
    """How the samples of one input lie in its array."""

    AXIS_0 = "axis 0 of the model's input is the batch"
    STACKED = "one whole model input after the other on an axis of its own"
    CONSTANT = "a scalar, the same for all samples"


def row_layout(spec: InputSpec, shape: Sequence[int], place: str) -> RowLayout:
    """How samples lie in an array, told by its rank.

    Raises:
        SampleError: Neither reading of the shape fits the model.
    """
    if spec.shape is None:
        return RowLayout.AXIS_0 if shape else RowLayout.CONSTANT
    if len(shape) == len(spec.shape) and (not shape or fits_after_axis_0(shape, spec.shape)):
        return RowLayout.AXIS_0 if shape else RowLayout.CONSTANT
    stacked = ("samples", *spec.shape)
    if fits_after_axis_0(shape, stacked):
        return RowLayout.STACKED
    wanted = ("samples", *spec.shape[1:]) if spec.shape else stacked
    raise SampleError(
        place,
        spec.name,
        found=f"shape {shape_text(tuple(shape))}",
        wanted=f"shape {shape_text(wanted)}",
        fix=shape_remedy(wanted, shape),
    )


class RowReader:
    """A ``.npz`` file with samples along axis 0, or a ``.npy`` file of a model with one input.

    An array has the model's rank, with axis 0 counting samples, or one axis more in front, each
    entry being a whole model input (needed where axis 0 of the input is not the batch).
    """

    batched = False
    takes_images = False

    def __init__(self, path: Path, specs: Sequence[InputSpec]) -> None:
        self.kind = path.suffix.lower().removeprefix(".")
        if self.kind == "npy":
            check_single_input(path, specs)
        self._place = str(path)
        self._file = ArrayFile(path, specs[0].name if specs else "")
        self.labeled = has_labels(self._file, specs)
        self._layouts = self._check(specs)
        self.mergeable = RowLayout.STACKED not in self._layouts.values()
        self.fixed_batch = _fixed_batch(specs, self._layouts, self._place)
        self.sample_count: int | None = self._count()

    def _check(self, specs: Sequence[InputSpec]) -> dict[str, RowLayout]:
        headers = self._file.headers
        check_names(input_names(self._file, specs), specs, self._place)
        layouts = {}
        for spec in specs:
            check_dtype(spec, headers[spec.name].dtype, self._place)
            layouts[spec.name] = row_layout(spec, headers[spec.name].shape, self._place)
        return layouts

    def _streamed(self) -> list[str]:
        names = [n for n, layout in self._layouts.items() if layout != RowLayout.CONSTANT]
        return [*names, LABELS] if self.labeled else names

    def _count(self) -> int:
        headers = self._file.headers
        names = self._streamed()
        if not names:
            return 1
        first = names[0]
        count = headers[first].shape[0] if headers[first].shape else 0
        for name in names[1:]:
            shape = headers[name].shape
            if not shape or shape[0] != count:
                raise SampleError(
                    self._place,
                    name,
                    found=f"{shape[0] if shape else 'no'} samples along axis 0",
                    wanted=f"{count} samples as in '{first}'",
                    fix="save as many samples for each; where axis 0 of an input is not the"
                    " batch, stack whole inputs on a new first axis: np.stack",
                )
        return count

    def chunks(self) -> Iterator[Chunk]:
        """One chunk per sample."""
        constants = {
            name: self._file.read(name)
            for name, layout in self._layouts.items()
            if layout == RowLayout.CONSTANT
        }
        names = self._streamed()
        if not names:
            yield Chunk(constants, None, f"{self._place}[0]")
            return
        streams = zip(*(self._file.rows(name) for name in names), strict=True)
        for index, rows in enumerate(streams):
            feeds, labels = dict(constants), None
            for name, row in zip(names, rows, strict=True):
                if self.labeled and name == LABELS:
                    labels = row[None]
                else:
                    feeds[name] = row[None] if self._layouts[name] == RowLayout.AXIS_0 else row
            yield Chunk(feeds, labels, f"{self._place}[{index}]", divisible=self.mergeable)

    def facts(self) -> dict[str, Any]:
        """Which arrays could not be streamed, and why."""
        notes = [
            f"array '{name}' is in Fortran order and was read whole ({header.size_bytes} bytes):"
            " save it with np.ascontiguousarray to stream it"
            for name, header in self._file.headers.items()
            if header.fortran_order and name in self._streamed()
        ]
        return {"notes": notes} if notes else {}

    def fingerprint(self, samples: int) -> str | None:
        """None: the arrays themselves are hashed."""
        del samples
        return None


def check_single_input(path: Path, specs: Sequence[InputSpec]) -> None:
    """Refuses ``.npy`` files for a model whose inputs they cannot name.

    Raises:
        SourceError: The model has several inputs, or none.
    """
    if len(specs) != 1:
        names = ", ".join(f"'{spec.name}'" for spec in specs) or "none"
        raise SourceError(
            str(path),
            f"A .npy file holds one array without a name; the model's inputs are {names}",
            fix="save a .npz file with one array per input: np.savez(path, name=array, ...)",
        )


def has_labels(file: ArrayFile, specs: Sequence[InputSpec]) -> bool:
    """Whether a file has an array ``labels`` that is no model input."""
    return LABELS in file.headers and all(spec.name != LABELS for spec in specs)


def input_names(file: ArrayFile, specs: Sequence[InputSpec]) -> list[str]:
    """Names of a file's arrays without its labels."""
    labeled = has_labels(file, specs)
    return [name for name in file.headers if not (labeled and name == LABELS)]


def _fixed_batch(
    specs: Sequence[InputSpec], layouts: dict[str, RowLayout], place: str
) -> int | None:
    """The batch size that the model fixes for inputs whose axis 0 counts samples."""
    sizes: dict[str, int] = {}
    for spec in specs:
        size = spec.shape[0] if spec.shape else None
        if layouts[spec.name] == RowLayout.AXIS_0 and isinstance(size, int):
            sizes[spec.name] = size
    if len(set(sizes.values())) > 1:
        name, size = max(sizes.items(), key=lambda item: item[1])
        raise SampleError(
            place,
            name,
            found="samples along axis 0",
            wanted=f"{size} entries for each run, unlike the other inputs ({sizes})",
            fix="stack whole inputs on a new first axis, for every input: np.stack",
        )
    return next(iter(sizes.values()), None)


def check_batch_size(requested: int | None, fixed: int | None, *, mergeable: bool) -> int:
    """The batch size to use: the model's if it is fixed, else what was asked for, else 1.

    Raises:
        OptionError: The request contradicts the model or the data.
    """
    if requested is not None and requested < 1:
        raise OptionError("--batch-size", f"{requested} is no batch size", fix="use 1 or more")
    if requested is not None and fixed is not None and requested != fixed:
        raise OptionError(
            "--batch-size",
            f"The model's batch is fixed to {fixed}, {requested} was asked for",
            fix="leave --batch-size out, or export the model with a dynamic batch axis",
        )
    if not mergeable and requested not in (None, 1):
        raise OptionError(
            "--batch-size",
            "These samples are whole model inputs and cannot be put together",
            fix="leave --batch-size out",
        )
    return fixed or requested or 1
