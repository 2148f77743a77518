"""What an import is told of a network's inputs: ``x:Nx3xH=224xW=224``, ``tokens:1x128:int64``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir

from slimctl.core.contract import Feeds
from slimctl.core.errors import OptionError, nearest
from slimctl.data.random_data import random_array

DTYPES = (
    "float32",
    "float16",
    "float64",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint8",
    "bool",
)
"""Element types that numpy, torch and ONNX all have."""

_OPTION = "--input"
_AXIS = re.compile(r"(?P<dim>[A-WYZa-wyz_][0-9A-WYZa-wyz_]*)(=(?P<size>\d+))?|(?P<fixed>\d+)")
"""Sizes stand between letters x, so that names of dimensions have none."""

_SMALLEST = 2
"""Example size of the first dynamic axis; 0 and 1 are special cases to torch.export."""


class DeclaredInput(NamedTuple):
    """One input.

    Attributes:
        name: In the ONNX model.
        shape: Sizes; a name where the axis is dynamic.
        dtype: Element type.
    """

    name: str
    shape: tuple[int | str, ...]
    dtype: np.dtype[Any]


@dataclass(frozen=True)
class Declared:
    """All inputs.

    Attributes:
        inputs: In the order given.
        sizes: Of each dynamic dimension in the example; different ones, so that two axes that are
            mixed up are found out.
    """

    inputs: tuple[DeclaredInput, ...]
    sizes: Mapping[str, int]

    def random(self, sizes: Mapping[str, int], seed: int) -> Feeds:
        """Random inputs with these sizes of the dynamic dimensions. Same seed, same values."""
        generator = np.random.default_rng(seed)
        return {
            entry.name: random_array(
                generator,
                ir.DataType.from_numpy(entry.dtype),
                tuple(sizes[size] if isinstance(size, str) else size for size in entry.shape),
            )
            for entry in self.inputs
        }


def parse_inputs(texts: Sequence[str]) -> Declared:
    """Inputs from texts of the form ``NAME:SHAPE[:DTYPE]``.

    Raises:
        OptionError: A text has another form, a name comes twice, or one dimension has two sizes.
    """
    inputs: dict[str, DeclaredInput] = {}
    given: dict[str, int | None] = {}
    for text in texts:
        entry = _parsed(text, given)
        if entry.name in inputs:
            raise OptionError(_OPTION, f"'{entry.name}' is given twice", fix="give each input once")
        inputs[entry.name] = entry
    if not inputs:
        raise OptionError(_OPTION, "No input is given", fix="add for example --input x:Nx3x224x224")
    sizes = {
        dim: _SMALLEST + place if size is None else size
        for place, (dim, size) in enumerate(given.items())
    }
    return Declared(tuple(inputs.values()), sizes)


def _parsed(text: str, given: dict[str, int | None]) -> DeclaredInput:
    name, _, rest = text.partition(":")
    shape, _, dtype = rest.partition(":")
    if not name or not shape:
        raise _malformed(f"'{text}' is no input")
    dtype = dtype or "float32"
    if dtype not in DTYPES:
        raise OptionError(_OPTION, f"'{dtype}' is no element type", fix=nearest(dtype, DTYPES))
    axes = tuple(_axis(text, part, given) for part in shape.split("x"))
    return DeclaredInput(name, axes, np.dtype(dtype))


def _axis(text: str, part: str, given: dict[str, int | None]) -> int | str:
    match = _AXIS.fullmatch(part)
    if match is None:
        raise _malformed(f"'{part}' in '{text}' is no size")
    number = match["fixed"] or match["size"]
    size = None if number is None else int(number)
    if size == 0:
        raise _malformed(f"'{text}' has an axis of size 0")
    dim = match["dim"]
    if dim is None:
        assert size is not None, "the pattern has either"
        return size
    known = given.setdefault(dim, size)
    if known is None:
        given[dim] = size
    elif size not in (None, known):
        raise OptionError(
            _OPTION,
            f"Dimension '{dim}' is given the sizes {known} and {size}",
            fix="use another letter for the other axis",
        )
    return dim


def _malformed(what: str) -> OptionError:
    return OptionError(
        _OPTION,
        what,
        fix="write NAME:SHAPE[:DTYPE], for example x:Nx3xH=224xW=224 or tokens:1x128:int64",
    )
