"""A model between two steps, and what it computes on a few inputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import onnx_ir as ir

from slimctl.core.contract import Feeds
from slimctl.core.errors import ModelExecutionError
from slimctl.core.memory import return_freed_memory
from slimctl.graph.edit import interface
from slimctl.graph.opset import raise_opset
from slimctl.graph.save import PASSING_THRESHOLD, save_model
from slimctl.graph.session import Level, open_session, run
from slimctl.pipeline.probe import Probes, random_candidates, random_like, same_feeds

if TYPE_CHECKING:
    import onnxruntime as ort


class Observation(NamedTuple):
    """What a model computes on some inputs.

    Attributes:
        optimized: Outputs per input, with all of onnxruntime's optimizations.
        plain: Outputs for the first input without any; None when there are no inputs.
    """

    optimized: tuple[Feeds, ...]
    plain: Feeds | None


@dataclass
class Stage:
    """A model as it stands between two steps.

    Attributes:
        model: The graph; later steps clone it.
        path: Its file.
        observation: What it computes; None when it was not run.
        refusal: Why it was not run, in a sentence.
    """

    model: ir.Model
    path: Path
    observation: Observation | None = None
    refusal: str = ""
    _complaint: str | None = field(default=None, repr=False)

    def checker_complaint(self) -> str:
        """What the ONNX checker has against the file, empty when nothing. Asked only once."""
        if self._complaint is None:
            self._complaint = _checker_complaint(self.path)
        return self._complaint

    def raised_complaint(self, opset: int, folder: Path) -> str:
        """What the ONNX checker would have against the model in a newer operator set.

        Args:
            opset: The newer version of the default operator set.
            folder: An existing one, for a file that is deleted again.
        """
        with TemporaryDirectory(dir=folder) as place:
            raised = raise_opset(self.model, opset)
            path = Path(place) / "raised.onnx"
            return _checker_complaint(save_model(raised, path, most_inline=PASSING_THRESHOLD)[0])


def _checker_complaint(path: Path) -> str:
    import onnx

    failures = (onnx.checker.ValidationError, onnx.shape_inference.InferenceError)
    try:
        onnx.checker.check_model(str(path), full_check=True)
    except failures as error:
        return " ".join(str(error).split())
    return ""


def observe(
    path: Path, feeds: Sequence[Feeds], threads: int, known: tuple[Feeds, ...] = ()
) -> Observation:
    """Loads a model at two optimization levels and runs it on some inputs.

    Args:
        path: The model's file.
        feeds: Inputs.
        threads: Threads of onnxruntime.
        known: Outputs with all optimizations, if a model of equal content gave them just now.

    Raises:
        ModelExecutionError: onnxruntime does not load or run it; the message names the level.
    """
    optimized = known if len(known) == len(feeds) else ()
    if not optimized:
        optimized = _outputs(path, feeds, Level.ALL, threads)
    plain = _outputs(path, feeds[:1], Level.DISABLED, threads)
    return Observation(optimized, plain[0] if plain else None)


def _outputs(path: Path, feeds: Sequence[Feeds], level: Level, threads: int) -> tuple[Feeds, ...]:
    """Loads and runs a model; the session, which holds a copy of the weights, is gone then."""
    with _level_named(level):
        session = open_session(path, level=level, threads=threads)
        outputs = tuple(_apart(run(session, feed)) for feed in feeds)
    del session
    return_freed_memory()
    return outputs


@contextmanager
def _level_named(level: Level) -> Iterator[None]:
    try:
        yield
    except ModelExecutionError as error:
        what = f"{error.what} (optimization level {level})"
        raise ModelExecutionError(what, where=error.where, fix=error.fix) from error


def observe_original(stage: Stage, samples: Sequence[Feeds], *, seed: int, threads: int) -> Probes:
    """Finds probes that the original model runs on, and notes what it computes on them.

    It is run with all optimizations only: that is what its user runs today. When it cannot be run
    the stage says why, and nobody is to blame: custom operators run elsewhere.

    Args:
        stage: The original; its observation or refusal is filled in.
        samples: Real inputs, may be empty.
        seed: Seed of the random inputs.
        threads: Threads of onnxruntime.
    """
    try:
        session = open_session(stage.path, threads=threads)
        real = tuple(_apart(run(session, feeds)) for feeds in samples)
    except ModelExecutionError as error:
        stage.refusal = error.what
        return Probes()
    if samples:
        made = random_like(samples[0], seed)
        # Nothing is random about numbers of tokens: they need not be run twice.
        candidates = iter(() if same_feeds(made, samples[0]) else (made,))
    else:
        candidates = random_candidates(interface(stage.model), seed)
    feeds, outputs = _first_that_runs(session, candidates)
    del session
    return_freed_memory()
    probes = Probes(tuple(samples), feeds)
    if probes.all:
        stage.observation = Observation((*real, *outputs), None)
    else:
        stage.refusal = "no random input fits the model, and no data are given"
    return probes


def _apart(outputs: Feeds) -> Feeds:
    """Copies: an output as onnxruntime gives it keeps memory of the whole session."""
    return {name: _copied(output) for name, output in outputs.items()}


def _copied(output: Any) -> Any:
    return output.copy() if isinstance(output, np.ndarray) else output  # sequences and maps


def _first_that_runs(
    session: ort.InferenceSession, candidates: Iterator[Feeds]
) -> tuple[Feeds | None, tuple[Feeds, ...]]:
    for feeds in candidates:
        try:
            return feeds, (run(session, feeds),)
        except ModelExecutionError:
            continue  # another size may fit; if none does, the stage says so
    return None, ()
