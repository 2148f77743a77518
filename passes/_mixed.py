"""Mixed precision: which layers stay in float, chosen by what they spoil and what float costs.

Noise comes from the errors of single layers (:mod:`slimctl.evaluate.injection`), time from
onnxruntime's profile of the float and of the quantized model, and the price of a conversion from
a model in which every second layer is in float. What was chosen by these is measured, and changed
until the bounds hold.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import onnx_ir as ir

from slimctl.core.contract import Context, ReportTable
from slimctl.core.errors import OptionError, PassFailedError
from slimctl.evaluate.benchmark import benchmark
from slimctl.evaluate.injection import Injector
from slimctl.evaluate.probing import Probing
from slimctl.evaluate.profile import Profile, profile
from slimctl.graph.cost import node_costs
from slimctl.graph.edit import clone_model
from slimctl.graph.save import weight_bytes
from slimctl.graph.select import Selection
from slimctl.passes._attempt import Built, Outcome, Work
from slimctl.passes._fallback import Noise, noise_of
from slimctl.passes._mixed_choice import Bag, Boundary, Judge, Search
from slimctl.passes._plan import Plan, read_plan
from slimctl.passes._samples import spread_singles
from slimctl.passes.bias_correction import BiasCorrection, correct_biases

if TYPE_CHECKING:
    from slimctl.passes.quantize_static import QuantizeStatic

_SAMPLES = 4
"""Samples that noise is measured on."""

_EXACT = 1e-9
"""0.98 - 0.97 is 0.010000000000000009 in floating point; a bound of 0.01 means to allow it."""

_ROUNDS, _SECONDS = 12, 10.0
"""Of measuring latency."""


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
    """Chooses what stays in float, or does what a plan says.

    Args:
        options: Bounds, the objective, or a plan.
        work: Builds the models.
        built: With everything quantized.
        outcome: Told what was done.

    Raises:
        OptionError: A bound needs data or a metric that are not there, or the plan does not fit.
        PassFailedError: No choice keeps the bounds.
    """
    if options.plan is not None:
        plan = read_plan(Path(options.plan))
        plan.check(built.layers())
        floating = plan.floating
        outcome.notes.append(f"{len(floating)} layers in float by the plan '{options.plan}'")
        return _mixed(work, built, floating, None)
    return _Mixer(options, work, built, outcome).mix()


def _mixed(work: Work, whole: Built, floating: frozenset[str], costs: _Costs | None) -> Mixed:
    built = work.build(_selection(work, floating)) if floating else whole
    names = whole.layers()
    plan = Plan(layers={n: "float" if n in floating else "quantized" for n in names})
    tables = () if costs is None or not floating else (costs.table(floating),)
    return Mixed(built, plan, tables)


def _selection(work: Work, floating: Collection[str]) -> Selection:
    reasons = dict.fromkeys(floating, "left in float by mixed precision")
    return Selection(work.options.include, work.options.exclude, reasons)


class _Mixer:
    def __init__(self, options: QuantizeStatic, work: Work, built: Built, outcome: Outcome) -> None:
        self._options = options
        self._work = work
        self._context: Context = work.context
        self._built = built
        self._outcome = outcome
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
        if not bounds.limits_cost and judged(frozenset()).kept:
            self._outcome.notes.append("every layer is quantized: that keeps the bounds")
            return _mixed(self._work, self._built, frozenset(), None)
        costs = self._costs()
        bag = Bag(self._noise(), costs.cost, costs.boundaries)
        search = Search(bag, judged)
        if bounds.limits_cost:
            return self._within(search, bag, costs, judged)
        chosen = search.cheapest()
        if chosen is None:
            raise self._out_of_reach(judged)
        self._note(chosen, bag, search, judged)
        return _mixed(self._work, self._built, chosen, costs)

    # bounds on accuracy

    def _judge_for(self, bounds: Bounds) -> Callable[[frozenset[str]], Judge]:
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

        def judge(floating: frozenset[str]) -> Judge:
            after = self._context.metric(self._corrected(floating))
            assert after is not None, "there is a metric"
            kept = before - after <= bound + _EXACT and self._by_sqnr(floating).kept
            return Judge(kept, after - before)

        return judge

    def _by_sqnr(self, floating: frozenset[str]) -> Judge:
        found = self._context.fidelity(self._corrected(floating), "many")
        worst = min(found.values(), default=0.0)
        floor = self._bounds.min_sqnr
        return Judge(floor is None or worst >= floor, worst)

    def _corrected(self, floating: frozenset[str]) -> ir.Model:
        """The model as it will be, once a later bias-correction has run."""
        built = self._work.build(_selection(self._work, floating)) if floating else self._built
        if BiasCorrection.name not in self._context.later:
            return built.model
        model = clone_model(built.model)
        correct_biases(model, self._work.model, self._context)
        return model

    def _out_of_reach(self, judge: Callable[[frozenset[str]], Judge]) -> PassFailedError:
        bounds = self._bounds
        all_but_one = frozenset(self._built.layers()[1:])
        best = judge(all_but_one).value
        if bounds.max_metric_drop is None:
            what = f"--min-sqnr {bounds.min_sqnr:g}", f"{best:.1f} dB"
        else:
            what = f"--max-metric-drop {bounds.max_metric_drop:g}", f"a drop of {-best:.4f}"
        return PassFailedError(
            "quantize-static",
            f"No choice of layers keeps {what[0]}: with one layer quantized there is {what[1]}",
            fix="loosen the bound, or leave nodes in float with --exclude",
        )

    def _note(
        self,
        chosen: frozenset[str],
        bag: Bag,
        search: Search,
        judge: Callable[[frozenset[str]], Judge],
    ) -> None:
        unit = " dB" if self._bounds.max_metric_drop is None else " against the original's metric"
        before, after = judge(frozenset()).value, judge(chosen).value
        digits = ".1f" if unit == " dB" else "+.4f"
        self._outcome.notes.append(
            f"{len(chosen)} of {len(bag.noise)} layers in float: {after:{digits}}{unit} instead of "
            f"{before:{digits}}; {search.measured} choices measured"
        )

    # bounds on cost

    def _within(
        self,
        search: Search,
        bag: Bag,
        costs: _Costs,
        judge: Callable[[frozenset[str]], Judge],
    ) -> Mixed:
        """As many layers in float as the bound on cost allows, those that help most first."""
        budget = self._budget(costs)
        chosen = search.best_within(budget)
        chosen = self._fitting(chosen, bag)
        if self._bounds.min_sqnr or self._bounds.max_metric_drop is not None:
            found = judge(chosen)
            if not found.kept:
                raise PassFailedError(
                    "quantize-static",
                    f"The bounds on cost leave {len(chosen)} layers in float, and the bound on "
                    f"accuracy is missed ({found.value:.4g})",
                    fix="loosen one of them",
                )
        self._note(chosen, bag, search, judge)
        return _mixed(self._work, self._built, chosen, costs)

    def _budget(self, costs: _Costs) -> float:
        bounds = self._bounds
        if bounds.max_size is not None:
            left = bounds.max_size * costs.float_total - costs.quantized_total
            name, share = "--max-size", bounds.max_size
        else:
            assert bounds.max_latency is not None, "a bound on cost"
            left = bounds.max_latency * costs.float_total - costs.quantized_total
            name, share = "--max-latency", bounds.max_latency
        if left < 0:
            least = costs.quantized_total / costs.float_total
            raise PassFailedError(
                "quantize-static",
                f"{name} {share:g} is out of reach: with every layer quantized it is {least:.3f}",
                fix=f"allow {least:.3f} or more",
            )
        return left

    def _fitting(self, chosen: frozenset[str], bag: Bag) -> frozenset[str]:
        """The longest beginning of the choice for which what is measured keeps the bound on time.

        Looked for by bisection: a measurement takes seconds.
        """
        bound = self._bounds.max_latency
        order = [layer for layer in bag.order() if layer in chosen]
        if bound is None or not order or self._time_share(chosen) <= bound:
            return chosen
        low, high = 0, len(order) - 1
        while low < high:
            middle = (low + high + 1) // 2
            if self._time_share(frozenset(order[:middle])) <= bound:
                low = middle
            else:
                high = middle - 1
        return frozenset(order[:low])

    def _time_share(self, floating: frozenset[str]) -> float:
        built = self._work.build(_selection(self._work, floating))
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

    # what the choice is made by

    def _noise(self) -> dict[str, Noise]:
        """Noise of each layer by output, in the order of the graph."""
        samples = spread_singles(self._work.model, self._context, _SAMPLES)
        layers = self._built.layers()
        whole = self._corrected(frozenset())
        injector = Injector(self._work.model, samples)
        losses = injector.losses(whole, {layer: (layer,) for layer in layers})
        probing: Probing | None = None
        found: dict[str, Noise] = {}
        for layer, loss in losses.items():
            known = loss
            if known is None:
                probing = probing or Probing(self._work.model, samples)
                known = probing.loss(self._work.build(self._only(layer)).model)
            found[layer] = noise_of({name: level.db for name, level in known.outputs.items()})
        return found

    def _only(self, layer: str) -> Selection:
        others = frozenset(self._built.layers()) - {layer}
        return _selection(self._work, others)

    def _costs(self) -> _Costs:
        by_size = self._options.minimize == "size" and self._bounds.max_latency is None
        if by_size or self._bounds.max_size is not None:
            return _sizes(self._work.model, self._built)
        return _times(self._work, self._built, self._context)


@dataclass(frozen=True)
class _Costs:
    """What layers cost in float, in seconds or bytes.

    Attributes:
        unit: The unit.
        cost: By layer, what more it costs in float.
        boundaries: Conversions.
        float_total: Of the float model.
        quantized_total: With everything quantized.
    """

    unit: str
    cost: Mapping[str, float]
    boundaries: tuple[Boundary, ...]
    float_total: float
    quantized_total: float

    def table(self, floating: frozenset[str]) -> ReportTable:
        """The layers in float."""
        scale, unit = (1e3, "ms") if self.unit == "s" else (1e-3, "kB")
        rows = [(n, f"{c * scale:+.3f}") for n, c in self.cost.items() if n in floating]
        return ReportTable("Layers in float", ("layer", f">costs {unit}"), rows)


def _sizes(model: ir.Model, built: Built) -> _Costs:
    """Bytes of weights: those of a layer shrink from its float type to 8 bits."""
    quantized, whole = weight_bytes(built.model), weight_bytes(model)
    bytes_of = {cost.name: cost.weight_bytes for cost in node_costs(model)}
    layers = built.layers()
    total = sum(bytes_of.get(layer, 0) for layer in layers)
    share = (whole - quantized) / total if total else 0.0
    return _Costs("B", {n: bytes_of.get(n, 0) * share for n in layers}, (), whole, quantized)


def _times(work: Work, built: Built, context: Context) -> _Costs:
    """Seconds in onnxruntime on one thread."""
    feeds = context.example()
    assert feeds is not None, "there are data"
    layers = built.layers()
    alternating = work.build(_selection(work, layers[::2]))
    whole, quantized, mixed = (
        profile(model, feeds, threads=1) for model in (work.model, built.model, alternating.model)
    )
    slow, fast = _seconds_by_layer(whole, layers), _seconds_by_layer(quantized, layers)
    known = [layer for layer in layers if layer in slow and layer in fast]
    ratio = sum(fast[n] for n in known) / max(sum(slow[n] for n in known), 1e-12)
    typical = sum(slow[n] for n in known) / max(len(known), 1)
    cost = {}
    for layer in layers:
        before = slow.get(layer, typical)
        cost[layer] = before - fast.get(layer, before * ratio)
    price = _price_of_conversion(mixed)
    boundaries = tuple(_boundaries(work.model, layers, price))
    return _Costs("s", cost, boundaries, whole.kernels, quantized.kernels)


def _seconds_by_layer(found: Profile, layers: Collection[str]) -> dict[str, float]:
    """Time of the kernel that computes each layer; shared ones are shared."""
    seconds: dict[str, float] = {}
    for node in found.nodes:
        own = [name for name in {node.name, *node.covers} if name in layers]
        for name in own:
            seconds[name] = seconds.get(name, 0.0) + node.seconds / len(own)
    return seconds


_CONVERSIONS = ("QuantizeLinear", "DequantizeLinear")


def _price_of_conversion(found: Profile) -> float:
    """Seconds per byte that a Q or DQ reads and writes."""
    converting = [node for node in found.nodes if node.op_type in _CONVERSIONS]
    moved = sum(node.cost.activation_bytes or 0 for node in converting)
    return sum(node.seconds for node in converting) / moved if moved else 0.0


_BYTES = 5
"""A conversion reads 4 bytes and writes 1, or the other way round."""


def _boundaries(model: ir.Model, layers: Collection[str], price: float) -> Iterator[Boundary]:
    """Pairs of layers of which one reads what the other makes, other operators between them."""
    for node in model.graph:
        if node.name not in layers or node.inputs[0] is None:
            continue
        elements = _elements(node.inputs[0])
        for source in _sources(node.inputs[0], layers):
            yield Boundary(source, node.name or "", price * _BYTES * elements)


def _elements(value: ir.Value) -> int:
    """Elements of one sample; open dimensions count once."""
    if value.shape is None:
        return 0
    count = 1
    for size in value.shape:
        count *= size if isinstance(size, int) else 1
    return count


def _sources(value: ir.Value, layers: Collection[str]) -> set[str]:
    """The layers that a tensor is made of without another layer between."""
    found: set[str] = set()
    seen: set[ir.Value] = set()
    pending = [value]
    while pending:
        current = pending.pop()
        node = current.producer()
        if current in seen or node is None:
            continue
        seen.add(current)
        if node.name in layers:
            found.add(node.name or "")
        else:
            pending += [read for read in node.inputs if read is not None]
    return found
