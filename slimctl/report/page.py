"""What every page is made of: self-contained HTML, light and dark, no script, nothing fetched."""

from __future__ import annotations

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
h2.chapter { font-size: 1.3rem; margin: 2.6rem 0 .2rem; padding-top: 1.2rem;
  border-top: 2px solid var(--line); }
.dim { color: var(--dim); }
.cards { display: grid; gap: .75rem; margin: 1.25rem 0;
  grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); }
.card { background: var(--card); border: 1px solid var(--line); border-radius: .5rem;
  padding: .7rem .9rem; }
.card b { display: block; font-size: 1.35rem; font-variant-numeric: tabular-nums; }
.card > span { color: var(--dim); font-size: .85rem; overflow-wrap: anywhere; }
.chart + .scroll, .scroll + .chart, .scroll + .scroll { margin-top: .75rem; }
.scroll { overflow-x: auto; background: var(--card); border: 1px solid var(--line);
  border-radius: .5rem; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: .45rem .8rem; text-align: left; vertical-align: top;
  border-bottom: 1px solid var(--line); }
tr:last-child td { border-bottom: 0; }
th { color: var(--dim); font-weight: 600; font-size: .85rem; white-space: nowrap; }
td.number, th.number { text-align: right; white-space: nowrap; }
td.wide { min-width: 16rem; }
.named td code { display: inline-block; min-width: 11.5rem; }
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


def page(title: str, parts: Iterable[Markup | None], *, style: str = "") -> str:
    """A whole page.

    Args:
        title: What the browser shows.
        parts: Its sections; None is left out.
        style: CSS rules of this kind of page.
    """
    rules = f"{_STYLE}\n{style}".strip()
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)} - slimctl</title>\n<style>\n{rules}\n</style>\n</head>\n"
        f"<body>\n<main>\n{''.join(filter(None, parts))}</main>\n</body>\n</html>\n"
    )


def markup(value: Any) -> Markup:
    """A value as HTML."""
    return value if isinstance(value, Markup) else Markup(escape(str(value)))


def tag(name: str, content: Any, **attributes: str) -> Markup:
    """An element; ``class_`` and ``stroke_width`` become ``class`` and ``stroke-width``."""
    listed = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(value)}"'
        for key, value in attributes.items()
        if value
    )
    return Markup(f"<{name}{listed}>{markup(content)}</{name}>")


def code(value: Any) -> Markup:
    """A name out of a model or a file."""
    return tag("code", value)


def join(parts: Iterable[Any], separator: str = "") -> Markup:
    """Values one after the other."""
    return Markup(separator.join(markup(part) for part in parts))


def chapter(title: str, line: str, sections: Iterable[Markup]) -> Markup:
    """Sections that belong together, below a heading that stands out."""
    head = tag("h2", title, class_="chapter")
    return join([head, tag("div", line, class_="dim"), Markup("\n"), *sections])


def named(sections: Iterable[Markup]) -> Markup:
    """Sections whose tables begin with names of nodes, which are not squeezed."""
    return tag("div", join(sections), class_="named")


def section(title: str, content: Markup) -> Markup:
    """A heading and what stands below it."""
    return join([tag("h2", title), content, Markup("\n")])


_COLUMNS = {"n": "number", "w": "wide", ".": ""}


def table(header: Sequence[str], rows: Iterable[Sequence[Any]], kinds: str = "") -> Markup:
    """A table.

    Args:
        header: Of each column; no row of headings when all are empty.
        rows: Cells of each column.
        kinds: A letter for each column: ``n`` for numbers, ``w`` for sentences, ``.`` for the rest.
    """
    classes = [_COLUMNS[kind] for kind in kinds.ljust(len(header), ".")]

    def row(name: str, cells: Sequence[Any]) -> Markup:
        pairs = zip(cells, classes, strict=True)
        return tag("tr", join(tag(name, cell, class_=kind) for cell, kind in pairs))

    body = join(row("td", cells) for cells in rows)
    head = tag("thead", row("th", header)) if any(header) else Markup("")
    return tag("div", tag("table", join([head, tag("tbody", body)])), class_="scroll")


_ROWS = 20
"""Rows of a long table that are seen at once."""


def long_table(header: Sequence[str], rows: Sequence[Sequence[Any]], kinds: str = "") -> Markup:
    """A table of which the beginning is seen and the rest unfolds; see :func:`table`."""
    first = table(header, rows[:_ROWS], kinds)
    if len(rows) <= _ROWS:
        return first
    summary = tag("summary", f"{len(rows) - _ROWS} more")
    return join([first, tag("details", join([summary, table(header, rows[_ROWS:], kinds)]))])


def cards(pairs: Iterable[tuple[Any, str]]) -> Markup:
    """Values that stand out, each with what it is."""
    drawn = (
        tag("div", join([tag("b", value), tag("span", label)]), class_="card")
        for value, label in pairs
    )
    return tag("div", join(drawn), class_="cards")


def passed_or_failed(passed: bool) -> Markup:
    """A verdict in its color."""
    word, kind = ("passed", "good") if passed else ("failed", "bad")
    return tag("span", word, class_=kind)


def number(value: Any) -> str:
    """A number with the digits that mean something; ``-`` for none."""
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, int | float) else str(value)
