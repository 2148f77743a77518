"""Puts what a training copy has learned into the Q/DQ graph: values change, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from slimctl.graph.edit import NameScope, add_initializer, const_tensor
from slimctl.numerics.affine import quantize
from slimctl.passes._qat_graph import FloatBias, TrainingCopy
from slimctl.passes._weights import quantize_bias


def write_learned(
    copy: TrainingCopy,
    values: Mapping[str, NDArray[Any]],
    scales: Mapping[str, NDArray[np.float32]],
    model: ir.Model,
) -> None:
    """Changes a model.

    Args:
        copy: What was trained.
        values: What it learned and measured, by name.
        scales: Exponentials of what stands for scales, by the name of that.
        model: The Q/DQ graph that it is a copy of, or a clone.
    """
    store = _Store(model)
    nodes = {node.name: node for node in model.graph}
    known = copy.scale_values(scales)
    own = {*copy.start, *(scale.name for scale in copy.scales)}
    for name, array in values.items():
        if name not in own:
            store.constant(name, array)
    for name, array in known.items():
        if name in model.graph.initializers:
            store.constant(name, array)
    latents = {**copy.start, **values}
    for weight in copy.weights:
        floats = latents[weight.name]
        scale = known[weight.scale]
        codes = quantize(floats, scale, weight.zero_point, weight.kind, weight.axis)
        store.input(nodes[weight.holder], 0, codes)
    for bias in copy.biases:
        floats = latents[bias.name]
        scale = bias_scale(bias, known, floats.size)
        store.input(nodes[bias.restorer], 0, quantize_bias(floats, scale))
        store.input(nodes[bias.restorer], 1, scale)


def bias_scale(
    bias: FloatBias, scales: Mapping[str, NDArray[np.float32]], channels: int
) -> NDArray[np.float32]:
    """``s_x * s_w`` in float32 as kernels compute it: [channels], or [] for one."""
    product = np.float32(scales[bias.data_scale].reshape(())) * scales[bias.weight_scale]
    found = np.asarray(product, np.float32)
    # the groups of a ConvTranspose share the scales of their channels
    return np.tile(found, channels // found.size) if found.ndim else found


class _Store:
    """New values for constants of a model."""

    def __init__(self, model: ir.Model) -> None:
        self._graph, self._names = model.graph, NameScope(model)
        self._given: dict[str, bytes] = {}

    def constant(self, name: str, array: NDArray[Any]) -> None:
        """A constant by its name, whatever holds it."""
        value = self._graph.initializers.get(name)
        if value is None:
            (value,) = (n.outputs[0] for n in self._graph if n.outputs[0].name == name)
        before = const_tensor(value)
        assert before is not None, "it was a constant when the copy was made"
        tensor = _as(before, array, name)
        maker = value.producer()
        if maker is None:
            value.const_value = tensor
        else:  # a Constant node, whatever attribute it had
            maker.attributes.clear()
            maker.attributes.add(ir.AttrTensor("value", tensor))

    def input(self, node: ir.Node, index: int, array: NDArray[Any]) -> None:
        """A constant that a node reads: one of its own where others get other values for it."""
        value = node.inputs[index]
        before = const_tensor(value)
        assert value is not None and before is not None, "it was one when the copy was made"
        tensor = _as(before, array, value.name or "")
        data = tensor.numpy().tobytes()
        if self._given.setdefault(value.name or "", data) == data:
            value.const_value = tensor
            return
        name = self._names.fresh(value.name or "")
        node.replace_input_with(index, add_initializer(self._graph, name, tensor.numpy()))


def _as(before: ir.TensorProtocol, array: NDArray[Any], name: str) -> ir.TensorProtocol:
    """In type and shape as another."""
    shaped = array.reshape(before.shape.numpy()).astype(before.dtype.numpy())
    return ir.tensor(np.array(shaped, order="C"), dtype=before.dtype, name=name)
