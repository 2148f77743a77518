"""Chapters of an artifact's page from what other commands print with ``--json``.

A document is taken only when it is about the same model: its hash is that of a file which the
manifest names. A page that shows the latency of another model under this one's name would be worse
than none.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from slimctl.core.errors import OptionError
from slimctl.report import benchmark, sensitivity, verification
from slimctl.report.page import Document, Markup, chapter


class Asked(NamedTuple):
    """Something that can be on a page when somebody asks for it.

    Attributes:
        what: Its name.
        command: What to type.
        shows: What is seen then.
    """

    what: str
    command: str
    shows: str


class _Kind(NamedTuple):
    """What one command prints.

    Attributes:
        command: The command.
        title: Of the chapter.
        line: What was done, from the document.
        sections: What was found.
        measured: Hashes of the models that the document is about.
        is_source: It is about the original, not about the artifact.
    """

    command: str
    title: str
    line: Callable[[Document], str]
    sections: Callable[[Document], Iterable[Markup]]
    measured: Callable[[Document], Iterable[str]]
    is_source: bool = False


_KINDS = {
    "--verify": _Kind(
        "verify",
        "Verification",
        verification.line,
        verification.sections,
        lambda document: [document["sha256"]],
    ),
    "--sensitivity": _Kind(
        "sensitivity",
        "Sensitivity of the original",
        sensitivity.line,
        sensitivity.sections,
        lambda document: [document["sha256"]],
        is_source=True,
    ),
    "--bench": _Kind(
        "bench",
        "Benchmark",
        benchmark.line,
        benchmark.sections,
        lambda document: [model["sha256"] for model in document["models"]],
    ),
}

STYLE = verification.STYLE

ASKED = {
    option: Asked(kind.title, f"slimctl {kind.command} --json > {kind.command}.json", shows)
    for (option, kind), shows in zip(
        _KINDS.items(),
        (
            "SQNR along the graph, verdicts on nodes, values of the worst layers",
            "what each layer costs",
            "the distribution of latencies, bounds of operators",
        ),
        strict=True,
    )
}
"""What each option of ``slimctl report`` adds."""


def chapter_from(option: str, path: Path, manifest: Document) -> Markup:
    """The chapter of one document.

    Args:
        option: One of :data:`ASKED`.
        path: The file.
        manifest: Of the artifact whose page it is.

    Raises:
        OptionError: It cannot be read, is something else, or is about another model.
    """
    kind, document = _KINDS[option], _read(option, path)
    # What a file of unknown origin lacks shows wherever it is looked for.
    try:
        models = list(kind.measured(document))
        chapters = chapter(kind.title, kind.line(document), kind.sections(document))
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise OptionError(
            option,
            f"'{path}' is not what 'slimctl {kind.command} --json' prints",
            fix=f"write it anew: slimctl {kind.command} ... --json > {path.name}",
        ) from error
    _check_model(option, path, models, manifest)
    return chapters


def _check_model(option: str, path: Path, models: Iterable[str], manifest: Document) -> None:
    kind = _KINDS[option]
    files = manifest["source"]["files"] if kind.is_source else manifest["files"]
    if not {entry["sha256"] for entry in files} & set(models):
        wanted = f"the original, {files[0]['name']}" if kind.is_source else manifest["name"]
        raise OptionError(
            option,
            f"'{path}' is about another model than {wanted}",
            fix=f"run 'slimctl {kind.command} --json' on that model",
        )


def _read(option: str, path: Path) -> Document:
    try:
        document = json.loads(path.read_bytes())
    except OSError as error:
        why = f"Cannot read '{path}': {error.strerror}"
        raise OptionError(option, why, fix="check the path") from error
    except ValueError as error:
        why = f"'{path}' is no JSON: {error}"
        raise OptionError(option, why, fix="print it with --json") from error
    if not isinstance(document, dict):
        raise OptionError(option, f"'{path}' is no JSON object", fix="print it with --json")
    return dict(_with_numbers(document))


_NUMBERS = ("_db", "_error", "_steps", "_ms", "value", "drop", "low", "high", "best_db")
_NOT_FINITE = {text: float(text) for text in ("inf", "-inf", "nan")}


def _with_numbers(value: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """A document in which infinities are numbers again; JSON has texts for them."""
    for key, item in value.items():
        if isinstance(item, str) and key.endswith(_NUMBERS):
            yield key, _NOT_FINITE.get(item, item)
        else:
            yield key, _nested(item)


def _nested(item: Any) -> Any:
    if isinstance(item, dict):
        return dict(_with_numbers(item))
    return [_nested(part) for part in item] if isinstance(item, list) else item
