"""Recurrent layers: a hidden unit is a channel, in all of its gates and in both directions.

Names as in ONNX: T steps, B batch, D directions, G gates, H hidden units, I inputs. A unit whose
weights are zero stays at zero if it begins there:

- LSTM: ``C = f * C' + i * g(0)`` and ``H = o * h(C)``, zero where g(0) = h(0) = 0.
- GRU: ``H = (1 - z) * g(0) + z * H'``, before or after the reset gate is applied.
- RNN: ``H = f(0)``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from slimctl.graph.channels.coupling import Member, Role
from slimctl.graph.channels.fills import always_zero
from slimctl.graph.channels.rule import Rule
from slimctl.graph.channels.site import Site
from slimctl.graph.channels.units import Ids
from slimctl.graph.edit import const_array

if TYPE_CHECKING:
    import onnx_ir as ir

_W, _R, _B, _P = 1, 2, 3, 7
_ZERO_AT_ZERO = frozenset(
    {"elu", "leakyrelu", "relu", "scaledtanh", "softsign", "tanh", "thresholdedrelu"}
)
"""Activations with f(0) = 0, in lower case: ONNX does not mind how they are spelled."""


class _Layer(NamedTuple):
    """One of the recurrent operators.

    Attributes:
        gates: Blocks of H rows in W and R.
        activations: How many each direction has.
        judged: Which of them must be zero at zero.
        states: Inputs with the initial state [D, B, H].
    """

    gates: int
    activations: int
    judged: tuple[int, ...]
    states: tuple[int, ...]


_LAYERS = {
    "GRU": _Layer(3, 2, (1,), (5,)),
    "LSTM": _Layer(4, 3, (1, 2), (5, 6)),
    "RNN": _Layer(1, 1, (0,), (5,)),
}


def _recurrent(site: Site) -> None:
    """X [T, B, I], W [D, G*H, I], R [D, G*H, H], B [D, 2*G*H], P [D, 3*H]; Y [T, D, B, H].

    With ``layout=1`` other axes change places; the features of X, of the states and of all outputs
    stay last.
    """
    layer = _LAYERS[site.node.op_type]
    recurrence = site.constant(_R)
    others = [index for index in (_B, _P) if site.has(index)]
    if recurrence is None or any(site.constant(index) is None for index in (_W, *others)):
        site.block_inputs("its weights are computed at run time")
        return
    _read(site)
    ids = site.fresh(int(recurrence.shape[2]))
    site.member(_W, 1, np.tile(ids, layer.gates), Role.PRODUCE)
    site.member(_R, 1, np.tile(ids, layer.gates), Role.PRODUCE)
    site.member(_R, 2, ids, Role.CONSUME)
    for index in others:
        blocks = 2 * layer.gates if index == _B else 3
        site.member(index, 1, np.tile(ids, blocks), Role.PRODUCE)
    for index in layer.states:
        _begin(site, index, ids)
    _judge(site, layer, ids)
    for output in range(len(site.node.outputs)):
        site.label(2 if output else 3, site.computed(ids), output=output)
    site.when_fewer(
        ids, lambda removal: removal.set_int(site.node, "hidden_size", removal.count(ids))
    )


def _read(site: Site) -> None:
    for axis, labels in site.axes().items():
        if axis == 2:
            site.member(_W, 2, site.consume(labels), Role.CONSUME)
        else:
            site.block(labels.ids, "it is the time or the batch of a recurrent layer")


def _judge(site: Site, layer: _Layer, ids: Ids) -> None:
    for place, name in enumerate(site.attribute("activations", ())):
        judged = place % layer.activations in layer.judged
        if judged and name.lower() not in _ZERO_AT_ZERO:
            site.block(ids, f"its activation {name} does not keep a silent unit at zero")


def _begin(site: Site, index: int, ids: Ids) -> None:
    """The initial state must be zero where a unit is silent, or come from weights of its own."""
    value = site.node.inputs[index] if site.has(index) else None
    if value is None:
        return
    if always_zero(value):
        # Zero is also what a state begins with that is not given, in whatever size it has.
        site.when_fewer(ids, lambda _: site.node.replace_input_with(index, None))
        return
    learned = _expanded(value, ids)
    if site.is_constant(index):
        site.member(index, 2, ids, Role.PRODUCE)
    elif learned is not None:
        site.channels.members.append(learned)
        site.later(lambda removal: removal.set_sizes(learned.node, 1, {2: ids}))
    else:
        _computed_state(site, index, ids, value)


def _expanded(value: ir.Value, ids: Ids) -> Member | None:
    """A learned initial state that is repeated for each sequence of the batch."""
    node = value.producer()
    if (
        node is None
        or node.op_type != "Expand"
        or len(value.uses()) != 1
        or value.is_graph_output()
    ):
        return None
    source = node.inputs[0]
    array = const_array(source)
    if source is None or array is None or array.ndim == 0 or array.shape[-1] != ids.size:
        return None
    return Member(source, array.ndim - 1, ids, Role.PRODUCE, node, 0)


def _computed_state(site: Site, index: int, ids: Ids, value: ir.Value) -> None:
    for axis, labels in site.axes(index).items():
        if axis == 2:
            site.tie(ids, site.consume(labels))
        else:
            site.block(labels.ids, "it is the batch of a recurrent layer")
    if 2 not in site.axes(index):
        site.block(ids, f"its initial state '{value.name}' may not be zero")


RULES = dict.fromkeys(_LAYERS, Rule(_recurrent, computes=True))
