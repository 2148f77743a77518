"""Images and labels in IDX files, as the MNIST family comes: plain or packed with gzip.

The format (http://yann.lecun.com/exdb/mnist): two zero bytes, one for the type of the values, one
for the number of axes, the size of each axis in 32 bits, then the values, big-endian throughout.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import re
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from slimctl.core.errors import SourceError, nearest
from slimctl.data.batch import Chunk
from slimctl.data.folders import children, fixed_axis_0
from slimctl.data.images import image_input, one_sample, pillow, required_preprocess
from slimctl.data.inputs import InputSpec, check_feeds, shape_text
from slimctl.data.npz import read_exactly, reading
from slimctl.data.preprocess import in_grayscale, load_preprocess, resolve_transform

_TYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_GZIP_MAGIC = b"\x1f\x8b"
_IDX_NAME = re.compile(r".*[-_.]idx\d[-_.]ubyte(\.gz)?", re.IGNORECASE)
_IMAGES_NAME = re.compile(
    r"(?P<split>.*?)[-_.]?images[-_.]idx3[-_.]ubyte(?P<packed>\.gz)?", re.IGNORECASE
)
_HOLDER = "A file of IDX images"


def is_idx(path: Path) -> bool:
    """Whether a file is IDX by its name."""
    return _IDX_NAME.fullmatch(path.name) is not None


def find_splits(folder: Path) -> dict[str, Path]:
    """The files of images in a folder by what stands before ``images``, such as ``train``.

    Where a file is there packed and unpacked, the unpacked one is taken.

    Raises:
        SourceError: The folder cannot be read.
    """
    found: dict[str, Path] = {}
    for path in children(folder):
        match = _IMAGES_NAME.fullmatch(path.name)
        if match and path.is_file() and not (match["packed"] and match["split"] in found):
            found[match["split"]] = path
    return found


def images_of(folder: Path, split: str | None) -> Path:
    """The file of images that ``FOLDER`` or ``FOLDER#SPLIT`` means.

    Raises:
        SourceError: There is no such split, or more than one and none was chosen.
    """
    splits = find_splits(folder)
    if split is None and len(splits) == 1:
        return next(iter(splits.values()))
    if split in splits:
        return splits[split]
    place = str(folder) if split is None else f"{folder}#{split}"
    if not splits:
        raise SourceError(
            place,
            "The folder holds no IDX images, and only among those a name behind '#' chooses",
            fix=f"give '{folder}', or a folder with files like {split}-images-idx3-ubyte.gz",
        )
    names = ", ".join(f"'{name}'" for name in splits)
    if split is None:
        raise SourceError(
            place,
            f"The folder holds more than one file of IDX images: {names}",
            fix=f"choose one, for example {folder}#{next(iter(splits))}",
        )
    raise SourceError(
        place, f"The folder has no images of '{split}', but of {names}", fix=nearest(split, splits)
    )


class _Header(NamedTuple):
    """What the first bytes of an IDX file say."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    @property
    def size_bytes(self) -> int:
        """Size of the whole unpacked file."""
        return 4 + 4 * len(self.shape) + self.shape[0] * self.row_bytes

    @property
    def text(self) -> str:
        return f"{self.dtype.name} {shape_text(self.shape)}"


class IdxFile:
    """One IDX file, read row by row: it is never in memory as a whole.

    Raises:
        SourceError: The file is unreadable, truncated, or no IDX file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._stream() as stream, reading(str(path)):
            self.header = self._read_header(stream)
            packed = isinstance(stream, gzip.GzipFile)
        if not packed:
            self._check_size()

    def _stream(self) -> IO[bytes]:
        with reading(str(self.path)):
            # By its content: browsers unpack files and leave the suffix.
            with self.path.open("rb") as stream:
                packed = stream.read(2) == _GZIP_MAGIC
            return cast(IO[bytes], gzip.open(self.path)) if packed else self.path.open("rb")

    def _read_header(self, stream: IO[bytes]) -> _Header:
        magic = stream.read(4)
        if len(magic) < 4 or magic[:2] != b"\0\0" or magic[2] not in _TYPES or not magic[3]:
            raise SourceError(
                str(self.path),
                f"The file is no IDX file: it begins with the bytes '{magic.hex(' ')}'",
                fix="give the file as it was published, beginning with '00 00 08 03' for images",
            )
        sizes = np.frombuffer(read_exactly(stream, 4 * magic[3]), ">u4")
        return _Header(np.dtype(_TYPES[magic[2]]), tuple(int(size) for size in sizes))

    def _check_size(self) -> None:
        held, wanted = self.path.stat().st_size, self.header.size_bytes
        if held < wanted:
            raise SourceError(
                str(self.path),
                f"The file is truncated: it should have {wanted} bytes and has {held}",
                fix="write or copy the file again",
            )

    def rows(self) -> Iterator[NDArray[Any]]:
        """The entries along axis 0, one after the other."""
        header = self.header
        with self._stream() as stream:
            with reading(str(self.path)):
                self._read_header(stream)
            for _ in range(header.shape[0]):
                with reading(str(self.path)):
                    data = read_exactly(stream, header.row_bytes)
                row = np.frombuffer(data, header.dtype).reshape(header.shape[1:])
                yield row.astype(header.dtype.newbyteorder("="), copy=False)


def _images(path: Path) -> IdxFile:
    file = IdxFile(path)
    shape = file.header.shape
    if len(shape) != 3 or file.header.dtype != np.uint8 or 0 in shape[1:]:
        raise SourceError(
            str(path),
            f"The file holds {file.header.text}, grayscale images are uint8 [count,height,width]",
            fix="give the file of images; its labels are found beside it",
        )
    return file


def _labels_beside(images: IdxFile) -> IdxFile | None:
    """The file with the labels of a file of images; None when there is none."""
    name = images.path.name.removesuffix(".gz")
    stem = re.sub("idx3", "idx1", name.replace("images", "labels"), flags=re.IGNORECASE)
    for path in (images.path.with_name(stem), images.path.with_name(f"{stem}.gz")):
        if stem != name and path.is_file():
            return _checked_labels(IdxFile(path), images)
    return None


def _checked_labels(labels: IdxFile, images: IdxFile) -> IdxFile:
    header, count = labels.header, images.header.shape[0]
    if len(header.shape) != 1 or header.dtype.kind not in "iu":
        raise SourceError(
            str(labels.path),
            f"The file holds {header.text}, labels are integers [count]",
            fix="give labels as they were published, or move the file away to do without them",
        )
    if header.shape[0] != count:
        raise SourceError(
            str(labels.path),
            f"There are {header.shape[0]} labels for the {count} images of '{images.path.name}'",
            fix="take images and labels out of the same download",
        )
    return labels


class IdxReader:
    """A file of grayscale images for a model with one image input, labels beside it."""

    kind = "idx"
    batched = False
    mergeable = True
    takes_images = True

    def __init__(self, path: Path, specs: Sequence[InputSpec], *, preprocess: str | None) -> None:
        self._images = _images(path)
        self._preprocess = required_preprocess(preprocess, _HOLDER)
        self._spec = image_input(specs, str(path), _HOLDER)
        self._image = pillow()
        settings = in_grayscale(load_preprocess(self._preprocess), self._spec)
        self._transform = resolve_transform(settings, self._spec, str(path))
        self._labels = _labels_beside(self._images)
        self.labeled = self._labels is not None
        self.fixed_batch = fixed_axis_0(specs)
        self.sample_count: int | None = self._images.header.shape[0]

    def _rows(self) -> Iterator[tuple[NDArray[Any], NDArray[Any] | None]]:
        """Pixels [height, width] and the label [1] of each image."""
        if self._labels is None:
            yield from ((pixels, None) for pixels in self._images.rows())
            return
        pairs = zip(self._images.rows(), self._labels.rows(), strict=True)
        yield from ((pixels, label[None]) for pixels, label in pairs)

    def chunks(self) -> Iterator[Chunk]:
        """One chunk per image."""
        for index, (pixels, label) in enumerate(self._rows()):
            place = f"{self._images.path}[{index}]"
            feeds = {self._spec.name: self._transform.apply(self._image.fromarray(pixels))}
            check_feeds(feeds, [one_sample(self._spec)], place)
            yield Chunk(feeds, label, place, divisible=True)

    def facts(self) -> dict[str, Any]:
        """The resolved preprocessing and the version of the library that resizes."""
        settings = {"name": self._preprocess, **self._transform.facts()}
        return {"preprocess": settings, "pillow": self._image.__version__}

    def fingerprint(self, samples: int) -> str | None:
        """Pixels, labels and preprocessing decide the arrays, packed or not."""
        digest = hashlib.sha256(json.dumps(self.facts(), sort_keys=True).encode())
        digest.update(shape_text(self._images.header.shape[1:]).encode())
        for pixels, label in islice(self._rows(), min(samples, self._images.header.shape[0])):
            digest.update(pixels.tobytes())
            digest.update(b"" if label is None else f" {int(label[0])}\n".encode())
        return digest.hexdigest()
