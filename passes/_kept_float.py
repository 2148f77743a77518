"""Leaves the layers in float that cost the outputs too much (``--min-sqnr``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from slimctl.evaluate.injection import Injector
from slimctl.graph.edit import clone_model
from slimctl.graph.select import Selection
from slimctl.passes._attempt import Built, Outcome, Work
from slimctl.passes._fallback import (
    Noise,
    choose_float_layers,
    float_prices,
    float_reason,
    noise_of,
    worst_db,
)
from slimctl.passes._samples import spread_singles

_HEADROOM_DB: Final = 3.0
"""Layers are left in float until this much more than asked for is kept: the few samples that are
looked at were also calibrated with, and others are worse."""

_SAMPLES: Final = 4
"""Samples that single layers are looked at with; the choice is measured on more."""

_WORTH_DB: Final = 1.0
"""Layers are left in float only for a gain of at least this much."""


def keep_sqnr(work: Work, built: Built, floor_db: float, outcome: Outcome) -> Built:
    """The model itself, or one with the layers in float that cost its outputs too much.

    Args:
        work: Builds what is tried.
        built: With everything quantized.
        floor_db: What every output should keep.
        outcome: Told what was done, or that nothing helps.
    """
    before = work.context.fidelity(built.model, "many")
    if not before or min(before.values()) >= floor_db:
        return built
    corrected = work.fidelity(clone_model(built.model), "many")
    if min(corrected.values()) >= floor_db:
        return built
    layers = built.layers()
    alone = _noise_alone(work, built)
    outcome.alone["quantized"] = worst_db(alone)

    def measure(chosen: Sequence[str]) -> float:
        rest = work.build(_without(work, chosen, alone)).model
        return min(work.fidelity(rest, "many").values())

    worst, aim_db = min(corrected.values()), floor_db + _HEADROOM_DB
    prices = float_prices(work.model, layers)
    choice = choose_float_layers(noise_of(corrected), alone, prices, aim_db, measure)
    kept = worst
    if choice is not None and choice.sqnr_db >= worst + _WORTH_DB:
        kept = choice.sqnr_db
        built = work.build(_without(work, choice.layers, alone))
        outcome.notes.append(
            f"{len(choice.layers)} of {len(layers)} layers left in float: with all of them "
            f"quantized outputs keep {worst:.1f} dB, less than {floor_db:g} dB (--min-sqnr), "
            f"without these {kept:.1f} dB"
        )
    if kept < floor_db:
        outcome.warnings.append(
            f"an output keeps only {kept:.1f} dB, less than {floor_db:g} dB (--min-sqnr), and "
            "leaving the most sensitive layers in float does not reach it; measure the task's "
            "metric before you ship this"
        )
    return built


def _noise_alone(work: Work, built: Built) -> dict[str, Noise]:
    """Noise of each layer by itself: estimated for all at once, or else measured.

    That of probabilities is the noise of the scores behind them. There noises add up, and four
    samples tell them; of the noise of probabilities a few undecided entries are the most.
    """
    layers = built.layers()
    whole = clone_model(built.model)
    work.correct(whole)
    samples = spread_singles(work.model, work.context, _SAMPLES)
    main = {node.name for node in work.model.graph}  # errors are not injected into branches
    groups = {layer: (layer,) for layer in layers if layer in main}
    injector = Injector(work.model, samples)
    losses = injector.losses(whole, groups, scores=True) if groups else {}
    found: dict[str, Noise] = {}
    for layer in work.context.progress.track(
        iter(layers), total=len(layers), label="finding sensitive layers"
    ):
        loss = losses.get(layer)
        if loss is not None:
            found[layer] = noise_of({name: level.db for name, level in loss.outputs.items()})
        else:
            only = work.build(_only(work, layer, layers)).model
            found[layer] = noise_of(work.fidelity(only, "scores"))
    return found


def _only(work: Work, layer: str, layers: Sequence[str]) -> Selection:
    reasons = {other: "not looked at" for other in layers if other != layer}
    return Selection(work.options.include, work.options.exclude, reasons)


def _without(work: Work, layers: Sequence[str], alone: Mapping[str, Noise]) -> Selection:
    reasons = {layer: float_reason(alone[layer]) for layer in layers}
    return Selection(work.options.include, work.options.exclude, reasons)
