"""How near a model's outputs are to the original's, on outputs that were kept."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from slimctl.core.contract import Feeds
from slimctl.evaluate.compare import is_float
from slimctl.evaluate.metrics import Similarity


def worst_sqnr_db(reference: Iterable[Feeds], other: Iterable[Feeds]) -> float | None:
    """SQNR in dB of the worst output over all runs together; None when no output is of floats.

    Args:
        reference: Outputs of the original, one dictionary per run.
        other: Outputs of the compared model for the same inputs.
    """
    outputs: defaultdict[str, Similarity] = defaultdict(Similarity)
    for expected, found in zip(reference, other, strict=True):
        for name, array in expected.items():
            if is_float(array):
                outputs[name].update(array, found[name])
    return min((output.sqnr_db for output in outputs.values()), default=None)
