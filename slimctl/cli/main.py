"""The boundary: runs a command and turns every way it can end into an exit code.

0: fine. 1: a gate or verification failed. 2: the user's input or environment is at fault. 3: an
internal error. 130: interrupted. 141: the reader of stdout went away. This is the one place that
catches errors.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import typer

from slimctl.core.errors import ConfigError, GateFailedError, SlimctlError

INTERNAL_ERROR = 3
INTERRUPTED = 130  # 128 + SIGINT, as shells have it
BROKEN_PIPE = 141  # 128 + SIGPIPE

_ENVIRONMENT = {
    errno.ENOSPC: "free some space; temporary files go to the folder named by TMPDIR",
    errno.EDQUOT: "free some of your quota; temporary files go to the folder named by TMPDIR",
    errno.EACCES: "change the permissions, or choose another place",
    errno.EPERM: "change the permissions, or choose another place",
    errno.EROFS: "choose a writable place",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENOMEM: "free some memory, or use fewer samples or a smaller --batch-size",
}
"""Errors of the operating system that no code of ours can cause or cure."""


def main() -> NoReturn:
    """The console script."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Runs one command line.

    Args:
        arguments: Without the program's name.

    Returns:
        The exit code.
    """
    try:
        code = _execute(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        return _reader_left()
    except (KeyboardInterrupt, typer.Abort):
        return _interrupted()
    except Exception as error:  # noqa: BLE001 - the boundary: nothing may leave it as a bare traceback
        return _say(_in_our_words(error, arguments), as_json="--json" in arguments)
    return code


def _execute(arguments: Sequence[str]) -> int:
    from slimctl.cli.group import root_command

    command = root_command()
    if "_SLIMCTL_COMPLETE" in os.environ:  # a shell asks for completions
        command.main(args=list(arguments), prog_name="slimctl")
    try:
        with command.make_context("slimctl", list(arguments)) as context:
            command.invoke(context)
    except typer.Exit as ending:
        return ending.exit_code
    return 0


def _say(error: SlimctlError, *, as_json: bool) -> int:
    print(f"error: {error.message}", file=sys.stderr, flush=True)
    # A command that judges has printed its result by now, and stdout holds one document.
    if as_json and not isinstance(error, GateFailedError):
        from slimctl.cli.output import to_json

        sys.stdout.write(to_json({"error": _document(error)}) + "\n")
        sys.stdout.flush()
    return error.exit_code


def _document(error: SlimctlError) -> dict[str, Any]:
    return {
        "type": type(error).__name__,
        "exit_code": error.exit_code,
        **{name: value for name, value in vars(error).items() if not name.startswith("_")},
    }


def _usage_error(error: typer.TyperException) -> ConfigError:
    context = getattr(error, "ctx", None)
    where = context.command_path if context is not None else ""
    what, _, hint = error.format_message().partition(". Did you mean ")
    if close := getattr(error, "possibilities", None):  # an option; the message lists them too
        what, hint = error.message, " or ".join(repr(name) for name in close) + "?"
    help_line = f"see '{where or 'slimctl'} --help'"
    return ConfigError(
        what.rstrip("."), where=where, fix=f"did you mean {hint}" if hint else help_line
    )


def _interrupted() -> int:
    print("interrupted: no partial output was left", file=sys.stderr, flush=True)
    return INTERRUPTED


def _reader_left() -> int:
    # Python flushes stdout once more at exit; into nothing, so that it does not fail again.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return BROKEN_PIPE


def _in_our_words(error: Exception, arguments: Sequence[str]) -> SlimctlError:
    if isinstance(error, SlimctlError):
        return error
    if isinstance(error, typer.TyperException):
        return _usage_error(error)
    if isinstance(error, MemoryError):
        return SlimctlError("Out of memory", fix=_ENVIRONMENT[errno.ENOMEM])
    if isinstance(error, OSError) and error.errno in _ENVIRONMENT:
        place = f": {error.filename}" if error.filename else ""
        return SlimctlError(f"{error.strerror}{place}", fix=_ENVIRONMENT[error.errno])
    return _internal_error(error, arguments)


def _internal_error(error: Exception, arguments: Sequence[str]) -> InternalError:
    import tempfile
    import traceback

    summary = f"{type(error).__name__}: {error}".splitlines()[0]
    report = "".join(
        [
            f"arguments: {list(arguments)}\npython: {sys.version}\n\n",
            *traceback.format_exception(error),
        ]
    )
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="slimctl-traceback-", suffix=".txt", delete=False, encoding="utf-8"
        ) as file:
            file.write(report)
    except OSError:
        sys.stderr.write(report)
        return InternalError(f"Internal error: {summary}", where="traceback above")
    return InternalError(f"Internal error: {summary}", where=f"traceback saved to {file.name}")


class InternalError(SlimctlError):
    """A defect of slimctl, not of the user's input."""

    exit_code = INTERNAL_ERROR

    def __init__(self, what: str, *, where: str) -> None:
        super().__init__(what, where=where, fix="report it together with the traceback")
