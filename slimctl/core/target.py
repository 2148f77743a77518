"""What a pass may ask about the execution provider it compresses for."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

ActivationType = Literal["uint8", "int8", "uint16", "int16"]
WeightType = Literal["int8", "uint8"]


class Target(BaseModel):
    """One execution-provider profile, as read from a YAML file in ``slimctl/targets``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(description="Name used with --target.")
    title: str = Field(description="One line for people.")
    provider: str = Field(description="onnxruntime execution provider.")
    documents: tuple[str, ...] = Field(description="Where the rules come from.")
    activation_type: ActivationType = Field(description="Default type of quantized activations.")
    activation_symmetric: bool = Field(description="Zero point fixed at the middle of the type.")
    weight_type: WeightType = Field(description="Default type of quantized weights.")
    per_channel: bool = Field(description="One weight scale per output channel by default.")
    power_of_two: bool = Field(
        default=False, description="Scales are powers of two by default."
    )
    reduce_range: bool = Field(
        description="Weights use 7 bits: the kernels add pairs of uint8 x int8 products in 16 bits."
    )
    minimum_opset: int = Field(ge=7, description="Lowest ONNX opset the produced graph may have.")
    weighted: tuple[str, ...] = Field(
        description="Operators with an integer kernel for constant weights."
    )
    storage_only: tuple[str, ...] = Field(
        description="Operators whose weights are stored as integers but computed in float."
    )
    float_output: tuple[str, ...] = Field(
        description="Weighted operators whose integer kernel can write float: no Q after them."
    )
    elementwise: tuple[str, ...] = Field(
        description="Operators of several activations with an integer kernel."
    )
    unary: tuple[str, ...] = Field(
        description="Operators of one activation with an integer kernel and a range of their own."
    )
    data_movement: tuple[str, ...] = Field(
        description="Operators that hand values on unchanged: input and output share one range."
    )
    fixed_ranges: dict[str, tuple[float, float]] = Field(
        description="Operators whose output range is known without data."
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
    resize_modes: tuple[str, ...] = Field(description="Resize modes that only move values.")
