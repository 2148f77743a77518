"""Residual blocks: rank, choose, remove, refit, as many times as there are steps."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from slimctl.core.contract import Context, PassReport, ReportTable, Skipped
from slimctl.core.errors import OptionError, PassFailedError
from slimctl.graph.cost import node_costs
from slimctl.graph.edit import clone_model, const_array
from slimctl.graph.select import Selection
from slimctl.graph.shapes import infer_shapes
from slimctl.passes._first_order import tensor_effects
from slimctl.passes._importance import Importance
from slimctl.passes._layers import is_linear, output_axis
from slimctl.passes._prune_goal import Goal, Latency, cost_of, example_of, open_sizes
from slimctl.passes._prune_kept import all_kept
from slimctl.passes._prune_options import goal_of
from slimctl.passes._prune_report import cost_note, refit_note, rounded, time_note
from slimctl.passes._prune_select import ratio_of
from slimctl.passes._reconstruct import Kept, Reconstruction, reconstruct
from slimctl.passes._residual_blocks import Block, find_blocks, inside, remove_blocks

if TYPE_CHECKING:
    from slimctl.passes.prune import Prune

_NAME = "prune"
_COLUMNS = ("block", ">layers", ">importance", "what became of it")


@dataclass
class _Line:
    """One block over all steps.

    Attributes:
        layers: Names of its layers.
        importance: As it was last ranked.
        removed: Whether it is gone.
        why: Why it is, or is not.
    """

    layers: tuple[str, ...]
    importance: float = 0.0
    removed: bool = False
    why: str = "more important than others"


@dataclass
class BlockPruning:
    """A model on its way."""

    options: Prune
    model: ir.Model
    context: Context
    original: ir.Model = field(init=False)
    kept: dict[str, Kept] = field(init=False)
    lines: dict[str, _Line] = field(default_factory=dict)
    skipped: list[Skipped] = field(default_factory=list)
    totals: Counter[float | None] = field(default_factory=Counter)
    removed: Counter[float | None] = field(default_factory=Counter)
    metric: float | None = None
    refitted: Reconstruction | None = None

    def __post_init__(self) -> None:
        self.original = clone_model(self.model)
        self.kept = all_kept(self.model)

    # one step

    def step(self, progress: float) -> None:
        """Removes what brings the model this far, 0 to 1, on the way to its goal."""
        ranking = self._ranking(self._blocks())
        chosen = self._chosen(ranking, progress)
        if not chosen:
            return
        for place in chosen:
            line = self.lines[ranking.blocks[place].name]
            line.removed, line.why = True, ranking.why(place, chosen)
            self.removed[ranking.ratios[place]] += 1
        remove_blocks(self.model, ranking.names(chosen), made_by=_NAME)
        infer_shapes(self.model)
        self.refitted = self._refit(self.model) or self.refitted

    def _blocks(self) -> list[Block]:
        """Those that may go."""
        found, others = find_blocks(self.model)
        selection = Selection(self.options.include, self.options.exclude)
        usable: list[Block] = []
        excluded: list[Skipped] = []
        for block in found:
            reasons = ((node, selection.reason_against(node)) for node in block.layers)
            reason = next((f"'{node.name}': {why}" for node, why in reasons if why), None)
            if reason is None:
                usable.append(block)
            else:
                excluded.append(Skipped(block.name, reason))
        if not self.lines:
            self.skipped = [*others, *excluded]
            if not usable:
                raise self._nothing(selection)
        return usable

    def _nothing(self, selection: Selection) -> PassFailedError:
        unused = selection.unused()
        if unused:
            fix = f"the pattern '{unused[0]}' matches no layer; see 'slimctl inspect' for names"
        elif self.skipped:
            node, reason = self.skipped[0]
            fix = f"{len(self.skipped)} sums are no such block; the first, '{node}': {reason}"
        else:
            fix = "the model adds nothing up; use --structure channel"
        return PassFailedError(_NAME, "This model has no residual block that can go", fix=fix)

    def _ranking(self, blocks: Sequence[Block]) -> _Ranking:
        kind = self.options.importance or ("activation" if self.context.has_data else "l1")
        scores = block_importance(kind, self.model, blocks, self.context)
        ratios = [ratio_of(self.options.ratio, block.layers) for block in blocks]
        if not self.lines:
            self.totals.update(ratios)
        for block, score in zip(blocks, scores.tolist(), strict=True):
            layers = tuple(node.name or "" for node in block.layers)
            self.lines.setdefault(block.name, _Line(layers)).importance = score
        worth = self._saved(blocks) if self._goal is not None else np.ones(len(blocks))
        return _Ranking(blocks, scores / worth, ratios)

    def _saved(self, blocks: Sequence[Block]) -> NDArray[np.float64]:
        """What each block costs, in the unit of the goal."""
        by_bytes = self._goal is not None and self._goal[0] == "size"
        costs = {
            cost.name: float(cost.weight_bytes if by_bytes else cost.macs or 0)
            for cost in node_costs(self.model, open_sizes(self.model))
        }
        sums = [sum(costs.get(n.name or "", 0.0) for n in block.nodes) for block in blocks]
        return np.maximum(np.array(sums, np.float64), 1.0)

    # how much

    @property
    def _goal(self) -> tuple[Goal, float] | None:
        """What to count and how much of it may be left, or lost; None when blocks count."""
        return goal_of(self.options)

    def _chosen(self, ranking: _Ranking, progress: float) -> set[int]:
        chosen: set[int] = set()
        for ratio, total in self.totals.items():
            if ratio is not None:
                chosen |= self._share(ranking, ratio, progress * ratio * total)
        if self._goal is None:
            share = self.options.sparsity or 0.0
            return chosen | self._share(ranking, None, progress * share * self.totals[None])
        goal, wanted = self._goal
        order = ranking.order(None)

        def gone(count: int) -> set[int]:
            return chosen | ranking.closed(order[:count])

        counts = range(len(order) + 1)
        if goal == "metric":
            allowed = progress * wanted
            too_many = bisect_left(
                counts, True, key=lambda n: self._drop(ranking.names(gone(n))) > allowed
            )
            return gone(max(too_many - 1, 0))
        left = self._left(goal)
        reach = 1.0 - progress * (1.0 - wanted)
        enough = bisect_left(counts, True, key=lambda n: left(ranking.names(gone(n))) <= reach)
        if enough == len(counts):
            rest = left(ranking.names(gone(len(order))))
            raise OptionError(
                f"--target-{goal}",
                f"Out of reach: without all blocks that can go, {rest:.0%} is left",
                fix="ask for less, leave fewer layers out, or use --structure channel",
            )
        return gone(enough)

    def _share(self, ranking: _Ranking, ratio: float | None, wanted: float) -> set[int]:
        """So many blocks of those with one ratio, less those that went in earlier steps."""
        room = round(wanted) - self.removed[ratio]
        chosen: set[int] = set()
        for place in ranking.order(ratio):
            more = chosen | ranking.closed([place])
            if len(more) <= room:
                chosen = more
        return chosen

    def _left(self, goal: Goal) -> Callable[[Collection[str]], float]:
        """Measures what is left of the original without some blocks."""
        if goal == "latency":
            latency = Latency(self.original, example_of(self.context))
            return lambda names: latency(self._without(names))
        attribute = "weight_bytes" if goal == "size" else "macs"
        full = getattr(cost_of(self.original), attribute)
        if not full:
            raise OptionError(
                f"--target-{goal}",
                "What this model costs cannot be told: its shapes depend on the data",
                fix="give --sparsity or --target-size",
            )
        return lambda names: float(getattr(cost_of(self._without(names)), attribute) / full)

    def _drop(self, names: Collection[str]) -> float:
        """What the metric loses without some blocks, refitted as it will be."""
        if self.metric is None:
            self.metric = self._measured(self.original)
        model = self._without(names)
        self._refit(model)
        return self.metric - self._measured(model)

    def _measured(self, model: ir.Model) -> float:
        found = self.context.metric(model)
        assert found is not None, "checked before anything was done"
        return found

    def _without(self, names: Collection[str]) -> ir.Model:
        clone = clone_model(self.model)
        infer_shapes(clone)
        remove_blocks(clone, names, made_by=_NAME)
        infer_shapes(clone)
        return clone

    def _refit(self, model: ir.Model) -> Reconstruction | None:
        wanted = self.options.reconstruct
        if self.context.has_data if wanted is None else wanted:
            return reconstruct(model, self.original, self.kept, self.context)
        return None

    # what happened

    def report(self) -> PassReport:
        """The summary."""
        before, after = cost_of(self.original), cost_of(self.model)
        gone = sum(line.removed for line in self.lines.values())
        notes = [
            f"{gone} of {len(self.lines)} residual blocks removed",
            cost_note(before, after),
        ]
        skipped = list(self.skipped)
        if self.refitted is not None:
            notes.append(refit_note(self.refitted))
            skipped.extend(self.refitted.skipped)
        return PassReport(
            changed={"residual blocks": gone},
            skipped=skipped,
            notes=notes,
            timings=time_note(self.original, self.model, self.context),
            tables=[ReportTable("Residual blocks", _COLUMNS, list(self._rows()))],
            facts={
                "parameters": [before.parameters, after.parameters],
                "macs": [before.macs, after.macs],
                "blocks": [
                    {
                        "block": name,
                        "layers": line.layers,
                        "importance": round(line.importance, 6),
                        "removed": line.removed,
                        "why": line.why,
                    }
                    for name, line in self.lines.items()
                ],
                "explained": {} if self.refitted is None else rounded(self.refitted.explained),
            },
        )

    def _rows(self) -> Iterator[tuple[str, ...]]:
        for name, line in self.lines.items():
            became = f"{'removed' if line.removed else 'kept'}: {line.why}"
            yield name, str(len(line.layers)), f"{line.importance:.3g}", became


class _Ranking:
    """Blocks of a model in the order in which they go."""

    def __init__(
        self,
        blocks: Sequence[Block],
        scores: NDArray[np.float64],
        ratios: Sequence[float | None],
    ) -> None:
        self.blocks = blocks
        self.ratios = ratios
        self._order = np.argsort(scores, kind="stable").tolist()
        self._inside = inside(blocks)

    def order(self, ratio: float | None) -> list[int]:
        """Places of the blocks with this ratio, the least important first."""
        return [place for place in self._order if self.ratios[place] == ratio]

    def closed(self, places: Iterable[int]) -> set[int]:
        """With the blocks inside them."""
        places = list(places)
        return set(places).union(*(self._inside[place] for place in places))

    def names(self, places: Iterable[int]) -> set[str]:
        """Names of blocks."""
        return {self.blocks[place].name for place in places}

    def why(self, place: int, chosen: Collection[int]) -> str:
        """Why a block goes."""
        for outer in chosen:
            if place in self._inside[outer]:
                return f"it lies in '{self.blocks[outer].name}'"
        return "importance" if self.ratios[place] is None else "--ratio"


# importance


def block_importance(
    kind: Importance, model: ir.Model, blocks: Sequence[Block], context: Context
) -> NDArray[np.float64]:
    """What removing each block would cost, comparable over the whole model; [blocks].

    Args:
        kind: ``activation``: the energy of ``f(x)`` relative to that of ``x + f(x)``, on data.
            ``l1`` and ``l2``: mean norm of the rows of the last layers of ``f``, which say how
            large it is. ``taylor``: the squared relative change of the outputs without ``f(x)``,
            to first order. ``random``: a seeded draw.
        model: Holds the blocks.
        blocks: In its order.
        context: Gives data and the seed.
    """
    if kind == "random":
        return np.random.default_rng(context.seed).random(len(blocks))
    if kind == "activation":
        return _energy_shares(model, blocks, context)
    if kind == "taylor":
        return tensor_effects(model, [block.branch.name or "" for block in blocks], context)
    return np.array([_size(block, power=1 if kind == "l1" else 2) for block in blocks])


def _energy_shares(
    model: ir.Model, blocks: Sequence[Block], context: Context
) -> NDArray[np.float64]:
    names = [(block.branch.name or "", block.total.name or "") for block in blocks]
    energies = np.zeros((len(blocks), 2))
    tensors = list(dict.fromkeys(name for pair in names for name in pair))
    for found in context.activations(model, tensors):
        for place, pair in enumerate(names):
            for side, name in enumerate(pair):
                values = found[name][np.isfinite(found[name])]
                energies[place, side] += np.sum(np.square(values, dtype=np.float64))
    return np.asarray(energies[:, 0] / np.maximum(energies[:, 1], 1e-30))


def _size(block: Block, power: int) -> float:
    norms: list[float] = []
    for node in _last_layers(block):
        for value in node.inputs:
            array = const_array(value)
            if array is None or array.ndim < 2:
                continue
            axis = output_axis(node, array.ndim) if is_linear(node) else 0
            rows = np.moveaxis(array, axis, 0).reshape(array.shape[axis], -1)
            norms.append(float(np.linalg.norm(rows.astype(np.float64), power, axis=1).mean()))
    return float(np.mean(norms))


def _last_layers(block: Block) -> list[ir.Node]:
    """Layers of which the result reaches the sum through no other layer."""
    found: list[ir.Node] = []
    inner, seen = set(block.nodes), set[ir.Node]()
    pending = [block.branch]
    while pending:
        node = pending.pop().producer()
        if node is None or node not in inner or node in seen:
            continue
        seen.add(node)
        if node in block.layers:
            found.append(node)
        else:
            pending.extend(value for value in node.inputs if value is not None)
    return found
