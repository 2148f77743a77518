"""Branches and loops: operators that hold graphs, which come as functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from slimctl.runtime.registry import Array, Value, operator

if TYPE_CHECKING:
    from slimctl.runtime.plan import Declared
    from slimctl.runtime.session import Body


@operator("If", since=1)
def if_else(cond: Array, *, else_branch: Body, then_branch: Body) -> tuple[Value, ...]:
    """The outputs of one of two graphs."""
    return then_branch() if cond.item() else else_branch()


@operator("Loop", since=1)
def loop(
    m: Array | None = None, cond: Array | None = None, *v_initial: Value, body: Body
) -> tuple[Value, ...]:
    """The body again and again: what it carries at the end, then all that it gave in between.

    The schema lets a loop without ``cond`` ignore what its body says about going on. onnxruntime
    heeds it, and so does this function: otherwise a loop without ``m`` would never end.
    """
    carried: tuple[Value, ...] = v_initial
    given: list[tuple[Value, ...]] = []
    limit = np.inf if m is None else m.item()
    going = True if cond is None else cond.item()
    while going and len(given) < limit:
        outputs = body(np.asarray(len(given), np.int64), np.asarray(going), *carried)
        going = outputs[0].item()
        carried = outputs[1 : 1 + len(v_initial)]
        given.append(outputs[1 + len(v_initial) :])
    declared = body.plan.declared[1 + len(v_initial) :]
    stacked = (_stacked([step[i] for step in given], known) for i, known in enumerate(declared))
    return (*carried, *stacked)


def _stacked(values: Sequence[Array], declared: Declared, axis: int = 0) -> Array:
    """Values of all steps along a new axis.

    Without a step it is what the body declares; axes of unknown sizes then have no element, as in
    onnxruntime.
    """
    if values:
        return np.stack(values, axis)
    sizes = [size or 0 for size in declared.sizes]
    sizes.insert(axis % (len(sizes) + 1), 0)
    return np.zeros(sizes, declared.kind or np.float32)


@operator("Scan", since=9)
def scan(
    *initial_state_and_scan_inputs: Array,
    body: Body,
    num_scan_inputs: int,
    scan_input_axes: Sequence[int] | None = None,
    scan_input_directions: Sequence[int] | None = None,
    scan_output_axes: Sequence[int] | None = None,
    scan_output_directions: Sequence[int] | None = None,
) -> tuple[Array, ...]:
    """The body for each slice of its scan inputs: the last states, then its slices put together."""
    states: Sequence[Array] = initial_state_and_scan_inputs[:-num_scan_inputs]
    scanned = initial_state_and_scan_inputs[-num_scan_inputs:]
    axes = scan_input_axes or (0,) * num_scan_inputs
    turned = [np.moveaxis(x, axis, 0) for x, axis in zip(scanned, axes, strict=True)]
    states, given = _scanned(body, states, _directed(turned, scan_input_directions))
    axes = scan_output_axes or (0,) * len(given)
    declared = body.plan.declared[len(states) :]
    parts = zip(given, declared, axes, strict=True)
    stacked = [_stacked(steps, known, axis) for steps, known, axis in parts]
    return (*states, *_directed(stacked, scan_output_directions, axes))


def _directed(
    values: Sequence[Array], directions: Sequence[int] | None, axes: Sequence[int] | None = None
) -> list[Array]:
    """Values whose direction is 1 are reversed along their axis, the first by default."""
    directions, axes = directions or (0,) * len(values), axes or (0,) * len(values)
    triples = zip(values, directions, axes, strict=True)
    return [np.flip(x, axis) if direction else x for x, direction, axis in triples]


def _scanned(
    body: Body, states: Sequence[Array], scanned: Sequence[Array]
) -> tuple[Sequence[Array], list[list[Array]]]:
    """The last states, and for each scan output its slices."""
    lengths = {len(x) for x in scanned}
    if len(lengths) != 1:
        raise ValueError(f"sequences of different lengths cannot be scanned: {sorted(lengths)}")
    given: list[list[Array]] = [[] for _ in body.plan.outputs[len(states) :]]
    for slices in zip(*scanned, strict=True):
        outputs = body(*states, *map(np.asarray, slices))
        states = outputs[: len(states)]
        for steps, value in zip(given, outputs[len(states) :], strict=True):
            steps.append(value)
    return states, given


@operator("SequenceMap", since=17)
def sequence_map(
    input_sequence: list[Array], *additional_inputs: Value, body: Body
) -> tuple[list[Array], ...]:
    """The body for each element; sequences beside it run along, tensors stay the same."""
    rows = [
        body(element, *(x[i] if isinstance(x, list) else x for x in additional_inputs))
        for i, element in enumerate(input_sequence)
    ]
    return tuple([row[i] for row in rows] for i in range(len(body.plan.outputs)))


@operator("Optional", since=15)
def optional(input: Value = None, *, type: object = None) -> Value:
    """The input, or nothing."""
    return input


@operator("OptionalHasElement", since=15)
def optional_has_element(input: Value = None) -> Array:
    """Whether there is something."""
    return np.asarray(input is not None)


@operator("OptionalGetElement", since=15)
def optional_get_element(input: Value) -> Value:
    """What there is."""
    if input is None:
        raise ValueError("the optional is empty")
    return input
