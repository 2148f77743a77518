"""The proof that a removal is exact, for every test of this folder."""

from __future__ import annotations

import pytest

from tests.graph.channels import exactness
from tests.graph.channels.exactness import AssertExact, Exactness

__all__ = ["AssertExact", "Exactness"]


@pytest.fixture
def assert_exact() -> AssertExact:
    """Removes channels and compares with the original in which they are silenced."""
    return exactness.assert_exact
