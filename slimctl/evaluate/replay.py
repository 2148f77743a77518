"""The built-in runtime and onnxruntime side by side, node by node on the same inputs.

onnxruntime runs once with every tensor of codes as an output. The built-in runtime then computes
each node from what onnxruntime computed before it, so that a difference belongs to one node and
does not travel on. Without graph optimizations (or with basic ones) onnxruntime computes Q/DQ nodes
as they are written, and so does the runtime then; from the extended level on both compute with
integers.

Tensors of codes are compared in quantization steps. Float tensors are compared too where looking at
them changes nothing: with graph optimizations an observed tensor could not be fused away.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from slimctl.core.contract import Feeds
from slimctl.evaluate.compare import is_float
from slimctl.evaluate.metrics import Similarity
from slimctl.graph.session import CPU, Level, Products, open_session, run, tapped
from slimctl.runtime.device import EXACT, Device
from slimctl.runtime.plan import Step
from slimctl.runtime.registry import Value
from slimctl.runtime.session import Arithmetic, Runtime

TIE_STEPS = 0.02
"""How near a value must lie to the middle between two codes for rounding to decide. float32 holds a
value of 255 steps with an error of 1.5e-5 steps; sums of a thousand products in another order
differ by some thousandths."""

_INTEGER_LEVELS = (Level.EXTENDED, Level.ALL)


@dataclass
class NodeTotals:
    """One node's output over all samples, compared.

    Attributes:
        node: Its name.
        op_type: The operator that the runtime computed.
        tensor: Name of the output.
        elements: Values compared.
        differing: Codes that are not the same.
        steps: The largest difference, in quantization steps; 0 for float tensors.
        ties: Differing codes that are one step apart and whose exact value lies at a tie.
        relative: The largest difference of float values as a part of the largest value.
        is_codes: Whether the tensor holds codes.
    """

    node: str
    op_type: str
    tensor: str
    is_codes: bool
    elements: int = 0
    differing: int = 0
    steps: int = 0
    ties: int = 0
    relative: float = 0.0

    @property
    def only_ties(self) -> bool:
        """Whether rounding at ties explains every difference."""
        return self.differing == self.ties

    def add_other_shape(self, ours: NDArray[Any]) -> None:
        """Adds one run in which the runtimes do not even agree on the shape."""
        self.elements += ours.size
        if self.is_codes:
            self.differing += ours.size
            self.steps = max(
                self.steps, int(np.iinfo(ours.dtype).max) - int(np.iinfo(ours.dtype).min)
            )
        else:
            self.relative = float("inf")

    def add(self, ours: NDArray[Any], theirs: NDArray[Any], exact: NDArray[Any] | None) -> None:
        """Adds one run."""
        self.elements += ours.size
        if not self.is_codes:
            self.relative = max(self.relative, _relative(ours, theirs))
            return
        places = np.flatnonzero(ours.reshape(-1) != theirs.reshape(-1))
        if not places.size:
            return
        steps = np.abs(
            ours.reshape(-1)[places].astype(np.int64) - theirs.reshape(-1)[places].astype(np.int64)
        )
        self.differing += places.size
        self.steps = max(self.steps, int(steps.max()))
        if exact is not None and exact.size == ours.size:
            values = exact.reshape(-1)[places]
            at_tie = np.abs(values - np.floor(values) - 0.5) < TIE_STEPS
            self.ties += int(np.count_nonzero(at_tie & (steps == 1)))


def _relative(ours: NDArray[Any], theirs: NDArray[Any]) -> float:
    """The largest difference as a part of the largest value; infinite where only one is finite."""
    a, b = ours.astype(np.float64), theirs.astype(np.float64)
    finite = np.isfinite(a) & np.isfinite(b)
    if np.any(~finite & (a != b) & ~(np.isnan(a) & np.isnan(b))):
        return float("inf")
    worst = float(np.abs(a[finite] - b[finite]).max(initial=0.0))
    largest = float(np.abs(b[finite]).max(initial=0.0))
    return worst / largest if largest else worst


@dataclass(frozen=True)
class Replay:
    """One comparison of the two runtimes.

    Attributes:
        level: onnxruntime's graph optimizations.
        provider: Its execution provider.
        device: Whose integer arithmetic the runtime used.
        nodes: Nodes of the main graph, in the order in which they run.
        outputs: SQNR in dB of the float outputs, onnxruntime's against the runtime's when both run
            on their own; 200 for identical values.
    """

    level: Level
    provider: str
    device: str
    nodes: tuple[NodeTotals, ...]
    outputs: Mapping[str, float] = field(default_factory=dict)

    @property
    def codes(self) -> int:
        """Codes compared."""
        return sum(node.elements for node in self.nodes if node.is_codes)

    @property
    def identical(self) -> float:
        """Part of all codes that are the same, from 0 to 1; 1 where there are none."""
        differing = sum(node.differing for node in self.nodes)
        return 1.0 - differing / self.codes if self.codes else 1.0

    @property
    def steps(self) -> int:
        """The largest difference at any node, in quantization steps."""
        return max((node.steps for node in self.nodes), default=0)


def replay(
    model: ir.Model,
    samples: Iterable[Feeds],
    *,
    level: Level = Level.ALL,
    provider: str = CPU,
    device: Device = EXACT,
    arithmetic: Arithmetic | None = None,
    threads: int = 1,
) -> Replay:
    """Compares the runtimes on some samples.

    Args:
        model: As ``load_model`` leaves it; not changed.
        samples: Inputs of one run each.
        level: onnxruntime's graph optimizations.
        provider: Its execution provider.
        device: Whose integer arithmetic the runtime uses.
        arithmetic: How the runtime computes Q/DQ regions; None for the way of onnxruntime at this
            level.
        threads: onnxruntime's.

    Raises:
        UnsupportedModelError: The runtime has no function for an operator.
        ModelExecutionError: A runtime refuses the model or its inputs.
    """
    fused = level in _INTEGER_LEVELS
    if arithmetic is None:
        arithmetic = Arithmetic.INTEGER if fused else Arithmetic.FLOAT
    ours = Runtime(model, arithmetic=arithmetic, device=device, tracing=True)
    observed = _observed(model, ours, floats=not fused)
    watching = open_session(
        tapped(model, list(observed)),
        level=level,
        threads=threads,
        provider=provider,
        products=Products.NATIVE,
    )
    alone = open_session(
        model, level=level, threads=threads, provider=provider, products=Products.NATIVE
    )
    totals: dict[str, NodeTotals] = {}
    outputs: dict[str, Similarity] = {}
    for feeds in samples:
        _compare_nodes(ours, run(watching, feeds), feeds, observed, totals)
        found = ours.run(feeds)
        for name, expected in run(alone, feeds).items():
            if is_float(expected):
                outputs.setdefault(name, Similarity()).update(found[name], expected)
    return Replay(
        level,
        provider,
        device.name,
        tuple(totals.values()),
        {name: similarity.sqnr_db for name, similarity in outputs.items()},
    )


_Observed = Mapping[str, bool]
"""Whether a tensor holds codes, by name."""


def _observed(model: ir.Model, runtime: Runtime, *, floats: bool) -> _Observed:
    values = {v.name: v for node in model.graph for v in node.outputs if v.name}
    found: dict[str, bool] = {}
    for step in runtime.plan.steps:
        for name in step.outputs:
            value = values.get(name)
            if value is None:
                continue
            if is_codes(value):
                found[name] = True
            elif floats and value.dtype in (ir.DataType.FLOAT, ir.DataType.FLOAT16):
                found[name] = False
    return found


_CODES = (ir.DataType.UINT8, ir.DataType.INT8, ir.DataType.UINT16, ir.DataType.INT16)


def is_codes(value: ir.Value) -> bool:
    """Whether a tensor holds the codes of a quantized tensor: by the operator that makes it."""
    node = value.producer()
    if node is None or node.outputs[0] is not value:
        return False
    quantizes = node.op_type == "QuantizeLinear" or node.op_type.startswith("QLinear")
    known = value.dtype in _CODES or value.dtype is None
    return known and (quantizes or (node.op_type == "QGemm" and len(node.inputs) > 8))


def _compare_nodes(
    ours: Runtime,
    theirs: Mapping[str, Value],
    feeds: Feeds,
    observed: _Observed,
    totals: dict[str, NodeTotals],
) -> None:
    steps = ours.plan.steps
    rounded = {step.inputs[0] for step in steps if step.op_type == "QuantizeLinear"}
    floats: dict[str, NDArray[Any]] = {}

    def probe(step: Step, name: str, value: Value) -> Value:
        if name in rounded:
            floats[name] = value
        if name not in observed:
            return value
        total = totals.setdefault(
            name, NodeTotals(step.name, step.op_type, name, is_codes=observed[name])
        )
        expected = np.asarray(theirs[name])
        if expected.shape != np.shape(value):
            total.add_other_shape(value)
            return value
        total.add(value, expected, _exact(step, floats, ours))
        return expected.astype(value.dtype, copy=False)

    ours.run(feeds, probe=probe)


def _exact(step: Step, floats: Mapping[str, NDArray[Any]], runtime: Runtime) -> NDArray[Any] | None:
    """The values that were rounded, in steps."""
    if step.op_type != "QuantizeLinear":
        return step.engine.exact
    values, scale = floats.get(step.inputs[0]), runtime.plan.constants.get(step.inputs[1])
    if values is None or scale is None or scale.size != 1:
        return None
    return values.astype(np.float64) / float(scale.reshape(()))
