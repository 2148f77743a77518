"""Results as blocks of text and tables: aligned plain text in a pipe, rich on a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TextIO, TypeAlias

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True)
class Table:
    """Rows under named columns.

    Attributes:
        columns: Headings. A heading that starts with ``>`` is of a column of numbers, flushed
            right.
        rows: One sequence of texts per row, as long as ``columns``.
        title: A line above the table.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""

    @property
    def headings(self) -> list[str]:
        """Headings without their alignment marks."""
        return [column.removeprefix(">") for column in self.columns]

    @property
    def flushed_right(self) -> list[bool]:
        """For each column, whether it holds numbers."""
        return [column.startswith(">") for column in self.columns]


@dataclass(frozen=True)
class Facts:
    """Names and values, one pair a line."""

    pairs: Mapping[str, str]
    title: str = ""


@dataclass(frozen=True)
class Warned:
    """A sentence that must not be missed."""

    text: str


Block: TypeAlias = str | Table | Facts | Warned


@dataclass
class _Plain:
    """Writes blocks as aligned text, without colors and without cutting anything off."""

    stream: TextIO
    lines: list[str] = field(default_factory=list)

    def write(self, blocks: Sequence[Block]) -> None:
        for number, block in enumerate(blocks):
            if number and not (isinstance(block, str) and isinstance(blocks[number - 1], str)):
                self.lines.append("")
            self.lines += _plain_lines(block)
        self.stream.write("".join(line.rstrip() + "\n" for line in self.lines))


def _plain_lines(block: Block) -> list[str]:
    match block:
        case str():
            return [block]
        case Warned():
            return [f"WARNING: {block.text}"]
        case Facts():
            rows = [[f"{name}:", value] for name, value in block.pairs.items()]
            return _titled(block.title, _aligned(rows, [False, False]))
        case Table():
            rows = [block.headings, *(list(row) for row in block.rows)]
            return _titled(block.title, _aligned(rows, block.flushed_right))


def _titled(title: str, lines: list[str]) -> list[str]:
    return [title, *lines] if title else lines


def _aligned(rows: Sequence[Sequence[str]], flushed_right: Sequence[bool]) -> list[str]:
    widths = [max((len(text) for text in column), default=0) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            text.rjust(width) if right else text.ljust(width)
            for text, width, right in zip(row, widths, flushed_right, strict=True)
        )
        for row in rows
    ]


def _rich_block(block: Block) -> Any:
    from rich.table import Table as RichTable
    from rich.text import Text

    match block:
        case str():
            return Text(block)
        case Warned():
            return Text(f"WARNING: {block.text}", style="bold red")
        case Facts():
            grid = RichTable(
                box=None, show_header=False, title=block.title or None, title_justify="left"
            )
            grid.add_column(style="cyan", no_wrap=True)
            grid.add_column(overflow="fold")
            for name, value in block.pairs.items():
                grid.add_row(Text(name), Text(value))
            return grid
        case Table():
            return _rich_table(block)


def _rich_table(table: Table) -> Any:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table as RichTable
    from rich.text import Text

    drawn = RichTable(box=SIMPLE_HEAD, title=table.title or None, title_justify="left")
    for heading, right in zip(table.headings, table.flushed_right, strict=True):
        drawn.add_column(heading, justify="right" if right else "left", overflow="fold")
    for row in table.rows:
        drawn.add_row(*(Text(text) for text in row))
    return drawn


def write_blocks(stream: TextIO, blocks: Sequence[Block]) -> None:
    """Writes blocks to a stream: drawn by rich on a terminal, aligned text elsewhere."""
    if stream.isatty():
        console = terminal(stream)
        for block in blocks:
            console.print(_rich_block(block))
    else:
        _Plain(stream).write(blocks)


def terminal(stream: TextIO) -> Console:
    """A rich console on a stream. It honors ``NO_COLOR`` and ``TERM=dumb``."""
    from rich.console import Console

    return Console(file=stream, highlight=False)
