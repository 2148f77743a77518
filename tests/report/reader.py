"""Reads a page as a browser would: tags, attributes, text."""

from __future__ import annotations

from html.parser import HTMLParser


class Reader(HTMLParser):
    """Collects text, tags and whether every tag is closed.

    Attributes:
        open: Tags that are not closed yet.
        tags: All tags.
        attributes: All attributes of all tags, in order.
        text: What a person reads, titles included.
        titles: What the pointer shows.
    """

    VOID = frozenset({"meta", "br"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.titles: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += attrs
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "title" and "svg" in self.open:
            self.titles.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" in self.open:
            return
        self.text += data
        if self.open and self.open[-1] == "title" and self.titles:
            self.titles[-1] += data

    def values(self, name: str) -> list[str]:
        """Values of all attributes of a name."""
        return [value or "" for key, value in self.attributes if key == name]


def read(text: str) -> Reader:
    """A page, which must be well formed."""
    reader = Reader()
    reader.feed(text)
    reader.close()
    assert reader.open == []
    return reader
