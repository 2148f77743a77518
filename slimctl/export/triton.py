"""Triton Inference Server: a model repository with ``config.pbtxt``.

Follows ``model_config.proto`` of triton-inference-server/common and the README of its
onnxruntime_backend (both of 2024). The rules that the server enforces when it loads a model are
checked here: with ``max_batch_size`` above 0 the first axis of every tensor must be open and is not
listed in ``dims``; a tensor without further axes is ``dims: [ 1 ]`` reshaped to nothing; no
preferred batch is larger than the largest.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from slimctl.core.errors import ModelExecutionError, OptionError, UnsupportedModelError
from slimctl.export.common import Export, copy_model, first_that_runs, plain_name, register
from slimctl.graph.edit import Interface, Port, all_nodes, interface
from slimctl.graph.load import load_model
from slimctl.graph.session import Products, open_session, run

if TYPE_CHECKING:
    import onnxruntime as ort

    from slimctl.core.contract import Feeds
    from slimctl.pipeline.artifact import Artifact

_TYPES = {
    ir.DataType.BOOL: "TYPE_BOOL",
    ir.DataType.UINT8: "TYPE_UINT8",
    ir.DataType.UINT16: "TYPE_UINT16",
    ir.DataType.UINT32: "TYPE_UINT32",
    ir.DataType.UINT64: "TYPE_UINT64",
    ir.DataType.INT8: "TYPE_INT8",
    ir.DataType.INT16: "TYPE_INT16",
    ir.DataType.INT32: "TYPE_INT32",
    ir.DataType.INT64: "TYPE_INT64",
    ir.DataType.FLOAT16: "TYPE_FP16",
    ir.DataType.FLOAT: "TYPE_FP32",
    ir.DataType.DOUBLE: "TYPE_FP64",
    ir.DataType.STRING: "TYPE_STRING",
    ir.DataType.BFLOAT16: "TYPE_BF16",
}

_DEFAULT_BATCH = 4
"""What Triton itself takes for an onnxruntime model without a configuration
(``--backend-config=default-max-batch-size``)."""

_ON_GPU = frozenset({"cuda", "tensorrt"})
_ON_CPU = frozenset({"cpu", "cpu-arm64", "cpu-avx2", "openvino"})

_SAME = 1e-5
"""Share of the largest output by which an answer may change with the other request of its batch.
Both batches have the same shape, so sums are taken in the same order; what is left is a few float32
roundings of 6e-8."""


class Batching(BaseModel):
    """What ``slimctl bench --serving`` found; the file's other fields say how."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    max_batch_size: int = Field(ge=1)
    preferred_batch_size: tuple[int, ...] = ()
    max_queue_delay_microseconds: int = Field(0, ge=0)
    threads: int = Field(0, ge=0)

    @model_validator(mode="after")
    def _within(self) -> Batching:
        for size in self.preferred_batch_size:
            if not 1 <= size <= self.max_batch_size:
                raise ValueError(
                    f"preferred_batch_size {size} is not within 1 and"
                    f" max_batch_size {self.max_batch_size}"
                )
        return self


class Plan(NamedTuple):
    """How a model is served.

    Attributes:
        largest: ``max_batch_size``; 0 when requests cannot be joined.
        batching: How they are joined; None for Triton's defaults.
        threads: Of onnxruntime; 0 for all cores.
    """

    largest: int
    batching: Batching | None
    threads: int


@register
class Triton(Export):
    """``NAME/config.pbtxt`` and ``NAME/1/model.onnx`` in a repository."""

    name = "triton"
    summary = "Model repository of Triton Inference Server"

    serving: Path | None = Field(
        None,
        description="Dynamic batching, as 'slimctl bench --serving' writes it (JSON).",
        json_schema_extra={"metavar": "FILE", "unset": "batches of up to 4 where the model can"},
    )
    served_name: str | None = Field(
        None,
        description="Name of the model on the server.",
        json_schema_extra={"flags": ["--name"], "metavar": "NAME", "unset": "the artifact's"},
    )
    instances: int = Field(1, ge=1, description="Copies of the model that run side by side.")

    def place(self, artifact: Artifact, output: Path) -> Path:
        """The model's folder: a repository may hold others."""
        return output / self._model_name(artifact)

    def write(self, artifact: Artifact, target: Path) -> Sequence[str]:
        """Copies the model and writes its configuration."""
        batching = None if self.serving is None else read_batching(self.serving)
        model = load_model(artifact.model)
        ports = interface(model)
        reason = no_batch_axis(ports)
        notes = [] if reason else list(_try_batch(artifact, model))
        plan = self._plan(batching, reason)
        (target / "1").mkdir(parents=True)
        copy_model(artifact, target / "1")
        text = configuration(
            self._model_name(artifact),
            ports,
            plan,
            [
                *_instances(artifact.manifest.target, self.instances),
                *_accelerator(artifact.manifest.target, model),
            ],
        )
        (target / "config.pbtxt").write_text(text, encoding="utf-8")
        return [*_said(plan, reason, artifact.manifest.target), *notes]

    def _model_name(self, artifact: Artifact) -> str:
        if self.served_name is None:
            return plain_name(artifact.manifest.name)
        if self.served_name != plain_name(self.served_name):
            raise OptionError(
                "--name",
                f"'{self.served_name}' cannot be the name of a folder and of a model",
                fix=f"for example {plain_name(self.served_name)}",
            )
        return self.served_name

    def _plan(self, batching: Batching | None, reason: str) -> Plan:
        """How it is served.

        Raises:
            OptionError: Batches are asked for, and the model takes none.
        """
        if batching is not None and batching.max_batch_size > 1 and reason:
            raise OptionError(
                "--serving",
                f"It has batches of {batching.max_batch_size}, and the model takes none: {reason}",
                fix="export the model with an open first axis, or set max_batch_size to 1",
            )
        threads = 0 if batching is None else batching.threads
        if reason:
            return Plan(0, None, threads)
        return Plan(
            _DEFAULT_BATCH if batching is None else batching.max_batch_size, batching, threads
        )


def read_batching(path: Path) -> Batching:
    """Reads a serving configuration.

    Raises:
        OptionError: It cannot be read or says something impossible; names the field.
    """
    fix = "'slimctl bench MODEL --rate N --p99-ms X --serving FILE' writes one"
    try:
        return Batching.model_validate_json(path.read_bytes())
    except OSError as error:
        what = f"Cannot read '{path}': {error.strerror}"
        raise OptionError("--serving", what, fix=fix) from error
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in problem["loc"])
        text = problem["msg"].removeprefix("Value error, ")
        what = f"'{path}' is no serving configuration: {field + ': ' if field else ''}{text}"
        raise OptionError("--serving", what, fix=fix) from error


def no_batch_axis(ports: Interface) -> str:
    """Why requests cannot be joined along the first axis; empty when they can."""
    for kind, port in _named(ports):
        if not port.shape:
            return f"{kind} '{port.name}' has no first axis"
        if isinstance(port.shape[0], int):
            return f"the first axis of {kind} '{port.name}' is fixed to {port.shape[0]}"
    symbols = {port.shape[0] for port in ports.inputs if port.shape} - {None}
    if len(symbols) > 1:
        listed = ", ".join(sorted(map(str, symbols)))
        return f"the first axes of its inputs are different ones: {listed}"
    return ""


def _named(ports: Interface) -> Iterator[tuple[str, Port]]:
    yield from (("input", port) for port in ports.inputs)
    yield from (("output", port) for port in ports.outputs)


def _try_batch(artifact: Artifact, model: ir.Model) -> Iterator[str]:
    """Runs two requests as one batch: each must get a row of every output.

    Raises:
        UnsupportedModelError: An axis that is called open is not a batch.
    """
    session = open_session(artifact.model, products=Products.NATIVE)
    found = first_that_runs(session, model)
    if found is None:
        yield "no batch was tried: no random input fits the model"
        return
    feeds, _ = found
    twins = _run_pair(session, feeds, feeds)
    others = _run_pair(session, feeds, {name: _other(values) for name, values in feeds.items()})
    yield from _mixing(twins, others)


def _run_pair(session: ort.InferenceSession, one: Feeds, two: Feeds) -> Feeds:
    """What a batch of two requests gives.

    Raises:
        UnsupportedModelError: It fails, or does not give two rows.
    """
    try:
        outputs = run(session, {name: np.concatenate([one[name], two[name]]) for name in one})
    except ModelExecutionError as error:
        raise _no_batch(f"a batch of two fails: {error.what}") from error
    rows = 2 * len(next(iter(one.values())))
    for name, value in outputs.items():
        if np.shape(value)[:1] != (rows,):
            raise _no_batch(f"two requests give output '{name}' the shape {np.shape(value)}")
    return outputs


def _other(values: NDArray[Any]) -> NDArray[Any]:
    """Another request: twice as strong, so that scales taken from the batch would move."""
    return values * 2 if values.dtype.kind == "f" else np.flip(values)


def _no_batch(what: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"The first axis of the model is open and still no batch: {what}",
        where="outputs of the model",
        fix="export it with a fixed first axis, or one that all inputs and outputs share",
    )


def _mixing(twins: Feeds, others: Feeds) -> Iterator[str]:
    """Says when what else is in a batch changes the answer to its first request."""
    for name, value in twins.items():
        one, two = (array[: len(array) // 2] for array in (value, others[name]))
        if one.dtype.kind != "f" or not one.size:
            continue
        largest = float(np.abs(one).max())
        difference = float(np.abs(one.astype(np.float64) - two).max())
        if difference > _SAME * largest:
            yield (
                f"output '{name}' of a request depends on what else is in its batch"
                f" (by {100 * difference / max(largest, 1e-30):.2g} % of its largest value)"
            )


def configuration(name: str, ports: Interface, plan: Plan, sections: Sequence[str]) -> str:
    """The text of ``config.pbtxt``.

    Args:
        name: Of the model.
        ports: Its inputs and outputs.
        plan: How it is served.
        sections: Further blocks.

    Raises:
        UnsupportedModelError: Triton has no such tensors.
    """
    blocks = [
        f"name: {_quoted(name)}",
        'platform: "onnxruntime_onnx"',
        f"max_batch_size: {plan.largest}",
        _tensors("input", ports.inputs, batched=plan.largest > 0),
        _tensors("output", ports.outputs, batched=plan.largest > 0),
        *_dynamic_batching(plan),
        *sections,
        *_threads(plan.threads),
    ]
    return "\n".join(blocks) + "\n"


def _quoted(text: str) -> str:
    """A string of protobuf's text format, which escapes as JSON does."""
    return json.dumps(text, ensure_ascii=False)


def _tensors(field: str, ports: Sequence[Port], *, batched: bool) -> str:
    return (
        f"{field} [\n" + ",\n".join(_tensor(field, port, batched=batched) for port in ports) + "\n]"
    )


def _tensor(field: str, port: Port, *, batched: bool) -> str:
    if port.dtype not in _TYPES or port.shape is None:
        known = "its rank is unknown" if port.dtype in _TYPES else f"its type is {port.dtype}"
        raise UnsupportedModelError(
            f"Triton cannot serve {field} '{port.name}': {known}",
            where=f"{field} '{port.name}'",
            fix="export the model with ordinary tensors of known rank",
        )
    sizes = [size if isinstance(size, int) else -1 for size in port.shape[1 if batched else 0 :]]
    lines = [
        f"name: {_quoted(port.name)}",
        f"data_type: {_TYPES[port.dtype]}",
        f"dims: [ {', '.join(map(str, sizes or [1]))} ]",
        *([] if sizes else ["reshape { shape: [ ] }"]),  # dims may not be empty
    ]
    return "  {\n" + "\n".join(f"    {line}" for line in lines) + "\n  }"


def _dynamic_batching(plan: Plan) -> Iterator[str]:
    if plan.largest <= 1:
        return  # nothing to join
    if plan.batching is None:
        yield "dynamic_batching { }"
        return
    lines = []
    if plan.batching.preferred_batch_size:
        sizes = ", ".join(map(str, plan.batching.preferred_batch_size))
        lines.append(f"  preferred_batch_size: [ {sizes} ]")
    lines.append(f"  max_queue_delay_microseconds: {plan.batching.max_queue_delay_microseconds}")
    yield "\n".join(["dynamic_batching {", *lines, "}"])


def _instances(target: str, count: int) -> Iterator[str]:
    kind = "KIND_GPU" if target in _ON_GPU else "KIND_CPU"
    yield f"instance_group [\n  {{\n    count: {count}\n    kind: {kind}\n  }}\n]"


_ACCELERATORS = {"openvino": "cpu_execution_accelerator", "tensorrt": "gpu_execution_accelerator"}


def _accelerator(target: str, model: ir.Model) -> Iterator[str]:
    """The provider that the artifact was made for; others need no entry."""
    if target not in _ACCELERATORS:
        return
    lines = [f"name: {_quoted(target)}"]
    precision = _precision(model) if target == "tensorrt" else ""
    if precision:
        lines.append(f'parameters {{ key: "precision_mode" value: "{precision}" }}')
    inner = "\n".join(f"      {line}" for line in lines)
    yield (
        "optimization {\n  execution_accelerators {\n    "
        f"{_ACCELERATORS[target]} [ {{\n{inner}\n    }} ]\n  }}\n}}"
    )


def _precision(model: ir.Model) -> str:
    """TensorRT takes kernels of less than float32 only where it is told that it may."""
    if any(re.fullmatch(r"(De)?[Qq]uantizeLinear", node.op_type) for node in all_nodes(model)):
        return "INT8"
    weights = (value.const_value for value in model.graph.initializers.values())
    half = any(w is not None and w.dtype == ir.DataType.FLOAT16 for w in weights)
    return "FP16" if half else ""


def _threads(count: int) -> Iterator[str]:
    if count:
        yield (
            'parameters {\n  key: "intra_op_thread_count"\n'
            f'  value {{ string_value: "{count}" }}\n}}'
        )


def _said(plan: Plan, reason: str, target: str) -> Iterator[str]:
    if reason:
        yield f"max_batch_size is 0: {reason}"
    elif plan.batching is None:
        yield (
            f"max_batch_size is {plan.largest}, which nobody measured: 'slimctl bench MODEL"
            " --rate N --p99-ms X --serving FILE' finds what fits, and --serving FILE takes it"
        )
    if target not in _ON_GPU | _ON_CPU:
        yield f"Triton does not offer the provider of target {target}: it will run on the CPU"
