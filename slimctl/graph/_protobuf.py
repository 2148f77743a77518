"""What we need of protobuf itself."""

from __future__ import annotations

import onnx
from google.protobuf.message import (  # type: ignore[import-untyped]  # protobuf ships no types
    DecodeError,
    EncodeError,
)

PROTOBUF_LIMIT = (1 << 31) - 1
"""No protobuf message may be larger, in bytes."""


def parse(data: bytes) -> onnx.ModelProto | None:
    """The message, or None where the bytes are not one that has a graph."""
    proto = onnx.ModelProto()
    try:
        proto.ParseFromString(data)
    except (DecodeError, ValueError):  # ValueError: nested deeper than protobuf allows
        return None
    return proto if proto.HasField("graph") else None


def to_bytes(proto: onnx.ModelProto) -> bytes | None:
    """The message as bytes, always the same for the same message; None where it is too large."""
    try:
        data: bytes = proto.SerializeToString(deterministic=True)
    except EncodeError:
        return None
    return data if len(data) <= PROTOBUF_LIMIT else None
