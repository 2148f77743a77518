"""What a recipe may say. Validation changes no value; ``resolve.py`` makes defaults explicit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from slimctl.store.reference import NAME_PATTERN


class RecipePart(BaseModel):
    """Base of every part: immutable, and nothing unknown is accepted."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class DataSpec(RecipePart):
    """Where samples come from."""

    source: str = Field(
        min_length=1,
        description="A .npz file, a folder of .npz/.npy files, images or test_data_set_* folders, "
        "IDX files, a table (CSV, JSONL, Parquet), 'hf:NAME#SPLIT', 'module:function', or "
        "'random'. Paths are relative to the recipe file.",
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
        description="What is measured: a name from 'slimctl eval --list', or 'module:function'.",
    )


class Data(RecipePart):
    """The data of a recipe."""

    calibration: DataSpec | None = Field(None, description="Samples that passes may look at.")
    training: DataSpec | None = Field(
        None, description="Samples that models learn from; the calibration samples when absent."
    )
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


class Gate(RecipePart):
    """A bound against the original, one against the last accepted version, or both.

    The second kind has ``last`` in its name. It counts where ``output.store`` names a ledger that
    has an accepted version of the result; until then it is kept.
    """

    model_config = ConfigDict(json_schema_extra={"minProperties": 1})

    @model_validator(mode="after")
    def _bounds_something(self) -> Gate:
        fields = type(self).model_fields
        bounds = [name for name, field in fields.items() if field.default is None]
        if all(getattr(self, name) is None for name in bounds):
            raise ValueError(f"give at least one of {', '.join(bounds)}")
        return self


class AccuracyGate(Gate):
    """The metric on ``data.evaluation`` may fall by so much."""

    max_drop: float | None = Field(
        None, ge=0, description="Largest loss of the metric, 0.01 for one point."
    )
    max_drop_from_last: float | None = Field(
        None, ge=0, description="As max_drop, against the last accepted version."
    )


class SqnrGate(Gate):
    """The outputs must stay so close to the original's."""

    min_db: float | None = Field(
        None, description="Least signal-to-quantization-noise ratio in dB."
    )
    max_loss_from_last_db: float | None = Field(
        None, ge=0, description="Largest loss of it against the last accepted version, in dB."
    )


class SizeGate(Gate):
    """The bytes of the result's files."""

    max_ratio: float | None = Field(
        None, gt=0, description="Largest size as a share of the original's."
    )
    max_ratio_to_last: float | None = Field(
        None, gt=0, description="Largest size as a share of the last accepted version's."
    )


class LatencyGate(Gate):
    """Time of one run, the models measured in turns.

    A ratio decides where its 95 % interval leaves the bound out. Where it does not, measuring goes
    on for a while; after that the ratio itself decides, and the verdict says that it is within
    noise.
    """

    min_speedup: float | None = Field(
        None, gt=0, description="Least quotient of the original's time and ours."
    )
    min_speedup_over_last: float | None = Field(
        None, gt=0, description="Least quotient of the last accepted version's time and ours."
    )
    percentile: Literal["p50", "p90", "p99"] = Field("p50", description="Which latency counts.")
    threads: int = Field(1, ge=1, description="Threads of all models while measuring.")


class MemoryGate(Gate):
    """Resident memory that a session and its runs add, at most."""

    max_ratio: float | None = Field(
        None, gt=0, description="Largest memory as a share of the original's."
    )
    max_ratio_to_last: float | None = Field(
        None, gt=0, description="Largest memory as a share of the last accepted version's."
    )
    threads: int = Field(1, ge=1, description="Threads of all models while measuring.")


class PlacementGate(Gate):
    """What the target's provider does not take; ``slimctl target check`` lists it."""

    max_fallback_nodes: int | None = Field(
        None,
        ge=0,
        description="Most nodes, inputs and outputs that another provider has to run.",
    )
    max_more_than_last: int | None = Field(
        None, ge=0, description="Most of them more than in the last accepted version."
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
    memory: MemoryGate | None = Field(None, description="Bound on the memory of a session.")
    placement: PlacementGate | None = Field(
        None, description="Bound on what does not run on the target's provider."
    )
    verify: VerifyGate | None = Field(
        None, description="Bounds on what 'slimctl verify' finds node by node."
    )


class OutputSpec(RecipePart):
    """Where the result goes when the command line does not say."""

    store: str | None = Field(
        None,
        min_length=1,
        description="The ledger, a folder or a URL such as s3://bucket/models; the result becomes "
        "a version of NAME in it, and in a folder STORE/NAME/ is the current one.",
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
    data: Data = Field(
        default_factory=Data, description="Calibration, training and evaluation data."
    )
    steps: tuple[StepSpec, ...] = Field(min_length=1, description="The chain of passes, in order.")
    gates: Gates = Field(default_factory=Gates, description="Bounds that the result must keep.")
    output: OutputSpec | None = Field(None, description="Where the result goes.")
