"""A small network and samples for it."""

from tests.sensitivity.conftest import network, samples

__all__ = ["network", "samples"]
