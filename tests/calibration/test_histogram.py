"""Histograms: counts against NumPy's, invariance, what is left out, memory."""

from __future__ import annotations

import math
import threading

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from slimctl.calibration.histogram import BINS_PER_OCTAVE, ROW_LIMIT, Bins, FloatHistogram


def _histogram(*parts: np.ndarray, row_limit: int | None = None) -> FloatHistogram:
    histogram = FloatHistogram(row_limit=row_limit)
    for part in parts:
        histogram.update(part)
    return histogram


def _same(first: FloatHistogram, second: FloatHistogram) -> bool:
    ours, theirs = first.to_arrays(), second.to_arrays()
    return all(np.array_equal(ours[name], theirs[name]) for name in ours) and all(
        np.array_equal(one, other) for one, other in zip(first.bins(), second.bins(), strict=True)
    )


def _normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0.3, 2.0, shape).astype(np.float32)


def test_counts_equal_numpy_with_the_same_edges() -> None:
    values = _normal(7, 5000)
    bins = _histogram(values).bins()
    assert bins.weight.sum() == values.size
    assert np.all(bins.low <= bins.high) and np.all(bins.high[:-1] <= bins.low[1:])
    # An edge belongs to the bin farther from zero.
    upper = bins.low >= 0
    positive = np.histogram(values[values >= 0], np.append(bins.low[upper], np.inf))[0]
    edges = np.append(-bins.high[~upper][::-1], np.inf)
    negative = np.histogram(-values[values < 0], edges)[0]
    np.testing.assert_array_equal(bins.weight, [*negative[::-1], *positive])


def test_bins_are_finer_than_a_2048th_of_the_largest_octave() -> None:
    bins = _histogram(_normal(100_000)).bins()
    largest = max(-bins.low[0], bins.high[-1])
    assert np.max(bins.high - bins.low) <= 2.0 ** math.ceil(math.log2(largest)) / (
        2 * BINS_PER_OCTAVE
    )
    assert bins.weight.size > 2048


def test_extremes_are_exact_and_end_the_bins() -> None:
    values = _normal(3, 10_000)
    histogram = _histogram(values)
    bins = histogram.bins()
    assert histogram.minimum == bins.low[0] == values.min()
    assert histogram.maximum == bins.high[-1] == values.max()


@settings(max_examples=30, deadline=None)
@given(
    arrays(
        np.float32,
        array_shapes(min_dims=2, max_dims=3, min_side=1, max_side=12),
        elements=st.floats(width=32, allow_nan=True, allow_infinity=True),
    ),
    st.randoms(use_true_random=False),
)
def test_order_and_batches_do_not_matter(values: np.ndarray, random: object) -> None:
    whole = _histogram(values, row_limit=5)
    rows = [values[i : i + 1] for i in range(values.shape[0])]
    random.shuffle(rows)  # type: ignore[attr-defined]  # hypothesis gives random.Random
    assert _same(whole, _histogram(*rows, row_limit=5))
    merged = FloatHistogram(row_limit=5)
    for row in rows:
        merged.merge(_histogram(row, row_limit=5))
    assert _same(whole, merged)


def test_batches_of_different_shapes() -> None:
    first, second = _normal(2, 3, 8, 8), _normal(1, 3, 5, 11, seed=1)
    joined = np.concatenate([first.reshape(-1), second.reshape(-1)])
    ours, theirs = _histogram(first, second).bins(), _histogram(joined[np.newaxis]).bins()
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(one, other)


def test_long_rows_are_sampled_without_favoring_a_channel() -> None:
    # Every channel has its own value: the counts say how often each was met.
    channels, positions = 96, 4096
    values = np.repeat(np.arange(1, channels + 1), positions).astype(np.float32)
    for layout in ((1, channels, positions), (1, positions, channels)):
        shaped = values.reshape(1, channels, positions)
        if layout[-1] == channels:
            shaped = np.ascontiguousarray(shaped.swapaxes(1, 2))
        bins = _histogram(shaped, row_limit=ROW_LIMIT).bins()
        assert bins.weight.size == channels
        np.testing.assert_allclose(bins.weight, positions, rtol=0.1)


def test_sampling_keeps_the_extremes_of_every_sample() -> None:
    values = np.zeros((2, 200_000), np.float32)
    values[0, 12_345], values[1, 54_321] = 7.0, -9.0
    bins = _histogram(values, row_limit=1000).bins()
    assert bins.low[0] == -9.0 and bins.high[-1] == 7.0
    assert bins.weight[0] >= 1 and bins.weight[-1] >= 1


def test_signed_zeros_and_subnormals_are_one_bin_at_zero() -> None:
    values = np.array([0.0, -0.0, 1e-45, -1e-42, 1.0], np.float32)
    bins = _histogram(values).bins()
    assert bins.weight.tolist() == [4, 1]
    assert bins.low[0] <= 0 <= bins.high[0] < 1e-40


def test_what_is_left_out_is_counted() -> None:
    rows = np.ones((4, 6), np.float32)
    rows[0, :2] = np.nan
    rows[1, 0], rows[1, 1] = np.inf, -np.inf
    rows[2, 0] = np.finfo(np.float32).min
    histogram = _histogram(rows)
    assert (histogram.nan_count, histogram.inf_count, histogram.mask_count) == (2, 2, 1)
    assert (histogram.size, histogram.rows) == (24, 4)
    assert histogram.bins() == Bins(*(np.array([value]) for value in (1.0, 1.0, 19.0)))


@pytest.mark.parametrize(
    ("rows_with_infinity", "masked"), [(0, False), (1, False), (4, True), (8, True)]
)
def test_infinity_by_accident_and_by_design(rows_with_infinity: int, masked: bool) -> None:
    rows = _normal(8, 16)
    rows[:rows_with_infinity, 3] = -np.inf
    assert _histogram(rows).masked is masked


@pytest.mark.parametrize("mask", [np.finfo(np.float32).min, -1e38, -1e30])
def test_mask_constants_do_not_blow_the_range(mask: float) -> None:
    values = _normal(2, 50)
    clean = _histogram(values)
    values[:, -1] = mask
    histogram = _histogram(values)
    assert histogram.masked and not clean.masked
    assert histogram.minimum >= clean.minimum and histogram.maximum <= clean.maximum


def test_float16_mask_is_its_lowest_number() -> None:
    values = np.array([[1.0, -2.0, -65504.0]], np.float16)
    histogram = _histogram(values)
    assert histogram.mask_count == 1 and histogram.minimum == -2.0
    # In float32 it is an ordinary number.
    assert _histogram(values.astype(np.float32)).minimum == -65504.0


@pytest.mark.parametrize("dtype", [np.float16, np.float64, ml_dtypes.bfloat16])
def test_other_types_count_as_float32(dtype: type) -> None:
    values = _normal(3, 100).astype(dtype)
    assert _same(_histogram(values), _histogram(values.astype(np.float32)))


def test_tiny_float16_activations_have_resolution() -> None:
    values = (np.arange(1, 200) * 6e-8).astype(np.float16)
    assert _histogram(values).bins().weight.size > 100


def test_float64_beyond_float32_is_infinite() -> None:
    assert _histogram(np.array([1e300, 1.0])).inf_count == 1


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 4)])
def test_empty_tensors_leave_no_range(shape: tuple[int, ...]) -> None:
    histogram = _histogram(np.zeros(shape, np.float32))
    assert histogram.empty and histogram.size == 0
    assert histogram.bins().weight.size == 0


def test_scalars_count() -> None:
    assert _histogram(np.array(2.5, np.float32)).bins().low.tolist() == [2.5]


def test_arrays_that_are_not_contiguous() -> None:
    values = _normal(4, 6, 8)
    assert _same(
        _histogram(values.transpose(0, 2, 1)),
        _histogram(np.ascontiguousarray(values.transpose(0, 2, 1))),
    )


def test_arrays_round_trip() -> None:
    values = _normal(2, 500)
    values[0, 0] = np.nan
    histogram = _histogram(values)
    restored = FloatHistogram.from_arrays(histogram.to_arrays())
    assert _same(histogram, restored)
    for ours, theirs in zip(histogram.bins(), restored.bins(), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_threads_may_update_at_the_same_time() -> None:
    parts = [_normal(2, 3000, seed=seed) for seed in range(16)]
    histogram = FloatHistogram()
    threads = [threading.Thread(target=histogram.update, args=(part,)) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert _same(histogram, _histogram(*parts))
