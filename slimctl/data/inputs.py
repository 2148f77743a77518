"""What the model asks of its data, and the checks that compare an array with it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from slimctl.core.contract import Feeds
from slimctl.core.errors import SampleError, UnsupportedModelError

if TYPE_CHECKING:
    from slimctl.graph.edit import Interface

Shape = tuple[int | str | None, ...]

_ALWAYS_FINITE_KINDS = "biuUSO"  # booleans, integers, strings


class InputSpec(NamedTuple):
    """One model input.

    Attributes:
        name: Name.
        dtype: Element type.
        shape: Sizes; a symbol's name or None where any size fits; None when the rank is unknown.
    """

    name: str
    dtype: ir.DataType
    shape: Shape | None

    @property
    def dtype_name(self) -> str:
        """Name of the type as numpy spells it."""
        return "string" if self.dtype == ir.DataType.STRING else self.dtype.numpy().name

    @property
    def text(self) -> str:
        """Type and shape for messages, such as ``float32 [N,3,224,224]``."""
        return f"{self.dtype_name} {shape_text(self.shape)}"


def input_specs(interface: Interface) -> tuple[InputSpec, ...]:
    """The inputs of a model.

    Raises:
        UnsupportedModelError: An input is no tensor, so no array can be fed to it.
    """
    return tuple(_spec(*port) for port in interface.inputs)


def _spec(name: str, dtype: ir.DataType | None, shape: Shape | None) -> InputSpec:
    if dtype is None:
        raise UnsupportedModelError(
            f"Input '{name}' is no tensor with an element type (a sequence, a map, an optional)",
            where=f"input '{name}'",
            fix="export the model with tensors as inputs",
        )
    return InputSpec(name, dtype, shape)


def shape_text(shape: Sequence[int | str | None] | None) -> str:
    """A shape for messages; ``?`` stands for any size."""
    if shape is None:
        return "of any shape"
    return "[" + ",".join("?" if size is None else str(size) for size in shape) + "]"


def check_names(found: Iterable[str], specs: Sequence[InputSpec], place: str) -> None:
    """Checks that there is one array per input and no other.

    Raises:
        SampleError: Names the missing or the unknown array and the nearest name.
    """
    wanted = [spec.name for spec in specs]
    present = list(found)
    extra = [name for name in present if name not in wanted]
    for name in wanted:
        if name not in present:
            listed = ", ".join(f"'{other}'" for other in present) or "nothing"
            raise SampleError(
                place,
                name,
                found=f"arrays {listed}" if present else "no array",
                wanted=f"an array named '{name}'",
                fix=_rename_remedy(name, extra),
            )
    if extra:
        raise SampleError(
            place,
            extra[0],
            found=f"an array '{extra[0]}' that the model has no input for",
            wanted="one array for each of " + ", ".join(f"'{name}'" for name in wanted),
            fix="leave that array out of the data, or call it 'labels' if it says what is right",
        )


def _rename_remedy(name: str, extra: list[str]) -> str:
    close = get_close_matches(name, extra, n=1, cutoff=0.5)
    candidates = close or (extra if len(extra) == 1 else [])
    if candidates:
        return f"if '{candidates[0]}' is meant, save it under the name '{name}'"
    return f"save an array under the name '{name}'"


def check_dtype(spec: InputSpec, dtype: np.dtype[Any], place: str) -> None:
    """Checks an element type; byte order does not matter.

    A cast is never made silently, also not from float64: the data would no longer be what the
    user checked elsewhere.

    Raises:
        SampleError: With the cast to make.
    """
    if spec.dtype == ir.DataType.STRING:
        fits = dtype.kind in "USO"
    else:
        fits = dtype.newbyteorder("=") == spec.dtype.numpy()
    if not fits:
        raise SampleError(
            place,
            spec.name,
            found=f"dtype {dtype.name}",
            wanted=f"dtype {spec.dtype_name}",
            fix=f'convert it before saving: array.astype("{spec.dtype_name}")',
        )


def check_shape(spec: InputSpec, shape: Sequence[int], place: str) -> None:
    """Checks the shape of an array that is fed as it is.

    Raises:
        SampleError: With the change to make where it is recognizable.
    """
    if spec.shape is None or _fits(shape, spec.shape):
        return
    raise SampleError(
        place,
        spec.name,
        found=f"shape {shape_text(tuple(shape))}",
        wanted=f"shape {shape_text(spec.shape)}",
        fix=shape_remedy(spec.shape, shape),
    )


def _fits(shape: Sequence[int], wanted: Shape) -> bool:
    return len(shape) == len(wanted) and all(
        not isinstance(want, int) or size == want for size, want in zip(shape, wanted, strict=True)
    )


def fits_after_axis_0(shape: Sequence[int], wanted: Shape) -> bool:
    """Whether an array has the model's rank and sizes when axis 0 is free to be any size."""
    return len(shape) == len(wanted) and _fits(shape[1:], wanted[1:])


def shape_remedy(wanted: Shape, shape: Sequence[int]) -> str:
    """What to do about a shape that does not fit."""
    if len(shape) == len(wanted) - 1 and _fits(shape, wanted[1:]):
        return "add the batch axis: array[None]"
    order = _transposition(wanted, shape)
    if order:
        return f"the axes are in another order: array.transpose({', '.join(map(str, order))})"
    return f"give it the shape {shape_text(wanted)}"


def _transposition(wanted: Shape, shape: Sequence[int]) -> tuple[int, ...] | None:
    """Axes order between channels-last and channels-first, when that is all that differs."""
    rank = len(wanted)
    if len(shape) != rank or rank < 3:
        return None
    to_first = (0, rank - 1, *range(1, rank - 1))
    to_last = (0, *range(2, rank), 1)
    for order in (to_first, to_last):
        if fits_after_axis_0([shape[axis] for axis in order], wanted):
            return order
    return None


def check_feeds(feeds: Feeds, specs: Sequence[InputSpec], place: str) -> None:
    """Checks names, types and shapes of arrays that are fed as they are.

    Raises:
        SampleError: The first array that does not fit.
    """
    check_names(feeds, specs, place)
    for spec in specs:
        check_dtype(spec, feeds[spec.name].dtype, place)
        check_shape(spec, feeds[spec.name].shape, place)


def all_finite(array: NDArray[Any]) -> bool:
    """Whether an array holds neither NaN nor infinity."""
    if array.dtype.kind in _ALWAYS_FINITE_KINDS:
        return True
    # NaN and infinity survive a sum, and a sum needs no temporary array; it may overflow by
    # itself, therefore only a finite sum is an answer.
    with np.errstate(over="ignore", invalid="ignore"):
        if np.isfinite(np.sum(array)):
            return True
    return bool(np.isfinite(array).all())


def finite_rows(array: NDArray[Any]) -> NDArray[np.bool_]:
    """For each index of axis 0, whether it holds finite values only."""
    if array.dtype.kind in _ALWAYS_FINITE_KINDS:
        return np.ones(array.shape[0], np.bool_)
    return np.asarray(np.isfinite(array).reshape(array.shape[0], -1).all(axis=1))


def non_finite_text(array: NDArray[Any]) -> str:
    """How many NaN and infinite values an array holds, and where the first one is."""
    bad = ~np.isfinite(array)
    nans, infinities = int(np.isnan(array).sum()), int(np.isinf(array).sum())
    counts = [f"{count} {word}" for count, word in ((nans, "NaN"), (infinities, "Inf")) if count]
    first = ",".join(str(axis) for axis in np.unravel_index(int(bad.argmax()), array.shape))
    return f"{' and '.join(counts)} (the first at [{first}])"
