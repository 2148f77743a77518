"""Plan files: which precision each layer gets. They can be read, edited and given back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from slimctl.core.errors import OptionError, nearest
from slimctl.passes._mixed_words import Choice, Precision
from slimctl.passes._precision import FLOAT
from slimctl.passes._precisions import PRECISIONS

_OPTION: Final = "--plan"

_HEAD: Final = (
    "# Precision of each layer, one word:\n"
    + "".join(f"#   {word:<14}{kind.meaning}\n" for word, kind in PRECISIONS.items())
    + "# Layers that are missing are quantized as the options say. Edit it and give it back with\n"
    + "# --plan.\n"
)

_QUANTIZED: Final = "quantized"
"""What version 1 says of a layer that is not in float."""


class Plan(BaseModel):
    """A plan.

    Attributes:
        version: Of the format; the first one knows ``quantized`` and ``float`` only.
        layers: Precision by name of the layer, in the order of the graph.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Literal[1, 2] = 2
    layers: Mapping[str, Precision]

    @model_validator(mode="after")
    def _words_are_of_the_version(self) -> Self:
        known = (FLOAT, _QUANTIZED) if self.version == 1 else tuple(PRECISIONS)
        for layer, word in self.layers.items():
            if word not in (*PRECISIONS, _QUANTIZED):
                raise ValueError(f"layer '{layer}' is {word!r}, which is no precision")
            if word not in known:
                raise ValueError(
                    f"layer '{layer}' is {word}, and version {self.version} knows "
                    f"{', '.join(known)}"
                )
        return self

    def has(self, kind: Precision) -> bool:
        """Whether some layer has this precision."""
        return kind in self.layers.values()

    def choice(
        self,
        able: Mapping[str, Sequence[Precision]],
        path: Path,
        refuse: Callable[[str, Precision], OptionError],
    ) -> Choice:
        """The precision of every layer of a model.

        Args:
            able: By layer what it can have; the first where the plan says nothing.
            path: Of the plan, for errors.
            refuse: The error about a precision that a layer cannot have.

        Raises:
            OptionError: The model has no such layer, or the layer cannot have its precision.
        """
        for name in self.layers:
            if name not in able:
                raise OptionError(
                    _OPTION,
                    f"'{path}': the model has no layer '{name}' that can be quantized",
                    fix=nearest(name, able),
                )
        found: dict[str, Precision] = {}
        for name, kinds in able.items():
            word = self.layers.get(name, _QUANTIZED)
            found[name] = kinds[0] if word == _QUANTIZED else word
            if found[name] not in kinds:
                raise refuse(name, found[name])
        return found

    def text(self) -> str:
        """The file."""
        return _HEAD + yaml.safe_dump(
            {"version": self.version, "layers": dict(self.layers)}, sort_keys=False, width=1000
        )


def refusal(
    path: Path, layer: str, kind: Precision, reason: str, others: Sequence[Precision]
) -> OptionError:
    """The error about a precision that a layer cannot have."""
    rest = [other for other in others if other != kind]
    return OptionError(
        _OPTION,
        f"'{path}': layer '{layer}' cannot be {kind}: {reason}",
        fix=f"write '{layer}: {rest[0]}'" + "".join(f", or {other}" for other in rest[1:]),
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
        raise OptionError(
            _OPTION,
            f"'{path}' is no plan: {_first_problem(error)}",
            fix="write 'version: 2' and 'layers:' with a line 'NAME: PRECISION' for each layer, "
            f"of {', '.join(PRECISIONS)}",
        ) from error


def _first_problem(error: ValidationError) -> str:
    """Where it is and what; of a layer, its name and word."""
    problem = error.errors(include_url=False)[0]
    place = [str(part) for part in problem["loc"]]
    if len(place) > 1 and place[0] == "layers":
        return f"layer '{place[1]}' is {problem['input']!r}, which is no precision"
    said = problem["msg"].removeprefix("Value error, ")
    return ": ".join([".".join(place), said] if place else [said])
