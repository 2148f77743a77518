"""What continuous integration reads."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

from slimctl.recipe.gates import GateResult
from slimctl.report.ci import junit, summary, workflow_commands

GATES = (
    GateResult("size", 0.5, 0.4, True, "0.4 of the size"),
    GateResult("sqnr.last", 1.0, 2.0, False, "lost 2 dB < 3 & more, 100%\nreally"),
)
DOCUMENT: dict[str, Any] = {
    "name": "net",
    "source": {"size_bytes": 2_000_000},
    "model": {"size_bytes": 500_000},
    "results": {
        "size_ratio": 0.25,
        "sqnr_db": 21.25,
        "metric": "top1",
        "metric_original": 0.9,
        "metric_result": 0.89,
    },
    "steps": [
        {
            "name": "fuse",
            "sqnr_db": None,
            "metric": None,
            "changed": {},
            "warnings": ["a | b: c, d"],
        },
        {
            "name": "quantize-static",
            "sqnr_db": 21.25,
            "metric": 0.89,
            "changed": {"Conv": 3},
            "warnings": [],
        },
    ],
}


def test_junit_has_a_test_for_each_gate() -> None:
    suites = ElementTree.fromstring(junit("net", GATES, 1.5))
    assert suites.attrib == {"tests": "2", "failures": "1", "errors": "0"}
    (suite,) = suites
    assert suite.attrib["time"] == "1.500"
    cases = {case.attrib["name"]: case for case in suite}
    assert [child.tag for child in cases["size"]] == ["system-out"]
    (failure,) = cases["sqnr.last"]
    assert failure.tag == "failure"
    assert failure.text == GATES[1].message


def test_junit_without_gates_is_one_test_that_passed() -> None:
    suites = ElementTree.fromstring(junit("net", (), 0.0))
    assert suites.attrib["tests"] == "1"
    assert suites.attrib["failures"] == "0"
    assert [case.attrib["name"] for case in suites[0]] == ["run"]


def test_annotations_are_escaped_as_github_asks() -> None:
    assert list(workflow_commands("a,b.yaml", DOCUMENT, GATES)) == [
        "::error file=a%2Cb.yaml,title=gate sqnr.last::lost 2 dB < 3 & more, 100%25%0Areally",
        "::warning file=a%2Cb.yaml,title=fuse::a | b: c, d",
    ]


def test_summary_is_markdown() -> None:
    lines = summary(DOCUMENT, GATES).splitlines()
    assert lines[0] == "## net: 1 of 2 gates failed"
    assert "| size | 2.00 MB | 0.50 MB (25.0%) |" in lines
    assert "| top1 | 0.9000 | 0.8900 |" in lines
    assert "| sqnr.last | **failed** | lost 2 dB &lt; 3 & more, 100% really |" in lines
    assert "| quantize-static | 21.2 dB | 0.8900 | 3 Conv |" in lines
    assert summary(DOCUMENT, GATES[:1]).startswith("## net: passed")


def test_names_do_not_break_tables() -> None:
    strange = {**DOCUMENT, "name": "a|b\nc"}
    assert summary(strange, ()).startswith("## a\\|b c: passed")
