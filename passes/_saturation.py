"""Which layers need smaller weights, learned from what they compute on calibration data.

x86 processors without VNNI add pairs of uint8 x int8 products in 16 bits and saturate. Whether a
layer meets that depends on its weights and on what it reads: many never do. The built-in runtime
computes what such a processor would, beside what is exact. Layers for which the two agree keep all
8 bits; the others get the largest weights whose pairs fit into 16 bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import onnx_ir as ir

from slimctl.core.contract import Feeds, Progress
from slimctl.core.errors import ModelExecutionError, UnsupportedModelError
from slimctl.passes._attempt import Built, Outcome, Work
from slimctl.passes._samples import spread_singles
from slimctl.runtime.counts import Counts
from slimctl.runtime.device import find_device
from slimctl.runtime.session import Runtime

_DEVICE: Final = "x86-avx2"

_SAMPLES: Final = 4
"""Runs that are looked at: every code of every layer counts, some 100,000 in each of them. With 8
the outputs of EfficientNet-lite0 and MobileNetV2 keep as much, to 0.1 dB."""

_ROUNDS: Final = 2
"""Layers read something else when others have smaller weights: in the networks named above the
second round finds one or two more, a third none. What is found in the last one counts, too."""


class _Found(NamedTuple):
    """What one round shows.

    Attributes:
        saturating: Layers with codes that are not exact.
        unseen: Layers that made no codes: they write float, or stand in a branch.
    """

    saturating: Mapping[str, Counts]
    unseen: frozenset[str]

    @property
    def names(self) -> frozenset[str]:
        """Of both."""
        return self.unseen.union(self.saturating)


def keep_full_range(work: Work, built: Built, outcome: Outcome) -> Built:
    """The model in which only layers that saturate on calibration data have smaller weights.

    Args:
        work: Remembers which layers keep 8 bits.
        built: With smaller weights wherever pairs of products could saturate.
        outcome: Told how many layers have them, and why.
    """
    candidates = built.reduced()
    if not candidates:
        return built
    if not work.context.has_data:
        outcome.notes.append(_all_smaller("there are no calibration data"))
        return built
    work.full_range = candidates
    return _settled(work, built, outcome)


def check_full_range(work: Work, built: Built, outcome: Outcome) -> Built:
    """Looks again at layers that kept 8 bits, in a model in which others were left in float.

    Args:
        work: As :func:`keep_full_range` left it.
        built: The model.
        outcome: Told if more layers saturate.
    """
    work.full_range &= frozenset(built.layers())
    return _settled(work, built, outcome) if work.full_range else built


def _settled(work: Work, built: Built, outcome: Outcome) -> Built:
    candidates, saturating = work.full_range, dict[str, Counts]()
    try:
        samples = spread_singles(work.model, work.context, _SAMPLES)
        for _ in range(_ROUNDS):
            built = work.build(built.selection)
            found = _saturating(work, built, samples)
            saturating.update(found.saturating)
            work.full_range -= found.names
            if not found.names:
                break
        else:
            built = work.build(built.selection)
    except (UnsupportedModelError, ModelExecutionError) as error:
        work.full_range = frozenset()
        where = f" ({error.where})" if error.where else ""
        outcome.notes.append(_all_smaller(f"{error.what}{where}"))
        return work.build(built.selection)
    unseen = candidates - work.full_range - saturating.keys()
    outcome.notes.append(_note(candidates, saturating, unseen, len(samples)))
    return built


def _saturating(work: Work, built: Built, samples: Sequence[Feeds]) -> _Found:
    """Layers of full range that a processor without VNNI would not compute exactly."""
    counts = _counted(built.model, samples, work.context.progress)
    names = work.full_range
    wrong = {name: counts[name] for name in names & counts.keys() if counts[name].device_differs}
    return _Found(wrong, names - counts.keys())


def _counted(model: ir.Model, samples: Sequence[Feeds], progress: Progress) -> dict[str, Counts]:
    runtime = Runtime(model, device=find_device(_DEVICE), counting=True)
    shown = progress.track(iter(samples), total=len(samples), label="looking for saturation")
    for feeds in shown:
        runtime.run(feeds)
    return runtime.counts()


def _all_smaller(reason: str) -> str:
    return f"weights are smaller in every layer that could saturate without VNNI: {reason}"


def _note(
    candidates: frozenset[str],
    saturating: Mapping[str, Counts],
    unseen: frozenset[str],
    samples: int,
) -> str:
    kept = len(candidates) - len(saturating) - len(unseen)
    text = (
        f"{len(saturating)} of {len(candidates)} layers that could saturate without VNNI do so on "
        f"{samples} samples{_extent(saturating)} and have smaller weights; {kept} keep 8 bits"
    )
    if unseen:
        text += f"; {len(unseen)} have smaller weights because they make no codes to compare"
    return text


def _extent(saturating: Mapping[str, Counts]) -> str:
    if not saturating:
        return ""
    shares = sorted(count.device_differs / count.elements for count in saturating.values())
    steps = max(count.device_steps for count in saturating.values())
    return f" (in {shares[0]:.2g} to {shares[-1]:.2g} of their codes, by up to {steps} steps)"
