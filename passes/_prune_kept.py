"""What a removal leaves of the layers, and which units are what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from slimctl.graph.channels import Channels, Group, Role
from slimctl.graph.edit import all_nodes, const_tensor
from slimctl.passes._layers import is_linear, output_axis
from slimctl.passes._reconstruct import Kept


def attention_units(channels: Channels) -> NDArray[np.int64]:
    """Units that are whole heads: batch axes of products of two activations."""
    found: list[NDArray[np.int64]] = [np.zeros(0, np.int64)]
    for passage in channels.passages:
        node = passage.node
        if node.op_type == "MatMul":
            computed = all(value in channels.tensors for value in node.inputs)
            for value in node.inputs if computed else ():
                if value is not None and value.shape is not None:
                    axes = channels.tensors[value].items()
                    found.extend(a.ids for axis, a in axes if axis < len(value.shape) - 2)
        elif "Attention" in node.op_type:
            found.extend(passage.ids)
    ids = np.concatenate(found)
    return np.unique(channels.units.find(ids[ids >= 0]))


def considered_share(model: ir.Model, channels: Channels, groups: Sequence[Group]) -> float:
    """Share of the weights of linear layers of which a slice can go with one of the groups."""
    usable = np.concatenate([*(group.free for group in groups), np.zeros(0, np.int64)])
    weights: dict[ir.Value, int] = {}
    for node in all_nodes(model):
        weight = node.inputs[1] if is_linear(node) and len(node.inputs) > 1 else None
        tensor = const_tensor(weight)
        if weight is not None and tensor is not None:
            weights[weight] = tensor.size
    touched = {
        member.value
        for member in channels.members
        if member.value in weights and np.isin(channels.units.find(member.ids), usable).any()
    }
    return sum(weights[value] for value in touched) / max(sum(weights.values()), 1)


def all_kept(model: ir.Model) -> dict[str, Kept]:
    """Every channel of every linear layer."""
    found: dict[str, Kept] = {}
    for node in model.graph:
        weight = node.inputs[1] if is_linear(node) and len(node.inputs) > 1 else None
        tensor = const_tensor(weight)
        if tensor is None:
            continue
        shape = tensor.shape.numpy()
        count = int(shape[output_axis(node, len(shape))])
        found[node.name or ""] = Kept(node.outputs[0].name or "", np.arange(count))
    return found


def kept_after(
    channels: Channels, gone: NDArray[np.int64], kept: Mapping[str, Kept]
) -> dict[str, Kept]:
    """What is left of each layer's channels when units go."""
    removed = set(channels.units.find(gone).tolist())
    found = dict(kept)
    for member in channels.members:
        name = member.node.name or ""
        if member.place != 1 or member.role is not Role.PRODUCE or name not in found:
            continue
        stays = [unit not in removed for unit in channels.units.find(member.ids).tolist()]
        found[name] = Kept(found[name].output, found[name].channels[np.array(stays)])
    return found
