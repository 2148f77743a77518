"""Recurrent layers, step by step.

Names as in ONNX: T steps, B batch, D directions, G gates, H hidden units, I inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from slimctl.training.operator import Call, Operator, Results, any_of, only, without_inputs

States: TypeAlias = tuple[Tensor, ...]
"""What goes from step to step, each [B, H]; the first is what the layer gives."""


class _Weights(NamedTuple):
    """Of one direction: w [G*H, I], r [G*H, H], biases of both [G*H]."""

    w: Tensor
    r: Tensor
    w_bias: Tensor
    r_bias: Tensor


Cell: TypeAlias = Callable[[_Weights, Tensor, States], States]
"""From the weights, ``x @ w.T`` of a step [B, G*H], and the states, to the next states."""


def _run(
    call: Call, cell: Cell, x: Tensor, weights: Sequence[Tensor | None], states: States
) -> Results:
    """X [T, B, I]; w [D, G*H, I], r [D, G*H, H], b [D, 2*G*H]; states [D, B, H].

    Returns:
        Y [T, D, B, H] and the last states [D, B, H].
    """
    direction = call.attribute("direction", "forward")
    turned = {"forward": [False], "reverse": [True], "bidirectional": [False, True]}[direction]
    found, last = [], []
    for index, backwards in enumerate(turned):
        steps = x.flip(0) if backwards else x
        outputs, end = _direction(
            cell, steps, _weights(weights, index), tuple(state[index] for state in states)
        )
        found.append(outputs.flip(0) if backwards else outputs)
        last.append(end)
    return torch.stack(found, 1), *(torch.stack(states) for states in zip(*last, strict=True))


def _weights(weights: Sequence[Tensor | None], index: int) -> _Weights:
    w, r, b = weights
    assert w is not None and r is not None, "only the bias may be left out"
    rows = w.shape[1]
    bias = w.new_zeros(2 * rows) if b is None else b[index]
    return _Weights(w[index], r[index], bias[:rows], bias[rows:])


def _direction(cell: Cell, x: Tensor, weights: _Weights, states: States) -> tuple[Tensor, States]:
    inputs = x @ weights.w.T  # [T, B, G*H]
    outputs = []
    for step in inputs:
        states = cell(weights, step, states)
        outputs.append(states[0])
    return torch.stack(outputs), states


def _initial(x: Tensor, r: Tensor, given: Sequence[Tensor | None]) -> States:
    zeros = x.new_zeros(r.shape[0], x.shape[1], r.shape[2])
    return tuple(zeros if state is None else state for state in given)


# cells


def _lstm_cell(weights: _Weights, x: Tensor, states: States) -> States:
    """Gates in the order input, output, forget, cell."""
    hidden, cell = states
    gates = x + weights.w_bias + hidden @ weights.r.T + weights.r_bias
    enter, leave, keep, new = gates.chunk(4, -1)
    cell = torch.sigmoid(keep) * cell + torch.sigmoid(enter) * torch.tanh(new)
    return torch.sigmoid(leave) * torch.tanh(cell), cell


def _gru_cell(weights: _Weights, x: Tensor, states: States, *, reset_behind: bool) -> States:
    """Gates in the order update, reset, hidden."""
    (hidden,) = states
    size = hidden.shape[-1]
    inputs = x + weights.w_bias
    r, bias = weights.r, weights.r_bias
    both = inputs[:, : 2 * size] + hidden @ r[: 2 * size].T + bias[: 2 * size]
    update, reset = torch.sigmoid(both).chunk(2, -1)
    if reset_behind:
        carried = reset * (hidden @ r[2 * size :].T + bias[2 * size :])
    else:
        carried = (reset * hidden) @ r[2 * size :].T + bias[2 * size :]
    new = torch.tanh(inputs[:, 2 * size :] + carried)
    return ((1 - update) * new + update * hidden,)


def _rnn_cell(weights: _Weights, x: Tensor, states: States) -> States:
    carried = states[0] @ weights.r.T + weights.r_bias
    return (torch.tanh(x + weights.w_bias + carried),)


# operators


def _others(given: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """Bias, lengths, first states: the inputs behind X, W and R, None for those left out."""
    return (*given, None, None, None, None)[:4]


def _lstm(call: Call, x: Tensor, w: Tensor, r: Tensor, *given: Tensor | None) -> Results:
    b, _, hidden, cell = _others(given)
    return _run(call, _lstm_cell, x, (w, r, b), _initial(x, r, (hidden, cell)))


def _gru(call: Call, x: Tensor, w: Tensor, r: Tensor, *given: Tensor | None) -> Results:
    b, _, hidden, _ = _others(given)
    cell = partial(_gru_cell, reset_behind=bool(call.attribute("linear_before_reset", 0)))
    return _run(call, cell, x, (w, r, b), _initial(x, r, (hidden,)))


def _rnn(call: Call, x: Tensor, w: Tensor, r: Tensor, *given: Tensor | None) -> Results:
    b, _, hidden, _ = _others(given)
    return _run(call, _rnn_cell, x, (w, r, b), _initial(x, r, (hidden,)))


def _activations(*usual: str) -> Callable[[Call], str]:
    def refuses(call: Call) -> str:
        given = [name.lower() for name in call.attribute("activations", ())]
        expected = list(usual) * (len(given) // len(usual))
        return f"its activations are {', '.join(given)}" if given != expected else ""

    return refuses


_PLAIN = any_of(only(layout=(0,), clip=(None,)), without_inputs(sequence_lens=4))

OPERATORS = {
    "GRU": Operator(_gru, any_of(_PLAIN, _activations("sigmoid", "tanh")), outputs=2),
    "LSTM": Operator(
        _lstm,
        any_of(
            _PLAIN,
            _activations("sigmoid", "tanh", "tanh"),
            only(input_forget=(0,)),
            without_inputs(P=7),
        ),
        outputs=3,
    ),
    "RNN": Operator(_rnn, any_of(_PLAIN, _activations("tanh")), outputs=2),
}
