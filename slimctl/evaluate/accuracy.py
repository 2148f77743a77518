"""A model's score on labeled data."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import onnx_ir as ir

from slimctl.core.contract import Progress, SilentProgress
from slimctl.core.errors import OptionError, SourceError
from slimctl.data.sources import DataSource
from slimctl.evaluate.metrics import OPTION, Measured, open_metric
from slimctl.graph.session import Level, Products, open_session, run


@dataclass(frozen=True)
class Score:
    """The result of one evaluation.

    Attributes:
        metric: Name of the metric.
        value: Over all samples.
        samples: How many there were.
        higher_is_better: Which direction is an improvement.
        measured: The records behind it, for :mod:`slimctl.evaluate.significance`.
    """

    metric: str
    value: float
    samples: int
    higher_is_better: bool
    measured: Measured | None = field(default=None, compare=False, repr=False)


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
        reference: The model to compare with, for metrics that need one.
        threads: Threads of onnxruntime, 0 for all cores.
        level: Graph optimizations of onnxruntime.
        products: Arithmetic of its integer kernels.
        progress: Where to say how far the work is.

    Raises:
        OptionError: Unknown metric, or one that does not fit the model.
        SourceError: The metric needs labels and the data have none.
        SampleError: Labels are not what the metric needs.
        ModelExecutionError: onnxruntime refuses the model.
    """
    measured = open_metric(metric)
    check_needs(measured, source, reference)
    teacher = None
    if measured.needs == "reference" and reference is not None:
        teacher = open_session(reference, level=level, threads=threads, products=products)
    session = open_session(model, level=level, threads=threads, products=products)
    samples = 0
    tracked = (progress or SilentProgress()).track(
        source.batches(), total=None, label=f"evaluate {metric}"
    )
    for batch in tracked:
        expected = None if teacher is None else run(teacher, batch.feeds)
        measured.update(run(session, batch.feeds), batch.labels, batch.size, reference=expected)
        samples += batch.size
    return Score(metric, measured.value(), samples, measured.higher_is_better, measured)


def check_needs(measured: Measured, source: DataSource, reference: ir.Model | Path | None) -> None:
    """Refuses a metric that cannot be measured.

    Raises:
        OptionError: It compares with a model, and there is none.
        SourceError: It needs labels, and the data have none.
    """
    if measured.needs == "labels" and not source.labeled:
        raise SourceError(
            source.spec,
            f"{measured.name} needs labels and the data have none",
            fix="add an array 'labels' to the .npz, use class folders, or yield (inputs, labels)",
        )
    if measured.needs == "reference" and reference is None:
        raise OptionError(
            OPTION, f"{measured.name} needs a model to agree with", fix="name it with --against"
        )
