"""The strongest channels of what a layer reads are multiplied in float, all others in integers.

One scale serves all channels of an activation. Where a few are many times as strong as the rest,
they take it, and the rest keeps a few levels. ``X W = X' W + X[:, o] W[o]``, where ``X'`` is ``X``
with the outlier channels ``o`` set to zero (Dettmers et al., "LLM.int8(): 8-bit Matrix
Multiplication for Transformers at Scale", NeurIPS 2022, section 3.2): the product in integers has
a small range, and the product in float a few columns.
"""

from __future__ import annotations

import math
from typing import ClassVar, Final, NamedTuple

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from pydantic import Field

from slimctl.core.contract import Context, Effect, Pass, PassReport, Skipped
from slimctl.graph.edit import NameScope, set_provenance
from slimctl.graph.select import Patterns, Selection, keep_float
from slimctl.graph.shapes import infer_shapes
from slimctl.passes._layers import QUANTIZERS
from slimctl.passes._linear_samples import LinearLayer
from slimctl.passes._smooth_inputs import SharedInput, shared_inputs, strengths
from slimctl.passes._weights_write import Editor, graph_of

_LEAST_SHRINK: Final = 2.0
"""A bit gained for the rest; with less a further product does not pay."""

_MOST: Final = 0.25
"""Of the channels: more are no outliers."""

_REASON: Final = "it multiplies the outliers of another layer, in float"


class SplitOutliers(Pass):
    """Multiply the strongest input channels of MatMul and Gemm in float."""

    name: ClassVar[str] = "split-outliers"
    summary: ClassVar[str] = "Multiply the strongest input channels of linear layers in float"
    effect: ClassVar[Effect] = Effect.EXACT
    needs_data: ClassVar[bool] = True
    not_after: ClassVar[frozenset[str]] = QUANTIZERS

    channels: int = Field(
        16, ge=1, description="How many of each tensor that layers read: the strongest ones."
    )
    include: Patterns = Field(
        (), description="Split only matching layers: name glob, op:TYPE or re:REGEX; repeatable."
    )
    exclude: Patterns = Field(
        (), description="Leave matching layers as they are: as --include; repeatable."
    )

    def apply(self, model: ir.Model, context: Context) -> PassReport:
        """Splits every layer for which the range of the other channels shrinks by half."""
        infer_shapes(model)
        selection = Selection(self.include, self.exclude)
        everything, skipped = shared_inputs(model, selection)
        found = [shared for shared in everything if shared.axis == -1]
        for shared in everything:
            if shared.axis != -1:
                skipped.extend(Skipped(n, "convolutions stay as they are") for n in shared.names)
        splits: list[_Split] = []
        for shared, strength in strengths(model, found, context):
            split = self._choose(shared, strength.peak)
            if isinstance(split, str):
                skipped.extend(Skipped(name, split) for name in shared.names)
            else:
                splits.append(split)
        editor = Editor(model, NameScope(model), self.name)
        for split in splits:
            _write(split, editor)
        changed: dict[str, int] = {}
        for layer in (layer for split in splits for layer in split.shared.layers):
            kind = layer.layer.node.op_type
            changed[kind] = changed.get(kind, 0) + 1
        return PassReport(
            changed=changed,
            skipped=tuple(skipped),
            notes=(
                *_notes(splits),
                *(f"the pattern '{pattern}' matched nothing" for pattern in selection.unused()),
            ),
            facts={"range_shrinks": {s.shared.name: round(s.shrinks, 3) for s in splits}},
        )

    def _choose(self, shared: SharedInput, peak: NDArray[np.float64]) -> _Split | str:
        count = min(self.channels, math.floor(_MOST * peak.size))
        if not count:
            return f"{peak.size} channels are too few to take some apart"
        order = np.argsort(-peak, kind="stable")
        largest, rest = float(peak[order[0]]), float(peak[order[count]])
        if not largest:
            return "its input never held anything but zeros"
        shrinks = largest / rest if rest else math.inf
        if shrinks < _LEAST_SHRINK:
            return (
                f"without its {count} strongest channels the range of its input shrinks "
                f"{shrinks:.1f} times only"
            )
        return _Split(shared, np.sort(order[:count]), shrinks)


class _Split(NamedTuple):
    """Outlier channels of a tensor, and how much smaller the range is without them."""

    shared: SharedInput
    channels: NDArray[np.int64]
    shrinks: float


def _write(split: _Split, editor: Editor) -> None:
    """One selection and one product with zeros serve all layers that read the tensor."""
    layers, value = split.shared.layers, split.shared.value
    first, base = layers[0].layer.node, split.shared.name
    home = graph_of(first)
    mask = np.ones(split.shared.channels, np.float32)
    mask[split.channels] = 0
    places = editor.constant(home, f"{base}_outlier_channels", split.channels)
    others = editor.constant(home, f"{base}_other_channels", mask)
    outliers = editor.before(first, "Gather", [value, places], {"axis": -1}).outputs[0]
    rest = editor.before(first, "Mul", [value, others]).outputs[0]
    rest.type, outliers.type = value.type, value.type
    for layer in layers:
        _split(layer, split.channels, outliers, rest, editor)


def _split(
    layer: LinearLayer,
    channels: NDArray[np.int64],
    outliers: ir.Value,
    rest: ir.Value,
    editor: Editor,
) -> None:
    node, output = layer.layer.node, layer.layer.output
    weight = layer.matrix()[0].T[channels].astype(np.float32)  # [outliers, outputs]
    rows = editor.constant(graph_of(node), f"{layer.name}_outlier_weight", weight)
    product = editor.before(node, "MatMul", [outliers, rows])
    product.name = editor.names.fresh_node(f"{layer.name}_outliers")
    keep_float(product, _REASON)
    node.replace_input_with(0, rest)
    added = ir.Node(
        "", "Add", [None, product.outputs[0]], name=editor.names.fresh_node(f"{layer.name}_sum")
    )
    total = added.outputs[0]
    total.type, total.shape = output.type, output.shape
    output.replace_all_uses_with(total, replace_graph_outputs=True)
    added.replace_input_with(0, output)
    output.name, total.name = editor.names.fresh(f"{layer.name}_others"), output.name
    set_provenance(added, editor.creator)
    graph_of(node).insert_after(node, added)


def _notes(splits: list[_Split]) -> list[str]:
    if not splits:
        return []
    layers = sum(len(split.shared.layers) for split in splits)
    median = float(np.median([split.shrinks for split in splits]))
    return [
        f"{layers} layers read {len(splits)} tensors whose range shrinks {median:.1f} times "
        "(median) without their strongest channels"
    ]
