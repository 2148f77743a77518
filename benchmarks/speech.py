"""What silero-vad needs beside other models: samples that do not stack, and a state to carry on.

Its inputs are a chunk [N, 576], the state [2, N, 128] and the rate [], so that samples lie along
different axes or along none. In use the state that one chunk leaves is given to the next, and
errors of a quantized model come back with it; samples alone do not show that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.samples import voice
from benchmarks.workload import open_session

Feeds = Mapping[str, NDArray[Any]]

RATE = 16_000
CHUNK = 512
CONTEXT = 64
THRESHOLD = 0.5
"""As the package's own ``get_speech_timestamps`` has it."""


def save_samples(samples: Sequence[Feeds], place: Path) -> Path:
    """Writes samples as ``slimctl --calib`` and others read them; the suffix is added.

    Returns:
        One npz with samples along axis 0 of every input; where an input has another first axis, a
        folder with an npz per sample, which only slimctl reads.
    """
    if all(array.shape[:1] == (1,) for feeds in samples for array in feeds.values()):
        path = place.with_name(f"{place.name}.npz")
        joined = {name: np.concatenate([feeds[name] for feeds in samples]) for name in samples[0]}
        np.savez(path, allow_pickle=False, **joined)
        return path
    place.mkdir(exist_ok=True)
    for index, feeds in enumerate(samples):
        np.savez(place / f"{index:04}.npz", allow_pickle=False, **feeds)
    return place


def listened(model: Path, signal: NDArray[np.float32]) -> NDArray[np.float64]:
    """Probability of speech in each chunk of a signal, the model's own state going round."""
    session = open_session(model, threads=1)
    state, context = np.zeros((2, 1, 128), np.float32), np.zeros(CONTEXT, np.float32)
    rate, found = np.array(RATE, np.int64), []
    for chunk in signal[: signal.size // CHUNK * CHUNK].reshape(-1, CHUNK):
        feeds = {"input": np.concatenate([context, chunk])[np.newaxis], "state": state, "sr": rate}
        probability, state = session.run(None, feeds)
        context = chunk[-CONTEXT:]
        found.append(float(probability[0, 0]))
    return np.array(found)


def streamed_agreement(
    reference: Path, other: Path, *, seed: int = 1, seconds: float = 60.0
) -> tuple[float, float]:
    """Speech that both hear, of what either hears, and the mean difference of probabilities."""
    signal = voice(np.random.default_rng(seed), seconds, RATE).astype(np.float32)
    first, second = listened(reference, signal), listened(other, signal)
    either = np.sum((first > THRESHOLD) | (second > THRESHOLD))
    both = np.sum((first > THRESHOLD) & (second > THRESHOLD))
    difference = float(np.mean(np.abs(first - second)))
    return (float(both / either) if either else 1.0), difference
