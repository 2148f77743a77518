"""Mixed precision: what each layer is computed in, chosen by what it spoils and what it costs.

Noise comes from the errors of single layers (:mod:`slimctl.evaluate.injection`), time from
onnxruntime's profiles of the model in each precision, and the price of a conversion from a model in
which every second layer is in float. What was chosen by these is measured, and changed until the
bounds hold.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import onnx_ir as ir

from slimctl.core.contract import Context, ReportTable
from slimctl.core.errors import OptionError, PassFailedError
from slimctl.evaluate.benchmark import benchmark
from slimctl.evaluate.injection import Injector
from slimctl.evaluate.probing import Probing
from slimctl.evaluate.profile import Profile, profile
from slimctl.graph.edit import clone_model
from slimctl.graph.save import weight_bytes
from slimctl.graph.session import CPU
from slimctl.passes._attempt import Built, Outcome, Work
from slimctl.passes._fallback import Noise, noise_of, worst_db
from slimctl.passes._mixed_candidates import (
    Candidates,
    View,
    build,
    candidates,
    layers_of,
    possible,
)
from slimctl.passes._mixed_choice import Bag, Judge, Search
from slimctl.passes._mixed_costs import Costs, bit_operations, sizes, times
from slimctl.passes._mixed_words import Choice, Precision, all_of, counted
from slimctl.passes._plan import Plan, read_plan, refusal
from slimctl.passes._precision import FLOAT, Aim, Layers
from slimctl.passes._precisions import PRECISIONS
from slimctl.passes._samples import spread_singles

if TYPE_CHECKING:
    from slimctl.passes.quantize_static import QuantizeStatic

_SAMPLES: Final = 4
"""Samples that noise is measured on."""

_EXACT: Final = 1e-9
"""0.98 - 0.97 is 0.010000000000000009 in floating point; a bound of 0.01 means to allow it."""

_ROUNDS, _SECONDS = 12, 10.0
"""Of measuring latency."""

_SAME_SIZE: Final = 1.01
"""Weights that are stored alike differ by their scales and biases."""

_SILENT: Final = 1e-12
"""Noise that is none: 120 dB below the signal."""

_SAME_DB: Final = 0.3
"""Estimates of noise from :data:`_SAMPLES` samples are no better than this."""


class Mixed(NamedTuple):
    """A model of mixed precision.

    Attributes:
        built: The model.
        plan: Precision of each layer.
        tables: For the summary.
    """

    built: Built
    plan: Plan
    tables: tuple[ReportTable, ...]


@dataclass(frozen=True)
class Bounds:
    """What the result must keep; None where nothing is asked for.

    Attributes:
        min_sqnr: Of every output on calibration samples, in dB.
        max_metric_drop: Loss of the metric on the evaluation data.
        max_size: Bytes of the weights, as a share of the float model's.
        max_latency: Median time of a run on one thread, as a share of the float model's.
    """

    min_sqnr: float | None
    max_metric_drop: float | None
    max_size: float | None
    max_latency: float | None

    @property
    def limits_cost(self) -> bool:
        """Whether there is a bound on size or time."""
        return self.max_size is not None or self.max_latency is not None


def mix(options: QuantizeStatic, work: Work, built: Built, outcome: Outcome) -> Mixed:
    """Chooses the precision of each layer, or does what a plan says.

    Args:
        options: Bounds, the objective, or a plan.
        work: Builds the models.
        built: With everything quantized.
        outcome: Told what was done.

    Raises:
        OptionError: A bound needs data or a metric that are not there, or the plan does not fit.
        PassFailedError: No choice keeps the bounds.
    """
    layers = layers_of(work, built)
    if not layers.nodes:
        build(work, {})  # says why
    if options.plan is not None:
        return _planned(Path(options.plan), layers, built, outcome)
    return _Mixer(options, layers, built, outcome).mix()


def _planned(path: Path, layers: Layers, built: Built, outcome: Outcome) -> Mixed:
    work, able = layers.work, possible(layers)

    def refused(layer: str, kind: Precision, reason: str = "") -> OptionError:
        # For bytes alone nothing is passed over that the target takes.
        others = candidates(layers, built, "size").kinds[layer]
        why = reason or PRECISIONS[kind].against(layer, layers)
        return refusal(path, layer, kind, why, others)

    choice = read_plan(path).choice(able, path, refused)
    mixed = _Choices(layers, built).mixed(choice)
    for layer, problem in View(work, built).refused(mixed.built, choice).items():
        reason = f"{work.context.target.name} does not run that: {problem.reason}"
        raise refused(layer, choice[layer], f"{reason} ({problem.found})")
    outcome.notes.append(f"layers: {counted(choice)}, by the plan '{path}'")
    return mixed


class _Choices:
    """Builds what choices make.

    Args:
        layers: Of the float model.
        built: With everything quantized as the options say.
    """

    def __init__(self, layers: Layers, built: Built) -> None:
        self._work = layers.work
        self._whole = built
        self.start: Choice = {name: kinds[0] for name, kinds in possible(layers).items()}

    @property
    def begins(self) -> bool:
        """Whether the options alone make anything of the model."""
        return set(self.start.values()) != {FLOAT}

    def build(self, choice: Choice) -> Built:
        """The model.

        Raises:
            PassFailedError: All of it is float.
        """
        made = self.begins and choice == self.start
        return self._whole if made else build(self._work, choice)

    def mixed(self, choice: Choice, *tables: ReportTable) -> Mixed:
        """The model with its plan."""
        return Mixed(self.build(choice), Plan(layers=dict(choice)), tables)


class _Whole(NamedTuple):
    """A model with all layers in one precision: what was measured, and its noise added up."""

    seconds: float
    size_bytes: int
    sqnr_db: float

    def __str__(self) -> str:
        size = f"{self.size_bytes / 1e6:.2f} MB"
        return f"{self.seconds * 1e3:.1f} ms, {size}, {self.sqnr_db:.1f} dB"

    def is_beaten(self, other: _Whole, *, by_size: bool) -> bool:
        """Whether the other is no slower, no bigger where that counts, and as good."""
        bigger = other.size_bytes > self.size_bytes * _SAME_SIZE
        slower = other.seconds > self.seconds
        return not slower and not (bigger and by_size) and other.sqnr_db >= self.sqnr_db - _SAME_DB


class _Mixer:
    def __init__(
        self, options: QuantizeStatic, layers: Layers, built: Built, outcome: Outcome
    ) -> None:
        self._options = options
        self._layers = layers
        self._work = layers.work
        self._context: Context = layers.work.context
        self._built = built
        self._outcome = outcome
        self._choices = _Choices(layers, built)
        self._profiles: dict[Precision, Profile] = {}
        self._bounds = Bounds(
            options.min_sqnr or None,
            options.max_metric_drop,
            options.max_size,
            options.max_latency,
        )

    def mix(self) -> Mixed:
        """The result."""
        bounds = self._bounds
        if not self._context.has_data:
            raise OptionError(
                "--mixed-precision", "It needs calibration data", fix="give --calib SOURCE"
            )
        judged = self._judge_for(bounds)
        start = self._choices.start
        if self._aim == "time" and not bounds.limits_cost and judged(start).kept:
            self._outcome.notes.append("every layer is quantized: that keeps the bounds")
            return self._choices.mixed(start)
        found = candidates(self._layers, self._built, self._aim)
        self._tell_passed_over()
        if not found.whole:
            raise self._only_float()
        if self._aim != "time":
            # Where a search begins does not depend on measurements: with what costs least.
            costs = self._costs(found)
            least = {n: costs.cheapest_first(kinds, n)[0] for n, kinds in found.kinds.items()}
            if not bounds.limits_cost and judged(least).kept:
                self._outcome.notes.append(
                    f"layers: {counted(least)}: what costs least keeps the bounds"
                )
                return self._choices.mixed(least, *costs.tables(least, start))
        found, noise = self._worthwhile(found)
        if self._aim == "time":
            costs = self._costs(found)
        else:
            found = found.ordered(costs.cheapest_first)
        by_layer = {n: {k: noise[k].get(n, {}) for k in kinds} for n, kinds in found.kinds.items()}
        bag = Bag(by_layer, costs.cost, costs.boundaries, costs.prices)
        search = Search(bag, judged)
        chosen = self._within(search, bag, costs) if bounds.limits_cost else search.cheapest()
        if chosen is None:
            raise self._out_of_reach(search, bag.finest())
        self._note(chosen, search, start)
        return self._choices.mixed(chosen, *costs.tables(chosen, start))

    @property
    def _aim(self) -> Aim:
        """What layers are counted by."""
        bounds = self._bounds
        by_size = self._options.minimize == "size" and bounds.max_latency is None
        if by_size or bounds.max_size is not None:
            return "size"
        measurable = self._is_measurable or bounds.max_latency is not None
        return "time" if measurable else "operations"

    def _tell_passed_over(self) -> None:
        """Says what was not tried, where a provider that is not here would have it."""
        if not self._is_measurable:
            self._outcome.notes += [f"no candidate: {reason}" for reason in self._passed_over()]

    def _passed_over(self) -> list[str]:
        able = {kind for kinds in possible(self._layers).values() for kind in kinds}
        reasons = {n: k.passed_over(self._layers, self._aim) for n, k in PRECISIONS.items()}
        return [f"{name} ({why})" for name, why in reasons.items() if why and name in able]

    def _only_float(self) -> PassFailedError:
        return PassFailedError(
            "quantize-static",
            "No layer can have another precision than float: "
            + "; ".join(self._passed_over() or ["the provider takes none"]),
            fix="leave --max-latency out, which counts layers without measuring them, or quantize "
            "--mode fp16",
        )

    # bounds on accuracy

    def _judge_for(self, bounds: Bounds) -> Callable[[Choice], Judge]:
        if bounds.max_metric_drop is None:
            return self._by_sqnr
        before = self._context.metric(self._work.model)
        if before is None:
            raise OptionError(
                "--max-metric-drop",
                "There is no metric to keep",
                fix="give --data SOURCE and --metric, or data.evaluation with a metric",
            )
        bound = bounds.max_metric_drop

        def judge(choice: Choice) -> Judge:
            after = self._context.metric(self._corrected(choice))
            assert after is not None, "there is a metric"
            kept = before - after <= bound + _EXACT and self._by_sqnr(choice).kept
            return Judge(kept, after - before)

        return judge

    def _by_sqnr(self, choice: Choice) -> Judge:
        found = self._context.fidelity(self._corrected(choice), "many")
        worst = min(found.values(), default=0.0)
        floor = self._bounds.min_sqnr
        return Judge(floor is None or worst >= floor, worst)

    def _corrected(self, choice: Choice) -> ir.Model:
        """The model as it will be, once a later bias-correction has run."""
        return self._as_it_will_be(self._choices.build(choice))

    def _as_it_will_be(self, built: Built) -> ir.Model:
        model = clone_model(built.model)
        self._work.correct(model)
        return model

    def _out_of_reach(self, search: Search, finest: Choice) -> PassFailedError:
        bounds = self._bounds
        best = search.judge(finest).value
        if bounds.max_metric_drop is None:
            what = f"--min-sqnr {bounds.min_sqnr:g}", f"{best:.1f} dB"
        else:
            what = f"--max-metric-drop {bounds.max_metric_drop:g}", f"a drop of {-best:.4f}"
        return PassFailedError(
            "quantize-static",
            f"No choice of precisions keeps {what[0]}: with {counted(finest)} there is {what[1]}",
            fix="loosen the bound, or leave nodes in float with --exclude",
        )

    def _note(self, chosen: Choice, search: Search, start: Choice) -> None:
        unit = " dB" if self._bounds.max_metric_drop is None else " against the original's metric"
        digits = ".1f" if unit == " dB" else "+.4f"
        said = f"{search.judge(chosen).value:{digits}}{unit}"
        if self._choices.begins:
            said += f" instead of {search.judge(start).value:{digits}}"
        self._outcome.notes.append(
            f"layers: {counted(chosen)}; {said}; {search.measured} choices measured"
        )

    # bounds on cost

    def _within(self, search: Search, bag: Bag, costs: Costs) -> Choice:
        """As precise as the bound on cost allows, what helps most first."""
        choices = search.within(self._budget(bag, costs))
        chosen = self._fitting(choices)
        if self._bounds.min_sqnr or self._bounds.max_metric_drop is not None:
            found = search.judge(chosen)
            if not found.kept:
                raise PassFailedError(
                    "quantize-static",
                    f"The bounds on cost allow {counted(chosen)}, and the bound on accuracy is "
                    f"missed ({found.value:.4g})",
                    fix="loosen one of them",
                )
        return chosen

    def _budget(self, bag: Bag, costs: Costs) -> float:
        bounds = self._bounds
        if bounds.max_size is not None:
            name, share = "--max-size", bounds.max_size
            least = float(weight_bytes(self._choices.build(bag.start()).model))
        else:
            assert bounds.max_latency is not None, "a bound on cost"
            name, share = "--max-latency", bounds.max_latency
            least = costs.usual_total
        if share * costs.float_total < least:
            least /= costs.float_total
            raise PassFailedError(
                "quantize-static",
                f"{name} {share:g} is out of reach: with every layer quantized "
                f"({counted(bag.start())}) it is {least:.3f}",
                fix=f"allow {math.ceil(least * 1e3) / 1e3:.3f} or more",
            )
        if bounds.max_size is not None:  # an estimate may be too low: bytes are counted later
            least = min(least, costs.estimated(bag.start()))
        return share * costs.float_total - least

    def _fitting(self, choices: list[Choice]) -> Choice:
        """The last choice for which what is measured keeps the bound on cost.

        Looked for by bisection: a measurement of time takes seconds.
        """
        if len(choices) == 1 or self._keeps_cost(choices[-1]):
            return choices[-1]
        low, high = 0, len(choices) - 2
        while low < high:
            middle = (low + high + 1) // 2
            if self._keeps_cost(choices[middle]):
                low = middle
            else:
                high = middle - 1
        return choices[low]

    def _keeps_cost(self, choice: Choice) -> bool:
        bounds = self._bounds
        if bounds.max_latency is not None:
            return self._time_share(choice) <= bounds.max_latency
        assert bounds.max_size is not None, "a bound on cost"
        share = weight_bytes(self._choices.build(choice).model) / weight_bytes(self._work.model)
        return share <= bounds.max_size

    def _time_share(self, choice: Choice) -> float:
        built = self._choices.build(choice)
        feeds = self._context.example()
        assert feeds is not None, "there are data"
        before, after = benchmark(
            [self._work.model, built.model],
            feeds,
            threads=1,
            rounds=_ROUNDS,
            max_seconds=_SECONDS,
            memory=False,
        )
        return after.p50 / before.p50

    # what there is to choose from

    def _worthwhile(
        self, found: Candidates
    ) -> tuple[Candidates, dict[Precision, dict[str, Noise]]]:
        """Of the precisions that the target runs those that pay, with the noise of all."""
        noise = self._noise(found)
        if not self._is_measurable:
            return found, noise
        for kind, reason in self._beaten(found, noise).items():
            self._outcome.notes.append(reason)
            found = found.without(kind)
        return found, noise

    def _beaten(
        self, found: Candidates, noise: Mapping[Precision, Mapping[str, Noise]]
    ) -> dict[Precision, str]:
        """Precisions that another one beats, with the reason.

        Where time is what counts, float beats what is slower: nothing is as exact.
        """
        facts = {
            kind: _Whole(self._profile(kind, model).kernels, weight_bytes(model), _db(noise[kind]))
            for kind, model in self._models(found).items()
        }
        by_size = self._aim == "size"
        beaten: dict[Precision, str] = {}
        for (kind, own), (other, better) in permutations(facts.items(), 2):
            if kind in (self._layers.usual, FLOAT, *beaten) or other in beaten:
                continue
            if other != FLOAT and self._weighted(found, kind) != self._weighted(found, other):
                continue  # they are for different layers: as a whole they say nothing
            beats = own.is_beaten(better, by_size=by_size or other != FLOAT)
            if beats and not is_finer(noise[kind], noise[other]):
                beaten[kind] = f"no candidate: {kind} ({own}); {other} has {better}"
        return beaten

    def _weighted(self, found: Candidates, kind: Precision) -> set[str]:
        """Layers with weights that can have a precision."""
        return {n for n, kinds in found.kinds.items() if kind in kinds} & self._layers.stored

    def _models(self, found: Candidates) -> dict[Precision, ir.Model]:
        models: dict[Precision, ir.Model] = {k: built.model for k, built in found.whole.items()}
        return {**models, FLOAT: self._work.model}

    def _profile(self, kind: Precision, model: ir.Model) -> Profile:
        """Of the model with all layers in one precision."""
        if kind not in self._profiles:
            self._profiles[kind] = self._measured(model)
        return self._profiles[kind]

    def _measured(self, model: ir.Model) -> Profile:
        feeds = self._context.example()
        assert feeds is not None, "there are data"
        return profile(model, feeds, threads=1)

    def _noise(self, found: Candidates) -> dict[Precision, dict[str, Noise]]:
        """Noise of each layer by output, by precision."""
        samples = spread_singles(self._work.model, self._context, _SAMPLES)
        injector = Injector(self._work.model, samples)
        probing: Probing | None = None
        noise: dict[Precision, dict[str, Noise]] = {FLOAT: {}}
        for kind, built in found.whole.items():
            layers = [name for name, kinds in found.kinds.items() if kind in kinds]
            losses = injector.losses(self._as_it_will_be(built), {n: (n,) for n in layers})
            noise[kind] = {}
            for layer, loss in losses.items():
                known = loss
                if known is None:
                    probing = probing or Probing(self._work.model, samples)
                    only = build(self._work, all_of(found.kinds, kind, (layer,)))
                    known = probing.loss(only.model)
                noise[kind][layer] = noise_of({n: level.db for n, level in known.outputs.items()})
            self._outcome.alone[kind] = worst_db(noise[kind])
        return noise

    # costs

    @property
    def _is_measurable(self) -> bool:
        """Whether time here says something about the target."""
        return self._context.target.provider == CPU

    def _costs(self, found: Candidates) -> Costs:
        if self._aim == "size":
            return sizes(self._work.model, found, self._built.model)
        if self._aim == "operations":
            self._outcome.notes.append(
                f"layers are counted by bit operations: {self._context.target.provider} is not "
                "here to be measured"
            )
            return bit_operations(self._work.model, found)
        start = self._choices.start
        alternating: Choice = {**start, **all_of(list(start)[::2], FLOAT, ())}
        return times(
            self._work.model,
            found,
            self._measured(self._built.model),
            {kind: self._profile(kind, model) for kind, model in self._models(found).items()},
            self._measured(self._choices.build(alternating).model),
        )


def is_finer(noise: Mapping[str, Noise], other: Mapping[str, Noise]) -> bool:
    """Whether some layer makes less than half of the noise that it makes otherwise.

    All layers added up, the loudest ones hide the others.
    """
    return any(
        _worst(noise[layer]) < _worst(other[layer]) / 2 for layer in noise.keys() & other.keys()
    )


def _worst(noise: Noise) -> float:
    return max(noise.values(), default=0.0)


def _db(noise: Mapping[str, Noise]) -> float:
    """SQNR of the output that has most noise, that of all layers added up."""
    outputs = {output for each in noise.values() for output in each}
    totals = (sum(each.get(output, 0.0) for each in noise.values()) for output in outputs)
    return -10.0 * math.log10(max((_SILENT, *totals)))
