"""Finds the layers that must stay in float so that every output keeps a given SQNR.

Noise of different layers adds up, to a good approximation: each layer is quantized alone once,
which says how much noise it puts on each output, and the layers with the most of it go first. The
noise of all layers together scales the estimate; what was chosen is then measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

Noise = Mapping[str, float]
"""Noise power by output, relative to the power of the signal."""

_MARGINS_DB: Final = (0.5, 2.0, 4.0, 6.0, 9.0)
"""How much better than asked for the estimate must be, one try after the other."""


class Choice(NamedTuple):
    """Layers to leave in float, worst first, and the SQNR of the worst output that was measured."""

    layers: tuple[str, ...]
    sqnr_db: float


def noise_of(sqnr_db: Mapping[str, float]) -> dict[str, float]:
    """Relative noise power from SQNR: ``10 ** (-dB / 10)``."""
    return {name: 10.0 ** (-value / 10.0) for name, value in sqnr_db.items()}


def worst_db(noise: Mapping[str, Noise]) -> dict[str, float]:
    """SQNR in dB of the output that suffers most, by layer; of those that add noise at all."""
    peaks = {layer: max(outputs.values(), default=0.0) for layer, outputs in noise.items()}
    return {layer: round(-10.0 * math.log10(peak), 2) for layer, peak in peaks.items() if peak > 0}


def choose_float_layers(
    together: Noise,
    alone: Mapping[str, Noise],
    aim_db: float,
    measure: Callable[[tuple[str, ...]], float],
) -> Choice | None:
    """The layers to leave in float so that every output keeps ``aim_db``.

    Args:
        together: Noise with all layers quantized.
        alone: Noise by layer with that one quantized only.
        aim_db: What every output should keep.
        measure: SQNR in dB of the worst output with some layers in float; called a few times, with
            more and more layers.

    Returns:
        The first choice that reaches the aim, or else the best that was tried; None when nothing
        could be tried.
    """
    best: Choice | None = None
    tried: tuple[str, ...] = ()
    for margin in _MARGINS_DB:
        layers = _until_quiet(together, alone, 10.0 ** (-(aim_db + margin) / 10.0))
        if len(layers) == len(alone):
            layers = layers[:-1]  # the quietest may stay, or there would be nothing quantized
        if layers == tried or not layers:
            continue
        tried = layers
        found = Choice(layers, measure(layers))
        if best is None or found.sqnr_db > best.sqnr_db:
            best = found
        if found.sqnr_db >= aim_db:
            break
    return best


def _until_quiet(together: Noise, alone: Mapping[str, Noise], limit: float) -> tuple[str, ...]:
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
    return tuple(chosen)
