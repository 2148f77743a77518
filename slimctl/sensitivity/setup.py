"""What a scan is about: everything that a worker needs to do its part of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from slimctl.recipe.schema import DataSpec

Direction = Literal["alone", "except"]
"""Only the group is changed, or everything but the group."""

Grouping = Literal["layer", "type", "scope"]


@dataclass(frozen=True)
class Setup:
    """A scan.

    Attributes:
        model: The float model's file.
        data: Samples that outputs are compared on.
        calibration: Samples that ranges of activations come from; None: the same.
        changes: What is tried, such as ``int8``.
        directions: Whether groups are changed alone, or all but them.
        grouping: What is changed together: single layers, all of one operator, or all in one scope
            of names.
        include: Patterns of layers to look at; empty for all.
        exclude: Patterns of layers to leave out.
        target: Execution provider, by name or file.
        metric: What is measured besides SQNR; None for nothing.
        fast: Estimate from the error that the layer makes by itself, on few samples.
        tolerance_db: Half the width of the interval of SQNR that is narrow enough.
        seed: Of everything random.
        threads: Threads of onnxruntime; 0 lets it decide.
    """

    model: Path
    data: DataSpec
    calibration: DataSpec | None = None
    changes: tuple[str, ...] = ("int8",)
    directions: tuple[Direction, ...] = ("alone",)
    grouping: Grouping = "layer"
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    target: str = "cpu"
    metric: str | None = None
    fast: bool = False
    tolerance_db: float = 1.5
    seed: int = 0
    threads: int = 0

    def facts(self) -> dict[str, Any]:
        """All of it as JSON types, for a hash and for reports."""
        told = asdict(self) | {"model": str(self.model)}
        for name in ("data", "calibration"):
            spec = getattr(self, name)
            told[name] = None if spec is None else spec.model_dump(mode="json")
        return told


class Task(NamedTuple):
    """One probe.

    Attributes:
        change: What is done.
        direction: To the group, or to everything else.
        group: Its name.
    """

    change: str
    direction: Direction
    group: str


class Named(NamedTuple):
    """A layer's name and operator."""

    name: str
    op_type: str


_LAST_PART: Final = re.compile(r"[/.][^/.]*$")


def group_by(grouping: Grouping) -> Callable[[Named], str]:
    """What the group of a layer is called."""
    if grouping == "type":
        return lambda layer: layer.op_type
    if grouping == "scope":
        return lambda layer: _LAST_PART.sub("", layer.name) or layer.name
    return lambda layer: layer.name


def groups_of(layers: Sequence[Named], grouping: Grouping) -> dict[str, list[str]]:
    """Names of the layers by group, in the order of the graph."""
    name = group_by(grouping)
    found: dict[str, list[str]] = {}
    for layer in layers:
        found.setdefault(name(layer), []).append(layer.name)
    return found
