"""Recurrent layers.

torch has them in one piece, for its own order of gates. A GRU that resets before the product of
matrices is not among those, and goes step by step.
Names as in ONNX: T steps, B batch, D directions, G gates, H hidden units, I inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from slimctl.training.operator import Call, Operator, Results, any_of, only, without_inputs

Compute: TypeAlias = Callable[[Tensor, list[Tensor], list[Tensor], bool], Sequence[Tensor]]
"""From x [T, B, I], first states [D, B, H], four weights for each direction, and whether there are
two of them, to y [T, B, D*H] and the last states [D, B, H]."""


class _Layer(NamedTuple):
    """A kind of layer.

    Attributes:
        compute: All steps at once.
        order: The gates as it wants them, by their places in ONNX.
    """

    compute: Compute
    order: Sequence[int]


def _run(
    call: Call, layer: _Layer, x: Tensor, given: Sequence[Tensor | None], states: list[Tensor]
) -> Results:
    """X [T, B, I]; given: w [D, G*H, I], r [D, G*H, H], b [D, 2*G*H]; states [D, B, H].

    Returns:
        Y [T, D, B, H] and the last states [D, B, H].
    """
    direction = call.attribute("direction", "forward")
    backwards = direction == "reverse"
    y, *last = layer.compute(
        x.flip(0) if backwards else x,
        states,
        _weights(given, layer.order),
        direction == "bidirectional",
    )
    y = y.reshape(*y.shape[:2], states[0].shape[0], -1).transpose(1, 2)  # from [T, B, D*H]
    return y.flip(0) if backwards else y, *last


def _weights(given: Sequence[Tensor | None], order: Sequence[int]) -> list[Tensor]:
    """Of each direction: w [G*H, I], r [G*H, H], the biases of both [G*H]."""
    w, r, b = given
    assert w is not None and r is not None, "only the bias may be left out"
    rows = w.shape[1]
    b = w.new_zeros(w.shape[0], 2 * rows) if b is None else b
    found = []
    for index in range(w.shape[0]):
        parts = (w[index], r[index], b[index, :rows], b[index, rows:])
        found += [_ordered(part, order) for part in parts]
    return found


def _ordered(weight: Tensor, order: Sequence[int]) -> Tensor:
    """Gates in another order; they lie one behind the other along axis 0."""
    if len(order) == 1:
        return weight
    gates = weight.chunk(len(order))
    return torch.cat([gates[place] for place in order])


def _initial(x: Tensor, r: Tensor, given: Sequence[Tensor | None]) -> list[Tensor]:
    zeros = x.new_zeros(r.shape[0], x.shape[1], r.shape[2])
    return [zeros if state is None else state for state in given]


# layers: torch's have biases, one layer, no dropout (whose mode does not matter then), steps first


def _lstm_layer(
    x: Tensor, states: list[Tensor], weights: list[Tensor], both: bool
) -> Sequence[Tensor]:
    found: Sequence[Tensor] = torch.lstm(x, states, weights, True, 1, 0.0, False, both, False)
    return found


def _gru_layer(
    x: Tensor, states: list[Tensor], weights: list[Tensor], both: bool
) -> Sequence[Tensor]:
    found: Sequence[Tensor] = torch.gru(x, states[0], weights, True, 1, 0.0, False, both, False)
    return found


def _rnn_layer(
    x: Tensor, states: list[Tensor], weights: list[Tensor], both: bool
) -> Sequence[Tensor]:
    found: Sequence[Tensor] = torch.rnn_tanh(
        x, states[0], weights, True, 1, 0.0, False, both, False
    )
    return found


def _stepwise_gru_layer(
    x: Tensor, states: list[Tensor], weights: list[Tensor], both: bool
) -> Sequence[Tensor]:
    """A GRU that resets the hidden state before it is multiplied."""
    outputs, last = [], []
    for index, hidden in enumerate(states[0]):
        steps = x.flip(0) if both and index else x
        found = _gru_steps(steps, hidden, weights[4 * index : 4 * index + 4])
        last.append(found[-1])
        outputs.append(found.flip(0) if both and index else found)
    return torch.cat(outputs, -1), torch.stack(last)


def _gru_steps(x: Tensor, hidden: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """Gates in the order reset, update, hidden: x [T, B, I], hidden [B, H] to [T, B, H]."""
    w, r, w_bias, r_bias = weights
    size = 2 * hidden.shape[-1]
    found = []
    for inputs in x @ w.T + w_bias + r_bias:  # [T, B, G*H]
        both = torch.sigmoid(inputs[:, :size] + hidden @ r[:size].T)
        reset, update = both.chunk(2, -1)
        new = torch.tanh(inputs[:, size:] + (reset * hidden) @ r[size:].T)
        hidden = (1 - update) * new + update * hidden
        found.append(hidden)
    return torch.stack(found)


# operators


def _others(given: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """Bias, lengths, first states: the inputs behind X, W and R, None for those left out."""
    return (*given, None, None, None, None)[:4]


def _lstm(call: Call, x: Tensor, w: Tensor, r: Tensor, *given: Tensor | None) -> Results:
    """ONNX has input, output, forget, cell; torch input, forget, cell, output."""
    b, _, hidden, cell = _others(given)
    states = _initial(x, r, (hidden, cell))
    return _run(call, _Layer(_lstm_layer, (0, 2, 3, 1)), x, (w, r, b), states)


def _gru(call: Call, x: Tensor, w: Tensor, r: Tensor, *given: Tensor | None) -> Results:
    """ONNX has update, reset, hidden; torch reset, update, hidden."""
    b, _, hidden, _ = _others(given)
    layer = _gru_layer if call.attribute("linear_before_reset", 0) else _stepwise_gru_layer
    return _run(call, _Layer(layer, (1, 0, 2)), x, (w, r, b), _initial(x, r, (hidden,)))


def _rnn(call: Call, x: Tensor, w: Tensor, r: Tensor, *given: Tensor | None) -> Results:
    b, _, hidden, _ = _others(given)
    return _run(call, _Layer(_rnn_layer, (0,)), x, (w, r, b), _initial(x, r, (hidden,)))


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
