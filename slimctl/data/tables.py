"""Rows of CSV, JSONL and Parquet files and of data sets on the Hugging Face hub.

The ``datasets`` library reads them in pieces: 10,000 rows of CSV, 10 MB of JSONL, 256 rows of
Parquet. It is imported when the first such source is opened, not before.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from slimctl.core.errors import MissingExtraError, SourceError

TABLE_SUFFIXES = {".csv": "csv", ".jsonl": "json", ".parquet": "parquet"}
"""What the library calls the format of a file."""

HUB_PREFIX = "hf:"

Row = Mapping[str, Any]

_HUB_NAME = re.compile(
    r"hf:(?P<path>\w[\w.-]*(/\w[\w.-]*)?)(:(?P<name>[^:@#]+))?(@(?P<revision>[^@#]+))?#(?P<split>[^#]+)"
)
_PARQUET_ROWS = 256


class Table(NamedTuple):
    """A source of rows, opened anew for each pass.

    Attributes:
        place: Name for messages.
        kind: Name of the kind, for the manifest.
        arguments: Of ``datasets.load_dataset``.
        fix: What to do when the library cannot read it.
        folder: What paths in it are relative to.
    """

    place: str
    kind: str
    arguments: Mapping[str, Any]
    fix: str
    folder: Path

    def rows(self) -> Iterator[Row]:
        """The rows in order, each a dictionary by column.

        Raises:
            SourceError: The library cannot find or read them.
            MissingExtraError: It is not installed.
        """
        with self._guarded():
            rows = self._opened()
        for index in range(1 << 62):
            with self._guarded(f"[{index}]"):
                row = next(rows, None)
            if row is None:
                return
            yield row

    def _opened(self) -> Iterator[Row]:
        try:
            return iter(datasets_library().load_dataset(**self.arguments, streaming=True))
        except StopIteration:  # what the library makes of an empty file
            return iter(())

    @contextmanager
    def _guarded(self, row: str = "") -> Iterator[None]:
        """Turns what the library raises into a SourceError."""
        try:
            yield
        except _library_errors() as error:
            text = " ".join(str(error).split()) or "no reason given"
            raise SourceError(
                self.place + row,
                f"The datasets library cannot read it: {type(error).__name__}: {text}",
                fix=self.fix,
            ) from error


def _library_errors() -> tuple[type[Exception], ...]:
    """What reading rows may raise.

    The library has an error of its own for few things; most are of what it uses, with these bases:
    OSError (files, the network, damaged images), ValueError (names, pandas, pyarrow), TypeError
    (columns whose type changes), ImportError (a decoder that is not there). Errors of the hub also
    are errors of its HTTP client, and the client may raise others.
    """
    from huggingface_hub import errors

    return (
        *(datasets_library().exceptions.DatasetsError, errors.EntryNotFoundError),
        *errors.HfHubHTTPError.__bases__,
        *(OSError, ValueError, TypeError, LookupError, RuntimeError, ImportError),
    )


def datasets_library() -> Any:
    """The module ``datasets``.

    Raises:
        MissingExtraError: It is not installed.
    """
    try:
        import datasets
    except ImportError as error:
        raise MissingExtraError("data", "Reading CSV, JSONL, Parquet and hub data sets") from error
    return datasets


def is_table(path: Path) -> bool:
    """Whether a file holds rows, by its name."""
    return path.suffix.lower() in TABLE_SUFFIXES


def file_table(path: Path) -> Table:
    """A file of rows."""
    suffix = path.suffix.lower()
    # The library reads names as patterns.
    arguments: dict[str, Any] = {
        "path": TABLE_SUFFIXES[suffix],
        "data_files": glob.escape(str(path.absolute())),
        "split": "train",
    }
    if suffix == ".parquet":
        arguments |= _parquet_options()
    kind = suffix.removeprefix(".")
    fix = f"write the file again, as one table in {kind.upper()}"
    return Table(str(path), kind, arguments, fix, path.parent)


def _parquet_options() -> dict[str, Any]:
    """Reads as little at once as the format allows.

    By default the library unpacks whole row groups, of which a file may have one, and pyarrow
    fetches those that come next, which are all of the file in the end.
    """
    datasets_library()  # pyarrow comes with it
    from pyarrow.dataset import ParquetFragmentScanOptions

    scan = ParquetFragmentScanOptions(pre_buffer=False, use_buffered_stream=True)
    return {"batch_size": _PARQUET_ROWS, "fragment_scan_options": scan}


def hub_table(spec: str) -> Table:
    """A split of a data set on the hub: ``hf:NAME[:CONFIG][@REVISION]#SPLIT``.

    Raises:
        SourceError: The text has another form, or the library would take a local folder for it.
    """
    match = _HUB_NAME.fullmatch(spec)
    if match is None:
        raise SourceError(
            spec,
            "This is not of the form hf:NAME[:CONFIG][@REVISION]#SPLIT",
            fix="write for example hf:user/name#test; where a shell reads '#', in quotes",
        )
    if Path(match["path"]).exists():
        raise SourceError(
            spec,
            f"There is a local '{match['path']}', which the datasets library would read instead"
            " of the data set on the hub",
            fix="run the command in another folder, or give the local data by their path",
        )
    arguments = {key: value for key, value in match.groupdict().items() if value is not None}
    fix = (
        "correct the name, configuration, revision or split; data that are not public need"
        " 'hf auth login', and the hub must be within reach"
    )
    return Table(spec, "hf", arguments, fix, Path())
