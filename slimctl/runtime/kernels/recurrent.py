"""Recurrent layers: LSTM, GRU, RNN."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from slimctl.runtime.floats import in_float32
from slimctl.runtime.named_activations import Activation
from slimctl.runtime.recurrence import (
    Floats,
    State,
    Step,
    activations_by_direction,
    clipping,
    initial_state,
    lstm_step,
    run_layer,
    split_biases,
)
from slimctl.runtime.registry import Array, operator


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
    functions = activations_by_direction(names, len(r), activation_alpha, activation_beta)
    w_bias, r_bias = _biases(b, r)
    steps = [_rnn_step(r[d], f, clipping(clip)) for d, (f,) in enumerate(functions)]
    initial = (_initial(initial_h, x, r, layout),)
    gates = _projection(x, w, w_bias + r_bias, layout)
    return run_layer(gates, sequence_lens, initial, steps, direction=direction, layout=layout)


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
    functions = activations_by_direction(names, len(r), activation_alpha, activation_beta)
    w_bias, r_bias = _biases(b, r)
    make = _gru_step_linear if linear_before_reset else _gru_step
    steps = [make(r[d], r_bias[d], f, g, clipping(clip)) for d, (f, g) in enumerate(functions)]
    initial = (_initial(initial_h, x, r, layout),)
    gates = _projection(x, w, w_bias, layout)
    return run_layer(gates, sequence_lens, initial, steps, direction=direction, layout=layout)


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
    functions = activations_by_direction(names, len(r), activation_alpha, activation_beta)
    peepholes = np.zeros((len(r), 3 * r.shape[2]), x.dtype) if p is None else p
    steps = [
        lstm_step(_times(r[d]), peepholes[d], three, clip, coupled=bool(input_forget))
        for d, three in enumerate(functions)
    ]
    w_bias, r_bias = _biases(b, r)
    initial = (_initial(initial_h, x, r, layout), _initial(initial_c, x, r, layout))
    gates = _projection(x, w, w_bias + r_bias, layout)
    return run_layer(gates, sequence_lens, initial, steps, direction=direction, layout=layout)


def _times(r: Array) -> Callable[[Array], Array]:
    return lambda hidden: hidden @ r.T


def _projection(x: Array, w: Array, bias: Array, layout: int) -> Callable[[int], Array]:
    """The input's part of the gates of a direction, [sequence, batch, gates * hidden]."""
    x = x.swapaxes(0, 1) if layout else x
    return lambda d: x @ w[d].T + bias[d]


def _initial(state: Array | None, x: Array, r: Array, layout: int) -> Array:
    return initial_state(state, x, r.shape[0], r.shape[2], layout)


def _biases(b: Array | None, r: Array) -> tuple[Array, Array]:
    return split_biases(b, r.shape[0], r.shape[1], r.dtype)
