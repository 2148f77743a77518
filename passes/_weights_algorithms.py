"""Runs an algorithm over all matrices of a model, where it needs data a few layers at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Literal, NamedTuple

import numpy as np
import onnx_ir as ir

from slimctl.core.contract import Context, Feeds
from slimctl.graph.edit import NameScope
from slimctl.numerics.blocks import (
    Blocks,
    Grid,
    Matrix,
    in_blocks,
    round_blocks,
    searched_parameters,
)
from slimctl.numerics.half_quadratic import half_quadratic
from slimctl.passes._weights_awq import Group, groups_of, round_important, scale_group
from slimctl.passes._weights_fold import Factors
from slimctl.passes._weights_gptq import Correction, Plan, make_plan, round_corrected
from slimctl.passes._weights_layers import Shared
from slimctl.passes._weights_moments import Observe, collect, observable, portions
from slimctl.passes._weights_walk import Walk, depths

Algorithm = Literal["rtn", "hqq", "gptq", "awq"]

_HALF_QUADRATIC_BITS: Final = (2, 4)
"""The 8-bit kernel takes whole zero points only."""


class Settings(NamedTuple):
    """What all matrices share.

    Attributes:
        algorithm: How weights are rounded.
        bits: Bits per weight.
        symmetric: Zero points are the middle.
        kernels: Zero points may be fractions, as MatMulNBits takes them.
        correction: For GPTQ.
    """

    algorithm: Algorithm
    bits: int
    symmetric: bool
    kernels: bool
    correction: Correction

    def grid(self, shared: Shared) -> Grid:
        """What the codes of a matrix mean."""
        return Grid(self.bits, self.symmetric, shared.storage.dtype)


@dataclass
class Job:
    """One run over a model.

    Attributes:
        model: Is changed: by whoever takes the results, and by AWQ.
        settings: What is wanted.
        context: Gives data.
        names: Scope of the model.
        plain: Matrices for which the algorithm could do less than it does, with the reason.
    """

    model: ir.Model
    settings: Settings
    context: Context
    names: NameScope
    plain: dict[str, str] = field(default_factory=dict)

    def run(self, matrices: Sequence[Shared]) -> Iterator[tuple[Shared, Blocks]]:
        """Quantizes one matrix after the other.

        The caller writes each into the model before it takes the next: so layers that come later
        are rounded for what the layers before them really compute.
        """
        if self.settings.algorithm == "gptq":
            yield from self._corrected(matrices)
        elif self.settings.algorithm == "awq":
            yield from self._scaled(matrices)
        else:
            for shared in matrices:
                yield shared, self.rounded(shared)

    def rounded(self, shared: Shared) -> Blocks:
        """To nearest, with parameters that need no data."""
        grid, matrix = self.settings.grid(shared), shared.storage.matrix()
        blocks = in_blocks(matrix, shared.block)
        parameters = searched_parameters(blocks, grid)
        if self.settings.algorithm == "hqq":
            whole = (
                shared.has_table
                or not self.settings.kernels
                or grid.bits not in _HALF_QUADRATIC_BITS
            )
            parameters = half_quadratic(blocks, parameters, grid, whole=whole)
        return round_blocks(matrix, parameters, shared.block, grid)

    def _with_data(self, matrices: Sequence[Shared]) -> list[Shared]:
        """Those whose inputs can be observed; says why the others cannot."""
        seen, found = observable(self.model), []
        for shared in matrices:
            if shared.has_table:
                if shared.products:
                    self.plain[shared.name] = "a table shares its weight: nearest is best for rows"
            elif any(layer.node not in seen for layer in shared.products):
                self.plain[shared.name] = "it stands in a loop: its input cannot be observed"
            else:
                found.append(shared)
        return found

    def _moments(
        self, portion: Sequence[Shared], observe: Observe
    ) -> Iterator[tuple[int, Shared, Matrix | None]]:
        found = collect(portion, observe)
        for place, (shared, moments) in enumerate(zip(portion, found, strict=True)):
            if moments is None:
                self.plain[shared.name] = "its input never held a finite value"
            yield place, shared, moments

    def _corrected(self, matrices: Sequence[Shared]) -> Iterator[tuple[Shared, Blocks]]:
        """GPTQ."""
        with_data = self._with_data(matrices)
        work = self._corrected_for_data(with_data)
        yield from self.context.progress.track(work, total=len(with_data), label="GPTQ")
        done = {id(shared) for shared in with_data}
        for shared in matrices:
            if id(shared) not in done:
                yield shared, self.rounded(shared)

    def _corrected_for_data(self, matrices: Sequence[Shared]) -> Iterator[tuple[Shared, Blocks]]:
        walk = Walk(self.model, self.context)
        products = {id(shared): [layer.node for layer in shared.products] for shared in matrices}
        found = depths(self.model, list(products.values()))
        depth = dict(zip(products, found, strict=True))

        def apart(one: Shared, other: Shared) -> bool:
            # Where every run begins at the start, many small portions would cost too much.
            return walk.resumes and depth[id(one)] != depth[id(other)]

        for portion in portions(matrices, apart):
            latest: tuple[Matrix, Plan] | None = None
            nodes = [node for shared in portion for node in products[id(shared)]]
            observe = partial(walk.activations, nodes=nodes)
            for _, shared, moments in self._moments(portion, observe):
                if moments is None:
                    yield shared, self.rounded(shared)
                    continue
                if latest is None or latest[0] is not moments:
                    latest = moments, make_plan(moments, self.settings.correction)
                yield shared, self._correct(shared, latest[1])

    def _correct(self, shared: Shared, plan: Plan) -> Blocks:
        matrix, grid = shared.storage.matrix(), self.settings.grid(shared)
        return round_corrected(matrix, plan, shared.block, grid, self.settings.correction)

    def _scaled(self, matrices: Sequence[Shared]) -> Iterator[tuple[Shared, Blocks]]:
        """AWQ: first all scales, which change nothing that is computed, then rounding."""

        # Scales change weights in front of a portion, too, but nothing that is computed from them.
        def observe(tensors: Sequence[str]) -> Iterator[Feeds]:
            found = self.context.activations(self.model, tensors)
            return self.context.progress.track(found, total=None, label="AWQ")

        strengths: dict[int, Factors] = {}
        for portion in portions(self._with_data(matrices)):
            measured = self._moments(portion, observe)
            found = {place: moments for place, _, moments in measured if moments is not None}
            for group in groups_of(portion):
                if all(place in found for place in group.places):
                    factors = self._scale(group, portion, found)
                    for place in group.places:
                        strengths[id(portion[place])] = np.diagonal(found[place]) / factors**2
        for shared in matrices:
            importance = strengths.get(id(shared))
            if importance is None:
                yield shared, self.rounded(shared)
            else:
                grid, matrix = self.settings.grid(shared), shared.storage.matrix()
                yield shared, round_important(matrix, importance, shared.block, grid)

    def _scale(
        self, group: Group, portion: Sequence[Shared], moments: dict[int, Matrix]
    ) -> Factors:
        members = [portion[place] for place in group.places]
        grids = [self.settings.grid(shared) for shared in members]
        first = moments[group.places[0]]
        factors = scale_group(group.tensor, members, first, grids, self.names)
        if isinstance(factors, str):
            self.plain.update({shared.name: f"not scaled: {factors}" for shared in members})
            return np.ones(len(first))
        return factors
