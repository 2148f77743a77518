"""Which weights of a matrix go, and how the others make good for it: arrays only.

Matrices are [outputs, inputs]. Without updates a mask is all there is. With them this is SparseGPT
(Frantar and Alistarh, "SparseGPT: Massive Language Models Can Be Accurately Pruned in One-Shot",
ICML 2023), the Optimal Brain Surgeon of Hassibi and Stork (NIPS 1992) column by column: with ``H``
the second moments of the inputs, taking out ``w_j`` costs ``w_j^2 / [H^-1]_jj`` and is best made
good by ``-w_j / [H^-1]_jj * [H^-1]_j`` on the weights that are still open. All of it is read off
the upper factor ``U`` of ``H^-1 = U^T U``: once columns before ``j`` are settled, ``[H^-1]_jj`` of
the rest is ``U_jj^2``. Columns cannot make good for what goes behind them; once it is settled which
weights stay, they become the least-squares solution under that mask (Boža, "Fast and Effective
Weight Update for Pruned Large Language Models", TMLR 2024), which halves the error again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from slimctl.numerics.second_order import inverse_factor

Matrix = NDArray[np.float64]
Mask = NDArray[np.bool_]

_BLOCK = 128
"""Columns whose updates are gathered before the columns behind them see them (section 3.3)."""

_RIDGES = (0.01, 0.1, 1.0, np.inf)
"""Tried strengths of the ridge, as shares of the diagonal. SparseGPT adds one percent of its mean.
With few rows for many inputs, correlations are mostly chance: at infinity there are none, nothing
is updated, and what is left is Wanda."""

_FALLBACK_RIDGE = 0.1
"""Where there are too few rows to try."""

_TRIED_OUTPUTS = 64
"""Outputs on which ridges are tried."""

_FEWEST_ROWS = 8
_GATHERED = 1024
"""Rows that are summed up together: products of few rows cost as much as those of many."""

_REFITS = 20
"""Steps of conjugate gradients; errors no longer fall behind them, with up to 600 inputs."""

_TINY = np.float32(1e-30)
_SMALLEST = 1e-6
"""Added to the diagonal, relative to its mean: an input that is always the same gets a pivot."""


class Pattern(Protocol):
    """Says which weights go.

    Attributes:
        width: So many neighboring columns are decided together; [outputs, width] at a time.
    """

    @property
    def width(self) -> int: ...

    def plan(self, scores: NDArray[np.floating]) -> Mask:
        """What goes if everything is decided at once; True where a weight goes."""
        ...

    def decide(self, scores: NDArray[np.floating], planned: Mask) -> Mask:
        """What goes of the next columns, by what their weights cost now.

        Args:
            scores: [outputs, width]
            planned: What was planned for these columns.
        """
        ...

    def some(self, rows: NDArray[np.int64], of: int) -> Pattern:
        """The same for some of the outputs."""
        ...


@dataclass(frozen=True)
class TwoOfFour:
    """Of four neighbors in a row the two with the lowest scores go."""

    width: int = 4

    def plan(self, scores: NDArray[np.floating]) -> Mask:
        """As :meth:`Pattern.plan`; the number of columns is a multiple of four."""
        fours = scores.reshape(-1, 4)
        gone = np.zeros(fours.shape, bool)
        lowest_two = np.argsort(fours, axis=1, kind="stable")[:, :2]
        np.put_along_axis(gone, lowest_two, True, axis=1)
        return gone.reshape(scores.shape)

    def decide(self, scores: NDArray[np.floating], planned: Mask) -> Mask:
        """As :meth:`Pattern.decide`."""
        del planned
        return self.plan(scores)

    def some(self, rows: NDArray[np.int64], of: int) -> TwoOfFour:
        """As :meth:`Pattern.some`."""
        del rows, of
        return self


@dataclass(frozen=True)
class Count:
    """So many go, wherever they are.

    A block of columns gives as many as it would if all were decided at once; which ones is decided
    when its turn comes.
    """

    count: int
    width: int = _BLOCK

    def plan(self, scores: NDArray[np.floating]) -> Mask:
        """As :meth:`Pattern.plan`."""
        return lowest(scores, self.count)

    def decide(self, scores: NDArray[np.floating], planned: Mask) -> Mask:
        """As :meth:`Pattern.decide`."""
        return lowest(scores, int(np.count_nonzero(planned)))

    def some(self, rows: NDArray[np.int64], of: int) -> Count:
        """As :meth:`Pattern.some`."""
        return Count(round(self.count * len(rows) / of))


@dataclass(frozen=True)
class Given:
    """These go."""

    mask: Mask
    width: int = _BLOCK

    def plan(self, scores: NDArray[np.floating]) -> Mask:
        """As :meth:`Pattern.plan`."""
        return self.mask.reshape(scores.shape)

    def decide(self, scores: NDArray[np.floating], planned: Mask) -> Mask:
        """As :meth:`Pattern.decide`."""
        del scores
        return planned

    def some(self, rows: NDArray[np.int64], of: int) -> Given:
        """As :meth:`Pattern.some`."""
        del of
        return Given(self.mask[rows])


def lowest(scores: NDArray[np.floating], count: int) -> Mask:
    """True at exactly ``count`` of the lowest scores; of equal ones the first."""
    flat = scores.reshape(-1)
    gone = np.zeros(flat.size, bool)
    if count > 0:
        bound = np.partition(flat, min(count, flat.size) - 1)[min(count, flat.size) - 1]
        gone[flat < bound] = True
        missing = count - int(np.count_nonzero(gone))
        gone[np.flatnonzero(flat == bound)[:missing]] = True
    return gone.reshape(scores.shape)


def lowest_by_row(scores: NDArray[np.floating], count: int) -> Mask:
    """As :func:`lowest`, as many in every row; rows differ by one at most.

    Wanda compares weights of one output with one another (Sun et al., "A Simple and Effective
    Pruning Approach for Large Language Models", ICLR 2024, section 3).
    """
    ends = np.arange(1, len(scores) + 1) * count // len(scores)
    each = np.diff(ends, prepend=0)
    ranks = np.argsort(np.argsort(scores, axis=1, kind="stable"), axis=1, kind="stable")
    return np.asarray(ranks < each[:, None])


# second moments


class Equations(NamedTuple):
    """Second moments of inputs ``x`` and of what is to be computed from them, ``y``.

    Attributes:
        xx: ``E[x x^T]`` [groups, inputs, inputs].
        yx: ``E[y x^T]`` [groups, outputs, inputs].
        yy: ``E[y^2]`` [groups, outputs].
    """

    xx: NDArray[np.float64]
    yx: NDArray[np.float64]
    yy: NDArray[np.float64]

    def error(self, matrix: Matrix) -> float:
        """``E||y - W x||^2``."""
        found = self.yy.sum() - 2 * np.sum(matrix * self.yx) + np.sum((matrix @ self.xx) * matrix)
        return max(float(found), 0.0)


class _Sums(NamedTuple):
    rows: int
    x: NDArray[np.float64]
    y: NDArray[np.float64]
    xx: NDArray[np.float64]
    yx: NDArray[np.float64]
    yy: NDArray[np.float64]


class Moments:
    """Sums over rows, of two halves of them apart, in memory that does not grow with the rows."""

    def __init__(self, groups: int, outputs: int, inputs: int) -> None:
        self._count = np.zeros(2, np.int64)
        self._x = np.zeros((2, groups, inputs))
        self._y = np.zeros((2, groups, outputs))
        self._xx = np.zeros((2, groups, inputs, inputs), np.float32)
        self._yx = np.zeros((2, groups, outputs, inputs), np.float32)
        self._yy = np.zeros((2, groups, outputs))
        self._shifts: tuple[NDArray[np.float32], NDArray[np.float32]] | None = None
        self._waiting: list[tuple[NDArray[np.float32], NDArray[np.float32], Mask]] = []

    def add(self, x: NDArray[np.float32], y: NDArray[np.float32], half: Mask) -> None:
        """Adds rows.

        Args:
            x: [rows, groups, inputs]
            y: [rows, groups, outputs]
            half: Which half each belongs to, [rows].
        """
        self._waiting.append((x, y, half))
        if sum(len(rows) for rows, _, _ in self._waiting) >= _GATHERED:
            self._take()

    def _take(self) -> None:
        """Sums up what is waiting."""
        rows = [part for part in self._waiting if len(part[0])]
        self._waiting = []
        if not rows:
            return
        x, y, half = (np.concatenate(column) for column in zip(*rows, strict=True))
        if self._shifts is None:
            # Variances are small differences of large numbers where means are far from zero.
            self._shifts = x.mean(axis=0), y.mean(axis=0)
        for index, chosen in enumerate((~half, half)):
            xs = np.moveaxis(x[chosen] - self._shifts[0], 1, 0)  # [groups, rows, inputs]
            ys = np.moveaxis(y[chosen] - self._shifts[1], 1, 0)
            self._count[index] += xs.shape[1]
            self._x[index] += xs.sum(axis=1, dtype=np.float64)
            self._y[index] += ys.sum(axis=1, dtype=np.float64)
            self._xx[index] += np.swapaxes(xs, 1, 2) @ xs
            self._yx[index] += np.swapaxes(ys, 1, 2) @ xs
            self._yy[index] += np.sum(ys.astype(np.float64) ** 2, axis=1)

    @property
    def usable(self) -> bool:
        """Whether there are rows, and no overflow."""
        self._take()
        return self._shifts is not None and bool(np.isfinite(self._xx).all())

    @property
    def halves(self) -> bool:
        """Whether one half can say something about the other."""
        self._take()
        return int(self._count.min()) >= _FEWEST_ROWS

    def means(self, half: int | None = None) -> tuple[Matrix, Matrix]:
        """Means of x [groups, inputs] and y [groups, outputs]; of a half, or of all rows."""
        self._take()
        assert self._shifts is not None, "rows were added"
        sums = self._over(half)
        return sums.x / sums.rows + self._shifts[0], sums.y / sums.rows + self._shifts[1]

    def about(self, x: Matrix, y: Matrix, half: int | None = None) -> Equations:
        """Moments about a point: the means give covariances, zeros what is raw."""
        self._take()
        assert self._shifts is not None, "rows were added"
        sums = self._over(half)
        to_x, to_y = x - self._shifts[0], y - self._shifts[1]
        mean_x, mean_y = sums.x / sums.rows, sums.y / sums.rows
        xx = sums.xx / sums.rows
        xx -= mean_x[:, :, None] * mean_x[:, None, :]
        xx += (mean_x - to_x)[:, :, None] * (mean_x - to_x)[:, None, :]
        yx = sums.yx / sums.rows - mean_y[:, :, None] * mean_x[:, None, :]
        yx += (mean_y - to_y)[:, :, None] * (mean_x - to_x)[:, None, :]
        yy = sums.yy / sums.rows - mean_y**2 + (mean_y - to_y) ** 2
        return Equations(xx, yx, yy)

    def _over(self, half: int | None) -> _Sums:
        parts = (self._x, self._y, self._xx, self._yx, self._yy)
        if half is None:
            return _Sums(int(self._count.sum()), *(p.sum(axis=0, dtype=np.float64) for p in parts))
        return _Sums(int(self._count[half]), *(p[half].astype(np.float64) for p in parts))


# updates


class Pruned(NamedTuple):
    """What came of one layer.

    Attributes:
        matrix: [groups, outputs, inputs], zero where weights went.
        bias: [groups, outputs]; None where it must stay.
        error: Share of the energy of ``y`` that is computed wrongly, on rows that the updates had
            not seen; None where there were too few to tell.
    """

    matrix: Matrix
    bias: Matrix | None
    error: float | None


def prune_matrix(
    weight: Matrix, moments: Moments, pattern: Pattern, *, bias_is_free: bool
) -> Pruned:
    """Takes weights out and lets the others, and the bias, make good for it.

    Before any goes, the weights become those that best compute ``y`` from ``x``: so the layer also
    makes good for errors of the layers before it. The strength of the ridge is what one half of the
    rows says about the other.

    Args:
        weight: [groups, outputs, inputs], columns in the order of the pattern.
        moments: Of inputs, in the same order, and of what the layer is to compute from them, less
            a bias that is not free.
        pattern: What goes.
        bias_is_free: Whether the bias may change.
    """
    ridge, error = _FALLBACK_RIDGE, None
    if moments.halves:
        errors = {each: _unseen(weight, moments, pattern, each, bias_is_free) for each in _RIDGES}
        ridge = min(errors, key=lambda key: errors[key])
        error = errors[ridge]
    x, y = _center(moments, None, bias_is_free)
    matrix = _pruned(weight, moments.about(x, y), pattern, ridge)
    bias = y - np.einsum("goi,gi->go", matrix, x) if bias_is_free else None
    return Pruned(matrix, bias, error)


def _center(moments: Moments, half: int | None, is_free: bool) -> tuple[Matrix, Matrix]:
    x, y = moments.means(half)
    return (x, y) if is_free else (np.zeros_like(x), np.zeros_like(y))


def _unseen(
    weight: Matrix, moments: Moments, pattern: Pattern, ridge: float, is_free: bool
) -> float:
    """Error on the one half with what the other led to, relative to the energy there."""
    rows = np.unique(np.linspace(0, weight.shape[1] - 1, _TRIED_OUTPUTS).astype(np.int64))
    point = _center(moments, 0, is_free)
    seen, unseen = (_of_outputs(moments.about(*point, half), rows) for half in (0, 1))
    energy = _of_outputs(moments.about(*_center(moments, 1, is_free), 1), rows).yy.sum()
    of_all = (np.arange(weight.shape[0])[:, None] * weight.shape[1] + rows).reshape(-1)
    some = pattern.some(of_all, weight.shape[0] * weight.shape[1])
    found = _pruned(weight[:, rows], seen, some, ridge)
    return unseen.error(found) / max(float(energy), 1e-30)


def _of_outputs(equations: Equations, rows: NDArray[np.int64]) -> Equations:
    return Equations(equations.xx, equations.yx[:, rows], equations.yy[:, rows])


def _pruned(weight: Matrix, equations: Equations, pattern: Pattern, ridge: float) -> Matrix:
    """[groups, outputs, inputs] with updates."""
    if np.isinf(ridge):
        costs = weight**2 * np.diagonal(equations.xx, axis1=1, axis2=2)[:, None, :]
        gone = pattern.plan(costs.reshape(-1, weight.shape[2])).reshape(weight.shape)
        return np.where(gone, 0.0, weight)
    spreads = [ridged(each, ridge) for each in equations.xx]
    factors = [inverse_factor(each) for each in spreads]
    rest = equations.yx - weight @ equations.xx
    best = [w + r @ u.T @ u for w, r, u in zip(weight, rest, factors, strict=True)]
    costs = np.stack([w**2 / np.sum(u**2, axis=0) for w, u in zip(best, factors, strict=True)])
    planned = pattern.plan(costs.reshape(-1, weight.shape[2])).reshape(weight.shape)
    found = []
    for w, u, spread, gone in zip(best, factors, spreads, planned, strict=True):
        found.append(refit(w, prune_columns(w, u, pattern, gone), spread))
    return np.stack(found)


def ridged(spread: Matrix, ridge: float) -> Matrix:
    """Second moments with a share of the diagonal added to it."""
    found = spread.copy()
    diagonal = np.diagonal(spread)
    least = _SMALLEST * float(diagonal.mean()) + 1e-30
    np.fill_diagonal(found, diagonal * (1.0 + ridge) + least)
    return found


def prune_columns(weight: Matrix, factor: Matrix, pattern: Pattern, planned: Mask) -> Matrix:
    """One matrix, column by column (algorithm 1 of SparseGPT).

    Args:
        weight: [outputs, inputs]
        factor: From :func:`slimctl.numerics.second_order.inverse_factor`.
        pattern: What goes.
        planned: What it planned, [outputs, inputs].
    """
    found = weight.copy()
    inputs = weight.shape[1]
    step = _BLOCK - _BLOCK % pattern.width or pattern.width
    for start in range(0, inputs, step):
        stop = min(start + step, inputs)
        inner = factor[start:stop, start:stop]
        errors = _prune_block(found[:, start:stop], inner, pattern, planned[:, start:stop])
        found[:, stop:] -= errors @ factor[start:stop, stop:]
    return found


def _prune_block(block: Matrix, factor: Matrix, pattern: Pattern, planned: Mask) -> Matrix:
    """Settles a block of columns in place; what columns behind it have to make good for."""
    errors = np.zeros(block.shape)
    gone = np.zeros(block.shape, bool)
    pivots = np.diagonal(factor)
    for column in range(block.shape[1]):
        if column % pattern.width == 0:
            these = slice(column, column + pattern.width)
            costs = (block[:, these] / pivots[these]) ** 2
            gone[:, these] = pattern.decide(costs, planned[:, these])
        error = np.where(gone[:, column], block[:, column], 0.0) / pivots[column]
        block[:, column:] -= np.outer(error, factor[column, column:])
        errors[:, column] = error
    block[gone] = 0.0  # up to here they are what rounding leaves
    return errors


def refit(weight: Matrix, pruned: Matrix, spread: Matrix) -> Matrix:
    """``W'`` with the zeros of a pruned matrix that brings ``E||(W - W') x||^2`` to its least.

    Conjugate gradients on all rows at once, each under its mask, scaled by the diagonal.

    Args:
        weight: What is to be computed, [outputs, inputs].
        pruned: Where to start; what is zero stays so.
        spread: Second moments of the inputs.
    """
    stays = pruned != 0
    spread = spread.astype(np.float32)
    scale = np.diagonal(spread)
    found = pruned.astype(np.float32)
    residual = ((weight - pruned).astype(np.float32) @ spread) * stays
    direction = residual / scale
    size = np.sum(residual * direction, axis=1, keepdims=True)
    for _ in range(_REFITS):
        moved = (direction @ spread) * stays
        length = size / np.maximum(np.sum(direction * moved, axis=1, keepdims=True), _TINY)
        found += length * direction
        residual -= length * moved
        scaled = residual / scale
        before, size = size, np.sum(residual * scaled, axis=1, keepdims=True)
        direction = scaled + size / np.maximum(before, _TINY) * direction
    return found.astype(np.float64)
