"""Files of a version: into objects, and out of them again."""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from slimctl.core.errors import OutputError
from slimctl.core.files import output_error
from slimctl.store.backend import Backend
from slimctl.store.log import Piece, StoredFile
from slimctl.store.objects import ObjectWriter, damaged, get_object, sha256_of
from slimctl.store.pieces import cuts, frame, join
from slimctl.store.wire import Range


def store_files(writer: ObjectWriter, files: Sequence[Path]) -> tuple[StoredFile, ...]:
    """Puts files into a ledger.

    Args:
        writer: Where.
        files: Of one artifact: models refer to files of weights by their names.

    Raises:
        OutputError: A file cannot be read.
        StoreError: An object cannot be written.
    """
    with ExitStack() as stack:
        contents = {file.name: stack.enter_context(_content(file)) for file in files}
        where = cuts(contents)
        return tuple(_stored(writer, name, data, where[name]) for name, data in contents.items())


@contextmanager
def _content(file: Path) -> Iterator[memoryview]:
    """The bytes of a file, mapped: weights are larger than memory at times."""
    try:
        with file.open("rb") as stream:
            if file.stat().st_size == 0:  # nothing cannot be mapped
                yield memoryview(b"")
                return
            with (
                mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
                memoryview(mapped) as view,
            ):
                yield view
    except OSError as error:
        raise OutputError(file, f"Cannot read the file: {error.strerror}") from error


def _stored(
    writer: ObjectWriter, name: str, data: memoryview, spans: Sequence[Range]
) -> StoredFile:
    return StoredFile(
        name=name,
        size_bytes=len(data),
        sha256=sha256_of(data),
        frame=writer.put(frame(data, spans)),
        pieces=tuple(
            Piece(offset=start, size=stop - start, sha256=writer.put(data[start:stop]))
            for start, stop in spans
        ),
    )


def read_parts(backend: Backend, file: StoredFile, version: str) -> Iterator[bytes]:
    """The bytes of a file, part after part, each checked.

    Args:
        backend: Where it lies.
        file: Which.
        version: Whose it is, for messages.

    Raises:
        DamagedError: An object is missing or damaged, or the whole is not what was stored.
    """
    digest = hashlib.sha256()
    pieces = (
        (piece.offset, get_object(backend, piece.sha256, version=version, file=file.name))
        for piece in file.pieces
    )
    rest = get_object(backend, file.frame, version=version, file=file.name)
    for part in join(rest, pieces):
        digest.update(part)
        yield part
    if digest.hexdigest() != file.sha256:
        raise damaged(backend, file.frame, version, file.name, "is not the file that was stored")


def write_files(
    backend: Backend, files: Sequence[StoredFile], version: str, folder: Path
) -> list[Path]:
    """Writes files of a version into a folder that exists.

    Raises:
        DamagedError: An object is missing or damaged.
        OutputError: A file cannot be written.
    """
    return [_written(backend, file, version, folder / file.name) for file in files]


def _written(backend: Backend, file: StoredFile, version: str, target: Path) -> Path:
    try:
        with target.open("xb") as stream:
            for part in read_parts(backend, file, version):
                stream.write(part)
    except OSError as error:
        raise output_error(target, error) from error
    return target
