"""A graph as a torch module: its weights are parameters, and go back into the graph."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Self

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor, nn

from slimctl.core.errors import UnsupportedModelError
from slimctl.graph.edit import const_tensor
from slimctl.graph.select import Selection
from slimctl.training.branches import distinct_names
from slimctl.training.graph import TorchGraph
from slimctl.training.learnable import find_measuring, find_weights, statistics_of
from slimctl.training.tensors import to_numpy, to_torch

_WHOLE = (torch.bool, torch.int32, torch.int64)
_FEW = 4096
"""Elements. Sizes, axes and indices are few; larger ones would be moved in every step."""

_REMEDY = "leave out the step that trains"


class TrainableGraph(nn.Module):
    """Computes what a model computes, and learns.

    Weights (see :mod:`slimctl.training.learnable`) are parameters, statistics of batches and other
    constants are buffers, sizes and indices stay on the CPU. Half precision is computed, and
    learned, in single precision. Zeros among the elements of matrices stay zeros: pruned
    connections do not come back.

    Attributes:
        learned: Names of the weights, in the order of ``weights``.
        skipped: Nodes whose weights are kept, with the reason.

    Args:
        model: Not changed; :meth:`write_back` changes it.
        selection: Which nodes learn; all by default.
        also: Names of further float constants that are learned, such as quantization scales.
        masked: Zeros of matrices stay zeros.

    Raises:
        UnsupportedModelError: torch cannot run an operator, which is named, or there is nothing
            to learn.
    """

    def __init__(
        self,
        model: ir.Model,
        selection: Selection | None = None,
        *,
        also: Collection[str] = (),
        masked: bool = True,
    ) -> None:
        super().__init__()
        self._graph = TorchGraph(model, _REMEDY)
        selection = selection or Selection()
        found, self.skipped = find_weights(self._graph.model, selection)
        matrices = {weight.value.name or "": weight.matrix for weight in found}
        held = self._graph.constants
        stored = distinct_names(model)  # without what a newer operator set brought with it
        self.learned = tuple(n for n in (*matrices, *also) if n in held and n in stored)
        if not self.learned:
            raise UnsupportedModelError(
                "The graph has no weights to learn",
                where=f"graph {model.graph.name}",
                fix="choose layers with --include and --exclude that have float weights; a "
                "quantized model is trained with quantize --mode qat",
            )
        measuring = find_measuring(self._graph.model, selection)
        self._measuring = frozenset(node.name or "" for node in measuring)
        self._statistics = tuple(
            name for name in dict.fromkeys(_names(statistics_of(measuring))) if name in stored
        )
        decaying = {weight.value.name for weight in found if weight.decays}
        self._decaying = tuple(name in decaying for name in self.learned)
        self.weights = nn.ParameterList(
            [nn.Parameter(_channels_last(held[name])) for name in self.learned]
        )
        numbers = self._graph.numbers()
        self._numbers = {
            name: tensor
            for name, tensor in held.items()
            if name not in self.learned and (_is_number(tensor) or name in numbers)
        }
        self._fixed = tuple(n for n in held if n not in self.learned and n not in self._numbers)
        for index, name in enumerate(self._fixed):
            self.register_buffer(f"fixed_{index}", held[name], persistent=name in self._statistics)
        self._masks: list[Tensor | None] = []
        for index, name in enumerate(self.learned):
            mask = _mask(held[name]) if masked and matrices.get(name, False) else None
            self.register_buffer(f"mask_{index}", mask, persistent=False)
            if mask is not None:
                self.weights[index].register_hook(_Masked(self, index))
        self._graph.constants = {}  # they live in the module now

    def forward(self, feeds: Mapping[str, Tensor], keep: Collection[str]) -> dict[str, Tensor]:
        """Computes tensors of the model.

        Args:
            feeds: Inputs by name.
            keep: Names of the tensors to give back.

        Raises:
            ModelExecutionError: The inputs do not fit; names the node.
        """
        held: dict[str, Tensor] = dict(zip(self.learned, self.weights, strict=True))
        for index, name in enumerate(self._fixed):
            held[name] = self.get_buffer(f"fixed_{index}")
        given = {name: _channels_last(tensor) for name, tensor in feeds.items()}
        return self._graph.execute({**self._numbers, **held, **given}, keep)

    def train(self, mode: bool = True) -> Self:
        """Whether normalizations that learn use, and measure, the statistics of batches."""
        self._graph.set_training(self._measuring if mode else ())
        return super().train(mode)

    def by_decay(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """Weights that decay, and those that do not: biases, scales, what was named further."""
        pairs = list(zip(self.weights, self._decaying, strict=True))
        return [w for w, decays in pairs if decays], [w for w, decays in pairs if not decays]

    def mask(self, index: int) -> Tensor | None:
        """Which elements of a weight may be other than zero; None if all may."""
        return self._buffers[f"mask_{index}"]

    @torch.no_grad()
    def apply_masks(self) -> None:
        """Sets what must be zero to zero; momentum moves weights that have no gradient."""
        for index, weight in enumerate(self.weights):
            mask = self.mask(index)
            if mask is not None:
                weight.mul_(mask)

    def values(self) -> dict[str, Tensor]:
        """What was learned and measured, by name of the tensor."""
        found: dict[str, Tensor] = dict(zip(self.learned, self.weights, strict=True))
        for index, name in enumerate(self._fixed):
            if name in self._statistics:
                found[name] = self.get_buffer(f"fixed_{index}")
        return found

    def write_back(self, model: ir.Model) -> list[str]:
        """Puts what was learned into a model; only values change.

        Args:
            model: The one that this was made from, or a clone of it.

        Returns:
            Names of the tensors whose values are other than before.
        """
        places = distinct_names(model)
        changed = []
        for name, tensor in self.values().items():
            value = places[name]
            before = const_tensor(value)
            assert before is not None, "it was a constant when this was made"
            learned = to_numpy(tensor.cpu())
            if learned.tobytes() == to_torch(before.numpy()).numpy().tobytes():
                continue  # narrowing would change NaNs
            array = learned.astype(before.dtype.numpy())
            if array.tobytes() != before.numpy().tobytes():
                _store(value, ir.tensor(np.array(array), dtype=before.dtype, name=name))
                changed.append(name)
        return changed


class _Masked:
    """A hook that keeps gradients off what must stay zero."""

    def __init__(self, module: TrainableGraph, index: int) -> None:
        self._module, self._index = module, index

    def __call__(self, gradient: Tensor) -> Tensor:
        mask = self._module.mask(self._index)
        assert mask is not None, "hooks are for weights with a mask"
        return gradient * mask


def _mask(weight: Tensor) -> Tensor | None:
    """Ones where a weight is not zero; None if it is nowhere zero, or everywhere."""
    kept = weight != 0
    return None if bool(kept.all()) or not bool(kept.any()) else kept.to(weight.dtype)


def _channels_last(tensor: Tensor) -> Tensor:
    """The same values; kernels and images lie in memory as convolutions are fastest on them.

    Copied, since the order of one channel or one position says nothing, and ``contiguous`` would
    leave strides by which torch computes the whole network channels first.
    """
    if tensor.ndim != 4 or not tensor.is_floating_point():
        return tensor
    return torch.empty_like(tensor, memory_format=torch.channels_last).copy_(tensor)


def _is_number(tensor: Tensor) -> bool:
    """Whether it says what to do rather than being computed with: such tensors stay on the CPU."""
    return tensor.dtype in _WHOLE and tensor.numel() <= _FEW


def _names(values: Collection[ir.Value]) -> list[str]:
    return [value.name or "" for value in values]


def _store(value: ir.Value, tensor: ir.TensorProtocol) -> None:
    node = value.producer()
    if node is None:
        value.const_value = tensor
    else:  # a Constant node, whatever attribute it had
        node.attributes.clear()
        node.attributes.add(ir.AttrTensor("value", tensor))
