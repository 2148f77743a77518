"""Recurrent layers of onnxruntime that quantize their inputs and states while they run."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from slimctl.runtime.engine import Engine
from slimctl.runtime.integer_matmul import multiply
from slimctl.runtime.kernels.quantize import dynamic_quantize_linear
from slimctl.runtime.recurrence import (
    Floats,
    State,
    activations_by_direction,
    initial_state,
    lstm_step,
    run_layer,
    split_biases,
)
from slimctl.runtime.registry import MICROSOFT, Array, operator


@operator("DynamicQuantizeLSTM", since=1, domain=MICROSOFT)
def dynamic_quantize_lstm(
    x: Array,
    w: Array,
    r: Array,
    b: Array | None,
    sequence_lens: Array | None,
    initial_h: Array | None,
    initial_c: Array | None,
    p: Array | None,
    w_scale: Array,
    w_zero_point: Array,
    r_scale: Array,
    r_zero_point: Array,
    *,
    activation_alpha: Floats | None = None,
    activation_beta: Floats | None = None,
    activations: tuple[str, ...] | None = None,
    clip: float | None = None,
    direction: str = "forward",
    hidden_size: int | None = None,
    input_forget: int = 0,
    engine: Engine,
) -> State:
    """LSTM whose inputs are quantized by the range of all of them, its states step by step.

    The states of a batch share a range. onnxruntime with several threads gives each of them a part
    of the batch, with a range of its own.

    Args:
        x: [sequence, batch, input].
        w: Codes [directions, input, 4 * hidden].
        r: Codes [directions, hidden, 4 * hidden].
        b: [directions, 8 * hidden].
        sequence_lens: [batch].
        initial_h: [directions, batch, hidden].
        initial_c: [directions, batch, hidden].
        p: Peephole weights [directions, 3 * hidden].
        w_scale: [directions] or [directions, 4 * hidden].
        w_zero_point: As its scale.
        r_scale: [directions] or [directions, 4 * hidden].
        r_zero_point: As its scale.
        activation_alpha: As for LSTM.
        activation_beta: As for LSTM.
        activations: As for LSTM.
        clip: As for LSTM.
        direction: As for LSTM.
        hidden_size: As for LSTM.
        input_forget: As for LSTM.
        engine: Integer arithmetic.
    """
    del hidden_size
    directions, size = r.shape[:2]
    names = activations or ("Sigmoid", "Tanh", "Tanh") * directions
    functions = activations_by_direction(names, directions, activation_alpha, activation_beta)
    peepholes = np.zeros((directions, 3 * size), x.dtype) if p is None else p
    inputs = _products("input", w, w_scale, w_zero_point, engine)
    states = _products("state", r, r_scale, r_zero_point, engine)
    steps = [
        lstm_step(states[d], peepholes[d], functions[d], clip, coupled=bool(input_forget))
        for d in range(directions)
    ]
    w_bias, r_bias = split_biases(b, directions, 4 * size, x.dtype)
    bias = w_bias + r_bias
    initial = [initial_state(state, x, directions, size, 0) for state in (initial_h, initial_c)]
    longest = len(x) if sequence_lens is None else int(sequence_lens.max(initial=0))
    every, *last = run_layer(
        lambda d: inputs[d](x[:longest]) + bias[d],
        sequence_lens,
        tuple(initial),
        steps,
        direction=direction,
    )
    missing = [(0, len(x) - longest), (0, 0), (0, 0), (0, 0)]
    return np.pad(every, missing), *last


def _products(
    name: str, weights: Array, scale: Array, zero_point: Array, engine: Engine
) -> list[Callable[[Array], Array]]:
    """For each direction, the product of floats, quantized by their own range, and its weights."""

    def split() -> list[tuple[Array, Array]]:
        return [(codes, zero_point[d : d + 1].reshape(-1)) for d, codes in enumerate(weights)]

    parts = engine.prepared(name, (weights, zero_point), split)
    return [
        _product(codes, scale[d], zero, engine.part(f"{name} {d}"))
        for d, (codes, zero) in enumerate(parts)
    ]


def _product(
    weights: Array, scale: Array, zero_point: Array, engine: Engine
) -> Callable[[Array], Array]:
    def product(values: Array) -> Array:
        codes, own, zero = dynamic_quantize_linear(values)
        summed = multiply(codes, zero, weights, zero_point, engine)
        return engine.values(summed, None, own * scale)

    return product
