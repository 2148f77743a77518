"""Zeros among the weights: two of every four, or anywhere.

The graph stays as it is; :func:`_who_gains` says who makes use of the zeros.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from slimctl.core.contract import Context, PassReport, Skipped
from slimctl.core.errors import PassFailedError
from slimctl.graph.edit import NameScope, all_nodes, clone_model, const_array, remove_dead
from slimctl.graph.save import initializer_values
from slimctl.graph.select import Selection
from slimctl.passes._first_order import element_effects
from slimctl.passes._importance import Importance
from slimctl.passes._input_moments import count_batches, energies, second_moments
from slimctl.passes._layers import is_linear
from slimctl.passes._linear_write import Bias, Solution, Writer
from slimctl.passes._obs import (
    Count,
    Given,
    Mask,
    Moments,
    Pattern,
    TwoOfFour,
    lowest,
    lowest_by_row,
    prune_matrix,
)
from slimctl.passes._prune_select import Scope, ratio_of
from slimctl.passes._sparse_layers import Sparse, SparseLayer, find_layers, stages

if TYPE_CHECKING:
    from slimctl.passes.prune import Prune

Scores = NDArray[np.float32]

_MOST_INPUTS = 4608
"""A 3 x 3 kernel over 512 channels; its second moments take 170 MB."""

_UNSEEN = "its inputs held no finite values"


@dataclass(frozen=True)
class Wanted:
    """What is asked for.

    Attributes:
        pattern: Where zeros may be.
        share: Of the weights that become zero; of no effect for 2:4.
        ratio_of: A share of its own for a layer, or None.
        scope: One threshold for all layers, or the same share of each.
        importance: None takes ``activation`` with data, else ``l1``.
        update: Whether the weights that stay make good for those that go; needs data.
        steps: The share is reached in so many steps.
        selection: Which layers may be touched.
    """

    pattern: Sparse
    share: float
    ratio_of: Callable[[ir.Node], float | None]
    scope: Scope
    importance: Importance | None
    update: bool
    steps: int
    selection: Selection


def wanted_of(options: Prune, context: Context) -> Wanted:
    """What the options of the pass ask for."""
    assert options.structure in ("2:4", "unstructured"), "other structures change the graph"
    update = context.has_data if options.reconstruct is None else options.reconstruct
    return Wanted(
        pattern=options.structure,
        share=options.sparsity or 0.0,
        ratio_of=lambda node: ratio_of(options.ratio, [node]),
        scope=options.scope,
        importance=options.importance,
        update=update,
        steps=options.steps,
        selection=Selection(options.include, options.exclude),
    )


def sparsify(model: ir.Model, wanted: Wanted, context: Context) -> PassReport:
    """Makes the weights of Conv, Gemm and MatMul sparse, in place.

    Raises:
        PassFailedError: No layer can be made sparse.
    """
    layers, skipped = find_layers(model, wanted.pattern, wanted.selection, wanted.ratio_of)
    if not layers:
        raise _nothing(wanted, skipped)
    work = _Work(model, wanted, context, layers)
    for step in range(1, wanted.steps + 1):
        work.step(step / wanted.steps)
    remove_dead(model)  # the weights before
    lines = [_line(entry) for entry in layers]
    zeros = sum(line["zeros"] for line in lines)
    return PassReport(
        changed={f"weights of {len(layers)} layers": zeros},
        skipped=skipped,
        notes=[
            _how_many(model, lines),
            *work.how(),
            _packed(model),
            _who_gains(wanted.pattern),
        ],
        facts={"layers": lines},
    )


def _nothing(wanted: Wanted, skipped: Sequence[Skipped]) -> PassFailedError:
    unused = wanted.selection.unused()
    if unused:
        fix = f"the pattern '{unused[0]}' matches no layer; see 'slimctl inspect' for names"
    elif skipped:
        node, reason = skipped[0]
        fix = f"{len(skipped)} layers stay as they are; the first, '{node}': {reason}"
    else:
        fix = "the model has no Conv, Gemm or MatMul with constant weights"
    return PassFailedError("prune", "No weights in this model can be made sparse", fix=fix)


@dataclass
class _Work:
    """A model on its way."""

    model: ir.Model
    wanted: Wanted
    context: Context
    layers: list[SparseLayer]
    original: ir.Model = field(init=False)
    kind: Importance = field(init=False)
    energies: dict[str, NDArray[np.float64]] = field(default_factory=dict)
    effects: dict[str, NDArray[np.float64]] = field(default_factory=dict)
    passes: int = 0

    def __post_init__(self) -> None:
        self.original = clone_model(self.model)
        self.kind = self.wanted.importance or ("activation" if self.context.has_data else "l1")

    def step(self, progress: float) -> None:
        """Brings the model this far, 0 to 1, on the way to what is wanted."""
        if self.kind == "activation":
            self._measure()
        if self.kind == "taylor":
            weights = [entry.layer.layer.weight_value.name or "" for entry in self.layers]
            self.effects = element_effects(self.model, weights, self.context)
        patterns = self._patterns(progress)
        names = NameScope(self.model)
        updated = [entry for entry in self.layers if self._is_updated(entry)]
        for entry in self.layers:
            if entry not in updated:
                self._mask(entry, patterns[entry.name], names)
        in_order = stages(self.model, updated)
        self.passes = len(in_order)
        batches = count_batches(self.model, updated[0].layer, self.context) if updated else 0
        for stage in self.context.progress.track(
            iter(in_order), total=len(in_order), label="making layers sparse"
        ):
            self._update(stage, patterns, batches, names)

    def _is_updated(self, entry: SparseLayer) -> bool:
        return self.wanted.update and not entry.unread and len(entry.order) <= _MOST_INPUTS

    # what matters

    def _measure(self) -> None:
        """``E[x^2]`` of what each layer reads, [groups, inputs], in the order of the pattern."""
        seen = [entry for entry in self.layers if not entry.unread]
        means = energies(self.model, [entry.reader for entry in seen], self.context)
        for entry, mean in zip(seen, means, strict=True):
            if mean is None:
                entry.unread = _UNSEEN
            else:
                self.energies[entry.name] = mean

    def _scores(self, entry: SparseLayer) -> Scores:
        """What each weight matters, [groups, outputs, inputs]."""
        weight = entry.matrix()
        if self.kind == "random":
            seed = (self.context.seed, self.layers.index(entry))
            draw = np.random.default_rng(seed).random(weight.shape)
            return np.where(weight == 0, -1.0, draw).astype(np.float32)
        if self.kind == "l1":
            return np.abs(weight).astype(np.float32)
        if self.kind == "taylor":
            effects = self.effects[entry.layer.layer.weight_value.name or ""]
            return entry.ordered(effects).astype(np.float32)
        if entry.name not in self.energies:
            return np.square(weight).astype(np.float32)
        return (weight**2 * self.energies[entry.name][:, None, :]).astype(np.float32)

    # how many, and which

    def _patterns(self, progress: float) -> dict[str, Pattern]:
        """What goes in each layer, by name."""
        if self.wanted.pattern == "2:4":
            return {entry.name: self._pattern(entry, TwoOfFour()) for entry in self.layers}
        counts = self._counts(progress)
        return {e.name: self._pattern(e, Count(counts[e.name])) for e in self.layers}

    def _pattern(self, entry: SparseLayer, pattern: Count | TwoOfFour) -> Pattern:
        """With a fixed mask, unless what an update costs decides."""
        if self.kind == "activation" and self._is_updated(entry):
            return pattern
        scores = self._scores(entry)
        rows = scores.reshape(-1, scores.shape[2])
        if (
            isinstance(pattern, Count)
            and self.kind == "activation"
            and self.wanted.scope == "local"
        ):
            return Given(lowest_by_row(rows, pattern.count))
        return Given(pattern.plan(rows))

    def _counts(self, progress: float) -> dict[str, int]:
        """How many weights of each layer go."""
        share = self.wanted.share * progress
        counts = {
            entry.name: round(entry.ratio * progress * entry.stored().size)
            for entry in self.layers
            if entry.ratio is not None
        }
        rest = [entry for entry in self.layers if entry.ratio is None]
        if self.wanted.scope == "local" or self.kind == "random":
            ends = np.rint(share * np.cumsum([0, *(entry.stored().size for entry in rest)]))
            each = np.diff(ends).astype(int).tolist()  # they add up to the share of all
        else:
            each = global_counts([self._scores(entry) for entry in rest], share)
        return counts | dict(zip((entry.name for entry in rest), each, strict=True))

    # changing weights

    def _mask(self, entry: SparseLayer, pattern: Pattern, names: NameScope) -> None:
        """Zeros and nothing else; the bits of the other weights stay."""
        by_data = self.kind == "activation" and entry.name in self.energies
        entry.method = "wanda" if by_data else "magnitude"
        if self.kind in ("random", "taylor"):
            entry.method = self.kind
        stays = entry.unordered((~_planned(entry, pattern)).astype(np.float64))
        before = entry.stored()
        array = np.where(entry.layer.weight_of(stays) != 0, before, before.dtype.type(0))
        Writer(names).replace(entry.layer.layer.node, 1, array, f"{entry.name}_sparse")

    def _update(
        self,
        stage: Sequence[SparseLayer],
        patterns: dict[str, Pattern],
        batches: int,
        names: NameScope,
    ) -> None:
        """SparseGPT on layers of which none reads what another writes."""
        readers = [entry.reader for entry in stage]
        found = second_moments(self.model, self.original, readers, self.context, batches)
        for entry, moments in zip(stage, found, strict=True):
            if moments.usable:
                self._settle(entry, patterns[entry.name], moments, names)
            else:
                entry.unread = _UNSEEN
                self._mask(entry, patterns[entry.name], names)

    def _settle(
        self, entry: SparseLayer, pattern: Pattern, moments: Moments, names: NameScope
    ) -> None:
        if isinstance(pattern, Count) and not pattern.count:
            return
        bias = Bias(entry.layer)
        done = prune_matrix(entry.matrix(), moments, pattern, bias_is_free=bias.free)
        entry.method, entry.error = "sparsegpt", done.error
        current = bias.current(done.matrix.shape[:2]) if done.bias is None else done.bias
        Writer(names).write(entry.layer, Solution(entry.unordered(done.matrix), current), bias)

    # what happened

    def how(self) -> Iterator[str]:
        """Sentences about methods."""
        updated = [entry for entry in self.layers if entry.method == "sparsegpt"]
        if updated:
            yield (
                f"in {len(updated)} layers the weights that stay make good for those that went "
                f"(SparseGPT){_typical(updated)}"
            )
            yield (
                "each was measured and changed with the layers before it already sparse, in "
                f"{self.passes} passes over the data"
            )
        by_data = sum(entry.method == "wanda" for entry in self.layers)
        if by_data:
            yield (
                f"in {by_data} layers weights were ranked by size times what they read in the "
                "original (Wanda)"
            )
        if self.kind == "activation":
            for entry in self.layers:
                if entry.method == "magnitude":
                    yield f"weights of '{entry.name}' were ranked by size alone: {entry.unread}"


def _planned(entry: SparseLayer, pattern: Pattern) -> Mask:
    """[groups, outputs, inputs]; by size, where the pattern does not know better."""
    weight = entry.matrix()
    return pattern.plan(weight.reshape(-1, weight.shape[2]) ** 2).reshape(weight.shape)


def global_counts(scores: Sequence[Scores], share: float) -> list[int]:
    """How many weights of each layer lie below one threshold for all.

    Scores become comparable as in LAMP (Lee et al., "Layer-adaptive Sparsity for the
    Magnitude-based Pruning", ICLR 2021): relative to the sum of all scores of the layer that are
    not smaller. The largest of each layer has 1, so no layer goes as a whole before the others.

    Args:
        scores: Of the layers.
        share: Of all their weights.
    """
    if not scores:
        return []
    relative = np.concatenate([_relative(each) for each in scores])
    gone = lowest(relative, round(share * relative.size))
    ends = np.cumsum([each.size for each in scores])
    return [int(np.count_nonzero(part)) for part in np.split(gone, ends[:-1])]


def _relative(scores: Scores) -> Scores:
    """In ascending order."""
    ordered = np.sort(scores, axis=None).astype(np.float64)
    rest = np.cumsum(ordered[::-1])[::-1]
    return (ordered / np.maximum(rest, 1e-300)).astype(np.float32)


# what is said


def _line(entry: SparseLayer) -> dict[str, Any]:
    array = entry.stored()
    return {
        "layer": entry.name,
        "weights": array.size,
        "zeros": int(array.size - np.count_nonzero(array)),
        "method": entry.method,
        "error": None if entry.error is None else round(entry.error, 6),
    }


def _typical(updated: Sequence[SparseLayer]) -> str:
    known = [entry.error for entry in updated if entry.error is not None]
    if not known:
        return ""
    return f": {np.median(known):.2%} of what a layer computes is wrong (median, on unseen samples)"


def _how_many(model: ir.Model, lines: Sequence[dict[str, Any]]) -> str:
    zeros, considered = (sum(line[key] for line in lines) for key in ("zeros", "weights"))
    total = sum(_linear_weights(model))
    return (
        f"{zeros / considered:.1%} of the weights of {len(lines)} layers are zero; they hold "
        f"{considered / total:.0%} of all weights of Conv, Gemm and MatMul"
    )


def _linear_weights(model: ir.Model) -> Iterator[int]:
    """Sizes of the weights of linear layers; shared ones count once."""
    seen: set[ir.Value] = set()
    for node in all_nodes(model):
        weight = node.inputs[1] if is_linear(node) and len(node.inputs) > 1 else None
        array = const_array(weight)
        if weight is not None and array is not None and weight not in seen:
            seen.add(weight)
            yield array.size


def _packed(model: ir.Model) -> str:
    """What the weights take up, as they are and compressed."""
    plain = packed = 0
    for value in initializer_values(model):
        if value.const_value is not None and value.const_value.dtype != ir.DataType.STRING:
            content = value.const_value.tobytes()
            plain += len(content)
            packed += len(zlib.compress(content, 1))  # level 6 takes three times as long for 4 %
    return f"the weights take up {plain / 1e6:.2f} MB, compressed with zlib {packed / 1e6:.2f} MB"


def _who_gains(pattern: Sparse) -> str:
    if pattern == "unstructured":
        return (
            "onnxruntime on CPU computes zeros like any other number: this does not run faster, "
            "it only compresses better"
        )
    # onnxruntime.ai/docs/execution-providers/TensorRT-ExecutionProvider.html#trt_sparsity_enable;
    # 256 channels: https://github.com/NVIDIA/TensorRT/issues/3849 and /4065.
    return (
        "TensorrtExecutionProvider makes use of the zeros on NVIDIA GPUs from Ampere on, if "
        "trt_sparsity_enable is set, mostly in layers with 256 channels or more; onnxruntime on "
        "CPU computes zeros like any other number"
    )
