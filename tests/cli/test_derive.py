from __future__ import annotations

from enum import StrEnum
from typing import ClassVar, Literal

import pytest
import typer
from pydantic import Field, field_validator, model_validator
from typer.testing import CliRunner

from slimctl.cli.derive import bounds, build_pass, pass_parameters
from slimctl.core.contract import Effect, Pass
from slimctl.core.errors import ConfigError, OptionError


class Family(StrEnum):
    SMALL = "small"
    LARGE = "large"


class Shrink(Pass):
    """A pass that only has options."""

    name: ClassVar[str] = "shrink"
    summary: ClassVar[str] = "Shrink"
    effect: ClassVar[Effect] = Effect.APPROXIMATE

    method: Literal["auto", "kl", "minmax"] = Field("auto", description="How.")
    weight_type: Literal["int4", "uint4"] | None = Field(None, description="Type of weights.")
    per_channel: bool | None = Field(
        None,
        description="Scales per channel.",
        json_schema_extra={"flags": ["--per-channel/--per-tensor"]},
    )
    keep_relu: bool = Field(True, description="Keep Relu.")
    percentile: float = Field(99.9, gt=0, le=100, description="Share kept.")
    block_size: int | None = Field(None, ge=1, description="Block.")
    exclude: tuple[str, ...] = Field((), description="Left alone.")
    families: tuple[Family, ...] = Field(tuple(Family), description="Which.")
    secret: int = Field(3, description="Only for recipes.", json_schema_extra={"cli": False})

    @field_validator("method", mode="before")
    @classmethod
    def _alias(cls, value: object) -> object:
        return "kl" if value == "entropy" else value

    @model_validator(mode="after")
    def _fit(self) -> Shrink:
        if self.block_size and self.method == "minmax":
            raise ValueError("block_size needs a search")
        return self


def _parse(*arguments: str) -> Pass:
    found: list[Pass] = []

    def shrink(**values: object) -> None:
        found.append(build_pass(Shrink, values))

    import inspect

    parameters = pass_parameters(Shrink)
    shrink.__signature__ = inspect.Signature(parameters)
    app = typer.Typer(rich_markup_mode=None)
    app.command()(shrink)
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    if result.exit_code:
        raise typer.BadParameter(result.output)
    return found[0]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), Shrink()),
        (("--method", "kl"), Shrink(method="kl")),
        (("--method", "entropy"), Shrink(method="kl")),
        (("--weight-type", "uint4"), Shrink(weight_type="uint4")),
        (("--per-channel",), Shrink(per_channel=True)),
        (("--per-tensor",), Shrink(per_channel=False)),
        (("--no-keep-relu",), Shrink(keep_relu=False)),
        (("--keep-relu",), Shrink(keep_relu=True)),
        (("--percentile", "12.5"), Shrink(percentile=12.5)),
        (("--block-size", "32"), Shrink(block_size=32)),
        (("--families", "large"), Shrink(families=(Family.LARGE,))),
        (("--exclude", "a", "--exclude", "op:Softmax"), Shrink(exclude=("a", "op:Softmax"))),
    ],
)
def test_options_become_fields(arguments: tuple[str, ...], expected: Shrink) -> None:
    parsed = _parse(*arguments)
    assert parsed == expected
    assert type(parsed) is Shrink


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"percentile": "0"}, ("--percentile", "greater than 0", "0 < x <= 100")),
        ({"percentile": "101"}, ("--percentile", "less than or equal to 100")),
        ({"percentile": "much"}, ("--percentile", "'much'", "0 < x <= 100")),
        ({"block_size": "1.5"}, ("--block-size", "'1.5'", "1 <= x")),
        ({"method": "klm"}, ("--method", "'klm'", "did you mean 'kl'?")),
    ],
)
def test_a_bad_value_names_the_option_and_the_remedy(
    values: dict[str, str], message: tuple[str, ...]
) -> None:
    with pytest.raises(OptionError) as caught:
        build_pass(Shrink, values)
    for part in message:
        assert part in caught.value.message


def test_options_that_do_not_fit_each_other() -> None:
    with pytest.raises(ConfigError, match="block_size needs a search"):
        build_pass(Shrink, {"block_size": "4", "method": "minmax"})


def test_help_shows_defaults_choices_and_bounds() -> None:
    parameters = {parameter.name: parameter for parameter in pass_parameters(Shrink)}
    assert "secret" not in parameters

    def option(name: str):
        return parameters[name].annotation.__metadata__[0]

    assert option("method").metavar == "auto|kl|minmax"
    assert option("weight_type").show_default == "the target decides"
    assert option("method").show_default
    assert not option("exclude").show_default
    assert parameters["method"].default == "auto"
    assert parameters["percentile"].default == "99.9"
    assert parameters["keep_relu"].default is True
    assert option("families").metavar == "small|large"
    assert parameters["families"].default == ["small", "large"]
    assert "0 < x <= 100" in option("percentile").help


def test_bounds_in_words() -> None:
    fields = Shrink.model_fields
    assert bounds(fields["percentile"]) == "0 < x <= 100"
    assert bounds(fields["block_size"]) == "1 <= x"
    assert bounds(fields["method"]) == ""
