"""Whether a change that is exact in float is worth it for the step that loses accuracy later."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from slimctl.core.contract import Outlook

WORTH_DB: Final = 0.3
"""Kept is what gains at least this much: smaller differences are luck, and other data may turn them
around."""


def why_not(outlook: Outlook | None, later: Sequence[str], changed: str) -> str:
    """Why a model stays as it is; empty when it does not.

    Args:
        outlook: What the model and the changed one would keep.
        later: Names of the passes behind.
        changed: What the change is called, as in "smoothed".
    """
    if outlook is None:
        return "no later step can tell whether it helps" if later else ""
    if outlook.other_db is None:
        return f"the worst output keeps {outlook.model_db:.1f} dB as it is"
    if outlook.other_db >= outlook.model_db + WORTH_DB:
        return ""
    return (
        f"{changed}, the worst output would keep {outlook.other_db:.1f} dB, as it is "
        f"{outlook.model_db:.1f} dB; a gain of {WORTH_DB:g} dB is asked for"
    )


def gain_note(text: str, outlook: Outlook | None) -> str:
    """What was done and what it gains."""
    if outlook is None or outlook.other_db is None:
        return text
    return (
        f"{text}: the worst output keeps {outlook.other_db:.1f} dB instead of "
        f"{outlook.model_db:.1f} dB once quantized"
    )
