"""Whether the exported graph computes what the network computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from slimctl.core.contract import Feeds
from slimctl.core.errors import ModelExecutionError, SlimctlError, UnsupportedModelError
from slimctl.training.import_inputs import Declared

SEEDS = 3
"""Random inputs of the example's size."""

Run = Callable[[Feeds], Sequence[NDArray[Any]]]


class Check(NamedTuple):
    """One comparison on the same inputs.

    Attributes:
        inputs: Where they came from.
        sizes: Of the dynamic dimensions.
        differences: Largest one of each output, relative to the largest value of that output.
            None where nothing could be compared.
        problem: Why not; empty otherwise.
        shapes: Of the outputs of the network.
    """

    inputs: str
    sizes: dict[str, int]
    differences: list[float] | None
    problem: str = ""
    shapes: Sequence[tuple[int, ...]] = ()

    def largest(self) -> float:
        """The largest difference; infinite where nothing could be compared."""
        return float("inf") if self.differences is None else max(self.differences)


def check_repeatable(network: Run, example: Feeds) -> None:
    """Refuses a network that answers twice in different ways: no graph can be like it.

    Raises:
        UnsupportedModelError: With the largest difference.
    """
    first, second = network(example), network(example)
    same = len(first) == len(second) and all(
        a.shape == b.shape and np.array_equal(a, b, equal_nan=a.dtype.kind in "fc")
        for a, b in zip(first, second, strict=True)
    )
    if not same:
        raise UnsupportedModelError(
            "The network gives different outputs for the same inputs: it draws random numbers, or"
            " keeps a state between calls",
            where="forward",
            fix="make it a function of its inputs: take noise and state as inputs",
        )


def compare(
    network: Run,
    graph: Run,
    declared: Declared,
    data: Iterator[Feeds],
    *,
    seed: int,
) -> Iterator[Check]:
    """Both on random inputs, on these of other sizes where axes are dynamic, and on the user's.

    Raises:
        UnsupportedModelError: The network itself takes no other size of the dynamic axes, or fails
            on the user's data.
    """
    for number in range(seed, seed + SEEDS):
        feeds = declared.random(declared.sizes, number)
        yield _check(f"random, seed {number}", declared.sizes, network(feeds), graph, feeds)
    yield from _other_sizes(network, graph, declared, seed)
    for index, feeds in enumerate(data):
        sizes = _sizes_of(declared, feeds)
        yield _check(f"given, batch {index}", sizes, network(feeds), graph, feeds)


def _other_sizes(network: Run, graph: Run, declared: Declared, seed: int) -> Iterator[Check]:
    """Twice and half the example, as far as the network itself takes them.

    Both keep multiples that networks which halve and double resolutions ask for.
    """
    if not declared.sizes:
        return
    twice = {dim: 2 * size for dim, size in declared.sizes.items()}
    half = {dim: max(1, size // 2) for dim, size in declared.sizes.items()}
    refused: list[SlimctlError] = []
    for sizes in (twice, half):
        feeds = declared.random(sizes, seed)
        try:
            reference = network(feeds)
        except UnsupportedModelError as error:
            refused.append(error)
            continue
        yield _check(f"random, seed {seed}", sizes, reference, graph, feeds)
    if len(refused) == 2:
        raise UnsupportedModelError(
            f"An axis is to be dynamic, and the network takes no other size. {refused[0].what}",
            where="forward",
            fix="write a number for that axis in --input, or a size that can be doubled: H=64",
        ) from refused[0]


def _sizes_of(declared: Declared, feeds: Feeds) -> dict[str, int]:
    return {
        size: int(found)
        for entry in declared.inputs
        for size, found in zip(entry.shape, feeds[entry.name].shape, strict=True)
        if isinstance(size, str)
    }


def _check(
    inputs: str,
    sizes: Mapping[str, int],
    reference: Sequence[NDArray[Any]],
    graph: Run,
    feeds: Feeds,
) -> Check:
    try:
        found = graph(feeds)
    except ModelExecutionError as error:
        return Check(inputs, dict(sizes), None, error.what)
    for number, (ours, theirs) in enumerate(zip(reference, found, strict=True)):
        if ours.shape != theirs.shape:
            shapes = f"{list(theirs.shape)} instead of {list(ours.shape)}"
            return Check(inputs, dict(sizes), None, f"output {number} has the shape {shapes}")
        if ours.dtype != theirs.dtype:
            types = f"{theirs.dtype} instead of {ours.dtype}"
            return Check(inputs, dict(sizes), None, f"output {number} has the type {types}")
    pairs = zip(reference, found, strict=True)
    differences = [difference(ours, theirs) for ours, theirs in pairs]
    return Check(inputs, dict(sizes), differences, shapes=[array.shape for array in reference])


def difference(reference: NDArray[Any], other: NDArray[Any]) -> float:
    """Largest difference, relative to the largest finite value of the reference.

    Values that are not finite must be the same; integers and booleans too: either makes the
    difference infinite. Where the reference is zero everywhere the difference is taken as it is.
    """
    if reference.dtype.kind in "biu":
        return 0.0 if np.array_equal(reference, other) else float("inf")
    finite = np.isfinite(reference)
    if not np.array_equal(reference[~finite], other[~finite], equal_nan=True):
        return float("inf")
    ours, theirs = reference[finite].astype(np.float64), other[finite].astype(np.float64)
    if not ours.size:
        return 0.0
    if not np.isfinite(theirs).all():
        return float("inf")
    scale = float(np.abs(ours).max()) or 1.0
    return float(np.abs(ours - theirs).max()) / scale
