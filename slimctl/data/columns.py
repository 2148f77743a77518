"""From rows of a table to samples: which column feeds which input, and how values become arrays."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from slimctl.core.errors import SampleError, SourceError
from slimctl.data.batch import Chunk
from slimctl.data.folders import fixed_axis_0
from slimctl.data.images import decoded, image_input, one_sample, pillow, required_preprocess
from slimctl.data.inputs import InputSpec, check_feeds, shape_text
from slimctl.data.npz import LABELS, reading
from slimctl.data.preprocess import ImageTransform, load_preprocess, resolve_transform
from slimctl.data.tables import Row, Table, datasets_library

LABEL_COLUMNS = ("label", LABELS)
"""Columns that hold labels, unless the model has an input of that name."""

_HOLDER = "A column of images"


class TableReader:
    """One sample per row: columns named as the model's inputs feed them, others are left alone.

    Rows come as Python numbers, which have no width, so they take the type of the input: whole
    numbers where they fit, fractions rounded, and never a fraction to a whole number. For a model
    with one input, a column of images feeds it whatever its name.
    """

    batched = False
    mergeable = True
    sample_count: int | None = None

    def __init__(self, table: Table, specs: Sequence[InputSpec], *, preprocess: str | None) -> None:
        self.kind = table.kind
        self._table = table
        self._specs = specs
        self._preprocess = preprocess
        self.fixed_batch = _fixed_batch(specs, table.place)
        first = next(table.rows(), {})
        self._label = _label_column(first, specs, table.place)
        self.labeled = self._label is not None
        self._columns = _feeding_columns(first, specs, self._label, table.place) if first else {}
        image = any(is_image(first[column]) for column in self._columns.values())
        self._transform = self._image_transform() if image else None
        self.takes_images = image or not first

    def _image_transform(self) -> ImageTransform:
        preprocess = required_preprocess(self._preprocess, _HOLDER)
        spec = image_input(self._specs, self._table.place, _HOLDER)
        pillow()
        return resolve_transform(load_preprocess(preprocess), spec, self._table.place)

    def chunks(self) -> Iterator[Chunk]:
        """One chunk per row."""
        for index, row in enumerate(self._table.rows()):
            place = f"{self._table.place}[{index}]"
            feeds = {spec.name: self._sample(row, spec, place) for spec in self._specs}
            labels = None if self._label is None else label_array(row[self._label], place)
            yield Chunk(feeds, labels, place, divisible=True)

    def _sample(self, row: Row, spec: InputSpec, place: str) -> NDArray[Any]:
        value = row.get(self._columns[spec.name])
        if self._transform is None:
            return sample_array(value, spec, place)
        array = image_array(value, self._transform, self._table.folder, spec, place)
        check_feeds({spec.name: array}, [one_sample(spec)], place)
        return array

    def facts(self) -> dict[str, Any]:
        """Which column fed which input, what the hub was asked for, the preprocessing."""
        facts: dict[str, Any] = {
            "columns": self._columns,
            "datasets": datasets_library().__version__,
        }
        if self.kind == "hf":
            facts["dataset"] = dict(self._table.arguments)
        if self._transform is not None:
            facts["preprocess"] = {"name": self._preprocess, **self._transform.facts()}
            facts["pillow"] = pillow().__version__
        return facts

    def fingerprint(self, samples: int) -> str | None:
        """None: the arrays themselves are hashed."""
        del samples
        return None


def _fixed_batch(specs: Sequence[InputSpec], place: str) -> int | None:
    """The size that the model fixes for axis 0, along which rows are put together."""
    sizes = {spec.shape[0] for spec in specs if spec.shape and isinstance(spec.shape[0], int)}
    scalars = [spec.name for spec in specs if spec.shape == ()]
    if scalars or len(sizes) > 1:
        what = (
            f"input '{scalars[0]}' is a scalar" if scalars else "inputs fix different sizes of it"
        )
        raise SourceError(
            place,
            f"Rows are put together along axis 0 of each input: {what}",
            fix="give whole inputs, in a folder of .npz files or by module:function",
        )
    return fixed_axis_0(specs)


def _label_column(first: Row, specs: Sequence[InputSpec], place: str) -> str | None:
    inputs = {spec.name for spec in specs}
    found = [name for name in LABEL_COLUMNS if name in first and name not in inputs]
    if len(found) > 1:
        raise SourceError(
            place,
            "There are two columns of labels: 'label' and 'labels'",
            fix="rename or remove one of them",
        )
    return found[0] if found else None


def _feeding_columns(
    first: Row, specs: Sequence[InputSpec], label: str | None, place: str
) -> dict[str, str]:
    """The column of each input by its name."""
    if len(specs) == 1 and specs[0].name not in first:
        images = [name for name, value in first.items() if is_image(value)]
        if len(images) > 1:
            listed = ", ".join(f"'{name}'" for name in images)
            raise SourceError(
                place,
                f"More than one column holds images: {listed}",
                fix=f"name the right one as the model's input, '{specs[0].name}'",
            )
        if images:
            return {specs[0].name: images[0]}
    for spec in specs:
        if spec.name not in first:
            raise _no_column(spec.name, [name for name in first if name != label], place)
    return {spec.name: spec.name for spec in specs}


def _no_column(name: str, columns: list[str], place: str) -> SampleError:
    close = get_close_matches(name, columns, n=1, cutoff=0.5)
    candidates = close or (columns if len(columns) == 1 else [])
    rename = f"if '{candidates[0]}' is meant, rename it to '{name}'" if candidates else ""
    listed = ", ".join(f"'{column}'" for column in columns)
    return SampleError(
        f"{place}[0]",
        name,
        found=f"columns {listed}" if columns else "no column",
        wanted=f"a column named '{name}'",
        fix=rename or f"name a column '{name}', or rename in Python with module:function",
    )


def is_image(value: Any) -> bool:
    """Whether a cell holds an image: of Pillow, encoded bytes, or ``{bytes, path}``."""
    if isinstance(value, Mapping):
        return bool(value) and set(value) <= {"bytes", "path"}
    return isinstance(value, bytes) or _is_pillow_image(value)


def _is_pillow_image(value: Any) -> bool:
    # Told by the name of its module, so that Pillow is imported for images only.
    return type(value).__module__.startswith("PIL.")


def image_array(
    value: Any, transform: ImageTransform, folder: Path, spec: InputSpec, place: str
) -> NDArray[Any]:
    """The image of a cell as a batch of one.

    Raises:
        SampleError: The cell holds no image.
        SourceError: The image cannot be read.
    """
    if _is_pillow_image(value):
        with reading(place):
            return transform.apply(value)
    content = value if isinstance(value, Mapping) else {"bytes": value}
    if isinstance(content.get("bytes"), bytes):
        return decoded(io.BytesIO(content["bytes"]), transform, place)
    if isinstance(content.get("path"), str):
        return decoded(folder / content["path"], transform, place)
    raise SampleError(
        place,
        spec.name,
        found=_text_of(value),
        wanted="an image, as in the first row",
        fix="fill the cell, or leave the row out",
    )


def sample_array(value: Any, spec: InputSpec, place: str) -> NDArray[Any]:
    """The value of a cell as a batch of one, of the type that the input has.

    Raises:
        SampleError: It does not fit the input.
    """
    array = _typed(_array(value, spec, place), spec, place)
    wanted = None if spec.shape is None else spec.shape[1:]
    if wanted and array.ndim == 0 and all(size == 1 for size in wanted):
        array = array.reshape((1,) * len(wanted))  # a table of numbers has no lists of one
    if wanted is not None and not _fits(array.shape, wanted):
        raise SampleError(
            place,
            spec.name,
            found="no value" if value is None else f"shape {shape_text(array.shape)}",
            wanted=f"shape {shape_text(wanted)} in each row, without the batch axis",
            fix="fill the cell, or leave the row out"
            if value is None
            else "write one sample into each row, as nested lists in JSONL or Parquet",
        )
    return array[None]


def _fits(shape: Sequence[int], wanted: Sequence[int | str | None]) -> bool:
    return len(shape) == len(wanted) and all(
        not isinstance(want, int) or size == want for size, want in zip(shape, wanted, strict=True)
    )


def _array(value: Any, spec: InputSpec, place: str) -> NDArray[Any]:
    try:
        array = np.asarray(value)
        missing = array.dtype.hasobject and spec.dtype.is_floating_point()
        # None becomes NaN, which is reported, or skipped if asked for, as in any other source.
        return array.astype(np.float64) if missing else array
    except (ValueError, TypeError) as error:
        raise SampleError(
            place,
            spec.name,
            found=_text_of(value),
            wanted=spec.dtype_name,
            fix="give lists the same length at each depth, and numbers only",
        ) from error


def _typed(array: NDArray[Any], spec: InputSpec, place: str) -> NDArray[Any]:
    convert, kinds, fix = _conversion(spec)
    if array.size and array.dtype.kind not in kinds:
        raise SampleError(
            place,
            spec.name,
            found=_text_of(array.tolist()),
            wanted=spec.dtype_name,
            fix=fix,
        )
    typed = convert(array)
    if typed.dtype.kind in "iu" and (typed != array).any():
        raise SampleError(
            place,
            spec.name,
            found=f"the number {array[typed != array].reshape(-1)[0]}",
            wanted=f"{spec.dtype_name}, which does not hold it",
            fix="correct the number",
        )
    return typed


def _conversion(spec: InputSpec) -> tuple[Callable[[NDArray[Any]], NDArray[Any]], str, str]:
    """How arrays take the type of an input, of which kinds they may be, and the remedy."""
    if spec.dtype == ir.DataType.STRING:
        return (lambda array: array.astype(object)), "U", "write text"
    wanted = spec.dtype.numpy()
    if spec.dtype.is_floating_point():
        return _rounded_to(wanted), "biuf", "write numbers only"
    if spec.dtype == ir.DataType.BOOL:
        return _rounded_to(wanted), "b", "write true and false"
    return _rounded_to(wanted), "biu", "write whole numbers: no fractions, no empty cells"


def _rounded_to(dtype: np.dtype[Any]) -> Callable[[NDArray[Any]], NDArray[Any]]:
    def convert(array: NDArray[Any]) -> NDArray[Any]:
        with np.errstate(over="ignore"):  # infinities are found later, with their sample
            return np.asarray(array.astype(dtype))

    return convert


def label_array(value: Any, place: str) -> NDArray[Any]:
    """The label of one row with an axis of samples in front.

    Raises:
        SampleError: It is no number and no array of numbers.
    """
    try:
        array = np.asarray(value)
    except ValueError:  # lists of different lengths
        array = np.asarray(None)
    if array.dtype.kind not in "biuf":
        raise SampleError(
            place,
            LABELS,
            found=_text_of(value),
            wanted="a number, or lists of numbers with one length at each depth",
            fix="number the classes from 0, and fill cells that are empty",
        )
    return array[None]


def _text_of(value: Any) -> str:
    """A value for messages, cut where it is long."""
    if value is None:
        return "no value"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
