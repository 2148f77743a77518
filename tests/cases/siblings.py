"""Siblings of the public bug reports: the same kind of trap with another operator, rank or opset.

A sibling is a function that builds a model, registered with what must hold in the words of
``manifest.json``. ``oracle.py`` judges it as it judges the case itself; its actions are those of
the case. Nothing here uses slimctl.
"""

from __future__ import annotations

import importlib
import json
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import ArrayLike
from onnx import numpy_helper

from tests.cases.oracle import HERE, Case

Feeds = dict[str, np.ndarray]
Change = Callable[[str, int, Feeds], object]
"""Edits the random feeds in place: kind (``calibration``, ``evaluation``), sample, feeds."""

MODULES = ("layers", "graphs", "floats", "sizes")
# Fewer samples than 32 leave the largest of these short tensors unseen: 8 of them cost 6 dB.
COUNT = {"calibration": 32, "evaluation": 4}
OPEN_SIZE = 5  # of a dimension without a number


@dataclass(frozen=True)
class Sibling(Case):
    """A variation of a bug report.

    Attributes:
        name: What is other than in the case.
        proto: The float model.
        change: Edits the feeds, which are random otherwise.
        folder: Where the model was written; :meth:`placed` says it.
    """

    name: str = ""
    proto: onnx.ModelProto = field(default_factory=onnx.ModelProto)
    change: Change | None = None
    folder: Path = Path()

    @property
    def model(self) -> Path:
        return self.folder / "model.onnx"

    def placed(self, folder: Path) -> Sibling:
        """The same with its model in a folder."""
        placed = replace(self, folder=folder)
        onnx.save(self.proto, placed.model)
        return placed

    def feeds(self, kind: str) -> list[Feeds]:
        seed = [zlib.crc32(self.name.encode()), len(kind)]
        rng = np.random.default_rng(seed)
        found = []
        for index in range(COUNT[kind]):
            stored = {item.name for item in self.proto.graph.initializer}
            inputs = [item for item in self.proto.graph.input if item.name not in stored]
            feeds = {item.name: _random(rng, item, index) for item in inputs}
            if self.change is not None:
                self.change(kind, index, feeds)
            found.append(feeds)
        return found


def _random(rng: np.random.Generator, value: onnx.ValueInfoProto, index: int) -> np.ndarray:
    """Normal floats, small integers; truth values in turn, so that both branches run."""
    kind = value.type.tensor_type
    shape = [dim.dim_value or OPEN_SIZE for dim in kind.shape.dim]
    dtype = onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)
    if dtype == np.bool_:
        return np.full((), index % 2 == 0) if not shape else rng.random(shape) < 0.6
    if dtype.kind == "i":
        return rng.integers(0, 4, shape).astype(dtype)
    return np.asarray(rng.normal(size=shape)).astype(dtype)


_FOUND: list[Sibling] = []


@cache
def _entries() -> Mapping[str, Mapping[str, Any]]:
    listed = json.loads((HERE / "manifest.json").read_text(encoding="utf-8"))
    return {entry["id"]: entry for entry in listed}


def sibling(
    case: str, name: str, *, change: Change | None = None, **check: Any
) -> Callable[[Callable[[], onnx.ModelProto]], Callable[[], onnx.ModelProto]]:
    """Registers what a function builds.

    Args:
        case: Number of the bug report.
        name: What is other than in it.
        change: Edits the random feeds.
        check: What must hold, as in the manifest; the action is the case's.
    """

    def register(build: Callable[[], onnx.ModelProto]) -> Callable[[], onnx.ModelProto]:
        entry = _entries()[case]
        checks = {"action": entry["check"]["action"], **check}
        proto = build()
        onnx.checker.check_model(proto)
        _FOUND.append(Sibling(case, checks, dict(entry), name, proto, change))
        return build

    return register


@cache
def all_siblings() -> tuple[Sibling, ...]:
    """Every sibling there is."""
    for module in MODULES:
        importlib.import_module(f"tests.cases.siblings_{module}")
    return tuple(_FOUND)


def siblings(action: str) -> list[Sibling]:
    """All siblings of cases that name an action."""
    return [each for each in all_siblings() if action in each.actions()]


def build(
    opset: int, text: str, *, ir_version: int = 0, header: str = "", **arrays: ArrayLike
) -> onnx.ModelProto:
    """A model from ONNX text.

    Args:
        opset: Of the default domain.
        text: The graph, and functions behind it.
        ir_version: That which came with the operator set when 0.
        header: Further imports: ``"my.own": 1``.
        arrays: Initializers; float64 becomes float32, other types stay.
    """
    known = onnx.helper.find_min_ir_version_for([onnx.helper.make_opsetid("", opset)])
    imports = ", ".join(filter(None, [f'"": {opset}', '"com.microsoft": 1', header]))
    model = onnx.parser.parse_model(
        f"<ir_version: {ir_version or max(known, 8 if header else 4)}, opset_import: [{imports}]>"
        f" {text}"
    )
    for name, values in arrays.items():
        model.graph.initializer.append(numpy_helper.from_array(_stored(values), name))
    return model


def _stored(values: ArrayLike) -> np.ndarray:
    array = np.asarray(values)
    return array.astype(np.float32) if array.dtype == np.float64 else array


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    """Weights that keep the size of what they are multiplied with, as exporters initialize them."""
    count = shape[0] if len(shape) == 2 else int(np.prod(shape[1:])) if len(shape) > 2 else 4
    rng = np.random.default_rng([seed, *shape])
    return (rng.normal(size=shape) / np.sqrt(count)).astype(np.float32)
