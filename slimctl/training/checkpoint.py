"""Training that survives being killed: its state on disk, written beside and renamed."""

from __future__ import annotations

import os
import pickle
import time
from pathlib import Path
from typing import Any

import torch

from slimctl.core.cache import cache_folder


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
        try:
            torch.save(state, beside)
            os.replace(beside, self.path)
        finally:
            beside.unlink(missing_ok=True)
        self._last = time.monotonic()

    def read(self) -> dict[str, Any] | None:
        """What was written last; None when there is nothing, or it is damaged."""
        if not self.exists:
            return None
        try:
            found: dict[str, Any] = torch.load(self.path, weights_only=True, map_location="cpu")
        except (RuntimeError, EOFError, OSError, pickle.UnpicklingError):
            return None
        return found

    def remove(self) -> None:
        """Forgets a run that came to its end."""
        self.path.unlink(missing_ok=True)
