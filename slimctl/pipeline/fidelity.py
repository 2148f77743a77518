"""How near a model's outputs are to the original's, on outputs that were kept."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from slimctl.core.contract import Feeds
from slimctl.evaluate.compare import is_float
from slimctl.evaluate.metrics import Similarity


def sqnr_by_output(reference: Iterable[Feeds], other: Iterable[Feeds]) -> dict[str, float]:
    """SQNR in dB of each output of floats, over all runs together.

    Args:
        reference: Outputs of the original, one dictionary per run.
        other: Outputs of the compared model for the same inputs.
    """
    outputs: defaultdict[str, Similarity] = defaultdict(Similarity)
    for expected, found in zip(reference, other, strict=True):
        for name, array in expected.items():
            if is_float(array):
                outputs[name].update(array, found[name])
    return {name: output.sqnr_db for name, output in outputs.items()}


def worst_sqnr_db(reference: Iterable[Feeds], other: Iterable[Feeds]) -> float | None:
    """SQNR in dB of the worst output, as :func:`sqnr_by_output`; None when none is of floats."""
    return min(sqnr_by_output(reference, other).values(), default=None)
