"""Fixes open dimensions: symbols become sizes in inputs, and what follows from them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import onnx_ir as ir

from slimctl.core.contract import Skipped
from slimctl.core.errors import OptionError, nearest
from slimctl.graph.edit import Dimension, dimensions
from slimctl.graph.shapes import with_sizes

_FIX = "give its size: dims NAME=SIZE"


class OpenSize(NamedTuple):
    """One open dimension of an input of the model.

    Attributes:
        input: Name of the input.
        axis: Its axis.
        name: Its symbol, or ``input[axis]`` when it has none.
    """

    input: str
    axis: int
    name: str


def open_sizes(model: ir.Model) -> Iterator[OpenSize]:
    """Every open dimension of every input, in order."""
    for value in model.graph.inputs:
        for axis, size in enumerate(dimensions(value.shape) or ()):
            if not isinstance(size, int):
                yield OpenSize(value.name or "", axis, size or f"{value.name}[{axis}]")


def parse_sizes(texts: tuple[str, ...]) -> dict[str, int]:
    """Sizes by name.

    Raises:
        OptionError: A text is not ``NAME=SIZE`` with a size of at least 1.
    """
    sizes = {}
    for text in texts:
        name, equals, size = text.rpartition("=")
        if not (equals and name and size.isdecimal() and int(size) > 0):
            raise OptionError("dims", f"'{text}' is not of the form NAME=SIZE", fix="batch=1")
        sizes[name] = int(size)
    return sizes


def fix_sizes(model: ir.Model, sizes: Mapping[str, int], batch: int) -> tuple[int, list[Skipped]]:
    """Fixes what is known, in place.

    Args:
        model: Inputs, outputs and everything between get the shapes that follow.
        sizes: By symbol or place.
        batch: Of first dimensions that ``sizes`` does not name; 0 leaves them open.

    Returns:
        How many dimensions were fixed, and those that stay open.

    Raises:
        OptionError: A name is of no open dimension.
    """
    found = list(open_sizes(model))
    unknown = [name for name in sizes if name not in {size.name for size in found}]
    if unknown:
        raise OptionError(
            "dims",
            f"No input has an open dimension '{unknown[0]}'",
            fix=nearest(unknown[0], [size.name for size in found]),
        )
    firsts = {size.name: batch for size in found if batch and size.axis == 0}
    chosen = firsts | dict(sizes)
    fixed = [size for size in found if size.name in chosen]
    if fixed:
        _replace(model, chosen)
    return len(fixed), [
        Skipped(f"input '{size.input}'", f"dimension {size.axis} ({size.name}) stays open: {_FIX}")
        for size in found
        if size.name not in chosen
    ]


def _replace(model: ir.Model, sizes: Mapping[str, int]) -> None:
    before = [dimensions(value.shape) for value in model.graph.outputs]
    sized = with_sizes(model, sizes)
    for value, stated in zip(sized.graph.outputs, before, strict=True):
        inferred = dimensions(value.shape)
        if inferred is None and stated is not None:  # behind an operator that nobody knows
            value.shape = ir.Shape([_named(size, sizes) for size in stated])
    model.graph = sized.graph


def _named(size: Dimension, sizes: Mapping[str, int]) -> Dimension:
    return sizes.get(size, size) if isinstance(size, str) else size
