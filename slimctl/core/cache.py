"""Where what can be computed again is kept between runs."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path


def cache_folder() -> Path:
    """``$SLIMCTL_CACHE``, or ``slimctl`` in the user's cache folder."""
    chosen = os.environ.get("SLIMCTL_CACHE")
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "slimctl"


def cache_key(*parts: str) -> str:
    """A name for an entry: the hash of everything that it depends on."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(f"\n{len(part)} {part}".encode())
    return digest.hexdigest()
