"""The contract between passes and the pipeline that runs them.

A pass is a frozen pydantic model: its fields are its options, an instance is a recipe step. The
command, the recipe step, the JSON schema and the reference page are derived from the class.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, Self, TypeAlias, TypeVar

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from slimctl.core.target import Target

Feeds: TypeAlias = dict[str, NDArray[Any]]
"""One run's inputs by name."""

CalibrationMethod = Literal["auto", "kl", "minmax", "percentile", "mse"]


SampleSet = Literal["few", "many", "scores"]
"""A few samples show a broken model; many tell how good one is. To tell two good ones apart, many
are looked at and probabilities compared by the scores that Softmax or Sigmoid made them from. Of an
output that is put together (of boxes and probabilities, say) each part counts by itself there."""


_T = TypeVar("_T")


class Effect(StrEnum):
    """What a pass does to the function that the model computes."""

    EXACT = "exact"  # the same function up to floating-point rounding
    APPROXIMATE = "approximate"  # trades accuracy for size or speed
    INTERFACE = "interface"  # changes inputs or outputs


class Range(NamedTuple):
    """The interval of real values that a quantized tensor represents."""

    low: float
    high: float


class Skipped(NamedTuple):
    """A candidate that a pass left alone."""

    node: str
    reason: str


class ReportTable(NamedTuple):
    """A table for the summary.

    Attributes:
        title: What it lists.
        columns: Headings; ``>`` in front aligns a column to the right.
        rows: One text per column.
    """

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


@dataclass(frozen=True)
class PassReport:
    """What one pass did.

    Attributes:
        changed: Number of changes by what was changed, for example ``{"Conv": 49}``.
        skipped: Every candidate that was left alone, with its reason.
        notes: Sentences for the summary.
        warnings: Sentences that the user must not miss.
        tables: Lists for the summary.
        timings: Sentences about measured time, which no two runs share: they are not hashed.
        facts: Values for the manifest, JSON types only.
    """

    changed: Mapping[str, int] = field(default_factory=dict)
    skipped: Sequence[Skipped] = ()
    notes: Sequence[str] = ()
    warnings: Sequence[str] = ()
    tables: Sequence[ReportTable] = ()
    timings: Sequence[str] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)


Label: TypeAlias = str | Callable[[], str]
"""What work is called; a function when that changes while it runs, such as a loss."""


class Progress(Protocol):
    """Where long work says how far it is. The command line draws it; elsewhere it is silent."""

    def track(self, items: Iterator[_T], *, total: int | None, label: Label) -> Iterator[_T]:
        """Yields the items and reports each."""
        ...


class SilentProgress:
    """Progress that nobody watches."""

    def track(self, items: Iterator[_T], *, total: int | None, label: Label) -> Iterator[_T]:
        """Yields the items and says nothing."""
        del total, label
        return items


class TrainingBatch(Protocol):
    """Some samples and their labels; see :class:`slimctl.data.batch.Batch`."""

    @property
    def feeds(self) -> Feeds:
        """One array per model input."""
        ...

    @property
    def labels(self) -> NDArray[Any] | None:
        """One per sample along axis 0; None when there are none."""
        ...

    @property
    def first(self) -> int:
        """Number of the first sample."""
        ...

    @property
    def size(self) -> int:
        """Number of samples."""
        ...


class TrainingData(Protocol):
    """What a model learns from."""

    @property
    def sample_count(self) -> int | None:
        """How many samples there are at most; None when only reading tells."""
        ...

    def batches(self) -> Iterator[TrainingBatch]:
        """A new pass over the data, always the same."""
        ...

    def content_hash(self) -> str:
        """The same for equal samples."""
        ...


@dataclass(frozen=True)
class RangeRequest:
    """Which ranges a pass wants to know.

    Attributes:
        tensors: Names of tensors of the model's main graph.
        method: How the threshold is chosen.
        percentile: Share of values kept, in percent, for ``percentile``.
        levels: Number of quantization levels, 256 for 8 bits.
        symmetric: Ranges are symmetric about zero.
        exponent: Power of the error that ``auto`` minimizes.
    """

    tensors: tuple[str, ...]
    method: CalibrationMethod
    percentile: float = 99.999
    levels: int = 256
    symmetric: bool = False
    exponent: float = 2.0


@dataclass(frozen=True)
class LinearInput:
    """How a linear layer reads its data input; enough to know the mean of what each weight sees.

    Attributes:
        node: Name of the Conv, ConvTranspose, Gemm or MatMul node.
        tensor: Name of the data input.
        kernel: Kernel size per spatial axis, empty for Gemm and MatMul.
        strides: As the kernel.
        dilations: As the kernel.
        pads: ONNX order, begins then ends.
        auto_pad: ONNX attribute.
        channel_axis: Axis of the tensor that the weights run over.
        transposed: The layer is a ConvTranspose.
        output_padding: Of a ConvTranspose, as the kernel.
    """

    node: str
    tensor: str
    kernel: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()
    dilations: tuple[int, ...] = ()
    pads: tuple[int, ...] = ()
    auto_pad: str = "NOTSET"
    channel_axis: int = 1
    transposed: bool = False
    output_padding: tuple[int, ...] = ()


class InputMean(NamedTuple):
    """Mean of what each weight position of a linear layer sees, over samples and positions.

    Attributes:
        first: From one half of the samples, float64 [channels, *kernel].
        second: From the other half; None when there is one sample only.
        both: From all samples.
    """

    first: NDArray[np.float64]
    second: NDArray[np.float64] | None
    both: NDArray[np.float64]


class Outlook(NamedTuple):
    """What a later step would make of two models that compute the same.

    Attributes:
        model_db: SQNR in dB that the worst output of the first would keep.
        other_db: That of the second; None when the first is good enough not to try it.
    """

    model_db: float
    other_db: float | None


class Context(Protocol):
    """What a pass may use besides the model. Passes never import calibration or data."""

    @property
    def target(self) -> Target:
        """The execution provider to compress for."""
        ...

    @property
    def seed(self) -> int:
        """Seed of everything random."""
        ...

    @property
    def progress(self) -> Progress:
        """Where to say how far the work is."""
        ...

    @property
    def has_data(self) -> bool:
        """Whether calibration data were given."""
        ...

    @property
    def reference(self) -> ir.Model:
        """The float model that a pass may compare with; it must not be changed.

        The input of the step that the pass declares to stand ``after``; for other passes, the input
        of the first APPROXIMATE step of the unbroken row of them that leads here.
        """
        ...

    @property
    def later(self) -> Sequence[str]:
        """Names of the passes that run after the current one."""
        ...

    def fidelity(self, model: ir.Model, samples: SampleSet = "few") -> Mapping[str, float]:
        """SQNR in dB of each float output against the original, on some calibration samples.

        Empty when there are no calibration data, or the original cannot be run here.
        """
        ...

    def ranges(self, model: ir.Model, request: RangeRequest) -> Mapping[str, Range]:
        """Ranges of tensors of this model on the calibration data.

        A tensor that never held a finite value (empty, or all NaN) has no entry.

        Raises:
            SourceError: There are no calibration data.
        """
        ...

    def input_means(
        self, model: ir.Model, layers: Sequence[LinearInput]
    ) -> Mapping[str, InputMean]:
        """Mean inputs of linear layers of this model on the calibration data, by node name."""
        ...

    def channel_rms(
        self, model: ir.Model, axes: Mapping[str, int]
    ) -> Mapping[str, NDArray[np.float64]]:
        """Root mean squares of the channels of tensors of this model on the calibration data.

        Args:
            model: Stays as it is.
            axes: For each tensor of the main graph, the axis that holds its channels.

        Returns:
            [channels] by tensor; one that never held a finite value has no entry.

        Raises:
            SourceError: There are no calibration data.
        """
        ...

    def outlook(self, model: ir.Model, other: ir.Model, changed: Collection[str]) -> Outlook | None:
        """What the next step that loses accuracy would make of either of two models.

        None when there is no such step, or it cannot tell.

        Args:
            model: A float model.
            other: One that computes the same, or the same model again: it is not looked at then.
            changed: Names of the tensors that hold other values in it.
        """
        ...

    def remembered(self, key: Hashable, compute: Callable[[], _T]) -> _T:
        """What was computed under this key earlier in the run; computes it the first time."""
        ...

    def metric(self, model: ir.Model) -> float | None:
        """The metric that the run is judged by, such that more is better.

        None when the run has no evaluation data or no metric.
        """
        ...

    def training_data(self) -> TrainingData:
        """What a model learns from: the training data, or the calibration data without.

        Raises:
            SourceError: There are neither.
        """
        ...

    @property
    def threads(self) -> int:
        """Threads of what runs models; 0 lets it decide."""
        ...

    def example(self) -> Feeds | None:
        """Inputs that the model takes: the first calibration batch, or random without data.

        None when neither is there.
        """
        ...

    def activations(
        self, model: ir.Model, tensors: Sequence[str], feeds: Iterable[Feeds] | None = None
    ) -> Iterator[Feeds]:
        """What tensors of this model's main graph hold, for one calibration batch after another.

        The order of the batches is the same in every call; memory is that of one batch.

        Args:
            model: Stays as it is.
            tensors: Names.
            feeds: Inputs instead of the calibration data, for a model that begins in its middle.

        Raises:
            SourceError: There are no calibration data.
        """
        ...

    def taylor_terms(self, model: ir.Model, tensors: Sequence[str]) -> Iterator[Feeds]:
        """What each element of some tensors contributes to the outputs, to first order.

        For one calibration batch after another, ``t * d(v^T y)/dt`` of each tensor, in its shape:
        what ``v^T y`` loses when the element becomes zero. ``y`` are the outputs relative to their
        norm, ``v`` random signs, so that the mean square of a sum of elements is the squared
        relative change of the outputs when all of them become zero. Memory is that of one batch.

        Args:
            model: Stays as it is.
            tensors: Float tensors of the main graph, weights or computed ones, by name.

        Raises:
            SourceError: There are no calibration data.
            MissingExtraError: torch is not installed.
            UnsupportedModelError: torch cannot run the model; names the node.
        """
        ...


class Pass(BaseModel):
    """Base of all passes.

    A subclass sets ``name``, ``summary`` and ``effect``, declares its options as fields with a
    description and bounds, and implements :meth:`apply`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    name: ClassVar[str]
    summary: ClassVar[str]
    effect: ClassVar[Effect]
    needs_data: ClassVar[bool] = False
    uses_metric: ClassVar[bool] = False
    """Looks at the metric that the run is judged by."""
    uses_data: ClassVar[bool] = False
    """Works without calibration data, and better with them."""
    trains: ClassVar[bool] = False
    """Learns from training data; see :meth:`requires_training`."""
    may_train: ClassVar[bool] = False
    """Stands for a chain in which a pass may train."""
    after: ClassVar[frozenset[str]] = frozenset()
    """Passes of which one must stand earlier in the chain; the reference is the model before it."""
    not_after: ClassVar[frozenset[str]] = frozenset()
    """Passes that must not stand earlier in the chain."""

    def actual_effect(self) -> Effect:
        """What this step does: ``effect``, unless its options change it."""
        return self.effect

    def requires_data(self) -> bool:
        """Whether this step, with its options, cannot do without calibration data."""
        return self.needs_data

    def requires_training(self) -> bool:
        """Whether this step, with its options, learns from data."""
        return self.trains

    def resolve(self, target: Target) -> Self:
        """An equal pass with every default that the target decides made explicit."""
        del target
        return self

    def expand(self) -> tuple[Pass, ...]:
        """The chain of single passes that this step stands for, in order."""
        return (self,)

    def anticipates(self, model: ir.Model, target: Target) -> Sequence[LinearInput]:
        """Layers whose mean inputs a later step is going to ask for, one that must stand after us.

        When this pass asks for ranges on the same model, one pass over the data serves both.
        Asking for other layers later is allowed; it costs another pass.
        """
        del model, target
        return ()

    def anticipates_ranges(self, model: ir.Model, target: Target) -> Sequence[str]:
        """Tensors whose ranges this pass is going to ask for, as far as that is known by now.

        They are collected when an earlier pass needs a pass over the data.
        """
        del model, target
        return ()

    def outlook(self, model: ir.Model, other: ir.Model, context: Context) -> Outlook | None:
        """What this pass would make of either of two models; see :meth:`Context.outlook`."""
        del model, other, context
        return None

    def minimum_opset(self, model: ir.Model, target: Target) -> int:
        """The lowest ONNX opset that the result needs; the pipeline raises the model to it."""
        del model, target
        return 0

    def requires(self, model: ir.Model) -> None:
        """Checks the model before anything is changed.

        Raises:
            UnsupportedModelError: The pass cannot work on this model.
        """
        del model

    def apply(self, model: ir.Model, context: Context) -> PassReport:
        """Changes the model in place and says what was done."""
        raise NotImplementedError(f"{type(self).__name__} does not implement apply")
