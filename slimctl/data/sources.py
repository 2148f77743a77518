"""Opens data sources: from the text after ``--calib`` or ``--data`` to checked batches.

Kinds, and how many arrays of each are in memory at a time:

=============================  ================================================  ==============
text                           samples                                           in memory
=============================  ================================================  ==============
``x.npz``, ``x.npy``           along axis 0 of arrays named as the inputs        one batch
folder of npz, npy             one batch per file, shapes may differ             one file
folder of images               one per image; class folders give labels          one batch
``x-images-idx3-ubyte.gz``     one per image; labels from the file beside it     one batch
folder of IDX files            the same; ``folder#train`` if there are several   one batch
``x.csv``, ``.jsonl``,         one per row; columns are named as the inputs,     a piece of
``.parquet``                   ``label`` or ``labels`` give labels               the file
``hf:NAME#SPLIT``              the same, streamed from the Hugging Face hub      the same
folder of                      ``test_data_set_*/input_*.pb``, one batch a set   one set
``module:function``            one batch per dictionary that it yields           one batch
``random``                     seeded, uncalibrated; ``random:name=1x3x48x320``  one batch
=============================  ================================================  ==============
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from slimctl.core.contract import Feeds
from slimctl.core.errors import OptionError, SampleError, SourceError
from slimctl.data.batch import Batch, Chunk, Reader
from slimctl.data.callables import CALLABLE_PATTERN, CallableReader
from slimctl.data.columns import TableReader
from slimctl.data.folders import (
    ARRAY_SUFFIXES,
    ArrayFolderReader,
    TestSetReader,
    children,
    test_set_folders,
)
from slimctl.data.idx import IdxReader, find_splits, images_of, is_idx
from slimctl.data.images import ImageReader, find_images
from slimctl.data.inputs import (
    InputSpec,
    all_finite,
    finite_rows,
    input_specs,
    non_finite_text,
    shape_text,
)
from slimctl.data.npz import LABELS, RowReader, check_batch_size
from slimctl.data.random_data import RandomReader
from slimctl.data.tables import HUB_PREFIX, file_table, hub_table, is_table

if TYPE_CHECKING:
    from slimctl.graph.edit import Interface

VALID_KINDS = (
    "x.npz or x.npy (samples along axis 0), a folder of .npz/.npy files, a folder of images with"
    " --preprocess, x-images-idx3-ubyte.gz or a folder of such files with --preprocess"
    " (folder#train chooses one), x.csv, x.jsonl or x.parquet with columns named as the inputs,"
    " hf:NAME[:CONFIG][@REVISION]#SPLIT, a folder of test_data_set_* folders, module:function,"
    " random"
)
"""What a source may be, for messages and help."""

_MANY = 1 << 62


@dataclass
class _Counts:
    """What became of the samples of one pass."""

    used: int = 0
    skipped_bad: int = 0
    dropped: int = 0


class DataSource:
    """Samples for one model, checked and batched. Every pass over it gives the same.

    Args:
        spec: The text that the user gave.
        reader: What reads it.
        inputs: What the model asks for.
        samples: Use the first so many usable samples; None for all.
        batch_size: Samples put together, or at most in a batch that the source made itself; None
            for 1, or what the model fixes.
        skip_bad: Leave out samples with NaN or infinite values rather than stop.
    """

    def __init__(
        self,
        spec: str,
        reader: Reader,
        inputs: Sequence[InputSpec],
        *,
        samples: int | None = None,
        batch_size: int | None = None,
        skip_bad: bool = False,
    ) -> None:
        if samples is not None and samples < 1:
            raise OptionError("--samples", f"{samples} samples are none", fix="use 1 or more")
        self.spec = spec
        self._reader = reader
        self._inputs = inputs
        self._limit = _MANY if samples is None else samples
        self._requested_batch = batch_size
        self._batch = check_batch_size(batch_size, reader.fixed_batch, mergeable=reader.mergeable)
        self._skip_bad = skip_bad
        self._hash: str | None = None
        self._counts: _Counts | None = None

    @property
    def sample_count(self) -> int | None:
        """How many samples a pass gives at most, None when only a pass tells."""
        total = self._reader.sample_count
        return None if total is None else min(total, self._limit)

    @property
    def labeled(self) -> bool:
        """Whether batches have labels."""
        return self._reader.labeled

    @property
    def uncalibrated(self) -> bool:
        """Whether the data are made up, so that nothing measured on them means anything."""
        return self._reader.kind == RandomReader.kind

    def batches(self) -> Iterator[Batch]:
        """A new pass over the data. Only one batch is held at a time.

        Raises:
            SampleError: A sample does not fit the model, or is not finite.
            SourceError: The source cannot be read, or no sample is left.
        """
        counts = _Counts()
        chunks = self._usable(counts)
        grouped = (
            self._divided(chunks, counts) if self._reader.batched else self._merged(chunks, counts)
        )
        for chunk in grouped:
            first = counts.used
            counts.used += chunk.size
            yield Batch(chunk.feeds, chunk.labels, first, chunk.size)
        if counts.used == 0:
            raise self._empty(counts)
        self._counts = counts

    def content_hash(self) -> str:
        """Hexadecimal SHA-256 of the data that are used: every batch, in order, with labels.

        For images it covers the files and their preprocessing instead of the decoded arrays.
        """
        if self._hash is None:
            self._hash = self._reader.fingerprint(self._limit) or self._hash_of_batches()
        return self._hash

    def describe(self) -> dict[str, Any]:
        """What the manifest says about the data, JSON types only. May need a pass over the data.

        ``skipped_bad`` counts samples left out for NaN or infinite values, ``dropped`` those that
        did not fill a batch of the size that the model fixes.
        """
        digest = self.content_hash()
        counts = self._counts or self._counts_without_reading()
        return {
            "source": self.spec,
            "kind": self._reader.kind,
            "sha256": digest,
            "samples": counts.used,
            "skipped_bad": counts.skipped_bad,
            "dropped": counts.dropped,
            "labeled": self.labeled,
            "uncalibrated": self.uncalibrated,
            **self._reader.facts(),
        }

    def _counts_without_reading(self) -> _Counts:
        # Only readers with a fingerprint come here: they know their count, and are always finite.
        total = self.sample_count or 0
        left_over = total % self._batch if self._reader.fixed_batch else 0
        return _Counts(used=total - left_over, dropped=left_over)

    def _usable(self, counts: _Counts) -> Iterator[Chunk]:
        for chunk in self._reader.chunks():
            kept = self._finite_part(chunk, counts)
            if kept is not None:
                yield kept

    def _finite_part(self, chunk: Chunk, counts: _Counts) -> Chunk | None:
        """The samples of a chunk without NaN and infinite values; None when none is left."""
        bad = [name for name, array in chunk.feeds.items() if not all_finite(array)]
        if not bad:
            return chunk
        if not self._skip_bad:
            raise _non_finite(chunk, bad[0])
        if not chunk.divisible or any(chunk.feeds[name].ndim == 0 for name in bad):
            counts.skipped_bad += chunk.size
            return None
        good = np.logical_and.reduce([finite_rows(chunk.feeds[name]) for name in bad])
        counts.skipped_bad += chunk.size - int(good.sum())
        return chunk.rows(good) if good.any() else None

    def _merged(self, chunks: Iterator[Chunk], counts: _Counts) -> Iterator[Chunk]:
        """Single samples put together to batches of one size."""
        waiting: list[Chunk] = []
        for index, chunk in enumerate(chunks, start=1):
            waiting.append(chunk)
            if len(waiting) == self._batch:
                yield _concatenated(waiting)
                waiting = []
            if index == self._limit:
                break
        if waiting and self._reader.fixed_batch:
            counts.dropped += len(waiting)
        elif waiting:
            yield _concatenated(waiting)

    def _divided(self, chunks: Iterator[Chunk], counts: _Counts) -> Iterator[Chunk]:
        """Ready-made batches, cut where they are longer than asked for."""
        left = self._limit
        for chunk in chunks:
            if chunk.size == 0:
                continue
            if chunk.size > left and not chunk.divisible:
                counts.dropped += chunk.size
                return
            step = self._requested_batch or chunk.size
            if not chunk.divisible or chunk.size <= min(step, left):
                yield chunk
            else:
                size = min(chunk.size, left)
                for start in range(0, size, step):
                    yield chunk.rows(slice(start, min(start + step, size)))
            left -= chunk.size
            if left <= 0:
                return

    def _empty(self, counts: _Counts) -> SourceError:
        if counts.dropped:
            fixed = self._reader.fixed_batch
            return SourceError(
                self.spec,
                f"{counts.dropped} samples do not fill one batch of the {fixed} that the model"
                " takes at a time",
                fix=f"give at least {fixed} samples, or export the model with a dynamic batch axis",
            )
        if counts.skipped_bad:
            return SourceError(
                self.spec,
                f"No sample is left: all {counts.skipped_bad} hold NaN or infinite values",
                fix="repair the data",
            )
        return SourceError(self.spec, "The source is empty", fix="give at least one sample")

    def _hash_of_batches(self) -> str:
        digest = hashlib.sha256()
        for batch in self.batches():
            for name in sorted(batch.feeds):
                _hash_array(digest, name, batch.feeds[name])
            if batch.labels is not None:
                _hash_array(digest, "", batch.labels)
        return digest.hexdigest()


def _non_finite(chunk: Chunk, name: str) -> SampleError:
    array, place = chunk.feeds[name], chunk.place
    if chunk.size > 1 and array.ndim:
        row = int(np.argmin(finite_rows(array)))
        array, place = array[row], f"{place}[{row}]"
    return SampleError(
        place,
        name,
        found=non_finite_text(array),
        wanted="finite values",
        fix="repair or remove the sample, or leave such samples out with --skip-bad-samples",
    )


def _concatenated(chunks: list[Chunk]) -> Chunk:
    first = chunks[0]
    if len(chunks) == 1:
        return first
    for chunk in chunks[1:]:
        _check_same_shape(first, chunk)
    feeds: Feeds = {
        name: np.concatenate([chunk.feeds[name] for chunk in chunks]) if array.ndim else array
        for name, array in first.feeds.items()
    }
    labels = [chunk.labels for chunk in chunks if chunk.labels is not None]
    return replace(
        first, feeds=feeds, labels=np.concatenate(labels) if labels else None, size=len(chunks)
    )


def _check_same_shape(first: Chunk, chunk: Chunk) -> None:
    """Refuses to put samples together whose arrays differ in size, as rows of a table may."""
    pairs = [(name, first.feeds[name], array) for name, array in chunk.feeds.items()]
    if first.labels is not None and chunk.labels is not None:
        pairs.append((LABELS, first.labels, chunk.labels))
    for name, wanted, array in pairs:
        if array.shape != wanted.shape:
            raise SampleError(
                chunk.place,
                name,
                found=f"shape {shape_text(array.shape)}",
                wanted=f"shape {shape_text(wanted.shape)} as in {first.place}, to make one batch",
                fix="fill samples up to one length, or use --batch-size 1",
            )


def _hash_array(digest: Any, name: str, array: NDArray[Any]) -> None:
    digest.update(f"{name}\0{array.dtype.str}\0{array.shape}\0".encode())
    if array.dtype.hasobject:
        digest.update(repr(array.tolist()).encode())
    elif array.size:
        digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8))


def open_source(
    spec: str,
    *,
    interface: Interface,
    samples: int | None = None,
    batch_size: int | None = None,
    preprocess: str | None = None,
    seed: int = 0,
    skip_bad: bool = False,
) -> DataSource:
    """Opens a data source and reads its first batch, so that errors come before any work.

    Args:
        spec: A path, ``hf:NAME#SPLIT``, ``module:function``, ``random`` or
            ``random:input=1x3x48x320``.
        interface: What the model asks for.
        samples: Use the first so many usable samples; all by default (8 batches for ``random``).
        batch_size: See :class:`DataSource`.
        preprocess: Preset or YAML file, for images only.
        seed: For ``random``.
        skip_bad: Leave out samples with NaN or infinite values, and count them.

    Raises:
        SourceError: No such source, unreadable, empty, or of an unknown kind.
        SampleError: The data do not fit the model, or hold NaN or infinite values.
        OptionError: An option contradicts the source or the model.
        MissingExtraError: Images need Pillow, tables the datasets library.
    """
    inputs = input_specs(interface)
    reader = _reader(
        spec,
        inputs,
        samples=samples,
        batch_size=batch_size,
        preprocess=preprocess,
        seed=seed,
    )
    if preprocess is not None and not reader.takes_images:
        raise OptionError(
            "--preprocess",
            f"'{spec}' holds arrays; only images are preprocessed",
            fix="leave --preprocess out",
        )
    source = DataSource(
        spec, reader, inputs, samples=samples, batch_size=batch_size, skip_bad=skip_bad
    )
    next(source.batches())
    return source


def _reader(
    spec: str,
    inputs: Sequence[InputSpec],
    *,
    samples: int | None,
    batch_size: int | None,
    preprocess: str | None,
    seed: int,
) -> Reader:
    if spec == "random" or spec.startswith("random:"):
        return RandomReader(spec, inputs, seed=seed, samples=samples, batch_size=batch_size)
    if spec.startswith(HUB_PREFIX):
        return TableReader(hub_table(spec), inputs, preprocess=preprocess)
    path = Path(spec).expanduser()
    if path.is_dir():
        return _folder_reader(path, inputs, preprocess)
    if path.exists():
        return _file_reader(path, inputs, preprocess)
    folder, sharp, split = spec.rpartition("#")
    if sharp and Path(folder).expanduser().is_dir():
        images = images_of(Path(folder).expanduser(), split)
        return IdxReader(images, inputs, preprocess=preprocess)
    if CALLABLE_PATTERN.fullmatch(spec):
        return CallableReader(spec, inputs, other_kinds=_kinds_remedy())
    raise SourceError(spec, "There is no such data source", fix=_missing_remedy(path))


def _kinds_remedy() -> str:
    return f"valid kinds: {VALID_KINDS}"


def _missing_remedy(path: Path) -> str:
    siblings = [other.name for other in path.parent.iterdir()] if path.parent.is_dir() else []
    close = get_close_matches(path.name, siblings, n=1, cutoff=0.8)
    hint = f"did you mean '{path.with_name(close[0])}'? " if close else ""
    return hint + _kinds_remedy()


def _file_reader(path: Path, inputs: Sequence[InputSpec], preprocess: str | None) -> Reader:
    if path.suffix.lower() in ARRAY_SUFFIXES:
        return RowReader(path, inputs)
    if is_idx(path):
        return IdxReader(path, inputs, preprocess=preprocess)
    if is_table(path):
        return TableReader(file_table(path), inputs, preprocess=preprocess)
    raise SourceError(str(path), "No kind of data source is in such a file", fix=_kinds_remedy())


def _folder_reader(folder: Path, inputs: Sequence[InputSpec], preprocess: str | None) -> Reader:
    files = children(folder)
    has_arrays = any(path.suffix.lower() in ARRAY_SUFFIXES for path in files)
    has_sets = bool(test_set_folders(folder))
    has_images = not has_sets and bool(find_images(folder))
    has_idx = bool(find_splits(folder))
    if has_arrays + has_sets + has_images + has_idx > 1:
        raise SourceError(
            str(folder),
            "The folder holds more than one kind of data",
            fix="give a folder with one kind: arrays, images, IDX files or test_data_set_* folders",
        )
    if has_arrays:
        return ArrayFolderReader(folder, inputs)
    if has_sets:
        return TestSetReader(folder, inputs)
    if has_images:
        return ImageReader(folder, inputs, preprocess=preprocess)
    if has_idx:
        return IdxReader(images_of(folder, None), inputs, preprocess=preprocess)
    raise SourceError(
        str(folder),
        "The folder holds no data" if files else "The folder is empty",
        fix=_kinds_remedy(),
    )
