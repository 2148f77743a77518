"""What elements of tensors matter to the outputs of a model, to first order.

Molchanov et al., "Importance Estimation for Neural Network Pruning", CVPR 2019: setting elements
``a`` to zero changes a loss by ``-sum a dL/da``, to first order; the square of that, in the mean
over samples, is their importance (equation 8).

Without labels, what is to be kept is the function itself. The squared change of the outputs ``y``
is ``|J a|^2`` to first order, with the Jacobian ``J = dy/da``; and for random signs ``v``,
``E[(v^T J a)^2] = |J a|^2``: one backward pass with the loss ``v^T y`` estimates it for all
elements at once (Hutchinson's estimator of a trace).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor

from slimctl.core.contract import Feeds
from slimctl.core.errors import UnsupportedModelError
from slimctl.training.graph import TorchGraph
from slimctl.training.tensors import to_numpy


def taylor_terms(
    model: ir.Model,
    tensors: Sequence[str],
    batches: Iterable[Feeds],
    *,
    seed: int,
    threads: int = 0,
) -> Iterator[Feeds]:
    """What each element contributes to ``v^T y``, for one batch after another.

    Args:
        model: Not changed.
        tensors: Names of float tensors of the main graph, constants or computed ones.
        batches: What the model is run on.
        seed: Of the signs.
        threads: For each operator; 0 leaves that to torch.

    Returns:
        ``t * d(v^T y)/dt`` by tensor, in its shape. Outputs are divided by their norm, so that the
        mean square of a sum of elements is the squared relative change of the outputs when they
        become zero. Probabilities are looked at as the scores that they are made from.

    Raises:
        UnsupportedModelError: torch cannot run the model here, or no output holds floats.
    """
    graph = TorchGraph(model)
    outputs = _watched(graph.model)
    if not outputs:
        raise UnsupportedModelError(
            "No output of the model holds floats: nothing can be differentiated",
            where=f"graph {model.graph.name}",
            fix="use another --importance",
        )
    for index, feeds in enumerate(batches):
        random = np.random.default_rng((seed, index))
        with _threads(threads):
            yield _terms(graph, feeds, tensors, outputs, random)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """For a while; the number belongs to the process."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _terms(
    graph: TorchGraph,
    feeds: Feeds,
    tensors: Sequence[str],
    outputs: Sequence[_Output],
    random: np.random.Generator,
) -> Feeds:
    found = graph.run(feeds, [*tensors, *(output.name for output in outputs)])
    wanted = [found[name] for name in tensors]
    parts = [_projected(found[name], shared, random) for name, shared in outputs]
    total = torch.stack(parts).sum()
    # What no output depends on has a gradient of zero.
    gradients = torch.autograd.grad(total, wanted, materialize_grads=True)
    return {
        name: to_numpy(tensor * gradient)
        for name, tensor, gradient in zip(tensors, wanted, gradients, strict=True)
    }


class _Output(NamedTuple):
    """What is looked at of one output.

    Attributes:
        name: The output, or the scores that it is made from.
        shared: Axis along which scores may shift together, which Softmax does not see.
    """

    name: str
    shared: int | None = None


def _watched(model: ir.Model) -> list[_Output]:
    """Outputs of floats; of probabilities the scores, which do not saturate."""
    return list(dict.fromkeys(_output(value) for value in model.graph.outputs if _is_float(value)))


def _is_float(value: ir.Value) -> bool:
    return value.dtype is not None and value.dtype.is_floating_point()


def _output(value: ir.Value) -> _Output:
    node = value.producer()
    if node is None or node.domain or node.op_type not in ("Sigmoid", "Softmax"):
        return _Output(value.name or "")
    (scores,) = node.inputs
    assert scores is not None, "it has one input"
    axis = node.attributes.get_int("axis", -1) if node.op_type == "Softmax" else None
    return _Output(scores.name or "", axis)


def _projected(tensor: Tensor, shared: int | None, random: np.random.Generator) -> Tensor:
    """``v^T y / |y|``, a number."""
    y = tensor if shared is None else tensor - tensor.mean(shared, keepdim=True)
    signs = torch.from_numpy(random.choice(np.array([-1.0, 1.0], np.float32), y.shape))
    # An output that is zero everywhere has no relative change.
    norm = y.detach().square().sum().sqrt().clamp_min(1e-30)
    return (signs.to(y.dtype) / norm * y).sum()
