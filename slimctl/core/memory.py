"""Memory of the process."""

from __future__ import annotations

import ctypes
from contextlib import suppress


def return_freed_memory() -> None:
    """Gives freed memory back to the system, where the C library can (glibc).

    It keeps what was freed, several hundred MB behind a session of onnxruntime, and what is
    allocated next has other sizes.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
