"""The precisions that layers may have: a table, and nothing else to add one to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from slimctl.passes._precision import Kind
from slimctl.passes._precision_blocks import Int4
from slimctl.passes._precision_half import Fp16
from slimctl.passes._precision_pairs import Float, Int8, Int8Weights, Int16

PRECISIONS: Final[Mapping[str, Kind]] = {
    kind.name: kind for kind in (Int8(), Int16(), Int8Weights(), Int4(), Fp16(), Float())
}
"""By name, in the order in which reports count them."""
