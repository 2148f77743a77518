"""What a recipe may say. Validation changes no value; ``resolve.py`` makes defaults explicit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"  # also the name of a folder


class RecipePart(BaseModel):
    """Base of every part: immutable, and nothing unknown is accepted."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class DataSpec(RecipePart):
    """Where samples come from."""

    source: str = Field(
        min_length=1,
        description="A .npz file, a folder of .npz/.npy files, images or test_data_set_* folders, "
        "'module:function', or 'random'. Paths are relative to the recipe file.",
    )
    samples: int | None = Field(
        None, ge=1, description="At most this many samples; all when absent."
    )
    batch_size: int | None = Field(None, ge=1, description="Samples per run of the model.")
    preprocess: str | None = Field(
        None, description="Image preprocessing: a preset's name or a YAML file."
    )
    skip_bad_samples: bool = Field(False, description="Leave out samples that hold NaN or Inf.")


class EvaluationSpec(DataSpec):
    """Samples to judge the result with."""

    metric: str | None = Field(
        None,
        description="What is measured on labeled samples: top1, top5, or 'module:function'.",
    )


class Data(RecipePart):
    """The data of a recipe."""

    calibration: DataSpec | None = Field(None, description="Samples that passes may look at.")
    evaluation: EvaluationSpec | None = Field(None, description="Samples that gates judge with.")


class StepSpec(RecipePart):
    """One step: the name of a pass, alone or with its options (``quantize: {calibration: kl}``)."""

    name: str
    options: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _read(cls, value: Any) -> Any:
        if isinstance(value, StepSpec):
            return {"name": value.name, "options": value.options}
        if isinstance(value, str):
            return {"name": value}
        if isinstance(value, Mapping) and len(value) == 1:
            name, options = next(iter(value.items()))
            return {"name": name, "options": {} if options is None else options}
        raise ValueError("a step is the name of a pass, or one name with its options")


class AccuracyGate(RecipePart):
    """The metric on ``data.evaluation`` may fall by this much against the original."""

    max_drop: float = Field(ge=0, description="Largest loss of the metric, 0.01 for one point.")


class SqnrGate(RecipePart):
    """The outputs must stay this close to the original's."""

    min_db: float = Field(description="Least signal-to-quantization-noise ratio in dB.")


class SizeGate(RecipePart):
    """The files of the result against those of the original."""

    max_ratio: float = Field(gt=0, description="Largest size as a share of the original's.")


class LatencyGate(RecipePart):
    """Time of one run against the original's, measured in turns."""

    min_speedup: float = Field(gt=0, description="Least quotient of the original's time and ours.")
    percentile: Literal["p50", "p90", "p99"] = Field("p50", description="Which latency counts.")
    threads: int = Field(1, ge=1, description="Threads of both models while measuring.")


class PlacementGate(RecipePart):
    """What the target's provider does not take; ``slimctl target check`` lists it."""

    max_fallback_nodes: int = Field(
        ge=0, description="Most nodes, inputs and outputs that another provider has to run."
    )


class VerifyGate(RecipePart):
    """The result, looked at inside on a few samples, as ``slimctl verify`` does."""

    model_config = ConfigDict(json_schema_extra={"minProperties": 1})

    max_step_difference: int | None = Field(
        None,
        ge=0,
        description="Largest difference between onnxruntime and the built-in runtime at any node, "
        "in quantization steps. It depends on the processor.",
    )
    min_sqnr: float | None = Field(
        None, description="Least signal-to-quantization-noise ratio of every output in dB."
    )
    max_metric_drop: float | None = Field(
        None, ge=0, description="Largest loss of the metric against the original."
    )
    max_faults: int = Field(0, ge=0, description="Most nodes at which the model is wrong.")

    @model_validator(mode="after")
    def _bounds_something(self) -> VerifyGate:
        if all(getattr(self, name) is None for name in self.model_fields_set):
            raise ValueError(f"give at least one of {', '.join(type(self).model_fields)}")
        return self


class Gates(RecipePart):
    """Bounds that the result must keep; a broken one fails the run with exit code 1."""

    accuracy: AccuracyGate | None = Field(None, description="Bound on the loss of the metric.")
    sqnr: SqnrGate | None = Field(None, description="Bound on the numeric distance.")
    size: SizeGate | None = Field(None, description="Bound on the size of the files.")
    latency: LatencyGate | None = Field(None, description="Bound on the time of one run.")
    placement: PlacementGate | None = Field(
        None, description="Bound on what does not run on the target's provider."
    )
    verify: VerifyGate | None = Field(
        None, description="Bounds on what 'slimctl verify' finds node by node."
    )


class OutputSpec(RecipePart):
    """Where the result goes when the command line does not say."""

    store: str | None = Field(
        None, min_length=1, description="Folder of artifacts; the result is STORE/NAME/."
    )
    path: str | None = Field(None, min_length=1, description="An .onnx file or an artifact folder.")

    @model_validator(mode="after")
    def _one_place(self) -> OutputSpec:
        if (self.store is None) == (self.path is None):
            raise ValueError("give one of 'store' and 'path'")
        return self


class Recipe(RecipePart):
    """A whole recipe."""

    version: Literal[1] = Field(description="Version of the recipe format.")
    name: str = Field(pattern=NAME_PATTERN, description="Name of the result.")
    description: str = Field("", description="One line for people.")
    model: str | None = Field(
        None, min_length=1, description="The .onnx file, relative to the recipe file."
    )
    target: str = Field("cpu", description="Execution-provider profile, or a YAML file with one.")
    seed: int = Field(0, ge=0, description="Seed of everything random.")
    threads: int = Field(0, ge=0, description="Threads of onnxruntime; 0 lets it decide.")
    data: Data = Field(default_factory=Data, description="Calibration and evaluation data.")
    steps: tuple[StepSpec, ...] = Field(min_length=1, description="The chain of passes, in order.")
    gates: Gates = Field(default_factory=Gates, description="Bounds that the result must keep.")
    output: OutputSpec | None = Field(None, description="Where the result goes.")
