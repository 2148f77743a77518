"""Training that survives being killed: its state on disk, written beside and renamed."""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import time
from pathlib import Path
from typing import Any

import torch

from slimctl.core.cache import cache_folder

_DIGEST_BYTES = 32
"""Of SHA-256, in front of the state: torch notices few of the ways in which a file is damaged."""


class Checkpoint:
    """The state of one run, under the hash of everything that decides how it goes.

    Args:
        key: That hash.
        minutes: Time between two writes; 0 writes none.
    """

    def __init__(self, key: str, minutes: float) -> None:
        self.path: Path = cache_folder() / "training" / f"{key}.pt"
        self._seconds = minutes * 60.0
        self._last = time.monotonic()

    @property
    def exists(self) -> bool:
        """Whether a run of these inputs was stopped before its end."""
        return self.path.is_file()

    def due(self) -> bool:
        """Whether it is time to write."""
        return self._seconds > 0.0 and time.monotonic() - self._last >= self._seconds

    def write(self, state: dict[str, Any]) -> None:
        """Replaces what was written before."""
        if self._seconds <= 0.0:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        beside = self.path.with_suffix(f".{os.getpid()}")
        stream = io.BytesIO()
        torch.save(state, stream)
        content = stream.getvalue()
        try:
            beside.write_bytes(hashlib.sha256(content).digest() + content)
            os.replace(beside, self.path)
        finally:
            beside.unlink(missing_ok=True)
        self._last = time.monotonic()

    def read(self) -> dict[str, Any] | None:
        """What was written last; None when there is nothing, or it is damaged."""
        if not self.exists:
            return None
        stored = self.path.read_bytes()
        digest, content = stored[:_DIGEST_BYTES], stored[_DIGEST_BYTES:]
        if hashlib.sha256(content).digest() != digest:
            return None
        try:
            found: dict[str, Any] = torch.load(
                io.BytesIO(content), weights_only=True, map_location="cpu"
            )
        except (RuntimeError, pickle.UnpicklingError):  # of another version of torch
            return None
        return found

    def remove(self) -> None:
        """Forgets a run that came to its end."""
        self.path.unlink(missing_ok=True)
