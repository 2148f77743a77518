"""What ``slimctl bench`` found, as a self-contained HTML page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from slimctl.report import charts
from slimctl.report.curves import Curve, curve_chart
from slimctl.report.page import (
    Document,
    Markup,
    cards,
    code,
    join,
    long_table,
    named,
    number,
    page,
    section,
    table,
    tag,
)


def benchmark_page(document: Document) -> str:
    """The page's text.

    Args:
        document: What the command prints with ``--json``, as Python values, each model with the
            percentiles 0 to 100 of its latencies as ``quantiles_ms``.
    """
    title = f"Benchmark of {Path(document['models'][0]['model']).name}"
    head = join([tag("h1", title), tag("div", line(document), class_="dim")])
    return page(title, [head, *sections(document)], style=charts.STYLE)


def sections(document: Document) -> list[Markup]:
    """Everything but the heading."""
    models, verdict = document["models"], _verdict(document)
    return [
        _cards(document),
        *([] if verdict is None else [verdict]),
        section(
            "Latency, milliseconds",
            join([_table(models), distribution([(m["model"], m["quantiles_ms"]) for m in models])]),
        ),
        named(_operators(document)),
        *_load(document["load"]),
    ]


def line(document: Document) -> str:
    """What was done."""
    size, threads = document["batch_size"], document["threads"] or "all"
    return f"batch size {size}, threads: {threads}, {document['models'][0]['runs']} runs"


def _cards(document: Document) -> Markup:
    model = document["models"][0]
    shown = [(f"{number(model[f'{name}_ms'])} ms", name.upper()) for name in ("p50", "p90", "p99")]
    shown.append((number(model["samples_per_second"]), "samples per second"))
    if document["speedup"] is not None:
        ratio = document["speedup"]
        interval = f"{number(ratio['low'])} to {number(ratio['high'])}"
        shown.append((f"{ratio['value']:.2f}x", f"as fast, 95 % interval {interval}"))
    return cards(shown)


def _verdict(document: Document) -> Markup | None:
    verdict = document["verdict"]
    if verdict is None:
        return None
    word = "Verdict" if verdict["decided"] else "No verdict"
    kind = "dim" if verdict["decided"] else "warning"
    return tag("p", f"{word}: {verdict['outcome']}; {verdict['reason']}.", class_=kind)


_TIMES = ("p50_ms", "p90_ms", "p99_ms", "mean_ms", "cpu_ms", "load_ms")


def _table(models: Sequence[Document]) -> Markup:
    header = ("model", "P50", "P90", "P99", "mean", "CPU", "load", "samples/s")
    rows = [
        (
            code(model["model"]),
            *(number(model[name]) for name in _TIMES),
            number(model["samples_per_second"]),
        )
        for model in models
    ]
    return table(header, rows, ".nnnnnnn")


def distribution(models: Sequence[tuple[str, Sequence[float]]]) -> Markup:
    """Share of runs that are at least as fast, up to the 99th percentile: the rest is one run.

    Args:
        models: Names with the percentiles 0 to 100 of their latencies, in milliseconds.
    """
    curves = [
        Curve(str(name), [(ms, share) for share, ms in enumerate(quantiles[:-1])])
        for name, quantiles in models
    ]
    return curve_chart(curves, across="milliseconds per run", up="% of runs")


def _operators(document: Document) -> Iterator[Markup]:
    sides = [document[key] for key in ("profile", "profile_against") if document.get(key)]
    for profile, model in zip(sides, document["models"], strict=False):
        nodes = sorted(profile["nodes"], key=lambda node: -node["seconds"])
        title = f"Operators of {model['model']}" if len(sides) > 1 else "Operators"
        yield section(title, join([_advice(profile["advice"]), _nodes(nodes)]))
    if document.get("difference"):
        yield _difference(document["difference"])


def _difference(difference: Document) -> Markup:
    rows = [
        (
            kind["kind"],
            *(f"{kind[key] * 1e3:.3f}" for key in ("seconds", "against")),
            tag("b", f"{kind['change'] * 1e3:+.3f}") if kind["sure"] else "noise",
            *(_counted(kind[key]) for key in ("operators", "operators_against")),
        )
        for kind in difference["kinds"]
    ]
    header = ("kind of operators", "ms", "other model", "change", "operators", "other model")
    listed = long_table(header, rows, ".nnn..")
    words = tag("p", f"{difference['words']}.", class_="dim")
    return section("What the difference comes from", join([words, listed]))


def _counted(operators: Document) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in operators.items()) or "-"


def _advice(items: Sequence[Document]) -> Markup:
    if not items:
        return Markup("")
    rows = [(item["action"], f"{item['share']:.1%}", item["nodes"]) for item in items]
    return table(("next", "share of the time", "operators"), rows, ".nn")


def _nodes(nodes: Sequence[Document]) -> Markup:
    header = ("operator", "kind", "µs", "share", "bound", "attained", "next", "because")
    rows = [
        (
            code(node["name"]),
            node["op_type"],
            f"{node['seconds'] * 1e6:.0f}",
            f"{node['share']:.1%}",
            node.get("bound", "-"),
            "-" if node.get("attained") is None else f"{node['attained']:.0%}",
            node.get("advice", "-"),
            node.get("reason", "-"),
        )
        for node in nodes
    ]
    return long_table(header, rows, "..nn.n.w")


def _load(load: Document | None) -> Iterator[Markup]:
    if load is None:
        return
    if load["batches"]:
        yield section("Batch sizes", _points(load["batches"], "batch_size", "samples_per_second"))
    if load["closed_loop"]:
        rows = _points(load["closed_loop"], "concurrency", "requests_per_second")
        yield section("Closed loop: clients on one session", rows)
    if load["open_loop"]:
        yield section("Open loop: latency against offered load, simulated", _offered(load))


def _points(items: Sequence[Document], name: str, speed: str) -> Markup:
    columns = (name, "p50_ms", "p90_ms", "p99_ms", speed)
    rows = [[number(item[column]) for column in columns] for item in items]
    return table([column.replace("_", " ") for column in columns], rows, "nnnnn")


def _offered(load: Document) -> Markup:
    items = load["open_loop"]
    columns = (
        *("rate", "max_batch", "queue_delay_ms", "p50_ms", "p90_ms", "p99_ms"),
        *("mean_batch", "busy"),
    )
    rows = [
        [*(number(item[column]) for column in columns), "" if item["stable"] else "overloaded"]
        for item in items
    ]
    header = [column.replace("_", " ") for column in columns]
    listed = table([*header, ""], rows, "nnnnnnnn.")
    curves = list(_curves(items))
    if not curves:
        return listed
    return join([listed, curve_chart(curves, across="requests per second", up="P99, ms")])


def _curves(items: Sequence[Document]) -> Iterator[Curve]:
    """P99 against the rate for each setting; rates that overload it have none."""
    settings = dict.fromkeys((item["max_batch"], item["queue_delay_ms"]) for item in items)
    for batch, delay in settings:
        points = [
            (item["rate"], item["p99_ms"])
            for item in items
            if (item["max_batch"], item["queue_delay_ms"]) == (batch, delay) and item["stable"]
        ]
        if points:
            yield Curve(f"max batch {batch}, delay {number(delay)} ms", sorted(points))
