"""Where the difference between two profiles comes from: kinds of operators whose time changed.

The same work has other names in other models: a Conv becomes a QLinearConv. Operators are compared
by the kind of their work. What a kind differs by from one half of the runs to the other, for the
same model, is noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from slimctl.evaluate.profile import Profile, Turns

_KINDS = {
    "convolutions": (
        *(
            "Conv",
            "ConvInteger",
            "ConvTranspose",
            "FusedConv",
            "NhwcFusedConv",
        ),
        *("QLinearConv", "QLinearConvTranspose"),
    ),
    "matrix products": (
        *("DynamicQuantizeMatMul", "FusedGemm", "FusedMatMul", "Gemm", "MatMul", "MatMulInteger"),
        *("MatMulIntegerToFloat", "MatMulNBits", "QGemm", "QLinearMatMul"),
    ),
    "conversions to and from integers": (
        *("DequantizeLinear", "DynamicQuantizeLinear", "QuantizeLinear"),
    ),
    "changes of layout": ("ReorderInput", "ReorderOutput", "Transpose"),
}
_KIND_OF = {op_type: kind for kind, op_types in _KINDS.items() for op_type in op_types}
_PREFIX = "QLinear"


TICK = 1e-6
"""The profiler counts whole microseconds."""

_ABOVE = 1 + 1e-6
"""Sums of ticks are a few bits off."""


class KindChange(NamedTuple):
    """One kind of operators in two models.

    Attributes:
        kind: What they do.
        seconds: Of all of them in the first model.
        against: Of all of them in the second.
        operators: Number by type in the first model.
        operators_against: Likewise in the second.
        noise: The most that either model's time differed between two halves of its runs.
    """

    kind: str
    seconds: float
    against: float
    operators: dict[str, int]
    operators_against: dict[str, int]
    noise: float

    @property
    def change(self) -> float:
        """Seconds that the first model needs more."""
        return self.seconds - self.against

    @property
    def is_sure(self) -> bool:
        """Whether it is more than noise."""
        return abs(self.change) > max(self.noise, TICK) * _ABOVE

    def to_dict(self) -> dict[str, Any]:
        """As JSON types."""
        return {**self._asdict(), "change": self.change, "sure": self.is_sure}


def kind_of(op_type: str) -> str:
    """The kind of an operator's work; its own name where no other operator does the same."""
    return _KIND_OF.get(op_type, op_type.removeprefix(_PREFIX))


def contrast(model: Turns, against: Turns) -> list[KindChange]:
    """Kinds of operators, those whose time changed most first."""
    ours, theirs = _times(model.whole), _times(against.whole)
    types, other_types = _types(model.whole), _types(against.whole)
    halves = [[_times(half) for half in side.halves] for side in (model, against)]
    found = [
        KindChange(
            kind,
            ours.get(kind, 0.0),
            theirs.get(kind, 0.0),
            types.get(kind, {}),
            other_types.get(kind, {}),
            max(abs(one.get(kind, 0.0) - two.get(kind, 0.0)) for one, two in halves),
        )
        for kind in dict.fromkeys([*ours, *theirs])
    ]
    return sorted(found, key=lambda one: -abs(one.change))


def _times(profile: Profile) -> dict[str, float]:
    seconds: dict[str, float] = {}
    for node in profile.nodes:
        kind = kind_of(node.op_type)
        seconds[kind] = seconds.get(kind, 0.0) + node.seconds
    return seconds


def _types(profile: Profile) -> dict[str, dict[str, int]]:
    counts: dict[str, dict[str, int]] = {}
    for node in profile.nodes:
        kind = counts.setdefault(kind_of(node.op_type), {})
        kind[node.op_type] = kind.get(node.op_type, 0) + 1
    return counts


_LEAST = 0.05
"""Share of the largest change from which a kind is worth a word."""
_NAMED = 3


def in_words(
    names: tuple[str, str], totals: tuple[float, float], found: Sequence[KindChange]
) -> str:
    """What the difference is, and what it comes from.

    Args:
        names: Of the two models.
        totals: Seconds in their kernels.
        found: From :func:`contrast`.
    """
    ours, theirs = (_ms(total) for total in totals)
    change = totals[0] - totals[1]
    said = (
        f"'{names[0]}' spends {ours} ms in kernels, '{names[1]}' {theirs}: "
        f"{_ms(abs(change))} ms {'more' if change > 0 else 'less'}"
    )
    sure = [one for one in found if one.is_sure]
    sure = [one for one in sure if abs(one.change) >= _LEAST * abs(sure[0].change)][:_NAMED]
    if not sure:
        return f"{said}; no kind of operators differs by more than its time varies by itself"
    return f"{said}; it comes from {'; '.join(map(_told, sure))}"


def _told(one: KindChange) -> str:
    before, after = (
        ", ".join(f"{count} {kind}" for kind, count in side.items())
        for side in (one.operators_against, one.operators)
    )
    if before and after:
        became = f"{before} in both" if before == after else f"{before} became {after}"
    else:
        became = f"{after} more" if after else f"{before} gone"
    signed = f"{'+' if one.change > 0 else '-'}{_ms(abs(one.change))}"
    return f"{one.kind}, {signed} ms ({became})"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g}"
