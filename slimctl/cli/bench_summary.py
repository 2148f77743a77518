"""What ``slimctl bench`` found, as JSON, as text, and for its report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slimctl.cli import words
from slimctl.cli.table import Block, Table, Warned
from slimctl.core.files import sha256_of_file
from slimctl.evaluate.contrast import KindChange, in_words
from slimctl.evaluate.roofline import HEAVY, Action, heavy, summarize
from slimctl.evaluate.serving import Serving, serving

if TYPE_CHECKING:
    from slimctl.evaluate.benchmark import BenchResult, Verdict
    from slimctl.evaluate.machine import Machine
    from slimctl.evaluate.profile import NodeTime, Profile
    from slimctl.evaluate.queueing import Load
    from slimctl.evaluate.roofline import Placed
    from slimctl.evaluate.study import LoadStudy, Questions

HEAVIEST = 15
"""Operators listed in a table; the JSON document has all of them."""


@dataclass(frozen=True)
class Found:
    """Everything that was measured; None, or nothing, for what was not asked for.

    ``profiles`` and ``placed`` have an entry for each of ``models``.
    """

    models: Sequence[Path]
    results: Sequence[BenchResult]
    batch_size: int
    threads: int
    verdict: Verdict | None
    profiles: Sequence[Profile]
    machine: Machine | None
    placed: Sequence[Sequence[Placed]]
    kinds: Sequence[KindChange] | None
    questions: Questions
    load: LoadStudy | None

    @property
    def serving(self) -> Serving | None:
        """The suggestion as a serving configuration."""
        if self.load is None or self.load.suggestion is None or self.questions.p99 is None:
            return None
        return serving(self.load.suggestion, self.questions.p99, self.threads)


def document(found: Found) -> dict[str, Any]:
    """The result as JSON types; of the latencies the percentiles 0 to 100."""
    verdict = found.verdict
    return {
        "batch_size": found.batch_size,
        "threads": found.threads,
        "models": [
            {
                "model": path,
                "sha256": sha256_of_file(path),
                **result.to_dict(),
                "samples_per_second": _rate(result, found.batch_size),
                "quantiles_ms": result.quantiles(),
            }
            for path, result in zip(found.models, found.results, strict=True)
        ],
        "speedup": None if verdict is None else verdict.ratio,
        "verdict": None
        if verdict is None
        else {
            "outcome": verdict.outcome.value,
            "decided": verdict.decided,
            "noise": verdict.noise,
            "reason": verdict.reason,
        },
        "profile": _profile_document(found, 0),
        "profile_against": _profile_document(found, 1),
        "difference": _difference_document(found),
        "machine": found.machine,
        "load": _load_document(found),
    }


def _profile_document(found: Found, index: int) -> dict[str, Any] | None:
    if index >= len(found.profiles):
        return None
    profile, placed = found.profiles[index], found.placed[index] if found.placed else ()
    return {
        "runs": profile.runs,
        "kernel_seconds": profile.kernels,
        "run_seconds": profile.run,
        "unmatched_seconds": profile.unmatched,
        "nodes": [node.to_dict() for node in placed or profile.nodes],
        "advice": [
            {"action": item.action.value, "share": item.share, "nodes": item.nodes}
            for item in summarize(placed)
        ],
    }


def _difference_document(found: Found) -> dict[str, Any] | None:
    if found.kinds is None:
        return None
    return {"words": _difference(found, found.kinds), "kinds": [k.to_dict() for k in found.kinds]}


def _difference(found: Found, kinds: Sequence[KindChange]) -> str:
    ours, theirs = found.profiles
    names = str(found.models[0]), str(found.models[1])
    return in_words(names, (ours.kernels, theirs.kernels), kinds)


def _load_document(found: Found) -> dict[str, Any] | None:
    load = found.load
    if load is None:
        return None
    return {
        "batch_fixed": load.fixed,
        "batches": [item.to_dict() for item in load.batches],
        "closed_loop": [item.to_dict() for item in load.clients],
        "open_loop": [item.to_dict() for item in load.offered],
        "suggestion": None if load.suggestion is None else load.suggestion.to_dict(),
        "serving": found.serving,
    }


def _rate(result: BenchResult, batch_size: int) -> float:
    return batch_size / result.mean * 1e3


def blocks(found: Found) -> Iterator[Block]:
    """The result as text."""
    yield _latencies(found)
    yield from _unsettled(found)
    if found.verdict is not None:
        yield from _verdict(found.models, found.verdict)
    for index, profile in enumerate(found.profiles):
        yield from _operators(_of(found, index), profile, found.placed[index : index + 1])
    if found.kinds is not None:
        yield _kinds(found.kinds)
        yield _difference(found, found.kinds)
    if found.machine is not None:
        yield _peaks(found.machine)
    for index, placed in enumerate(found.placed):
        yield from _advice(_of(found, index), placed)
    if found.load is not None:
        yield from _under_load(found, found.load)


def _latencies(found: Found) -> Table:
    count, results = found.batch_size, found.results
    return Table(
        ("model", ">P50", ">P90", ">P99", ">mean", ">CPU", ">load", ">samples/s", ">peak memory"),
        [
            (
                str(path),
                *(
                    words.milliseconds(value)
                    for value in (
                        *(result.p50, result.p90, result.p99),
                        *(result.mean, result.cpu, result.load),
                    )
                ),
                f"{_rate(result, count):.4g}",
                "-" if result.peak_memory is None else words.size(result.peak_memory),
            )
            for path, result in zip(found.models, results, strict=True)
        ],
        title=f"Milliseconds per run of {count} sample{'' if count == 1 else 's'}, "
        f"{results[0].runs} runs",
    )


def _unsettled(found: Found) -> Iterator[Block]:
    for path, result in zip(found.models, found.results, strict=True):
        if not result.settled:
            yield (
                f"'{path}' had not settled after {result.warmup} warm-up runs: its first rounds "
                "may be slow (--warmup, --max-seconds)"
            )


def _verdict(models: Sequence[Path], verdict: Verdict) -> Iterator[Block]:
    ratio = verdict.ratio
    yield (
        f"'{models[0]}' is {ratio.value:.2f}x as fast as '{models[1]}' "
        f"(95 % interval {ratio.low:.2f} to {ratio.high:.2f})"
    )
    word = "verdict" if verdict.decided else "no verdict"
    yield f"{word}: {verdict.outcome.value}; {verdict.reason}"


def _of(found: Found, index: int) -> str:
    """Which model it is about, where there are two."""
    return f" for '{found.models[index]}'" if len(found.profiles) > 1 else ""


def _kinds(kinds: Sequence[KindChange]) -> Table:
    return Table(
        ("kind", ">ms", ">other", ">change", ">noise", "operators", "other"),
        [
            (
                one.kind,
                *(f"{value * 1e3:.3f}" for value in (one.seconds, one.against)),
                f"{one.change * 1e3:+.3f}",
                f"{one.noise * 1e3:.3f}",
                *(_counted(side) for side in (one.operators, one.operators_against)),
            )
            for one in kinds[:HEAVIEST]
        ],
        title="What the difference comes from, milliseconds in kernels",
    )


def _counted(operators: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in operators.items()) or "-"


def _operators(
    which: str, profile: Profile, under_roof: Sequence[Sequence[Placed]]
) -> Iterator[Block]:
    placed = under_roof[0] if under_roof else None
    title = (
        f"Operators as onnxruntime runs them{which}: {len(profile.nodes)}, "
        f"{profile.kernels * 1e3:.3f} of {profile.run * 1e3:.3f} ms in kernels under the profiler"
    )
    if placed is None:
        slowest = sorted(profile.nodes, key=lambda node: -node.seconds)[:HEAVIEST]
        yield Table(_NODE_COLUMNS, [_node_row(node) for node in slowest], title=title)
    else:
        yield Table(
            (*_NODE_COLUMNS, "bound", ">attained", "next"),
            [(*_node_row(node.time), *_roof_row(node)) for node in heavy(placed)[:HEAVIEST]],
            title=title,
        )
    if profile.unmatched:
        share = words.percent(profile.unmatched / profile.kernels)
        yield f"{share} of the time is in operators inside of If, Loop or Scan, not listed"


_NODE_COLUMNS = ("operator", "kind", ">us", ">share", ">MACs", ">weights", ">activations")


def _node_row(node: NodeTime) -> tuple[str, ...]:
    return (
        node.name,
        node.op_type,
        f"{node.seconds * 1e6:.0f}",
        words.percent(node.share),
        words.number(node.cost.macs),
        words.size(node.cost.weight_bytes),
        words.size(node.cost.activation_bytes),
    )


def _roof_row(node: Placed) -> tuple[str, ...]:
    attained = "-" if node.attained is None else f"{node.attained:.0%}"
    return node.bound.value, attained, node.advice.action.value


def _peaks(machine: Machine) -> str:
    sizes = sorted(machine.bandwidth)
    near, far = machine.bandwidth[sizes[0]], machine.bandwidth[sizes[-1]]
    return (
        f"this machine: {machine.float_macs / 1e9:.3g} G multiply-accumulates/s in float32, "
        f"{machine.integer_macs / 1e9:.3g} in 8 bits; {near / 1e9:.3g} GB/s within its caches, "
        f"{far / 1e9:.3g} from memory; {machine.call * 1e6:.2g} us per call"
    )


def _advice(which: str, placed: Sequence[Placed]) -> Iterator[Block]:
    """What to do next, the action that reaches most of the time first."""
    for item in summarize(placed):
        if item.share < HEAVY:
            continue
        nodes = [node for node in placed if node.advice.action is item.action]
        reasons = _reasons(nodes)
        what = "leave as it is" if item.action is Action.NOTHING else item.action.value
        yield (
            f"next{which}: {what}, {words.percent(item.share)} of the time in {item.nodes} "
            f"operators: {reasons}"
        )


def _reasons(nodes: Sequence[Placed]) -> str:
    """The reason that covers most of the time."""
    shares: dict[str, float] = {}
    for node in nodes:
        shares[node.advice.reason] = shares.get(node.advice.reason, 0.0) + node.time.share
    return max(shares, key=lambda reason: shares[reason])


def _under_load(found: Found, load: LoadStudy) -> Iterator[Block]:
    if load.fixed is not None and (found.questions.batch_sizes or found.questions.rates):
        yield f"one batch size only: {load.fixed}; a request is one run"
    if load.batches and not load.fixed:
        yield _batches(load)
    if load.clients:
        yield _clients(load)
    if load.offered:
        yield _offered(load)
    if found.questions.p99 is not None:
        yield _suggestion(found, load)


def _milliseconds(*seconds: float) -> tuple[str, ...]:
    return tuple(words.milliseconds(value * 1e3) for value in seconds)


def _batches(load: LoadStudy) -> Table:
    rows = [item.to_dict() for item in load.batches]
    return Table(
        (">batch", ">P50", ">P90", ">P99", ">samples/s"),
        [
            (
                str(row["batch_size"]),
                *(words.milliseconds(row[name]) for name in ("p50_ms", "p90_ms", "p99_ms")),
                f"{row['samples_per_second']:.4g}",
            )
            for row in rows
        ],
        title=f"Batch sizes, milliseconds per run, {len(load.batches[0].seconds)} runs of each",
    )


def _clients(load: LoadStudy) -> Table:
    return Table(
        (">clients", ">P50", ">P90", ">P99", ">requests/s"),
        [
            (
                str(item.clients),
                *_milliseconds(item.p50, item.p90, item.p99),
                f"{item.per_second:.4g}",
            )
            for item in load.clients
        ],
        title="Closed loop: clients on one session, milliseconds per request",
    )


def _offered(load: LoadStudy) -> Table:
    return Table(
        (">requests/s", ">max batch", ">delay", ">P50", ">P90", ">P99", ">batch", ">busy", ""),
        [_offered_row(item) for item in load.offered],
        title="Open loop: milliseconds from arrival to answer, simulated",
    )


def _offered_row(load: Load) -> tuple[str, ...]:
    return (
        f"{load.rate:g}",
        str(load.batcher.max_batch),
        *_milliseconds(load.batcher.delay, load.p50, load.p90, load.p99),
        f"{load.batch:.2f}",
        f"{load.busy:.0%}",
        "" if load.stable else "overloaded",
    )


def _suggestion(found: Found, load: LoadStudy) -> Block:
    bound, rate = found.questions.p99 or 0.0, max(found.questions.rates)
    if load.suggestion is None:
        return Warned(f"no setting keeps P99 below {bound * 1e3:g} ms at {rate:g} requests/s")
    chosen = load.suggestion
    forward = load.batches[0].to_dict()["p50_ms"] / 1e3
    share = f"{chosen.batcher.delay / forward:.2g} of a forward pass"
    return (
        f"suggested: max batch {chosen.batcher.max_batch}, queue delay "
        f"{words.milliseconds(chosen.batcher.delay * 1e3)} ms ({share}): P99 "
        f"{words.milliseconds(chosen.p99 * 1e3)} ms at {rate:g} requests/s, "
        f"{chosen.busy:.0%} busy"
    )
