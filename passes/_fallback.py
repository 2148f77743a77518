"""Finds the layers that must stay in float so that every output keeps a given SQNR.

Noise of different layers adds up, to a good approximation: each layer is quantized alone once,
which says how much noise it puts on each output, and the layers with the most of it for what they
cost in float go first. The noise of all layers together scales the estimate; what was chosen is
then measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from statistics import median
from typing import Final, NamedTuple

import onnx_ir as ir

from slimctl.graph.cost import stated_costs

Noise = Mapping[str, float]
"""Noise power by output, relative to the power of the signal."""

_MARGINS_DB: Final = (0.5, 2.0, 4.0, 6.0, 9.0)
"""How much better than asked for the estimate must be, one try after the other."""

_HALVINGS: Final = 3
"""How often the way between too few layers and enough is halved."""


class Choice(NamedTuple):
    """Layers to leave in float, and the SQNR of the worst output that was measured.

    Attributes:
        layers: Names; first those that gain most for what they cost.
        sqnr_db: In dB.
    """

    layers: tuple[str, ...]
    sqnr_db: float


def noise_of(sqnr_db: Mapping[str, float]) -> dict[str, float]:
    """Relative noise power from SQNR: ``10 ** (-dB / 10)``."""
    return {name: 10.0 ** (-value / 10.0) for name, value in sqnr_db.items()}


def worst_db(noise: Mapping[str, Noise]) -> dict[str, float]:
    """SQNR in dB of the output that suffers most, by layer; of those that add noise at all."""
    peaks = {layer: max(outputs.values(), default=0.0) for layer, outputs in noise.items()}
    return {layer: round(-10.0 * math.log10(peak), 2) for layer, peak in peaks.items() if peak > 0}


def float_reason(noise: Noise) -> str:
    """Why a layer stays in float, by the noise that it makes alone: of probabilities, in scores."""
    worst = -10.0 * math.log10(max(*noise.values(), 1e-30))
    return (
        "left in float for accuracy: quantized alone it lowers an output, or the scores behind it, "
        f"to {worst:.1f} dB"
    )


def float_prices(model: ir.Model, layers: Collection[str]) -> dict[str, float]:
    """What each layer costs in float: the bytes of its weights, and conversions at its borders.

    Conversions are taken to cost as much as the weights of a typical layer, which is why a few
    large layers are not always beaten by many small ones.
    """
    bytes_of = {cost.name: cost.weight_bytes for cost in stated_costs(model)}
    weights = {layer: bytes_of.get(layer, 0) for layer in layers}
    typical = max(median(weights.values()), 1) if weights else 1
    return {layer: float((size or typical) + typical) for layer, size in weights.items()}


def choose_float_layers(
    together: Noise,
    alone: Mapping[str, Noise],
    prices: Mapping[str, float],
    aim_db: float,
    measure: Callable[[tuple[str, ...]], float],
) -> Choice | None:
    """The layers to leave in float so that every output keeps ``aim_db``.

    Args:
        together: Noise with all layers quantized.
        alone: Noise by layer with that one quantized only.
        prices: What each of them costs in float, above 0.
        aim_db: What every output should keep.
        measure: SQNR in dB of the worst output with some layers in float; called a few times, with
            more and more layers.

    Returns:
        The first choice that reaches the aim, or else the best that was tried; None when nothing
        could be tried.
    """
    best: Choice | None = None
    failed = 0
    for margin in _MARGINS_DB:
        layers = _until_quiet(together, alone, prices, 10.0 ** (-(aim_db + margin) / 10.0))
        if len(layers) == len(alone):
            layers = layers[:-1]  # the quietest may stay, or there would be nothing quantized
        if len(layers) == failed:
            continue
        found = Choice(layers, measure(layers))
        if best is None or found.sqnr_db > best.sqnr_db:
            best = found
        if found.sqnr_db >= aim_db:
            return _with_fewer(found, failed, aim_db, measure) if failed else found
        failed = len(layers)
    return best


def _with_fewer(
    enough: Choice, failed: int, aim_db: float, measure: Callable[[tuple[str, ...]], float]
) -> Choice:
    """Between so many layers that were too few and a choice that reaches the aim."""
    for _ in range(_HALVINGS):
        count = (failed + len(enough.layers)) // 2
        if count == failed:
            break
        layers = enough.layers[:count]
        found = Choice(layers, measure(layers))
        if found.sqnr_db >= aim_db:
            enough = found
        else:
            failed = count
    return enough


def _until_quiet(
    together: Noise, alone: Mapping[str, Noise], prices: Mapping[str, float], limit: float
) -> tuple[str, ...]:
    """Layers by noise for their price, until what the others make is within the limit."""
    share = {
        output: total / max(sum(noise.get(output, 0.0) for noise in alone.values()), 1e-30)
        for output, total in together.items()
    }
    scaled = {
        layer: {output: noise.get(output, 0.0) * share[output] for output in together}
        for layer, noise in alone.items()
    }
    order = sorted(scaled, key=lambda layer: (-max(scaled[layer].values()) / prices[layer], layer))
    left = {output: sum(noise[output] for noise in scaled.values()) for output in together}
    chosen: list[str] = []
    for layer in order:
        if all(noise <= limit for noise in left.values()):
            break
        chosen.append(layer)
        left = {output: noise - scaled[layer][output] for output, noise in left.items()}
    return tuple(chosen)
