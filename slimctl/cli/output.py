"""What a command says: results on stdout, everything else on stderr."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from slimctl.cli.table import Block, write_blocks

if TYPE_CHECKING:
    from slimctl.core.contract import Progress


def plain(value: Any) -> Any:
    """A value as JSON types: named tuples and models become objects, numpy scalars numbers.

    NaN and infinities become the texts ``"nan"``, ``"inf"`` and ``"-inf"``, as in manifests: JSON
    has no words for them.
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, PurePath):
        return str(value)
    return _plain_object(value)


def _plain_object(value: Any) -> Any:
    if hasattr(value, "_asdict"):
        return plain(value._asdict())
    if hasattr(value, "model_dump"):
        return plain(value.model_dump())
    if hasattr(value, "__dataclass_fields__"):
        return {name: plain(getattr(value, name)) for name in value.__dataclass_fields__}
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if isinstance(value, Iterable):
        return [plain(item) for item in value]
    return str(value)


def to_json(document: Mapping[str, Any]) -> str:
    """A document as strict JSON text (no NaN, no Infinity)."""
    return json.dumps(plain(document), indent=2, ensure_ascii=False, allow_nan=False)


@dataclass(frozen=True)
class Output:
    """Where a command's words go.

    Attributes:
        json: The result is one JSON document.
        quiet: No progress and no notes on stderr. Warnings and errors stay.
    """

    json: bool = False
    quiet: bool = False

    def result(self, document: Mapping[str, Any], blocks: Sequence[Block]) -> None:
        """Prints the command's result: the document with ``--json``, the blocks otherwise."""
        if self.json:
            sys.stdout.write(to_json(document) + "\n")
        else:
            write_blocks(sys.stdout, blocks)

    def note(self, text: str) -> None:
        """Says something by the way, on stderr."""
        if not self.quiet:
            print(text, file=sys.stderr, flush=True)

    def warn(self, text: str) -> None:
        """Says something that must not be missed, on stderr."""
        print(f"warning: {text}", file=sys.stderr, flush=True)

    def progress(self) -> Progress:
        """Progress that fits stderr."""
        from slimctl.cli.progress import progress_on

        return progress_on(sys.stderr, quiet=self.quiet)
