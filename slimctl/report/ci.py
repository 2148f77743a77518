"""What continuous integration reads: JUnit XML, annotations of GitHub, a summary in Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol
from xml.etree import ElementTree

from slimctl.report.page import Document


class Judged(Protocol):
    """A gate's verdict."""

    @property
    def gate(self) -> str:
        """Its name."""
        ...

    @property
    def passed(self) -> bool:
        """Whether the bound holds."""
        ...

    @property
    def message(self) -> str:
        """One sentence."""
        ...


def junit(name: str, gates: Sequence[Judged], seconds: float) -> str:
    """A test suite in which each gate is a test.

    Args:
        name: Of the result.
        gates: At least none: a run without gates is one test that passed.
        seconds: Time of the run.
    """
    failed = sum(not gate.passed for gate in gates)
    counts = {"tests": str(max(len(gates), 1)), "failures": str(failed), "errors": "0"}
    suites = ElementTree.Element("testsuites", counts)
    suite = ElementTree.SubElement(
        suites, "testsuite", {"name": f"slimctl.{name}", "time": f"{seconds:.3f}", **counts}
    )
    for gate in gates:
        case = ElementTree.SubElement(
            suite, "testcase", {"classname": f"slimctl.{name}", "name": gate.gate}
        )
        if gate.passed:
            ElementTree.SubElement(case, "system-out").text = gate.message
        else:
            failure = {"message": gate.message, "type": "gate"}
            ElementTree.SubElement(case, "failure", failure).text = gate.message
    if not gates:
        ElementTree.SubElement(suite, "testcase", {"classname": f"slimctl.{name}", "name": "run"})
    ElementTree.indent(suites)
    return (
        '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(suites, "unicode") + "\n"
    )


_ESCAPES = {"%": "%25", "\r": "%0D", "\n": "%0A"}
_PROPERTY_ESCAPES = {**_ESCAPES, ":": "%3A", ",": "%2C"}


def workflow_commands(recipe: str, document: Document, gates: Sequence[Judged]) -> Iterator[str]:
    """Workflow commands of GitHub: an error for each broken gate, a warning for each warning.

    Args:
        recipe: The recipe's file, which they are shown at.
        document: The manifest.
        gates: Verdicts.
    """
    for gate in gates:
        if not gate.passed:
            yield _annotation("error", recipe, f"gate {gate.gate}", gate.message)
    for step in document["steps"]:
        for warning in step["warnings"]:
            yield _annotation("warning", recipe, step["name"], warning)


def _annotation(level: str, file: str, title: str, message: str) -> str:
    place = f"file={_escaped(file, _PROPERTY_ESCAPES)},title={_escaped(title, _PROPERTY_ESCAPES)}"
    return f"::{level} {place}::{_escaped(message, _ESCAPES)}"


def _escaped(text: str, escapes: dict[str, str]) -> str:
    return "".join(escapes.get(letter, letter) for letter in text)


def summary(document: Document, gates: Sequence[Judged]) -> str:
    """The run in Markdown, for the page of a job.

    Args:
        document: The manifest.
        gates: Verdicts.
    """
    failed = [gate for gate in gates if not gate.passed]
    verdict = f"{len(failed)} of {len(gates)} gates failed" if failed else "passed"
    lines = [f"## {_cell(document['name'])}: {verdict}", ""]
    lines += _table(("", "before", "after"), list(_results(document)))
    if gates:
        rows = [(g.gate, "passed" if g.passed else "**failed**", g.message) for g in gates]
        lines += ["", *_table(("gate", "verdict", "why"), rows)]
    steps = [
        (step["name"], _decibel(step["sqnr_db"]), _number(step["metric"]), _counts(step["changed"]))
        for step in document["steps"]
    ]
    lines += ["", *_table(("step", "SQNR", "metric", "changed"), steps)]
    return "\n".join(lines) + "\n"


def _results(document: Document) -> Iterator[tuple[str, str, str]]:
    results = document["results"]
    before, after = document["source"]["size_bytes"], document["model"]["size_bytes"]
    yield "size", f"{before / 1e6:.2f} MB", f"{after / 1e6:.2f} MB ({results['size_ratio']:.1%})"
    if results["sqnr_db"] is not None:
        yield "SQNR of the worst output", "", _decibel(results["sqnr_db"])
    if results["metric"] is not None:
        pair = _number(results["metric_original"]), _number(results["metric_result"])
        yield (results["metric"], *pair)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [header, ["---"] * len(header), *rows]
    return ["| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines]


def _cell(text: str) -> str:
    """Text that does not end a cell or a line."""
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")


def _decibel(value: Any) -> str:
    return "" if value is None else f"{value:.1f} dB"


def _number(value: Any) -> str:
    return "" if value is None else f"{value:.4f}"


def _counts(changed: Document) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in changed.items()) or "nothing"
