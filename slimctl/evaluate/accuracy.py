"""A model's score on labeled data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir

from slimctl.core.contract import Progress, SilentProgress
from slimctl.core.errors import OptionError, SourceError
from slimctl.data.sources import DataSource
from slimctl.evaluate.metrics import OPTION, TopK, open_metric
from slimctl.graph.session import Level, Products, open_session, run


@dataclass(frozen=True)
class Score:
    """The result of one evaluation.

    Attributes:
        metric: Name of the metric.
        value: Over all samples.
        samples: How many there were.
        higher_is_better: Which direction is an improvement.
    """

    metric: str
    value: float
    samples: int
    higher_is_better: bool


def accuracy(
    model: ir.Model | Path,
    source: DataSource,
    metric: str,
    *,
    reference: ir.Model | Path | None = None,
    threads: int = 0,
    level: Level = Level.ALL,
    products: Products = Products.EXACT,
    progress: Progress | None = None,
) -> Score:
    """Evaluates a model.

    Args:
        model: The model, in memory or a file.
        source: Data opened for its interface.
        metric: See :mod:`slimctl.evaluate.metrics`.
        reference: The model to agree with, for ``agreement``.
        threads: Threads of onnxruntime, 0 for all cores.
        level: Graph optimizations of onnxruntime.
        products: Arithmetic of its integer kernels.
        progress: Where to say how far the work is.

    Raises:
        OptionError: Unknown metric, or one that does not fit the model.
        SourceError: The metric needs labels and the data have none.
        SampleError: Labels are not class numbers.
        ModelExecutionError: onnxruntime refuses the model.
    """
    measured = open_metric(metric)
    if measured.labels_from == "data" and not source.labeled:
        raise SourceError(
            source.spec,
            f"{metric} needs labels and the data have none",
            fix="add an array 'labels' to the .npz, use class folders, or yield (inputs, labels)",
        )
    teacher = None
    if isinstance(measured, TopK) and measured.labels_from == "reference":
        if reference is None:
            raise OptionError(
                OPTION, f"{metric} needs a model to agree with", fix="name it with --against"
            )
        teacher = open_session(reference, level=level, threads=threads, products=products)
    session = open_session(model, level=level, threads=threads, products=products)
    samples = 0
    tracked = (progress or SilentProgress()).track(
        source.batches(), total=None, label=f"evaluate {metric}"
    )
    for batch in tracked:
        labels = batch.labels
        if teacher is not None and isinstance(measured, TopK):
            labels = np.argmax(measured.scores(run(teacher, batch.feeds)), axis=-1)
        measured.update(run(session, batch.feeds), labels, batch.size)
        samples += batch.size
    return Score(metric, measured.value(), samples, measured.higher_is_better)
