"""Recurrent layers: LSTM, GRU, RNN."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from slimctl.runtime.floats import in_float32
from slimctl.runtime.named_activations import Activation, named_in_turn
from slimctl.runtime.registry import Array, operator

Floats: TypeAlias = tuple[float, ...]

State: TypeAlias = tuple[Array, ...]
"""The hidden state, and the cell state of an LSTM: [batch, hidden] each."""

Step: TypeAlias = Callable[[Array, State], State]
"""From the input's part of the gates, [batch, gates * hidden], and a state to the next state."""

_BACKWARD = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}


@operator("RNN", since=7)
@in_float32
def rnn(
    x: Array,
    w: Array,
    r: Array,
    b: Array | None = None,
    sequence_lens: Array | None = None,
    initial_h: Array | None = None,
    *,
    activation_alpha: Floats | None = None,
    activation_beta: Floats | None = None,
    activations: tuple[str, ...] = ("Tanh", "Tanh"),
    clip: float | None = None,
    direction: str = "forward",
    hidden_size: int | None = None,
    layout: int = 0,
) -> State:
    """H = f(X W^T + Wb + H R^T + Rb), step after step (ONNX, RNN)."""
    del hidden_size
    names = activations[: len(r)]
    functions = _by_direction(names, len(r), activation_alpha, activation_beta)
    w_bias, r_bias = _biases(b, r)
    steps = [_rnn_step(r[d], f, _clipping(clip)) for d, (f,) in enumerate(functions)]
    initial = (_initial(initial_h, x, r, layout),)
    return _run(x, w, w_bias + r_bias, sequence_lens, initial, steps, direction, layout)


def _rnn_step(r: Array, f: Activation, clipped: Activation) -> Step:
    return lambda gates, state: (f(clipped(gates + state[0] @ r.T)),)


@operator("GRU", since=7)
@in_float32
def gru(
    x: Array,
    w: Array,
    r: Array,
    b: Array | None = None,
    sequence_lens: Array | None = None,
    initial_h: Array | None = None,
    *,
    activation_alpha: Floats | None = None,
    activation_beta: Floats | None = None,
    activations: tuple[str, ...] | None = None,
    clip: float | None = None,
    direction: str = "forward",
    hidden_size: int | None = None,
    layout: int = 0,
    linear_before_reset: int = 0,
) -> State:
    """Gates z and r, and a new state h: H = (1 - z) h + z H, step after step (ONNX, GRU).

    The gates are f(X W^T + Wb + H R^T + Rb). h is g(X W^T + Wb + (r H) R^T + Rb), or with
    linear_before_reset g(X W^T + Wb + r (H R^T + Rb)).
    """
    del hidden_size
    names = activations or ("Sigmoid", "Tanh") * len(r)
    functions = _by_direction(names, len(r), activation_alpha, activation_beta)
    w_bias, r_bias = _biases(b, r)
    make = _gru_step_linear if linear_before_reset else _gru_step
    steps = [make(r[d], r_bias[d], f, g, _clipping(clip)) for d, (f, g) in enumerate(functions)]
    initial = (_initial(initial_h, x, r, layout),)
    return _run(x, w, w_bias, sequence_lens, initial, steps, direction, layout)


def _gru_step(r: Array, bias: Array, f: Activation, g: Activation, clipped: Activation) -> Step:
    size = r.shape[1]
    gates_r, new_r = r[: 2 * size], r[2 * size :]

    def step(gates: Array, state: State) -> State:
        (old,) = state
        both = f(clipped(gates[:, : 2 * size] + old @ gates_r.T + bias[: 2 * size]))
        update, reset = both[:, :size], both[:, size:]
        inner = (reset * old) @ new_r.T + bias[2 * size :]
        new = g(clipped(gates[:, 2 * size :] + inner))
        return ((1 - update) * new + update * old,)

    return step


def _gru_step_linear(
    r: Array, bias: Array, f: Activation, g: Activation, clipped: Activation
) -> Step:
    size = r.shape[1]

    def step(gates: Array, state: State) -> State:
        (old,) = state
        inner = old @ r.T + bias  # [batch, 3 * hidden]
        both = f(clipped(gates[:, : 2 * size] + inner[:, : 2 * size]))
        update, reset = both[:, :size], both[:, size:]
        new = g(clipped(gates[:, 2 * size :] + reset * inner[:, 2 * size :]))
        return ((1 - update) * new + update * old,)

    return step


@operator("LSTM", since=7)
@in_float32
def lstm(
    x: Array,
    w: Array,
    r: Array,
    b: Array | None = None,
    sequence_lens: Array | None = None,
    initial_h: Array | None = None,
    initial_c: Array | None = None,
    p: Array | None = None,
    *,
    activation_alpha: Floats | None = None,
    activation_beta: Floats | None = None,
    activations: tuple[str, ...] | None = None,
    clip: float | None = None,
    direction: str = "forward",
    hidden_size: int | None = None,
    input_forget: int = 0,
    layout: int = 0,
) -> State:
    """Gates i, o, f and a new state c: C = f C + i c, H = o h(C), step after step (ONNX, LSTM).

    i and f see the peephole weights times the old cell state, o sees them times the new one. With
    input_forget f is 1 - i.
    """
    del hidden_size
    names = activations or ("Sigmoid", "Tanh", "Tanh") * len(r)
    functions = _by_direction(names, len(r), activation_alpha, activation_beta)
    peepholes = np.zeros((len(r), 3 * r.shape[2]), x.dtype) if p is None else p
    steps = [
        _lstm_step(r[d], peepholes[d], f, g, h, _clipping(clip), coupled=bool(input_forget))
        for d, (f, g, h) in enumerate(functions)
    ]
    w_bias, r_bias = _biases(b, r)
    initial = (_initial(initial_h, x, r, layout), _initial(initial_c, x, r, layout))
    return _run(x, w, w_bias + r_bias, sequence_lens, initial, steps, direction, layout)


def _lstm_step(
    r: Array,
    peepholes: Array,
    f: Activation,
    g: Activation,
    h: Activation,
    clipped: Activation,
    *,
    coupled: bool,
) -> Step:
    input_p, output_p, forget_p = np.split(peepholes, 3)

    def step(gates: Array, state: State) -> State:
        hidden, cell = state
        parts = (gates + hidden @ r.T).reshape(len(hidden), 4, -1).swapaxes(0, 1)
        to_input, to_output, to_forget, to_cell = parts  # [batch, hidden] each
        taken = f(clipped(to_input + input_p * cell))
        kept = 1 - taken if coupled else f(clipped(to_forget + forget_p * cell))
        cell = kept * cell + taken * g(clipped(to_cell))
        return f(clipped(to_output + output_p * cell)) * h(cell), cell

    return step


def _run(
    x: Array,
    w: Array,
    bias: Array,
    lengths: Array | None,
    initial: State,
    steps: Sequence[Step],
    direction: str,
    layout: int,
) -> State:
    """Runs all directions.

    Args:
        x: [sequence, batch, input], or with layout 1 [batch, sequence, input].
        w: [directions, gates * hidden, input].
        bias: [directions, gates * hidden].
        lengths: Of the sequences, [batch]; all steps where it is None.
        initial: States, [directions, batch, hidden].
        steps: One for each direction.
        direction: Of ONNX.
        layout: Of ONNX.

    Returns:
        All hidden states, [sequence, directions, batch, hidden] or with layout 1 [batch, sequence,
        directions, hidden]; then the last states, [directions, batch, hidden] or with layout 1
        [batch, directions, hidden].
    """
    backward = _BACKWARD.get(direction, ())
    if len(backward) != len(w):
        raise ValueError(f"there are weights for {len(w)} directions, the direction is {direction}")
    x = x.swapaxes(0, 1) if layout else x
    hidden, last = [], []
    for d, step in enumerate(steps):
        gates = x @ w[d].T + bias[d]  # [sequence, batch, gates * hidden]
        state = tuple(values[d] for values in initial)
        states, state = _run_direction(gates, state, step, lengths, backward=backward[d])
        hidden.append(states)
        last.append(state)
    every = np.stack(hidden, axis=1)  # [sequence, directions, batch, hidden]
    finals = [np.stack(values) for values in zip(*last, strict=True)]
    if not layout:
        return every, *finals
    return every.transpose(2, 0, 1, 3), *(values.swapaxes(0, 1) for values in finals)


def _run_direction(
    gates: Array, state: State, step: Step, lengths: Array | None, *, backward: bool
) -> tuple[Array, State]:
    """All hidden states, [sequence, batch, hidden], and the last state.

    After its end a sequence keeps its state, and its hidden states are 0; backward, it begins at
    its end.
    """
    result = np.zeros((gates.shape[0], *state[0].shape), gates.dtype)
    times = range(gates.shape[0])
    for time in reversed(times) if backward else times:
        new = step(gates[time], state)
        if lengths is None:
            result[time], state = new[0], new
            continue
        runs = (time < lengths)[:, None]  # [batch, 1]
        state = tuple(np.where(runs, n, old) for n, old in zip(new, state, strict=True))
        result[time] = np.where(runs, new[0], 0)
    return result, state


def _initial(state: Array | None, x: Array, r: Array, layout: int) -> Array:
    """A first state as [directions, batch, hidden]; 0 where it is None."""
    if state is None:
        return np.zeros((r.shape[0], x.shape[0 if layout else 1], r.shape[2]), x.dtype)
    return state.swapaxes(0, 1) if layout else state


def _biases(b: Array | None, r: Array) -> tuple[Array, Array]:
    """Those that go with the input and with the state, [directions, gates * hidden] each."""
    if b is None:
        none = np.zeros(r.shape[:2], r.dtype)
        return none, none
    return b[:, : r.shape[1]], b[:, r.shape[1] :]


def _by_direction(
    names: Sequence[str], directions: int, alphas: Floats | None, betas: Floats | None
) -> list[list[Activation]]:
    """The activations of each direction; the parameters go through all of them in turn."""
    functions = named_in_turn(names, alphas, betas)
    each = len(functions) // directions
    return [functions[d * each : (d + 1) * each] for d in range(directions)]


def _clipping(clip: float | None) -> Activation:
    """What keeps the inputs of activations between -clip and clip."""
    if not clip:
        return lambda x: x
    return lambda x: np.clip(x, -x.dtype.type(clip), x.dtype.type(clip))
