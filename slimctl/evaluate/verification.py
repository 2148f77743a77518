"""Who is wrong: the model, onnxruntime's kernels on this processor, or nobody.

Three questions, each answered node by node:

- Do the quantization parameters contradict each other? (``parameters``)
- Does onnxruntime compute what the built-in runtime computes from the same inputs? (``replay``)
- Does each layer compute what the reference computes there? (``layers``)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import onnx_ir as ir

from slimctl.core.contract import Feeds, Progress, SilentProgress
from slimctl.evaluate.layers import LayerError, layer_errors
from slimctl.evaluate.parameters import Finding, check_parameters
from slimctl.evaluate.replay import NodeTotals, Replay, replay
from slimctl.evaluate.weights import check_weights
from slimctl.graph.session import CPU, Level
from slimctl.runtime.counts import Counts
from slimctl.runtime.device import DEVICES
from slimctl.runtime.session import Runtime

FEW_SAMPLES = 4
"""Runs that are looked at inside: every element of every tensor counts in each of them."""

LEVELS = (Level.DISABLED, Level.BASIC, Level.ALL)

SOUND_RATIO = 2.5
"""Largest root mean square difference of a sound layer from the best one, in units of what rounding
lets expect. Sound layers have 0.4 to 0.9, the first layer of EfficientNet-lite0 1.5: its weights
cancel each other. Most faults have 6 and more."""

SOUND_CHANNEL_RATIO = 5.0
"""The same for the worst channel: among hundreds one is further off. Measured: up to 2.7."""

SOUND_MEAN_STEPS = 0.25
"""Largest mean difference, in steps; 0.6 times the expected difference where that is more.
Rounding has almost none (0.04 measured): a zero point that is off by one gives exactly 1."""

SOUND_CLIPPED = 0.02
"""Largest part of the values that a range may cut off. Calibration that minimizes errors clips less
than 0.1 %."""

FEW_VALUES = 32
"""Fewer values cut off say nothing, and neither do the ranges of tensors of fewer elements."""

SOUND_RANGE = 0.2
"""Least part of the codes that a tensor should need: a fifth means more than two bits unused."""

FLOAT_ORDER = 1e-4
"""Largest relative difference of float values that the order of accumulation explains: 1,000 terms
with 24 bits each."""


class Verdict(StrEnum):
    """Why a node's output differs, or who is at fault."""

    TIE = "rounding tie"
    SATURATION = "saturation"
    ORDER = "accumulation order"
    FUSION = "fused kernel differs from its parts"
    MODEL = "model wrong"
    UNEXPLAINED = "unexplained"

    @property
    def parts(self) -> bool:
        """Whether the runtimes part here: they compute different things, not just rounding."""
        return self in (Verdict.SATURATION, Verdict.FUSION, Verdict.UNEXPLAINED)


@dataclass(frozen=True)
class Judgment:
    """One node of which something is to be said.

    Attributes:
        node: Its name.
        op_type: Its operator.
        tensor: Name of the tensor that shows it.
        verdict: Who is wrong.
        reason: Why, with numbers.
        level: onnxruntime's graph optimizations under which it shows; None where none matter.
        steps: The largest difference, in quantization steps; 0 where that means nothing.
    """

    node: str
    op_type: str
    tensor: str
    verdict: Verdict
    reason: str
    level: Level | None = None
    steps: float = 0.0


@dataclass(frozen=True)
class Verification:
    """All that was found.

    Attributes:
        samples: Number of runs that were looked at inside.
        replays: The runtimes compared, exact arithmetic, one for each level and provider.
        layers: Each layer against the reference; empty without one.
        judgments: What is to be said about nodes: faults of the model first.
        counts: Saturation, overflow and used codes at integer operators, by node.
    """

    samples: int
    replays: tuple[Replay, ...]
    layers: tuple[LayerError, ...]
    judgments: tuple[Judgment, ...]
    counts: dict[str, Counts]

    @property
    def faults(self) -> tuple[Judgment, ...]:
        """Nodes at which the model itself is wrong."""
        return tuple(found for found in self.judgments if found.verdict is Verdict.MODEL)

    @property
    def parting(self) -> Judgment | None:
        """The first node, in the order of the graph, from which the runtimes part."""
        return next((found for found in self.judgments if found.verdict.parts), None)

    @property
    def wrong_nodes(self) -> tuple[str, ...]:
        """Names of the nodes at which the model itself is wrong, each once."""
        return tuple(dict.fromkeys(found.node for found in self.faults))

    @property
    def farthest(self) -> NodeTotals | None:
        """The node at which the runtimes differ by the most steps; None where no codes are."""
        nodes = (node for found in self.replays for node in found.nodes if node.is_codes)
        return max(nodes, key=lambda node: node.steps, default=None)

    @property
    def step_difference(self) -> int:
        """The largest difference of the runtimes at any node, in quantization steps."""
        return max((found.steps for found in self.replays), default=0)


def verify_model(
    model: ir.Model,
    samples: Sequence[Feeds],
    *,
    reference: ir.Model | None = None,
    providers: Sequence[str] = (CPU,),
    threads: int = 1,
    progress: Progress | None = None,
) -> Verification:
    """Asks all three questions on some samples.

    Args:
        model: As ``load_model`` leaves it; not changed.
        samples: Inputs of one run each; a few are enough, since every element of every tensor
            counts.
        reference: The original, likewise; None leaves the third question out.
        providers: onnxruntime's execution providers; the CPU's is asked at every level.
        threads: onnxruntime's.
        progress: Where to say how far the work is.

    Raises:
        UnsupportedModelError: The runtime has no function for an operator.
        ModelExecutionError: A runtime refuses a model or the inputs.
    """
    told = progress or SilentProgress()
    places = [(CPU, level) for level in LEVELS]
    places += [(provider, Level.ALL) for provider in providers if provider != CPU]
    tracked = told.track(iter(places), total=len(places), label="compare runtimes")
    replays = [
        replay(model, samples, level=level, provider=provider, threads=threads)
        for provider, level in tracked
    ]
    judgments = [*_parameter_judgments(check_parameters(model))]
    for found in replays:
        judgments.extend(_replay_judgments(found, replays[0], model, samples, threads))
    layers: tuple[LayerError, ...] = ()
    if reference is not None:
        judgments.extend(_parameter_judgments(check_weights(model, reference)))
        layers = layer_errors(model, reference, samples)
    judgments.extend(_layer_judgments(layers))
    judgments.sort(key=lambda judgment: judgment.verdict is not Verdict.MODEL)
    return Verification(
        len(samples), tuple(replays), layers, tuple(judgments), count_codes(model, samples)
    )


def count_codes(model: ir.Model, samples: Sequence[Feeds]) -> dict[str, Counts]:
    """Saturation, overflow and used codes at integer operators, by node."""
    counting = Runtime(model, counting=True)
    for feeds in samples:
        counting.run(feeds)
    return counting.counts()


def _parameter_judgments(findings: Sequence[Finding]) -> list[Judgment]:
    return [
        Judgment(found.node, "", found.tensor, Verdict.MODEL, found.reason) for found in findings
    ]


def _replay_judgments(
    found: Replay,
    plain: Replay,
    model: ir.Model,
    samples: Sequence[Feeds],
    threads: int,
) -> list[Judgment]:
    """A verdict for every node that differs."""
    apart = [node for node in found.nodes if _differs(node)]
    emulated: dict[str, NodeTotals] = {}
    if found.level is Level.ALL and any(n.is_codes and not n.only_ties for n in apart):
        device = DEVICES["x86-avx2"]
        again = replay(
            model,
            samples,
            level=found.level,
            provider=found.provider,
            device=device,
            threads=threads,
        )
        emulated = {node.tensor: node for node in again.nodes}
    as_written = {node.tensor: node for node in plain.nodes}
    return [_judged(node, found, as_written, emulated) for node in apart]


def _differs(node: NodeTotals) -> bool:
    return node.differing > 0 if node.is_codes else _is_large(node)


def _is_large(node: NodeTotals) -> bool:
    return node.relative > FLOAT_ORDER


def _judged(
    node: NodeTotals,
    found: Replay,
    as_written: dict[str, NodeTotals],
    emulated: dict[str, NodeTotals],
) -> Judgment:
    verdict, reason = _verdict(node, found, as_written, emulated)
    return Judgment(
        node.node, node.op_type, node.tensor, verdict, reason, found.level, float(node.steps)
    )


def _verdict(
    node: NodeTotals,
    found: Replay,
    as_written: dict[str, NodeTotals],
    emulated: dict[str, NodeTotals],
) -> tuple[Verdict, str]:
    if not node.is_codes:
        return Verdict.UNEXPLAINED, f"float values differ by {node.relative:.2g} of the largest"
    share = f"{node.differing} of {node.elements} codes differ, by up to {node.steps}"
    if node.only_ties:
        return Verdict.TIE, f"{share}; the exact values lie between two codes"
    other = emulated.get(node.tensor)
    if other is not None and other.only_ties:
        return Verdict.SATURATION, (
            f"{share}; with pairs of products that saturate at 16 bits, as on x86 without VNNI,"
            f" {other.differing} do"
        )
    parts = as_written.get(node.tensor)
    if found.level is Level.ALL and parts is not None and parts.only_ties:
        return Verdict.FUSION, f"{share}; without graph optimizations {parts.differing} do"
    if node.steps == 1:
        return Verdict.ORDER, f"{share}; sums in another order round to the other side"
    return Verdict.UNEXPLAINED, share


def _layer_judgments(layers: Sequence[LayerError]) -> list[Judgment]:
    return [
        Judgment(
            layer.node,
            layer.op_type,
            layer.tensor,
            Verdict.MODEL,
            reason,
            steps=layer.rms_steps,
        )
        for layer in layers
        for reason in _faults(layer)
    ]


def _faults(layer: LayerError) -> list[str]:
    """What is wrong with a layer; the differences are told first."""
    found: list[str] = []
    if abs(layer.mean_steps) > max(SOUND_MEAN_STEPS, 0.6 * layer.expected_steps):
        found.append(
            f"its output is {layer.mean_steps:+.2f} steps off on average: a zero point, a bias or"
            " weights that were not rounded to nearest"
        )
    elif layer.rms_steps > SOUND_RATIO * layer.expected_steps:
        found.append(
            f"its output differs by {layer.rms_steps:.2f} steps (root mean square) from what the"
            " reference's layer makes of the same input, where rounding explains"
            f" {layer.expected_steps:.2f}: weights, scales or their axis"
        )
    elif layer.channel_ratio > SOUND_CHANNEL_RATIO:
        found.append(
            f"one channel of its output differs {layer.channel_ratio:.1f} times as much from the"
            " reference's as rounding explains: weights, scale or bias of a channel"
        )
    values = sum(layer.histogram)
    if layer.clipped > SOUND_CLIPPED and layer.clipped * values >= FEW_VALUES:
        found.append(f"its range cuts off {layer.clipped:.1%} of the reference's values")
    if 0.0 < layer.used_range < SOUND_RANGE and values >= FEW_VALUES:
        found.append(f"its values need {layer.used_range:.0%} of the codes: the scale is too large")
    return found


def to_dict(found: Verification) -> dict[str, Any]:
    """All of it, JSON types only."""
    return {
        "samples": found.samples,
        "max_step_difference": found.step_difference,
        "runtimes": [
            {
                "provider": one.provider,
                "level": one.level.value,
                "codes": one.codes,
                "identical": one.identical,
                "max_steps": one.steps,
                "outputs_db": dict(one.outputs),
            }
            for one in found.replays
        ],
        "judgments": [
            {
                "node": one.node,
                "op_type": one.op_type,
                "tensor": one.tensor,
                "verdict": one.verdict.value,
                "reason": one.reason,
                "level": None if one.level is None else one.level.value,
                "steps": one.steps,
            }
            for one in found.judgments
        ],
        "layers": [{**vars(layer), "excess_db": layer.excess_db} for layer in found.layers],
        "counts": {
            name: {
                "elements": count.elements,
                "at_low": count.at_low,
                "at_high": count.at_high,
                "overflowed": count.overflowed,
                "dead_channels": count.dead_channels,
                "used_range": count.used_range,
            }
            for name, count in found.counts.items()
        },
    }
