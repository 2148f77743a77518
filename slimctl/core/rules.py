"""What an execution provider asks of the nodes it takes, as data.

A rule names operators, what they must be like, why, what to do about it, and where that is written.
What each demand means is decided in one place, :mod:`slimctl.targets.demands`.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

QuantizedTypeName = Literal["int2", "uint2", "int4", "uint4", "int8", "uint8", "int16", "uint16"]
"""Types that activations and weights are stored in, by their ONNX names."""

Effect = Literal["fallback", "float", "advice"]

EVERY = "*"
"""Stands for every operator in a rule."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class FixedScale(_Part):
    """The one scale and zero point that an output may have."""

    scale: float = Field(gt=0.0, description="Of one step.")
    zero_point: int = Field(description="Code of 0.0.")


class Demand(_Part):
    """What must hold of a node. Everything that is given must hold; what is absent is free.

    Tensors are looked at through the Q/DQ pairs around the node: ``weights`` are quantized
    constants (biases apart), ``activations`` the other quantized inputs.
    """

    never: bool = Field(False, description="The provider takes no such node.")
    quantized: bool | None = Field(None, description="Activations are quantized, or must not be.")
    complete: bool = Field(
        False, description="Where one input is quantized, all inputs and outputs are."
    )
    types: tuple[str, ...] = Field((), description="Element types of the first input and output.")
    activation_types: tuple[QuantizedTypeName, ...] = Field(
        (), description="Types of quantized activations, those of outputs included."
    )
    weight_types: tuple[QuantizedTypeName, ...] = Field((), description="Types of weights.")
    type_pairs: tuple[tuple[QuantizedTypeName, QuantizedTypeName], ...] = Field(
        (), description="Types of the first two inputs together."
    )
    same_types: bool = Field(False, description="Activations in and out have one type.")
    same_scales: bool = Field(
        False, description="Activations in and out have one scale and zero point."
    )
    symmetric_activations: bool = Field(
        False, description="Zero points of activations are in the middle of their type."
    )
    symmetric_weights: bool = Field(
        False, description="Zero points of weights are in the middle of their type."
    )
    narrow_weights: bool = Field(
        False, description="The lowest code of signed weights is not used."
    )
    weight_axes: tuple[int, ...] | None = Field(
        None, description="Axes with one weight scale per channel; empty: one scale per weight."
    )
    per_tensor: bool = Field(False, description="Nothing has one scale per channel.")
    power_of_two: bool = Field(False, description="Scales are powers of two, biases apart.")
    constant_scales: bool = Field(False, description="Scales and zero points are constants.")
    output_scale: dict[QuantizedTypeName, FixedScale] = Field(
        default_factory=dict, description="Scale and zero point of the output by its type."
    )
    bias: Literal["int32", "float"] | None = Field(None, description="How the bias is stored.")
    own_dequantize: bool = Field(
        False, description="No other node reads the DQ nodes in front of the node."
    )
    static_shapes: bool = Field(False, description="Every size of inputs and outputs is fixed.")
    ranks: tuple[int, ...] = Field((), description="Numbers of dimensions of the first input.")
    constant_inputs: tuple[int, ...] = Field(
        (), description="Places of inputs that must be constants, quantized or not."
    )
    nonnegative_inputs: tuple[int, ...] = Field(
        (), description="Places of constant inputs that must hold no negative number."
    )
    attributes: dict[str, tuple[int | float | str, ...]] = Field(
        default_factory=dict, description="Values that attributes may have; defaults count."
    )
    explicit_attributes: tuple[str, ...] = Field(
        (), description="Attributes that must be written out, default or not."
    )
    last_axis: bool = Field(False, description="The attribute axis names the last dimension.")
    single_output: bool = Field(False, description="Only the first output is used.")

    def given(self) -> dict[str, Any]:
        """Demands that are made, by name."""
        return self._given

    @cached_property  # quantizers ask for every tensor
    def _given(self) -> dict[str, Any]:
        return {
            name: getattr(self, name)
            for name in type(self).model_fields
            if getattr(self, name)
            != type(self).model_fields[name].get_default(call_default_factory=True)
        }

    def __str__(self) -> str:
        """In words, for tables: ``static shapes; weight axes: 0``."""
        return "; ".join(_words(name, value) for name, value in self.given().items())

    @model_validator(mode="after")
    def _asks_something(self) -> Demand:
        if not self.given():
            raise ValueError("a rule demands nothing")
        return self


def _words(name: str, value: Any) -> str:
    words = name.replace("_", " ")
    if value is True:
        return words
    return f"{words}: {_text(value)}"


def _text(value: Any) -> str:
    match value:
        case bool():
            return "yes" if value else "no"
        case dict():
            return ", ".join(f"{key} {_text(item)}" for key, item in value.items())
        case FixedScale():
            return f"scale {value.scale:.6g} zero point {value.zero_point}"
        case tuple():
            between = " x " if any(isinstance(item, tuple) for item in value) else " or "
            texts = [between.join(item) if isinstance(item, tuple) else str(item) for item in value]
            return " or ".join(texts) or "none"
        case _:
            return str(value)


class Rule(_Part):
    """One condition under which a provider takes nodes."""

    name: str = Field(pattern=r"^[a-z0-9-]+$", description="Short, for tables.")
    operators: tuple[str, ...] = Field(
        (EVERY,), description="Operators, those of other domains as DOMAIN:NAME; * is every one."
    )
    applies_to: Literal["all", "float", "quantized"] = Field(
        "all", description="Nodes between Q/DQ pairs, other nodes, or both."
    )
    effect: Effect = Field(
        "fallback",
        description="What happens to a node that breaks the rule: another provider runs it; this "
        "one computes it in float, if it knows the operator; or it runs, and not well.",
    )
    require: Demand = Field(description="What must hold.")
    reason: str = Field(min_length=1, description="Why, in half a sentence.")
    fix: str = Field(min_length=1, description="What to do about it.")
    document: str = Field(min_length=1, description="Where that is written.")

    def covers(self, operator: str) -> bool:
        """Whether the rule speaks of an operator, written as in ``operators``."""
        return EVERY in self.operators or operator in self.operators


class OperatorTable(_Part):
    """Operators that a provider runs, and what is said about the others."""

    names: tuple[str, ...] = Field(
        (), description="Operators; those of other domains as DOMAIN:NAME."
    )
    installed: bool = Field(
        False, description="Those that the installed onnxruntime has kernels of this provider for."
    )
    newest_opset: int | None = Field(
        None,
        ge=7,
        description="Newest ONNX operator set that there are kernels for: an operator that changed "
        "in a later one has none in its new version.",
    )
    newest_versions: dict[str, int] = Field(
        default_factory=dict,
        description="Operators whose kernels are older: the newest version of each that has one.",
    )
    fix: str = Field(min_length=1, description="What to do about an operator that is missing.")
    document: str = Field(min_length=1, description="Where the list is written.")

    @model_validator(mode="after")
    def _lists_something(self) -> OperatorTable:
        if bool(self.names) == self.installed:
            raise ValueError("give names, or installed: true")
        if unknown := set(self.newest_versions) - set(self.names):
            listed = ", ".join(sorted(unknown))
            raise ValueError(f"newest_versions speaks of {listed}, names do not")
        return self

    def newest_version(self, operator: str) -> int | None:
        """Newest version of an ONNX operator that may have a kernel; None where it is not said."""
        return self.newest_versions.get(operator, self.newest_opset)
