"""One artifact as a self-contained HTML page: no script, nothing fetched."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

Document = Mapping[str, Any]

_STYLE = """
:root { color-scheme: light dark; --ink: #1d2129; --dim: #5d6673; --paper: #f6f7f9; --card: #fff;
  --line: #dfe3e8; --good: #18794e; --bad: #c62a2f; --accent: #2563c9; }
@media (prefers-color-scheme: dark) { :root { --ink: #e7eaee; --dim: #9aa4b1; --paper: #14171b;
  --card: #1c2026; --line: #313843; --good: #4cc38a; --bad: #ff8589; --accent: #7fb0ff; } }
* { box-sizing: border-box; }
body { margin: 0; padding: 1.5rem 1rem 3rem; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; }
main { max-width: 62rem; margin: 0 auto; }
h1 { font-size: 1.5rem; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.05rem; margin: 2rem 0 .6rem; }
.dim { color: var(--dim); }
.cards { display: grid; gap: .75rem; margin: 1.25rem 0;
  grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); }
.card { background: var(--card); border: 1px solid var(--line); border-radius: .5rem;
  padding: .7rem .9rem; }
.card b { display: block; font-size: 1.35rem; font-variant-numeric: tabular-nums; }
.card span { color: var(--dim); font-size: .85rem; }
.scroll { overflow-x: auto; background: var(--card); border: 1px solid var(--line);
  border-radius: .5rem; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: .45rem .8rem; text-align: left; vertical-align: top;
  border-bottom: 1px solid var(--line); }
tr:last-child td { border-bottom: 0; }
th { color: var(--dim); font-weight: 600; font-size: .85rem; white-space: nowrap; }
td.number, th.number { text-align: right; white-space: nowrap; }
code { font: .88em ui-monospace, "SFMono-Regular", Menlo, Consolas, monospace;
  overflow-wrap: anywhere; }
.good { color: var(--good); font-weight: 600; }
.bad { color: var(--bad); font-weight: 600; }
.warning { border-left: 4px solid var(--bad); background: var(--card); padding: .6rem .9rem; }
.bar { width: 10rem; height: .8rem; margin-top: .3rem; border-radius: .2rem;
  background: var(--line); overflow: hidden; }
.bar i { display: block; height: 100%; background: var(--accent); }
details { margin: .6rem 0; }
summary { cursor: pointer; color: var(--accent); }
""".strip()


class Markup(str):
    """Text that is HTML already; everything else is escaped."""

    __slots__ = ()


def render(document: Document) -> str:
    """A page from a manifest.

    Args:
        document: The manifest as JSON types.
    """
    parts = [
        _head(document),
        _cards(document),
        _gates(document),
        _steps(document),
        _groups(document),
        _skipped(document),
        _latency(document),
        _data(document),
        _provenance(document),
    ]
    title = escape(str(document["name"]))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title} - slimctl</title>\n<style>\n{_STYLE}\n</style>\n</head>\n"
        f"<body>\n<main>\n{''.join(filter(None, parts))}</main>\n</body>\n</html>\n"
    )


def _text(value: Any) -> str:
    return value if isinstance(value, Markup) else escape(str(value))


def _tag(name: str, content: Any, **attributes: str) -> Markup:
    listed = "".join(
        f' {key.rstrip("_")}="{escape(value)}"' for key, value in attributes.items() if value
    )
    return Markup(f"<{name}{listed}>{_text(content)}</{name}>")


def _code(value: Any) -> Markup:
    return _tag("code", value)


def _join(parts: Iterable[Any], separator: str = "") -> Markup:
    return Markup(separator.join(_text(part) for part in parts))


def _table(header: Sequence[str], rows: Iterable[Sequence[Any]], numbers: str = "") -> Markup:
    """A table; ``numbers`` has an ``n`` at the place of each column of numbers."""
    kinds = ["number" if kind == "n" else "" for kind in numbers.ljust(len(header), ".")]

    def row(tag: str, cells: Sequence[Any]) -> Markup:
        pairs = zip(cells, kinds, strict=True)
        return _tag("tr", _join(_tag(tag, cell, class_=kind) for cell, kind in pairs))

    body = _join(row("td", cells) for cells in rows)
    head = _tag("thead", row("th", header))
    return _tag("div", _tag("table", _join([head, _tag("tbody", body)])), class_="scroll")


def _section(title: str, content: Markup) -> Markup:
    return _join([_tag("h2", title), content, Markup("\n")])


def _head(document: Document) -> Markup:
    source = document["source"]["files"][0]["name"]
    line = f"made from {source} for target {document['target']}"
    parts = [_tag("h1", document["name"]), _tag("div", line, class_="dim")]
    if document["uncalibrated"]:
        parts.append(
            _tag(
                "p",
                "Uncalibrated: ranges come from random data. This artifact shows that the chain "
                "runs; its accuracy means nothing.",
                class_="warning",
            )
        )
    return _join([*parts, Markup("\n")])


def _cards(document: Document) -> Markup:
    results, source = document["results"], document["source"]
    cards = [
        (_bytes(document["model"]["size_bytes"]), f"was {_bytes(source['size_bytes'])}"),
        (f"{results['size_ratio']:.1%}", "of the original's size"),
    ]
    if results["sqnr_db"] is not None:
        cards.append(
            (f"{_number(results['sqnr_db'])} dB", f"SQNR on {results['sqnr_samples']} samples")
        )
    if results["metric"] is not None:
        was = _number(results["metric_original"])
        cards.append((_number(results["metric_result"]), f"{results['metric']}, was {was}"))
    drawn = (
        _tag("div", _join([_tag("b", value), _tag("span", label)]), class_="card")
        for value, label in cards
    )
    return _tag("div", _join(drawn), class_="cards")


def _gates(document: Document) -> Markup | None:
    gates = [*document["results"]["gates"], *document["run"]["gates"]]
    if not gates:
        return None
    rows = [(_passed(gate["passed"]), gate["gate"], gate["message"]) for gate in gates]
    return _section("Gates", _table(("verdict", "gate", "found"), rows))


def _passed(passed: bool) -> Markup:
    word, kind = ("passed", "good") if passed else ("failed", "bad")
    return _tag("span", word, class_=kind)


def _steps(document: Document) -> Markup:
    rows = [
        (
            index,
            _join([_tag("b", step["name"]), Markup("<br>"), _options(step["options"])]),
            ", ".join(f"{count} {what}" for what, count in step["changed"].items()) or "nothing",
            _bytes(step["weight_bytes"]),
            _number(step["sqnr_db"]),
            _number(step["metric"]),
        )
        for index, step in enumerate(document["steps"], start=1)
    ]
    header = ("", "step", "changed", "weights", "SQNR dB", "metric")
    notes = [
        _tag("li", _join([_tag("b", step["name"]), ": ", note]))
        for step in document["steps"]
        for note in step["notes"]
    ]
    notes += [_tag("li", note) for note in document["run"]["notes"]]
    listed = _tag("ul", _join(notes)) if notes else Markup("")
    return _section("Steps", _join([_table(header, rows, "n..nnn"), listed]))


def _groups(document: Document) -> Markup | None:
    """What is left of each group of layers that was pruned, drawn as bars."""
    parts = [
        _section(
            f"Kept by {step['name']}",
            _table(
                ("layers", "", "kept", "why this many"),
                [
                    (
                        _join((_code(name) for name in group["layers"]), " "),
                        _bar(group["kept"] / group["total"]),
                        f"{group['kept']} of {group['total']}",
                        group["why"],
                    )
                    for group in step["facts"].get("groups", ())
                ],
                "..n.",
            ),
        )
        for step in document["steps"]
        if step["facts"].get("groups")
    ]
    return _join(parts) if parts else None


def _bar(share: float) -> Markup:
    inner = _tag("i", "", style=f"width:{share:.1%}")
    return _tag("div", inner, class_="bar", title=f"{share:.0%}")


def _options(options: Document) -> Markup:
    shown = {key: value for key, value in options.items() if value not in (None, [], "")}
    return _code(", ".join(f"{key}={_plain(value)}" for key, value in shown.items()))


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _skipped(document: Document) -> Markup | None:
    rows = [
        (step["name"], _code(item["node"]), item["reason"])
        for step in document["steps"]
        for item in step["skipped"]
    ]
    if not rows:
        return None
    table = _table(("step", "node", "reason"), rows)
    summary = _tag("summary", f"Candidates left as they are: {len(rows)}")
    return _section("Left alone", _tag("details", _join([summary, table])))


def _latency(document: Document) -> Markup | None:
    latency = document["run"]["latency"]
    if not latency:
        return None
    rows = [
        (side, *(_number(times[key]) for key in ("p50_ms", "p90_ms", "p99_ms")))
        for side, times in latency.items()
    ]
    return _section("Latency", _table(("model", "P50 ms", "P90 ms", "P99 ms"), rows, ".nnn"))


def _data(document: Document) -> Markup | None:
    parts = [
        _section(f"{title} data", _facts(document[key]))
        for key, title in (("calibration", "Calibration"), ("evaluation", "Evaluation"))
        if document[key]
    ]
    return _join(parts) if parts else None


def _facts(facts: Document) -> Markup:
    return _table(("", ""), [(key, _code(_plain(value))) for key, value in facts.items()])


def _provenance(document: Document) -> Markup:
    files = _table(
        ("file", "bytes", "SHA-256"),
        [
            (entry["name"], f"{entry['size_bytes']:,}", _code(entry["sha256"]))
            for entry in (*document["source"]["files"], *document["files"])
        ],
        ".n",
    )
    run = document["run"]
    made = {
        **document["versions"],
        "host": f"{run['host']} ({run['platform']})",
        "started": run["started"],
        "manifest": document["manifest_hash"],
    }
    return _join([_section("Files", files), _section("Provenance", _facts(made))])


def _number(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, int | float) else str(value)


def _bytes(count: int) -> str:
    size = float(count)
    for unit in ("B", "KB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} GB"
