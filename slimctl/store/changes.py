"""What differs between two manifests in what went in: model, recipe, data, versions of packages."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from typing import Any, NamedTuple

from slimctl.store.summary import gates_of

_NOTHING = "-"
_IS_STEP = re.compile(r"steps\.\d+")
_SHOWN = 3
_HASH_DIGITS = 12


class Change(NamedTuple):
    """One value that differs.

    Attributes:
        path: As ``--set`` spells it where it stands in the recipe: ``steps.1.sparsity``.
        before: Its value in the first; None when there is none.
        after: Its value in the second; None when there is none.
        thing: What has to be changed for this to differ; values that differ for one reason share
            it. Empty when the result cannot depend on it.
    """

    path: str
    before: Any
    after: Any
    thing: str

    def in_words(self) -> str:
        """``steps.1.sparsity 0.3 -> 0.4``."""
        if _IS_STEP.fullmatch(self.path):
            return f"{self.path} " + (f"+{self.after}" if self.after else f"-{self.before}")
        return f"{self.path} {value_in_words(self.before)} -> {value_in_words(self.after)}"


class Pair(NamedTuple):
    """A step of the first and the step of the second that it corresponds to; None when it has none.

    Attributes:
        before: Index of the step in the first.
        after: Index of the step in the second.
    """

    before: int | None
    after: int | None


def value_in_words(value: Any) -> str:
    """A value in a line of text."""
    if value is None:
        return _NOTHING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or _NOTHING
    return str(value)


def changes_between(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Change]:
    """Everything that went in and differs, by manifests."""
    return [
        *_source(before, after),
        *_values("target", before["target"], after["target"]),
        *_steps(before["steps"], after["steps"]),
        *_values("seed", before["seed"], after["seed"]),
        *_data("calibration", before, after),
        *_data("training", before, after),
        *_data("evaluation", before, after),
        *_gates(before, after),
        *_mappings("versions", before["versions"], after["versions"]),
    ]


def things_changed(changes: Sequence[Change]) -> list[str]:
    """What was changed: one entry for each reason that the result may differ for."""
    return list(dict.fromkeys(change.thing for change in changes if change.thing))


def changes_in_words(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[str, ...]:
    """The first few changes, and how many more there are."""
    found = [change.in_words() for change in changes_between(before, after)]
    rest = len(found) - _SHOWN
    return (*found[:_SHOWN], f"{rest} more") if rest > 0 else tuple(found)


def paired_steps(before: Sequence[Any], after: Sequence[Any]) -> list[Pair]:
    """Which step of one chain is which of the other: the longest common sequence of names."""
    matcher = SequenceMatcher(
        None, [step["name"] for step in before], [step["name"] for step in after], autojunk=False
    )
    pairs: list[Pair] = []
    for kind, a, a_stop, b, b_stop in matcher.get_opcodes():
        if kind == "equal":
            pairs += [Pair(a + index, b + index) for index in range(a_stop - a)]
        else:
            pairs += [Pair(index, None) for index in range(a, a_stop)]
            pairs += [Pair(None, index) for index in range(b, b_stop)]
    return pairs


def _source(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[Change]:
    first, second = (side["source"]["content_hash"][:_HASH_DIGITS] for side in (before, after))
    yield from _values("model", first, second)


def _steps(before: Sequence[Any], after: Sequence[Any]) -> Iterator[Change]:
    for first, second in paired_steps(before, after):
        if first is None and second is not None:
            path = f"steps.{second}"
            yield Change(path, None, after[second]["name"], path)
        elif second is None and first is not None:
            path = f"steps.{first}"
            yield Change(path, before[first]["name"], None, f"{path} removed")
        elif first is not None and second is not None:
            options = (before[first]["options"], after[second]["options"])
            yield from _mappings(f"steps.{second}", *options)


def _data(part: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[Change]:
    place = f"data.{part}"
    for change in _mappings(place, before.get(part) or {}, after.get(part) or {}):
        shortened = (_shortened(change.before), _shortened(change.after))
        yield Change(change.path, *shortened, thing=place)


def _shortened(value: Any) -> Any:
    is_hash = isinstance(value, str) and len(value) == 64 and " " not in value
    return value[:_HASH_DIGITS] if is_hash else value


def _gates(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[Change]:
    bounds = [{gate["gate"]: gate["bound"] for gate in gates_of(side)} for side in (before, after)]
    for change in _mappings("gates", *bounds):
        yield change._replace(thing="")  # a gate judges a result and does not change it


def _mappings(place: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[Change]:
    for key in dict.fromkeys((*before, *after)):
        yield from _values(f"{place}.{key}", before.get(key), after.get(key))


def _values(path: str, before: Any, after: Any) -> Iterator[Change]:
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        yield from _mappings(path, before, after)
    elif before != after:
        yield Change(path, before, after, thing=path)
