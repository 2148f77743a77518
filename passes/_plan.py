"""Plan files: which precision each layer gets. They can be read, edited and given back."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final, Literal

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from slimctl.core.errors import OptionError, nearest

Precision = Literal["quantized", "float"]

_OPTION: Final = "--plan"

_HEAD: Final = """\
# Precision of each layer: 'quantized' as the options say, or 'float'. Layers that are missing are
# quantized. Edit it and give it back with --plan.
"""


class Plan(BaseModel):
    """A plan.

    Attributes:
        version: Of the format.
        layers: Precision by name of the layer, in the order of the graph.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Literal[1] = 1
    layers: Mapping[str, Precision]

    @property
    def floating(self) -> frozenset[str]:
        """Names of the layers that stay in float."""
        return frozenset(name for name, kind in self.layers.items() if kind == "float")

    def check(self, known: Collection[str]) -> None:
        """Refuses layers that the model does not have.

        Raises:
            OptionError: With the nearest name.
        """
        unknown = [name for name in self.layers if name not in known]
        if unknown:
            raise OptionError(
                _OPTION,
                f"The model has no layer '{unknown[0]}' that can be quantized",
                fix=nearest(unknown[0], known),
            )

    def text(self) -> str:
        """The file."""
        return _HEAD + yaml.safe_dump(
            {"version": self.version, "layers": dict(self.layers)}, sort_keys=False, width=1000
        )


def read_plan(path: Path) -> Plan:
    """Reads a plan file.

    Raises:
        OptionError: It cannot be read, or is no plan.
    """
    try:
        content: Any = yaml.safe_load(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(_OPTION, f"Cannot read '{path}': {error}", fix="name a file") from error
    except yaml.YAMLError as error:
        raise OptionError(
            _OPTION, f"'{path}' is no YAML: {error}", fix="correct the line that it names"
        ) from error
    try:
        return Plan.model_validate(content)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in problem["loc"])
        raise OptionError(
            _OPTION,
            f"'{path}' is no plan: {place}: {problem['msg']}",
            fix="write 'version: 1' and 'layers:' with a line 'NAME: quantized' or 'NAME: float'",
        ) from error
