"""Finds the weights in the bytes of an ONNX file without parsing it.

A protobuf message is a sequence of fields: a key (number and wire type, a varint), then the value.
A message within a message, like raw bytes, is a length and that many bytes, so the walk steps over
what it does not look for (https://protobuf.dev/programming-guides/encoding/).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from slimctl.core.errors import SlimctlError

_MODEL, _GRAPH, _NODE, _ATTRIBUTE, _TENSOR, _SPARSE, _FUNCTION = range(7)

# Numbers of fields from onnx.proto3.
_INSIDE: dict[int, dict[int, int]] = {
    _MODEL: {7: _GRAPH, 25: _FUNCTION},
    _GRAPH: {1: _NODE, 5: _TENSOR, 15: _SPARSE},
    _NODE: {5: _ATTRIBUTE},
    _ATTRIBUTE: {5: _TENSOR, 6: _GRAPH, 10: _TENSOR, 11: _GRAPH, 22: _SPARSE, 23: _SPARSE},
    _SPARSE: {1: _TENSOR, 2: _TENSOR},
    _FUNCTION: {7: _NODE},
}
_EXTERNAL_DATA = 13  # of a TensorProto: entries of a key (1) and a value (2)

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_LONGEST_VARINT = 10


class Range(NamedTuple):
    """Some bytes of a file.

    Attributes:
        start: The first.
        stop: The one behind the last.
    """

    start: int
    stop: int

    @property
    def size(self) -> int:
        """How many."""
        return self.stop - self.start


class NotProtobufError(SlimctlError):
    """The bytes are no ONNX model. Callers treat the file as bytes without a structure."""


def weights_inside(data: memoryview) -> list[Range]:
    """Where the values of tensors lie in a model, in order.

    Raises:
        NotProtobufError: It is not a model.
    """
    return sorted(
        value
        for tensor in _tensors(data)
        for number, value in _fields(data, tensor)
        if number != _EXTERNAL_DATA
    )


def weights_outside(data: memoryview) -> dict[str, list[Range]]:
    """Where the values of tensors lie in other files, by the name of the file.

    Raises:
        NotProtobufError: It is not a model.
    """
    found: dict[str, list[Range]] = {}
    for tensor in _tensors(data):
        entries = dict(
            _entry(data, value)
            for number, value in _fields(data, tensor)
            if number == _EXTERNAL_DATA
        )
        offset, length = (_number(entries.get(key, "0")) for key in ("offset", "length"))
        if "location" in entries and length:
            found.setdefault(entries["location"], []).append(Range(offset, offset + length))
    return found


def _number(text: str) -> int:
    # A file made to do harm may hold a number of a million digits.
    return int(text) if text.isdecimal() and len(text) < 20 else 0


def _entry(data: memoryview, value: Range) -> tuple[str, str]:
    texts = {
        number: bytes(data[part.start : part.stop]).decode("utf-8", "replace")
        for number, part in _fields(data, value)
    }
    return texts.get(1, ""), texts.get(2, "")


def _tensors(data: memoryview) -> Iterator[Range]:
    # A list and not recursion: a file made to do harm may nest as deep as it likes.
    rest = [(_MODEL, Range(0, len(data)))]
    while rest:
        kind, span = rest.pop()
        for number, value in _fields(data, span):
            inner = _INSIDE[kind].get(number)
            if inner == _TENSOR:
                yield value
            elif inner is not None:
                rest.append((inner, value))


def _fields(data: memoryview, span: Range) -> Iterator[tuple[int, Range]]:
    """Number and place of every field that is a length and bytes; the others are stepped over."""
    at = span.start
    while at < span.stop:
        key, at = _varint(data, at, span.stop)
        number, wire = key >> 3, key & 7
        if wire == _BYTES:
            length, at = _varint(data, at, span.stop)
            value = Range(at, at + length)
            at = value.stop
            if at <= span.stop:
                yield number, value
        elif wire == _VARINT:
            _, at = _varint(data, at, span.stop)
        elif wire in (_FIXED64, _FIXED32):
            at += 8 if wire == _FIXED64 else 4
        else:
            raise NotProtobufError(f"Wire type {wire} does not exist")
    if at > span.stop:
        raise NotProtobufError("A field is longer than the message that it is in")


def _varint(data: memoryview, at: int, stop: int) -> tuple[int, int]:
    """A number of seven bits a byte, the lowest first, and the place behind it."""
    value = 0
    for position, byte in enumerate(data[at : min(stop, at + _LONGEST_VARINT)]):
        value |= (byte & 0x7F) << (7 * position)
        if byte < 0x80:
            return value, at + position + 1
    raise NotProtobufError("A number has no end")
