"""Where torch is missing these tests are skipped, unless nothing may be."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec

import pytest

if find_spec("torch") is None and os.environ.get("SLIMCTL_REQUIRE_ASSETS") == "1":
    raise RuntimeError('torch is not installed: pip install "slimctl[torch]"')


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tests run side by side."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
