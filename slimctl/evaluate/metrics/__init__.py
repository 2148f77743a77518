"""How good outputs are: one module per family of metrics, found by itself.

A metric is spelled ``name``, ``name:OUTPUT`` when the model has several outputs that could be
meant, and ``name:OUTPUT?option=value&option=value`` with options, or is the user's own
``module:function``. A new one is one new file here, with a class as :mod:`slimctl.evaluate.metric`
describes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from pkgutil import iter_modules

from pydantic import ValidationError

from slimctl.core.errors import OptionError, nearest
from slimctl.evaluate.class_scores import Share, class_scores, in_top_k, top_k_accuracy
from slimctl.evaluate.metric import OPTION, Measured, Metric, registered
from slimctl.evaluate.similarity import LIMIT_DB, Similarity, cosine, max_abs_error, sqnr_db

__all__ = [
    "LIMIT_DB",
    "OPTION",
    "Measured",
    "Metric",
    "Share",
    "Similarity",
    "class_scores",
    "cosine",
    "in_top_k",
    "load_all",
    "max_abs_error",
    "metric_kinds",
    "metric_names",
    "open_metric",
    "options_of",
    "sqnr_db",
    "top_k_accuracy",
]

_FIRST = ("top1", "top5", "agreement")
"""Listed before the others, which follow by name."""


@cache
def load_all() -> None:
    """Imports every module of this package."""
    for module in iter_modules(__path__):
        import_module(f"{__name__}.{module.name}")


def metric_kinds() -> Mapping[str, type[Metric]]:
    """The built-in metrics by name."""
    load_all()
    found = registered()
    return {name: found[name] for name in [*_FIRST, *sorted(set(found) - set(_FIRST))]}


def metric_names() -> Iterator[str]:
    """Names of the built-in metrics."""
    yield from metric_kinds()


def options_of(kind: type[Metric]) -> list[str]:
    """Names of a metric's options."""
    return [name for name in kind.model_fields if name != "output"]


def open_metric(text: str) -> Measured:
    """A metric that has seen nothing yet.

    Args:
        text: ``name:OUTPUT?option=value&option=value`` or ``module:function``.

    Raises:
        OptionError: There is no such metric, no such option, or the value of one is wrong.
        SourceError: The user's function cannot be imported.
    """
    head, mark, options = text.partition("?")
    if mark and "=" not in options:  # a question mark in the name of an output
        head, options = text, ""
    name, _, output = head.partition(":")
    kinds = metric_kinds()
    if name in kinds:
        return Measured(_with_options(kinds[name], output, options))
    if output:
        from slimctl.evaluate.metrics.function import FunctionMetric

        return Measured(FunctionMetric.load(text))
    raise OptionError(
        OPTION,
        f"Unknown metric '{text}'",
        fix=f"{nearest(name, kinds)}; valid: {', '.join(kinds)}, module:function",
    )


def _with_options(kind: type[Metric], output: str, text: str) -> Metric:
    values: dict[str, str] = {}
    for part in filter(None, text.split("&")):
        name, _, value = part.partition("=")
        known = options_of(kind)
        if name not in known:
            valid = f"valid: {', '.join(known)}" if known else f"{kind.name} has no options"
            hint = f"{nearest(name, known)}; " if known else ""
            raise OptionError(OPTION, f"{kind.name} has no option '{name}'", fix=hint + valid)
        values[name] = value
    try:
        return kind.model_validate({"output": output, **values})
    except ValidationError as error:
        first = error.errors()[0]
        place = str(first["loc"][0]) if first["loc"] else kind.name
        raise OptionError(
            OPTION,
            f"Option '{place}' of {kind.name}: {first['msg']}",
            fix=f"write for example {_example(kind)}",
        ) from error


def _example(kind: type[Metric]) -> str:
    """The metric with its first option at its default."""
    name = options_of(kind)[0]
    default = kind.model_fields[name].default
    return f"{kind.name}?{name}={'1' if default is None else default}"
