"""What may be done to single layers, for asking what each would cost: precisions and sparsities.

A change makes variants of one float model: with only some layers changed, or all but some.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import onnx_ir as ir

from slimctl.core.contract import Context, Pass, Skipped
from slimctl.core.errors import OptionError, PassFailedError, nearest
from slimctl.graph.edit import clone_model
from slimctl.graph.select import Selection
from slimctl.graph.shapes import infer_shapes
from slimctl.passes._attempt import Rule, Work
from slimctl.passes._layers import Layer, is_linear, recognize
from slimctl.passes.convert_float import ConvertFloat
from slimctl.passes.prune import Prune
from slimctl.passes.quantize_static import QuantizeStatic
from slimctl.passes.quantize_weights import QuantizeWeights

_RULE: Final = Rule("auto", 2.0)
"""The range of least squared error for each tensor: nothing is tried out on the whole network."""

_SPARSE: Final = re.compile(r"sparse:(0?\.\d+)")

_EXAMPLES: Final = ("int8", "int16", "int4", "fp16", "sparse:0.5")


class Change(Protocol):
    """One way to change layers of one model."""

    def layers(self) -> list[str]:
        """Names of the layers that can be changed, in the order of the graph."""
        ...

    def skipped(self) -> Sequence[Skipped]:
        """Layers that cannot, with the reason."""
        ...

    def only(self, layers: Collection[str]) -> ir.Model:
        """A variant with these changed."""
        ...

    def without(self, layers: Collection[str]) -> ir.Model:
        """A variant with all changed but these."""
        ...


@dataclass(frozen=True)
class _Kind:
    """How one change is made.

    Attributes:
        make: The pass for some layers, from patterns to include.
        static: Ranges of activations are involved, which are calibrated once for all variants.
    """

    make: Callable[..., Pass]
    static: bool = False


def check_change(name: str) -> str:
    """The name itself, where there is such a change.

    Raises:
        OptionError: There is none.
    """
    _kind(name)
    return name


def minimum_opset(names: Sequence[str], model: ir.Model, context: Context) -> int:
    """The operator set that all of these need."""
    steps = (_kind(name).make().resolve(context.target) for name in names)
    return max((step.minimum_opset(model, context.target) for step in steps), default=0)


def open_change(name: str, model: ir.Model, context: Context) -> Change:
    """A change of a float model.

    Args:
        name: ``int8``, ``int16``, ``int4``, ``fp16``, or ``sparse:`` and a share.
        model: With inferred shapes; must not be changed afterwards.
        context: Target, data and what calibration finds out.

    Raises:
        OptionError: There is no such change.
    """
    kind = _kind(name)
    if kind.static:
        step = kind.make()
        assert isinstance(step, QuantizeStatic), "the only pass with ranges"
        return _Calibrated(step, model, context)
    return _Plain(kind.make, model, context)


def _kind(name: str) -> _Kind:
    if name in _KINDS:
        return _KINDS[name]
    sparse = _SPARSE.fullmatch(name)
    if sparse:
        share = float(sparse[1])
        return _Kind(lambda **options: _sparse(share, options))
    raise OptionError(
        "--options", f"Unknown change '{name}'", fix=f"{nearest(name, _EXAMPLES)}; "
        f"valid: {', '.join(_EXAMPLES)}",
    )  # fmt: skip


def _sparse(share: float, options: dict[str, Any]) -> Pass:
    return Prune(
        structure="unstructured", sparsity=share, importance="l1", reconstruct=False, **options
    )


_KINDS: Final[dict[str, _Kind]] = {
    "int8": _Kind(lambda **options: QuantizeStatic(min_sqnr=0.0, **options), static=True),
    "int16": _Kind(
        lambda **options: QuantizeStatic(min_sqnr=0.0, activation_type="uint16", **options),
        static=True,
    ),
    "int4": _Kind(lambda **options: QuantizeWeights(weight_type="uint4", **options)),
    "fp16": _Kind(lambda **options: ConvertFloat(kind="fp16", **options)),
}


class _Calibrated:
    """Static quantization: ranges and placement are found once."""

    def __init__(self, step: QuantizeStatic, model: ir.Model, context: Context) -> None:
        self._work = Work(step.resolve(context.target), model, context, _RULE)
        self._whole = None
        try:
            self._whole = self._work.build(Selection())
        except PassFailedError:
            self._names: list[str] = []
        else:
            self._names = self._whole.layers()

    def layers(self) -> list[str]:
        return self._names

    def skipped(self) -> Sequence[Skipped]:
        if self._whole is None:
            return ()
        return [item for emitter in self._whole.emitters for item in emitter.placement.skipped]

    def only(self, layers: Collection[str]) -> ir.Model:
        rest = {name: "not looked at" for name in self._names if name not in layers}
        return self._work.build(Selection(reasons=rest)).model

    def without(self, layers: Collection[str]) -> ir.Model:
        if not layers and self._whole is not None:
            return clone_model(self._whole.model)
        return self._work.build(Selection(reasons=dict.fromkeys(layers, "not looked at"))).model


class _Plain:
    """A pass that chooses its layers by pattern."""

    def __init__(self, make: Callable[..., Pass], model: ir.Model, context: Context) -> None:
        self._make = make
        self._model = model
        self._context = context
        self._names, self._skipped = self._possible()

    def _possible(self) -> tuple[list[str], Sequence[Skipped]]:
        """What the pass makes of all linear layers: those that it does not skip."""
        linear = [
            node.name or ""
            for node in self._model.graph
            if is_linear(node) and isinstance(recognize(node), Layer)
        ]
        try:
            report = self._make().apply(clone_model(self._model), self._context)
        except PassFailedError as error:
            return [], [Skipped(name, error.what) for name in linear]
        reasons = {item.node: item.reason for item in report.skipped}
        known = [Skipped(name, reasons[name]) for name in linear if name in reasons]
        return [name for name in linear if name not in reasons], known

    def layers(self) -> list[str]:
        return self._names

    def skipped(self) -> Sequence[Skipped]:
        return self._skipped

    def only(self, layers: Collection[str]) -> ir.Model:
        return self._applied(include=tuple(map(_exactly, layers)))

    def without(self, layers: Collection[str]) -> ir.Model:
        rest = tuple(_exactly(name) for name in self._names if name not in layers)
        return self._applied(include=rest)

    def _applied(self, include: tuple[str, ...]) -> ir.Model:
        variant = clone_model(self._model)
        if include:
            self._make(include=include).apply(variant, self._context)
            infer_shapes(variant)
        return variant


def _exactly(name: str) -> str:
    """A pattern for one node. Names may hold what globs give a meaning."""
    return f"re:^{re.escape(name)}$"
