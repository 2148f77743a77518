"""Cuts files so that weights which two versions share are the same bytes in both, and joins them.

A file becomes pieces, one for each large tensor, and a frame: what is left when the pieces are
taken out. A change of the graph then costs a new frame and no weights. Joining gives the file back
byte for byte, whatever was cut; where a cut lies decides only how much is shared.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from slimctl.store.wire import NotProtobufError, Range, weights_inside, weights_outside

SMALLEST = 16 * 1024
"""Bytes of the smallest piece. Below that an object of its own costs more, in requests and entries,
than its sharing saves."""

LARGEST = 64 * 1024 * 1024
"""Bytes of the largest piece: an object is held in memory, and one request on object storage."""


def cuts(contents: Mapping[str, memoryview]) -> dict[str, list[Range]]:
    """Where to cut some files that belong together.

    Args:
        contents: Bytes by name; models refer to files of weights by these names.

    Returns:
        Ranges of pieces by name, in order and apart from each other.
    """
    found: dict[str, list[Range]] = {name: [] for name in contents}
    for name, data in contents.items():
        if name.endswith(".onnx"):
            inside, outside = _weights(data)
            found[name] += inside
            for other, spans in outside.items():
                found.get(other, []).extend(spans)
    return {name: _tidied(spans, len(contents[name])) for name, spans in found.items()}


def _weights(data: memoryview) -> tuple[list[Range], dict[str, list[Range]]]:
    try:
        return weights_inside(data), weights_outside(data)
    except NotProtobufError:
        return [], {}


def _tidied(spans: Sequence[Range], size: int) -> list[Range]:
    """Pieces of a useful size: small ones left out, overlaps too, long stretches cut."""
    useful = sorted(span for span in spans if span.size >= SMALLEST and span.stop <= size)
    return [part for span in _filled(useful, size) for part in _shortened(span)]


def _filled(spans: Sequence[Range], size: int) -> Iterator[Range]:
    """The spans, and between them the stretches that are too long for a frame."""
    end = 0
    for span in (*spans, Range(size, size)):
        if span.start < end:
            continue
        if span.start - end > LARGEST:
            yield Range(end, span.start)
        if span.size:
            yield span
        end = span.stop


def _shortened(span: Range) -> Iterator[Range]:
    for start in range(span.start, span.stop, LARGEST):
        yield Range(start, min(start + LARGEST, span.stop))


def frame(data: memoryview, spans: Sequence[Range]) -> bytes:
    """What is left of a file without its pieces."""
    starts = (0, *(span.stop for span in spans))
    stops = (*(span.start for span in spans), len(data))
    return b"".join(data[start:stop] for start, stop in zip(starts, stops, strict=True))


def join(rest: bytes, pieces: Iterable[tuple[int, bytes]]) -> Iterator[bytes]:
    """The file, part after part.

    Args:
        rest: Its frame.
        pieces: Their places in the file, in order, and their bytes.
    """
    taken = written = 0
    for offset, piece in pieces:
        between = rest[taken : taken + offset - written]
        taken += len(between)
        written += len(between) + len(piece)
        yield between
        yield piece
    yield rest[taken:]
