"""What a pass may ask about the execution provider it compresses for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from slimctl.core.rules import EVERY, OperatorTable, Rule

ActivationType = Literal["uint8", "int8", "uint16", "int16"]
StoredActivationType = Literal["uint8", "int8", "uint16", "int16", "none"]
"""As :data:`ActivationType`; none leaves activations in float."""

WeightType = Literal["int8", "uint8"]
StaticWeightType = Literal["int8", "uint8", "int4"]
"""Types of the weights of static quantization; int4 is stored in 4 bits and computed as int8."""

ReducedRange = Literal["all", "learned", "none"]
"""Which layers get weights whose pairs of products with uint8 fit into 16 bits: all that would not
fit otherwise, those that do not on calibration data, or none."""

ABSORBED = ("Relu", "Clip")
"""Activation functions that kernels of other operators compute along."""


class Target(BaseModel):
    """One execution-provider profile, as read from a YAML file in ``slimctl/targets``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(description="Name used with --target.")
    title: str = Field(description="One line for people.")
    provider: str = Field(description="onnxruntime execution provider.")
    documents: tuple[str, ...] = Field(description="Where the rules come from.")
    quantize_mode: Literal["static", "fp16"] = Field(
        default="static", description="The mode of quantize that this provider gains from."
    )
    activation_type: ActivationType = Field(description="Default type of quantized activations.")
    activation_symmetric: bool = Field(description="Zero point fixed at the middle of the type.")
    weight_type: WeightType = Field(description="Default type of quantized weights.")
    narrow_weights: tuple[Literal["int4"], ...] = Field(
        default=(),
        description="Types of less than 8 bits that weights may be stored in: the provider widens "
        "them to int8 when it loads the model.",
    )
    embeddings: bool = Field(
        default=False,
        description="Rows of a table are looked up as int8 and restored by a DequantizeLinear with "
        "one scale per column.",
    )
    per_channel: bool = Field(description="One weight scale per output channel by default.")
    power_of_two: bool = Field(default=False, description="Scales are powers of two by default.")
    minimum_range: float = Field(
        default=0.0, ge=0.0, description="Activations have a range of at least this length."
    )
    reduce_range: ReducedRange = Field(
        description="Layers whose weights use less than 8 bits, where the kernels add pairs of "
        "uint8 x int8 products in 16 bits."
    )
    minimum_opset: int = Field(ge=7, description="Lowest ONNX opset the produced graph may have.")
    weighted: tuple[str, ...] = Field(
        description="Operators with an integer kernel for constant weights."
    )
    storage_only: tuple[str, ...] = Field(
        default=(),
        description="Operators whose weights are stored as integers but computed in float.",
    )
    float_output: tuple[str, ...] = Field(
        default=(),
        description="Weighted operators whose integer kernel can write float: no Q after them.",
    )
    elementwise: tuple[str, ...] = Field(
        default=(), description="Operators of several activations with an integer kernel."
    )
    unary: tuple[str, ...] = Field(
        default=(),
        description="Operators of one activation with an integer kernel and a range of their own.",
    )
    data_movement: tuple[str, ...] = Field(
        default=(),
        description="Operators that hand values on unchanged: input and output share one range.",
    )
    whole_graph: bool = Field(
        default=False,
        description="Every operator with an integer kernel is quantized, whatever stands beside "
        "it: float operators are slow, or run elsewhere.",
    )
    quantize_readers: bool = Field(
        default=False,
        description="Float operators read a tensor as integer kernels do: a residual sum then "
        "joins the convolution in front of it.",
    )
    fixed_ranges: dict[str, tuple[float, float]] = Field(
        default_factory=dict, description="Operators whose output range is known without data."
    )
    session_settings: dict[str, str] = Field(
        default_factory=dict,
        description="onnxruntime settings under which this machine optimizes as the target does.",
    )
    channel_multiple: int = Field(
        default=8,
        ge=1,
        description="Kernels run best when the number of channels is a multiple of this.",
    )
    float32_only: tuple[str, ...] = Field(
        default=(), description="Operators that a float16 or bfloat16 model keeps in float32."
    )
    resize_modes: tuple[str, ...] = Field(
        default=(), description="Resize modes that only move values."
    )
    operators: OperatorTable = Field(description="What the provider runs in float.")
    quantized_form: tuple[str, ...] = Field(
        default=(), description="Further operators that it runs in integers between Q/DQ pairs."
    )
    absorbing: tuple[str, ...] = Field(
        default=(), description="Float operators that compute a Relu or Clip behind them along."
    )
    absorbing_integers: tuple[str, ...] = Field(
        default=(),
        description="Operators whose integer kernel computes a Relu or Clip in front of the Q "
        "along, also where the Q does not make it redundant.",
    )
    interface_types: tuple[str, ...] = Field(
        default=(), description="Element types of inputs and outputs; empty: any."
    )
    rules: tuple[Rule, ...] = Field(default=(), description="What it asks of the nodes it takes.")

    @property
    def integer_operators(self) -> frozenset[str]:
        """Every operator that the provider runs in integers between Q/DQ pairs."""
        movement, forms = self.data_movement, self.quantized_form
        return frozenset((*self.weighted, *self.elementwise, *self.unary, *movement, *forms))

    def demands(self, name: str, operator: str | None = None) -> Iterator[Any]:
        """What rules ask for under one name, see :class:`~slimctl.core.rules.Demand`.

        Args:
            name: Field of ``Demand``.
            operator: Only rules that speak of it; None: all rules.
        """
        for rule in self.rules:
            if operator is None or rule.covers(operator):
                given = rule.require.given()
                if name in given:
                    yield given[name]

    def asks(self, name: str, operator: str | None = None) -> bool:
        """Whether some rule demands something."""
        return any(True for _ in self.demands(name, operator))

    def without_type(self, element_type: str) -> tuple[str, ...]:
        """Operators that a rule by their name does not let have an element type."""
        return tuple(
            operator
            for rule in self.rules
            if rule.require.types and element_type not in rule.require.types
            for operator in rule.operators
            if operator != EVERY
        )

    def weight_axis(self, operator: str, own: int | None) -> int | None:
        """Axis that has one weight scale per channel; None for one scale.

        Args:
            operator: Operator of a layer.
            own: Axis of the output channels in this layer's weight, None if it has none.
        """
        for axes in self.demands("weight_axes", operator):
            if own is None or own not in axes:
                own = axes[0] if axes and own is not None else None
        return own

    def weight_type_of(self, operator: str, wanted: WeightType) -> WeightType:
        """The wanted type, or the first that the operator's weights may have."""
        for types in self.demands("weight_types", operator):
            usable = [kind for kind in types if kind in ("int8", "uint8")]
            if wanted not in usable and usable:
                return usable[0]  # type: ignore[no-any-return]  # a WeightType by the line above
        return wanted
