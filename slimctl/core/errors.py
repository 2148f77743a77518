"""The error tree of slimctl.

Every error a user can meet is one of these classes. A class carries fields and builds its message
from them: what happened, where (file, node, sample), what to do. Only the command-line boundary
catches them; anything else that reaches it is an internal error (exit code 3).

    SlimctlError                  exit code 2: input or environment is at fault
    ├── ModelError                the model file or graph
    │   ├── ModelLoadError        not a model, truncated, missing or unsafe external data
    │   ├── UnsupportedModelError the graph holds something this step cannot handle
    │   └── ModelExecutionError   onnxruntime refused to load or run the model
    ├── DataError                 calibration or evaluation data
    │   ├── SourceError           the source cannot be opened or is empty
    │   └── SampleError           one sample has a wrong name, shape, dtype or value
    ├── ConfigError               options, targets, recipes
    │   ├── OptionError           one option value
    │   └── RecipeError           one place in a recipe file
    ├── PassError                 a step of the pipeline
    │   ├── PassFailedError       a pass could not do its job
    │   └── PassContractError     a pass broke what every pass must hold
    ├── OutputError               the output exists, or cannot be written
    ├── StoreError                the ledger cannot be reached, read or written
    │   └── DamagedError          a part of it is missing or is not what its hash says
    ├── MissingExtraError         an optional dependency is not installed
    └── GateFailedError           exit code 1: a gate or verification failed
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import ClassVar


class SlimctlError(Exception):
    """Base of all errors that slimctl raises on purpose.

    Args:
        what: What happened, one sentence without a final period.
        where: The place: a file, node, tensor, sample or option. Empty when there is none.
        fix: What the user can do about it.
    """

    exit_code: ClassVar[int] = 2

    def __init__(self, what: str, *, where: str = "", fix: str = "") -> None:
        self.what = what
        self.where = where
        self.fix = fix
        super().__init__(self.message)

    @property
    def message(self) -> str:
        """The full text: what, then where and the remedy on lines of their own."""
        lines = [self.what]
        if self.where:
            lines.append(f"  where: {self.where}")
        if self.fix:
            lines.append(f"  fix:   {self.fix}")
        return "\n".join(lines)

    def __reduce__(self) -> tuple[object, ...]:
        # Exceptions cross process boundaries; the keyword-only constructor needs its fields.
        return (_rebuild, (type(self), dict(self.__dict__)))


def _rebuild(kind: type[SlimctlError], fields: dict[str, object]) -> SlimctlError:
    error = kind.__new__(kind)
    error.__dict__.update(fields)
    Exception.__init__(error, error.message)
    return error


class ModelError(SlimctlError):
    """The model file or its graph is at fault."""


class ModelLoadError(ModelError):
    """The file is no readable model: wrong format, truncated, missing or unsafe external data."""

    def __init__(self, path: Path | str, what: str, *, fix: str = "") -> None:
        self.path = str(path)
        super().__init__(what, where=self.path, fix=fix)


class UnsupportedModelError(ModelError):
    """The graph holds something that the step cannot handle."""


class ModelExecutionError(ModelError):
    """onnxruntime refused to load or to run a model."""


class DataError(SlimctlError):
    """Calibration or evaluation data are at fault."""


class SourceError(DataError):
    """A data source cannot be opened, is empty, or is of an unknown kind."""

    def __init__(self, source: str, what: str, *, fix: str = "") -> None:
        self.source = source
        super().__init__(what, where=source, fix=fix)


class SampleError(DataError):
    """One sample does not fit the model's input.

    Args:
        sample: The sample's place in its source, such as ``calib.npz[17]``.
        input_name: The model input.
        found: What the sample has.
        wanted: What the model asks for.
        fix: What to do.
    """

    def __init__(
        self, sample: str, input_name: str, *, found: str, wanted: str, fix: str = ""
    ) -> None:
        self.sample = sample
        self.input_name = input_name
        self.found = found
        self.wanted = wanted
        super().__init__(
            f"Sample does not fit input '{input_name}': found {found}, wanted {wanted}",
            where=sample,
            fix=fix,
        )


class ConfigError(SlimctlError):
    """Options, targets or recipes are at fault."""


class OptionError(ConfigError):
    """One option has a value that cannot be used."""

    def __init__(self, option: str, what: str, *, fix: str = "") -> None:
        self.option = option
        super().__init__(what, where=option, fix=fix)


class RecipeError(ConfigError):
    """One place in a recipe file is wrong."""

    def __init__(self, path: Path | str, line: int | None, what: str, *, fix: str = "") -> None:
        self.path = str(path)
        self.line = line
        place = self.path if line is None else f"{self.path}:{line}"
        super().__init__(what, where=place, fix=fix)


class PassError(SlimctlError):
    """A step of the pipeline is at fault."""


class PassFailedError(PassError):
    """A pass could not do its job on this model."""

    def __init__(self, step: str, what: str, *, node: str = "", fix: str = "") -> None:
        self.step = step
        self.node = node
        where = f"step {step}" + (f", node '{node}'" if node else "")
        super().__init__(what, where=where, fix=fix)


class PassContractError(PassError):
    """A pass broke a promise that every pass must keep; a defect of the pass, not of the input."""

    def __init__(self, step: str, promise: str, *, detail: str = "") -> None:
        self.step = step
        self.promise = promise
        super().__init__(
            f"The result breaks a promise of every pass: {promise}"
            + (f" ({detail})" if detail else ""),
            where=f"step {step}",
            fix="leave this step out, or exclude the node with --exclude, and report the model",
        )


class OutputError(SlimctlError):
    """The output exists already or cannot be written."""

    def __init__(self, path: Path | str, what: str, *, fix: str = "") -> None:
        self.path = str(path)
        super().__init__(what, where=self.path, fix=fix)


class StoreError(SlimctlError):
    """The ledger cannot be reached, read or written, or does not hold what was asked for."""

    def __init__(self, place: Path | str, what: str, *, fix: str = "") -> None:
        self.place = str(place)
        super().__init__(what, where=self.place, fix=fix)


class DamagedError(StoreError):
    """A part of the ledger is missing or is not what its hash says.

    Args:
        place: The object or the log entry.
        version: Whose it is, such as ``net@3``.
        file: The file that it is a part of.
        problem: What is wrong with it.
        fix: What the user can do about it.
    """

    def __init__(self, place: str, version: str, file: str, problem: str, *, fix: str = "") -> None:
        self.version = version
        self.file = file
        self.problem = problem
        owner = f"'{file}' of {version}" if file else version
        super().__init__(place, f"The ledger is damaged: {owner} {problem}", fix=fix)


class MissingExtraError(SlimctlError):
    """An optional dependency is needed and not installed."""

    def __init__(self, extra: str, purpose: str) -> None:
        self.extra = extra
        super().__init__(f"{purpose} needs an extra", fix=f'pip install "slimctl[{extra}]"')


class GateFailedError(SlimctlError):
    """A gate or a verification bound is broken."""

    exit_code = 1


def nearest(name: str, valid: Iterable[str]) -> str:
    """A remedy that names the closest valid spelling, or all of them when nothing is close."""
    names = sorted(valid)
    close = get_close_matches(name, names, n=1, cutoff=0.5)
    if close:
        return f"did you mean '{close[0]}'?"
    return "valid names: " + ", ".join(names) if names else ""
