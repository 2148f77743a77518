"""Recurrent layers without their products: directions, lengths of sequences, states, gates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from slimctl.runtime.named_activations import Activation, named_in_turn

Array: TypeAlias = NDArray[Any]
Floats: TypeAlias = tuple[float, ...]

State: TypeAlias = tuple[Array, ...]
"""The hidden state, and the cell state of an LSTM: [batch, hidden] each."""

Step: TypeAlias = Callable[[Array, State], State]
"""From the input's part of the gates, [batch, gates * hidden], and a state to the next state."""

_BACKWARD = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}


def run_layer(
    gates: Callable[[int], Array],
    lengths: Array | None,
    initial: State,
    steps: Sequence[Step],
    *,
    direction: str,
    layout: int = 0,
) -> State:
    """Runs all directions.

    Args:
        gates: The input's part of the gates of a direction, [sequence, batch, gates * hidden].
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
    if len(backward) != len(steps):
        raise ValueError(
            f"there are weights for {len(steps)} directions, the direction is {direction}"
        )
    hidden, last = [], []
    for d, step in enumerate(steps):
        state = tuple(values[d] for values in initial)
        states, state = _run_direction(gates(d), state, step, lengths, backward=backward[d])
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
    """All hidden states, [sequence, batch, hidden], and the last state of each sequence.

    After its end a sequence goes on with hidden states of 0, of which nothing is kept.
    """
    gates = _reversed(gates, lengths) if backward else gates
    result = np.zeros((gates.shape[0], *state[0].shape), gates.dtype)
    last = state
    for time, given in enumerate(gates):
        state = step(given, state)
        if lengths is None:
            result[time], last = state[0], state
            continue
        runs = (time < lengths)[:, None]  # [batch, 1]
        last = tuple(np.where(runs, new, old) for new, old in zip(state, last, strict=True))
        result[time] = np.where(runs, state[0], 0)
        state = (result[time], *state[1:])
    return _reversed(result, lengths) if backward else result, last


def _reversed(values: Array, lengths: Array | None) -> Array:
    """Sequences from their end to their beginning; what lies after the end stays."""
    if lengths is None:
        return values[::-1]
    times = np.arange(len(values))[:, None]  # [sequence, 1]
    places = np.where(times < lengths, lengths - 1 - times, times)  # [sequence, batch]
    return np.take_along_axis(values, places[:, :, None], axis=0)


def lstm_step(
    recur: Callable[[Array], Array],
    peepholes: Array,
    activations: Sequence[Activation],
    clip: float | None,
    *,
    coupled: bool,
) -> Step:
    """Gates i, o, f and a new state c: C = f C + i c, H = o h(C).

    Args:
        recur: From hidden states to their part of the gates.
        peepholes: [3 * hidden]; i and f see them times the old cell state, o times the new one.
        activations: Of the gates, of the new state, of the output.
        clip: Bound of what the activations see; none where it is None.
        coupled: Whether f is 1 - i.
    """
    f, g, h = activations
    clipped = clipping(clip)
    input_p, output_p, forget_p = np.split(peepholes, 3)

    def step(gates: Array, state: State) -> State:
        hidden, cell = state
        parts = (gates + recur(hidden)).reshape(len(hidden), 4, -1).swapaxes(0, 1)
        to_input, to_output, to_forget, to_cell = parts  # [batch, hidden] each
        taken = f(clipped(to_input + input_p * cell))
        kept = 1 - taken if coupled else f(clipped(to_forget + forget_p * cell))
        cell = kept * cell + taken * g(clipped(to_cell))
        return f(clipped(to_output + output_p * cell)) * h(cell), cell

    return step


def initial_state(state: Array | None, x: Array, directions: int, size: int, layout: int) -> Array:
    """A first state as [directions, batch, hidden]; 0 where it is None."""
    if state is None:
        return np.zeros((directions, x.shape[0 if layout else 1], size), x.dtype)
    return state.swapaxes(0, 1) if layout else state


def split_biases(b: Array | None, directions: int, size: int, kind: Any) -> tuple[Array, Array]:
    """Those that go with the input and with the state, [directions, gates * hidden] each."""
    if b is None:
        none = np.zeros((directions, size), kind)
        return none, none
    return b[:, :size], b[:, size:]


def activations_by_direction(
    names: Sequence[str], directions: int, alphas: Floats | None, betas: Floats | None
) -> list[list[Activation]]:
    """The activations of each direction; the parameters go through all of them in turn."""
    functions = named_in_turn(names, alphas, betas)
    each = len(functions) // directions
    return [functions[d * each : (d + 1) * each] for d in range(directions)]


def clipping(clip: float | None) -> Activation:
    """What keeps the inputs of activations between -clip and clip."""
    if not clip:
        return lambda x: x
    return lambda x: np.clip(x, -x.dtype.type(clip), x.dtype.type(clip))
