"""Turns Q/DQ pairs into the operators on integers that onnxruntime would make of them.

A Q/DQ graph says what is quantized, and leaves it to the runtime to find its integer kernels when a
model is loaded, at the levels of optimization that look for them. The QOperator format names the
kernels in the file (QLinearConv, QLinearMatMul, and those of onnxruntime's domain com.microsoft):
what is computed in integers no longer depends on the level, and loading costs no search.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, ClassVar, Final

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from slimctl.core.contract import Context, Effect, Pass, PassReport, Skipped
from slimctl.core.errors import UnsupportedModelError
from slimctl.core.target import Target
from slimctl.graph.edit import (
    NameScope,
    add_initializer,
    all_nodes,
    const_array,
    remove_dead,
    set_provenance,
)
from slimctl.passes._qoperator_rules import CONTRIB, LAYERS, RULES, Integer
from slimctl.passes._qoperator_site import (
    DEQUANTIZE,
    QUANTIZE,
    Site,
    Unfit,
    dequantizer,
    quantizers,
)
from slimctl.passes._quantized_layers import was_quantized

_OPSET: Final = 13  # by then the operators that move values move integers of 8 bits, too
_PAIR: Final = (QUANTIZE, DEQUANTIZE)
_STORED: Final = "it has no integer kernel: the weight is stored as integers, computed in float"


class QOperator(Pass):
    """Operators on integers in place of Q/DQ pairs."""

    name: ClassVar[str] = "qoperator"
    summary: ClassVar[str] = "Operators on integers in place of Q/DQ pairs (QOperator format)"
    effect: ClassVar[Effect] = Effect.APPROXIMATE
    after: ClassVar[frozenset[str]] = frozenset({"quantize-static"})

    def minimum_opset(self, model: ir.Model, target: Target) -> int:
        """13, in which operators that move values take integers of 8 bits."""
        del model, target
        return _OPSET

    def requires(self, model: ir.Model) -> None:
        """Wants a Q/DQ graph.

        Raises:
            UnsupportedModelError: There is no DQ.
        """
        if not any(_is_pair(node) for node in all_nodes(model)) and not was_quantized(model):
            raise UnsupportedModelError(
                "The model holds no QuantizeLinear or DequantizeLinear to turn into operators",
                fix="put qoperator behind quantize-static",
            )

    def apply(self, model: ir.Model, context: Context) -> PassReport:
        """Replaces every node for which there is an integer operator."""
        del context
        before = _count_pairs(model)
        writer = _Writer(model)
        writer.drop_requantizers()
        changed: Counter[str] = Counter()
        skipped: list[Skipped] = []
        for node in [node for node in all_nodes(model) if _is_candidate(node)]:
            op_type = node.op_type
            reason = writer.turn(node)
            if reason:
                skipped.append(Skipped(node.name or "", reason))
            else:
                changed[op_type] += 1
        remove_dead(model)
        after = _count_pairs(model)
        note = f"{before - after} Q/DQ nodes are gone; {after} stay at borders to float operators"
        return PassReport(
            changed=dict(sorted(changed.items())),
            skipped=tuple(skipped),
            notes=(note,),
            facts={"pairs": {"before": before, "after": after}},
        )


def _is_pair(node: ir.Node) -> bool:
    return node.op_type in _PAIR and not node.domain


def _count_pairs(model: ir.Model) -> int:
    return sum(map(_is_pair, all_nodes(model)))


def _is_candidate(node: ir.Node) -> bool:
    """Whether a node stands between pairs, or has a weight that is stored as integers."""
    if _is_pair(node) or not node.inputs or dequantizer(node.inputs[0]) is None:
        return _has_stored_weight(node)
    if node.op_type in LAYERS and not node.domain:
        return dequantizer(node.inputs[1]) is not None
    return any(quantizers(output) for output in node.outputs) or _has_stored_weight(node)


def _has_stored_weight(node: ir.Node) -> bool:
    layer = node.op_type in (*LAYERS, "ConvTranspose") and not node.domain
    source = dequantizer(node.inputs[1]) if layer else None
    return source is not None and const_array(source.inputs[0]) is not None


class _Writer:
    """Replaces nodes of one model in place."""

    def __init__(self, model: ir.Model) -> None:
        self._model = model
        self._names = NameScope(model)
        self._zeros: dict[tuple[ir.Value, np.dtype[Any]], ir.Value] = {}
        self._codes: dict[tuple[ir.Graph, bytes, np.dtype[Any]], ir.Value] = {}

    def drop_requantizers(self) -> None:
        """Lets readers of a Q behind a DQ of the same scale read the integers themselves.

        Such a pair stands where a branch of an If quantizes for itself what it reads from outside.
        """
        for node in [node for node in all_nodes(self._model) if node.op_type == QUANTIZE]:
            source = dequantizer(node.inputs[0])
            if source is None or source.inputs[0] is None or node.outputs[0].is_graph_output():
                continue
            if _same_parameters(source, node):
                node.outputs[0].replace_all_uses_with(source.inputs[0])

    def turn(self, node: ir.Node) -> str:
        """Replaces a node by its operator on integers.

        Returns:
            Why it was left alone; empty when it was not.
        """
        if node.op_type == "ConvTranspose" and not node.domain:
            return _STORED
        rule = None if node.domain else RULES.get(node.op_type)
        if rule is None:
            return f"there is no integer {node.op_type}"
        try:
            made = rule(Site(node, self._zero_point))
        except Unfit as reason:
            return str(reason)
        self._replace(node, made)
        return ""

    def _replace(self, node: ir.Node, made: Integer) -> None:
        graph, inputs = _graph(node), list(made.inputs)
        for index, code in made.codes:
            inputs[index] = self._code(graph, code)
        while inputs and inputs[-1] is None:
            inputs.pop()
        new = ir.Node(
            made.domain, made.op_type, inputs, made.attributes, num_outputs=len(made.writes)
        )
        graph.insert_before(node, new)
        old = dict.fromkeys([node, *(value.producer() for value in made.writes)])
        for value, output in zip(made.writes, new.outputs, strict=True):
            self._take_over(value, output)
        # An unused output has no Q that says its type.
        _settle_types(new)
        name = node.name
        graph.remove([gone for gone in old if gone is not None], safe=True)
        new.name = name
        set_provenance(new, QOperator.name)
        if made.domain == CONTRIB:
            self._model.opset_imports.setdefault(CONTRIB, 1)

    def _take_over(self, value: ir.Value, output: ir.Value) -> None:
        """Lets a new value stand for an old one, under its name."""
        name, output.type, output.shape = value.name, value.type, value.shape
        value.replace_all_uses_with(output, replace_graph_outputs=True)
        value.name = self._names.fresh(f"{name}_replaced")
        output.name = name

    def _zero_point(self, scale: ir.Value, kind: Any) -> ir.Value:
        key = (scale, np.dtype(kind))
        if key not in self._zeros:
            array = const_array(scale)
            home = scale.graph
            assert array is not None and isinstance(home, ir.Graph), "a constant of the model"
            zeros = np.zeros(array.shape, kind)
            name = self._names.fresh(f"{scale.name}_zero_point")
            self._zeros[key] = add_initializer(home, name, zeros)
        return self._zeros[key]

    def _code(self, graph: ir.Graph, code: NDArray[Any]) -> ir.Value:
        key = (graph, code.tobytes(), code.dtype)
        if key not in self._codes:
            self._codes[key] = add_initializer(graph, self._names.fresh("pad_code"), code)
        return self._codes[key]


def _graph(node: ir.Node) -> ir.Graph:
    assert isinstance(node.graph, ir.Graph), "a node of a model"
    return node.graph


def _same_parameters(dequantize: ir.Node, quantize: ir.Node) -> bool:
    """Whether the Q gives back the integers that the DQ read."""
    sides = [[const_array(value) for value in node.inputs[1:3]] for node in (dequantize, quantize)]
    if any(len(side) != 2 or any(array is None for array in side) for side in sides):
        return False
    return all(
        a is not None and b is not None and a.dtype == b.dtype and a.size == 1 and a == b
        for a, b in zip(*sides, strict=True)
    )


def _settle_types(node: ir.Node) -> None:
    known = next((output.type for output in node.outputs if output.uses()), None)
    for output in node.outputs:
        if not output.uses() and not output.is_graph_output():
            output.type = known
