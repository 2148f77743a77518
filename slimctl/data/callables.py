"""Data from the user's own Python: ``module:function`` or ``file.py:function``."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slimctl.core.errors import SampleError, SlimctlError, SourceError
from slimctl.data.batch import Chunk
from slimctl.data.folders import BatchReader, batch_chunk
from slimctl.data.inputs import InputSpec, check_feeds
from slimctl.data.npz import LABELS

CALLABLE_PATTERN = re.compile(
    r"(?P<module>[^:]+\.py|[A-Za-z_][\w.]*):(?P<function>[A-Za-z_][\w.]*)"
)


class CallableReader(BatchReader):
    """A function without arguments that returns an iterable of batches.

    Each item is a dictionary of arrays by input name, or a pair of it and labels, an array whose
    axis 0 counts samples. The dictionary is fed to the model as it is. The function is called anew
    for every pass over the data and must yield the same each time.
    """

    kind = "callable"

    def __init__(self, spec: str, specs: Sequence[InputSpec], *, other_kinds: str) -> None:
        self._spec = spec
        super().__init__(specs)
        self._function = load_function(spec, other_kinds)

    def chunks(self) -> Iterator[Chunk]:
        """One chunk per item that the function yields."""
        for index, item in enumerate(_guarded(self._function, self._spec)):
            yield self._chunk(item, index)

    def _chunk(self, item: Any, index: int) -> Chunk:
        place = f"{self._spec}[{index}]"
        labels = None
        if isinstance(item, tuple) and len(item) == 2:
            item, labels = item
        if not isinstance(item, Mapping):
            raise SourceError(
                place,
                f"The function yielded {type(item).__name__}",
                fix="yield a dictionary of arrays by input name, or (dictionary, labels)",
            )
        feeds = {str(name): np.asarray(array) for name, array in item.items()}
        check_feeds(feeds, self._specs, place)
        self.labeled = labels is not None
        return batch_chunk(feeds, _label_array(labels, place), self._specs, place)


def _label_array(labels: Any, place: str) -> NDArray[Any] | None:
    """Labels as one array, of any shape behind the axis of samples.

    Raises:
        SampleError: Their rows have different lengths.
    """
    if labels is None:
        return None
    try:
        return np.asarray(labels)
    except ValueError as error:
        raise SampleError(
            place,
            LABELS,
            found="rows of different lengths",
            wanted="one array, with the same shape for each sample",
            fix="fill the rows up to one length, with -1 or what the metric leaves out",
        ) from error


def _guarded(function: Callable[[], Any], spec: str) -> Iterator[Any]:
    """Iterates over what the user's function returns; its exceptions become SourceErrors."""
    iterator: Iterator[Any] | None = None
    while True:
        try:
            if iterator is None:
                iterator = iter(function())
            item = next(iterator)
        except StopIteration:
            return
        except SlimctlError:
            raise
        except Exception as error:  # the user's code may raise anything
            raise user_code_error(spec, error) from error
        yield item


def user_code_error(spec: str, error: BaseException) -> SourceError:
    """What went wrong in the user's code, with the line where it did."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not _is_ours_or_import(frame.filename)]
    at = f" at {own[-1].filename}:{own[-1].lineno} in {own[-1].name}" if own else ""
    if isinstance(error, SyntaxError):
        at = f" at {error.filename}:{error.lineno}"
    return SourceError(
        spec,
        f"The Python code failed{at}: {type(error).__name__}: {error}",
        fix="correct that line, or run the function by itself to see the whole traceback",
    )


def _is_ours_or_import(filename: str) -> bool:
    return filename == __file__ or filename.startswith("<frozen importlib")


def load_function(spec: str, hint: str = "") -> Callable[..., Any]:
    """The function that ``module:function`` names.

    The module is imported as Python run in the working directory would: from there first. A path
    that ends in ``.py`` names the file itself.

    Args:
        spec: The text that the user gave.
        hint: What else the user may have meant, for the remedy.

    Raises:
        SourceError: No such module or function, or importing it failed.
    """
    match = CALLABLE_PATTERN.fullmatch(spec)
    if match is None:
        raise SourceError(
            spec, "This is not of the form module:function", fix="write for example calib:samples"
        )
    target: Any = _load_module(spec, match["module"], hint)
    for name in match["function"].split("."):
        if not hasattr(target, name):
            raise SourceError(
                spec,
                f"'{match['module']}' has no '{match['function']}'",
                fix=_joined("define it there, or correct the name after the colon", hint),
            )
        target = getattr(target, name)
    if not callable(target):
        raise SourceError(
            spec,
            f"'{match['function']}' is a {type(target).__name__}, not a function",
            fix="wrap it in a function without arguments that returns it",
        )
    function: Callable[..., Any] = target
    return function


def _joined(fix: str, hint: str) -> str:
    return f"{fix}; {hint}" if hint else fix


def _load_module(spec: str, name: str, hint: str) -> ModuleType:
    folder = os.getcwd()
    if folder not in sys.path:
        # It stays there: the user's function may import its neighbors when it runs.
        sys.path.insert(0, folder)
    if name.endswith(".py") and not Path(name).is_file():
        raise SourceError(spec, f"There is no file '{name}'", fix="correct the path")
    try:
        return _run_file(Path(name)) if name.endswith(".py") else importlib.import_module(name)
    except ModuleNotFoundError as error:
        if not name.endswith(".py") and error.name and f"{name}.".startswith(f"{error.name}."):
            raise SourceError(
                spec,
                f"There is no module '{error.name}'",
                fix=_joined("run the command in the folder that holds it, or install it", hint),
            ) from error
        raise user_code_error(spec, error) from error
    except SlimctlError:
        raise
    except Exception as error:  # importing runs the user's code
        raise user_code_error(spec, error) from error


def _run_file(path: Path) -> ModuleType:
    found = importlib.util.spec_from_file_location(path.stem, path)
    if found is None or found.loader is None:
        raise SourceError(str(path), "The file is no Python module", fix="correct the path")
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module
