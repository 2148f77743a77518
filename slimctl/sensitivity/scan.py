"""Probes the groups of a model one by one: what an output loses when one of them is changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, Self, overload

import onnx_ir as ir

from slimctl.core.contract import Feeds, Progress, SilentProgress, Skipped
from slimctl.core.errors import OptionError
from slimctl.data.sources import DataSource, open_source
from slimctl.evaluate.accuracy import Score, check_needs
from slimctl.evaluate.injection import Injector
from slimctl.evaluate.metrics import Measured, open_metric
from slimctl.evaluate.probing import Errors, Loss, Probing
from slimctl.evaluate.significance import paired
from slimctl.graph.cost import node_costs
from slimctl.graph.edit import interface
from slimctl.graph.load import load_model
from slimctl.graph.opset import raise_opset
from slimctl.graph.save import content_hash
from slimctl.graph.select import Selection
from slimctl.graph.shapes import infer_shapes
from slimctl.passes._changes import Change, minimum_opset, open_change
from slimctl.passes._layers import refuse_quantized
from slimctl.passes.fuse import Fuse
from slimctl.pipeline.context import PipelineContext
from slimctl.recipe.schema import DataSpec
from slimctl.sensitivity.samples import Samples
from slimctl.sensitivity.setup import Named, Setup, Task, groups_of
from slimctl.targets.load import load_target

_FEW = 1
"""Samples of an estimate: enough to rank layers, though not to tell how much each costs."""


@dataclass(frozen=True)
class MetricLoss:
    """What the metric loses; the interval is None where there is one record only."""

    drop: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Finding:
    """What one probe found.

    Attributes:
        change: What was done.
        direction: To the group, or to everything else.
        group: Name of the group.
        place: Of its first layer in the order of the graph, from 1.
        layers: The layers in it that were changed, or were the only ones that were not.
        op_types: Their operators.
        parameters: Elements of their weights.
        macs: Multiply-accumulates of one run; None while shapes are open.
        sqnr_db: Of the output that suffers most.
        low_db: Lower end of its 95 % interval; None for an estimate.
        high_db: Upper end.
        samples: How many were looked at.
        metric: What the metric loses; None where none is measured.
    """

    change: str
    direction: str
    group: str
    place: int
    layers: tuple[str, ...]
    op_types: tuple[str, ...]
    parameters: int
    macs: int | None
    sqnr_db: float
    low_db: float | None
    high_db: float | None
    samples: int
    metric: MetricLoss | None = None

    @property
    def task(self) -> Task:
        """The probe that found it."""
        return Task(self.change, self.direction, self.group)  # type: ignore[arg-type]

    def to_dict(self) -> dict[str, Any]:
        """JSON types only."""
        return asdict(self)

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Self:
        """The opposite of :meth:`to_dict`."""
        loss = stored["metric"]
        kept = {**stored, "metric": None if loss is None else MetricLoss(**loss)}
        return cls(**kept | {n: tuple(stored[n]) for n in ("layers", "op_types")})


class _FeedsOf(Sequence[Feeds]):
    """The feeds of samples, one batch after the other."""

    def __init__(self, samples: Samples) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    @overload
    def __getitem__(self, index: int) -> Feeds: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Feeds]: ...

    def __getitem__(self, index: int | slice) -> Feeds | Sequence[Feeds]:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        return self._samples[index].feeds


class Scanner:
    """Runs the probes of a setup. Opening it calibrates; probes can run in any order.

    Args:
        setup: What is scanned.
        progress: Where to say how far calibration is.

    Raises:
        ModelError: The model cannot be used, or is quantized already.
        DataError: The data cannot be used, or do not fit the model.
        OptionError: A change or a metric is unknown, or there is nothing to scan.
    """

    def __init__(self, setup: Setup, progress: Progress | None = None) -> None:
        if setup.fast and setup.directions != ("alone",):
            raise OptionError(
                "--fast", "It estimates what groups cost alone", fix="leave --converse out"
            )
        if setup.fast and setup.metric:
            raise OptionError("--fast", "It estimates SQNR only", fix="leave --metric out")
        self.setup = setup
        target = load_target(setup.target)
        loaded = load_model(setup.model)
        refuse_quantized(loaded, "scan the float model it was made from")
        self.data = self._open(setup.data, loaded)
        self._context = PipelineContext(
            target,
            setup.seed,
            progress or SilentProgress(),
            self.data if setup.calibration is None else self._open(setup.calibration, loaded),
            threads=setup.threads,
        )
        self._metric = open_metric(setup.metric) if setup.metric else None
        if self._metric is not None:
            check_needs(self._metric, self.data, loaded)
        self.model = self._prepared(loaded)
        self._batches = Samples(self.data)
        self._places = {node.name or "": n for n, node in enumerate(self.model.graph, start=1)}
        self._costs = {cost.name: cost for cost in node_costs(self.model)}
        self._converse: tuple[str, Probing] | None = None
        self._known: dict[str, dict[str, Loss | None]] = {}
        self.changes = {
            name: open_change(name, self.model, self._context) for name in setup.changes
        }

    def _open(self, spec: DataSpec, model: ir.Model) -> DataSource:
        return open_source(
            spec.source,
            interface=interface(model),
            samples=spec.samples,
            batch_size=spec.batch_size,
            preprocess=spec.preprocess,
            seed=self.setup.seed,
            skip_bad=spec.skip_bad_samples,
        )

    def _prepared(self, model: ir.Model) -> ir.Model:
        """As the quantizers get it: fused, and of an operator set that all changes know."""
        Fuse().apply(model, self._context)
        raised = raise_opset(model, minimum_opset(self.setup.changes, model, self._context))
        infer_shapes(raised)
        return raised

    @property
    def samples(self) -> int:
        """How many samples there are."""
        return self._batches.size

    def content_hash(self) -> str:
        """Of the model and the samples."""
        hashes = [content_hash(self.model), self.data.content_hash()]
        if self._context.data is not None and self._context.data is not self.data:
            hashes.append(self._context.data.content_hash())
        return " ".join(hashes)

    def skipped(self) -> dict[str, Sequence[Skipped]]:
        """Layers that a change cannot be made to, with reasons, by change."""
        return {name: change.skipped() for name, change in self.changes.items()}

    def tasks(self) -> list[Task]:
        """All probes, in the order of the changes and of the graph.

        Raises:
            OptionError: Patterns match nothing, or nothing can be changed.
        """
        tasks = [
            Task(change, direction, group)
            for change in self.changes
            for direction in self.setup.directions
            for group in self._groups(change)
        ]
        if not tasks:
            raise self._nothing()
        return tasks

    def _groups(self, change: str) -> dict[str, list[str]]:
        selection = Selection(self.setup.include, self.setup.exclude)
        nodes = {node.name: node for node in self.model.graph}
        chosen = [
            Named(name, nodes[name].op_type)
            for name in self.changes[change].layers()
            if name in nodes and selection.reason_against(nodes[name]) is None
        ]
        return groups_of(chosen, self.setup.grouping)

    def _nothing(self) -> OptionError:
        if any(change.layers() for change in self.changes.values()):
            return OptionError(
                "--include/--exclude",
                "The patterns leave no layer to look at",
                fix="see 'slimctl inspect' for the names of nodes",
            )
        reasons = [f"{s.node}: {s.reason}" for found in self.skipped().values() for s in found]
        return OptionError(
            "--options",
            f"No layer of the model can be made {', '.join(self.changes)}",
            fix=reasons[0] if reasons else "the model has no layers with weights",
        )

    @cached_property
    def _alone(self) -> Probing:
        return self._probing(self.model)

    def _probing(self, model: ir.Model) -> Probing:
        return Probing(model, _FeedsOf(self._batches), threads=self.setup.threads)

    def run(self, task: Task) -> Finding:
        """One probe.

        Raises:
            ModelExecutionError: onnxruntime refuses the variant.
        """
        change = self.changes[task.change]
        layers = self._groups(task.change)[task.group]
        if self.setup.fast:
            estimate = self._estimates(task.change)[task.group]
            if estimate is not None:
                known = self._facts(task, layers)
                return replace(known, sqnr_db=estimate.worst.db, samples=estimate.samples)
        if task.direction == "alone":
            return self._found(task, layers, self._alone, change.only(layers))
        return self._found(task, layers, self._base(task.change, change), change.without(layers))

    def _base(self, name: str, change: Change) -> Probing:
        """Starting from the model with everything changed: less is different then.

        Probes come change by change, and what is kept of samples is kept for one of them.
        """
        if self._converse is None or self._converse[0] != name:
            self._converse = None
            whole = change.without(())
            infer_shapes(whole)
            self._converse = name, self._probing(whole)
        return self._converse[1]

    def _found(
        self, task: Task, layers: Sequence[str], probing: Probing, variant: ir.Model
    ) -> Finding:
        errors, metric = self._measured(probing, variant)
        loss = errors.loss()
        worst = loss.worst
        known = self._facts(task, layers)
        found = replace(known, sqnr_db=worst.db, low_db=worst.low, high_db=worst.high)
        return replace(found, samples=loss.samples, metric=metric)

    def _estimates(self, name: str) -> dict[str, Loss | None]:
        """What each group costs alone, by its own error; see :mod:`slimctl.evaluate.injection`."""
        if name not in self._known:
            few = range(min(_FEW, len(self._batches)))
            samples = [self._batches[index].feeds for index in few]
            injector = Injector(self.model, samples, threads=self.setup.threads)
            self._known[name] = injector.losses(self.changes[name].without(()), self._groups(name))
        return self._known[name]

    def _facts(self, task: Task, layers: Sequence[str]) -> Finding:
        """What is known about a probe before it is run."""
        costs = [self._costs[name] for name in layers]
        macs = [cost.macs for cost in costs]
        return Finding(
            *task,
            place=self._places[layers[0]],
            layers=tuple(layers),
            op_types=tuple(dict.fromkeys(cost.op_type for cost in costs)),
            parameters=sum(cost.parameters for cost in costs),
            macs=None if None in macs else sum(m or 0 for m in macs),
            sqnr_db=0.0,
            low_db=None,
            high_db=None,
            samples=0,
        )

    def _measured(self, probing: Probing, variant: ir.Model) -> tuple[Errors, MetricLoss | None]:
        """Against the float model, whichever model the variant was made of."""
        errors = Errors(probing.parts)
        before, after = self._meters()
        for index, outputs in enumerate(probing.outputs(variant)):
            reference = self._alone.reference(index)
            errors.add(reference, outputs)
            batch = self._batches[index]
            for meter, found in ((before, reference), (after, outputs)):
                if meter is not None:
                    meter.update(found, batch.labels, batch.size, reference=reference)
            # A metric wants every sample; an error is known from a few.
            tolerance_db = self.setup.tolerance_db
            if after is None and tolerance_db and errors.is_known(tolerance_db):
                break
        return errors, self._drop(before, after)

    def _meters(self) -> tuple[Measured | None, Measured | None]:
        if self.setup.metric is None:
            return None, None
        return open_metric(self.setup.metric), open_metric(self.setup.metric)

    def _drop(self, before: Measured | None, after: Measured | None) -> MetricLoss | None:
        if before is None or after is None or self.setup.metric is None:
            return None
        scores = [
            Score(self.setup.metric, m.value(), self.samples, m.higher_is_better, m)
            for m in (before, after)
        ]
        found = paired(*scores, seed=self.setup.seed)
        return MetricLoss(found.drop, found.low, found.high)


def ranked(findings: Sequence[Finding]) -> list[Finding]:
    """Those that cost most first.

    Alone, that is those with the least SQNR; of all but a group, those with the most, for it is the
    group that everything gains from when it is left as it was.
    """

    def order(found: Finding) -> tuple[str, float, str]:
        sign = 1.0 if found.direction == "alone" else -1.0
        return (found.direction, sign * found.sqnr_db, found.group)

    return sorted(findings, key=order)
