"""Finds the layers that must stay in float so that every output keeps a given SQNR.

Noise of different layers adds up, to a good approximation: each layer is quantized alone once,
which says how much noise it puts on each output, and the layers with the most of it go first. The
noise of all layers together scales the estimate; what was chosen is then measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

Noise = Mapping[str, float]
"""Noise power by output, relative to the power of the signal."""

_MARGIN_DB: Final = 0.5
_STEP_DB: Final = 2.0
_TRIES: Final = 4


def noise_of(sqnr_db: Mapping[str, float]) -> dict[str, float]:
    """Relative noise power from SQNR: ``10 ** (-dB / 10)``."""
    return {name: 10.0 ** (-value / 10.0) for name, value in sqnr_db.items()}


def choose_float_layers(
    together: Noise,
    alone: Mapping[str, Noise],
    floor_db: float,
    holds: Callable[[Sequence[str]], bool],
) -> list[str] | None:
    """The layers to leave in float, worst first, so that every output keeps ``floor_db``.

    Args:
        together: Noise with all layers quantized.
        alone: Noise by layer with that one quantized only.
        floor_db: What every output must keep.
        holds: Measures a choice; called a few times with more and more layers.

    Returns:
        The layers, or None when no choice that was tried holds.
    """
    margin = _MARGIN_DB
    tried: list[str] = []
    for _ in range(_TRIES):
        chosen = _until_quiet(together, alone, 10.0 ** (-(floor_db + margin) / 10.0))
        margin += _STEP_DB
        if chosen == tried:
            continue
        tried = chosen
        if len(chosen) < len(alone) and holds(chosen):
            return chosen
    return None


def _until_quiet(together: Noise, alone: Mapping[str, Noise], limit: float) -> list[str]:
    """Layers in the order of their noise, until what the others make is within the limit."""
    share = {
        output: total / max(sum(noise.get(output, 0.0) for noise in alone.values()), 1e-30)
        for output, total in together.items()
    }
    scaled = {
        layer: {output: noise.get(output, 0.0) * share[output] for output in together}
        for layer, noise in alone.items()
    }
    order = sorted(scaled, key=lambda layer: (-max(scaled[layer].values()), layer))
    left = {output: sum(noise[output] for noise in scaled.values()) for output in together}
    chosen: list[str] = []
    for layer in order:
        if all(noise <= limit for noise in left.values()):
            break
        chosen.append(layer)
        left = {output: noise - scaled[layer][output] for output, noise in left.items()}
    return chosen
