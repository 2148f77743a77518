"""What public bug reports about float16 come down to: where float32 and Casts are then."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.passes.test_convert_float import FULL, HALF, Converted, build, convert, normal

__all__ = ["convert"]  # a fixture


# As B37: inputs that must stay float32


def test_resize_by_size_with_a_region(convert: Callable[..., Converted]) -> None:
    text = """g (float[1,3,8] x) => (float[1,3,5] y) {
        c = Conv(x, w)
        r = Resize<mode="linear", coordinate_transformation_mode="tf_crop_and_resize">
            (c, roi, , sizes)
        y = Conv(r, w)
    }"""
    arrays = {"roi": [0, 0, 0.1, 1, 1, 0.8], "sizes": np.array([1, 3, 5])}
    result = convert(build(text, 13, w=normal(3, 3, 1), **arrays))
    assert not result.full()
    assert result.node("Resize_r").inputs[1].dtype == FULL
    assert result.sqnr({"x": normal(1, 3, 8)}) > 45.0


def test_resize_by_computed_scales(convert: Callable[..., Converted]) -> None:
    text = """g (float[1,2,4,4] x, float[2] zoom) => (float[1,2,A,B] y) {
        c = Conv(x, w)
        s = Concat<axis=0>(ones, zoom)
        r = Resize<mode="nearest">(c, , s)
        y = Relu(r)
    }"""
    result = convert(build(text, 13, w=normal(2, 2, 1, 1), ones=[1.0, 1.0]))
    assert result.full() == {"Concat_s"} | ({"Relu_y"} & result.full())
    feeds = {"x": normal(1, 2, 4, 4), "zoom": np.array([2.0, 1.5], np.float32)}
    assert result.sqnr(feeds) > 45.0


def test_upsample_of_an_old_model(convert: Callable[..., Converted]) -> None:
    text = """g (float[1,2,4,4] x) => (float[1,2,8,8] y) {
        c = Conv(x, w) u = Upsample<mode="nearest">(c, s) y = Conv(u, w)
    }"""
    result = convert(build(text, 9, w=normal(2, 2, 1, 1), s=[1.0, 1, 2, 2]))
    assert result.node("Upsample_u").inputs[1].dtype == FULL
    assert result.sqnr({"x": normal(1, 2, 4, 4)}) > 45.0


def test_grid_of_a_sampler(convert: Callable[..., Converted]) -> None:
    text = """g (float[1,2,8,8] x, float[1,4,4,2] g) => (float[1,2,4,4] y) {
        c = Conv(x, w) t = Tanh(g) s = GridSample(c, t) y = Conv(s, w)
    }"""
    result = convert(build(text, 16, w=normal(2, 2, 1, 1)))
    assert result.full() == {"Tanh_t"}
    feeds = {"x": normal(1, 2, 8, 8), "g": normal(1, 4, 4, 2, seed=1)}
    assert result.sqnr(feeds) > 45.0


# As B39: types that are stated in attributes


def test_cast_of_a_comparison(convert: Callable[..., Converted]) -> None:
    text = """g (float[2,8] x) => (float[2,8] y) {
        h = MatMul(x, w) p = Greater(h, zero) f = Cast<to=1>(p) m = Mul(f, h) y = MatMul(m, w)
    }"""
    result = convert(build(text, w=normal(8, 8), zero=0.0))
    assert result.casts() == {HALF: 2, FULL: 1}
    assert result.sqnr({"x": normal(2, 8)}) > 50.0


def test_cast_like_and_cast_from_double(convert: Callable[..., Converted]) -> None:
    text = """g (float[2,8] x, double[2,8] d, int64[2,8] i) => (float[2,8] y) {
        h = MatMul(x, w)
        a = Cast<to=1>(d)
        b = CastLike(i, h)
        s = Sum(h, a, b)
        y = MatMul(s, w)
    }"""
    result = convert(build(text, 19, w=normal(8, 8)))
    assert not result.full()
    feeds = {
        "x": normal(2, 8),
        "d": normal(2, 8, seed=1).astype(np.float64),
        "i": np.arange(16).reshape(2, 8),
    }
    assert result.sqnr(feeds) > 50.0


# As B41: masks


LOWEST = float(np.finfo(np.float32).min)


@pytest.mark.parametrize("opset", [13, 17, 22])
@pytest.mark.parametrize(
    "mask",
    [
        "n = Sub(one, m) a = Mul(n, lowest) s = Add(h, a)",
        "k = Cast<to=9>(m) s = Where(k, h, lowest)",
        "k = Cast<to=9>(m) z = Where(k, zero, lowest) u = Unsqueeze(z, axis) v = Squeeze(u, axis)"
        " s = Add(h, v)",
    ],
    ids=["product", "choice", "moved"],
)
@pytest.mark.parametrize("with_data", [False, True], ids=["no data", "with data"])
def test_masks_of_other_kinds(
    convert: Callable[..., Converted], mask: str, opset: int, with_data: bool
) -> None:
    text = f"""g (float[3,8] x, float[3,8] m) => (float[3,8] y) {{
        h = MatMul(x, w) {mask} p = Softmax(s) y = MatMul(p, w)
    }}"""
    known = {"one": 1.0, "zero": 0.0, "lowest": LOWEST, "axis": [0]}
    arrays = {name: value for name, value in known.items() if name in mask}
    result_model = build(text, opset, w=normal(8, 8), **arrays)
    keep = (np.random.default_rng(0).random((3, 8)) > 0.4).astype(np.float32)
    keep[:, 0] = 1.0
    feeds = {"x": normal(3, 8, seed=1), "m": keep}
    result = convert(result_model, [feeds] if with_data else [])
    # Without data Softmax is float32, and a mask made of float32 inputs stays with it.
    assert result.report.facts["clamped"] == ([] if "Mul" in mask and not with_data else ["lowest"])
    assert ("Softmax_p" in result.full()) != with_data
    assert result.sqnr(feeds) > 45.0
    blind = {"x": normal(3, 8, seed=1), "m": np.zeros((3, 8), np.float32)}
    assert result.sqnr(blind) > -200.0  # finite is what is asked for


def test_two_masks_that_are_added(convert: Callable[..., Converted]) -> None:
    """A fully masked row twice over: infinities would give NaN."""
    text = """g (float[3,8] x, bool[3,8] m) => (float[3,8] y) {
        h = MatMul(x, w) a = Where(m, zero, lowest) b = Where(m, zero, lowest)
        s = Add(h, a) t = Add(s, b) p = Softmax(t) y = MatMul(p, w)
    }"""
    model = build(text, w=normal(8, 8), zero=0.0, lowest=-1e9)
    feeds = {"x": normal(3, 8, seed=1), "m": np.zeros((3, 8), bool)}
    result = convert(model, [feeds])
    assert not result.full()
    assert result.sqnr(feeds) > -200.0


def test_a_large_constant_that_is_no_mask(convert: Callable[..., Converted]) -> None:
    text = """g (float[3,8] x) => (float[3,8] y) {
        h = MatMul(x, w) a = Mul(h, big) b = Mul(a, small) y = MatMul(b, w)
    }"""
    result = convert(build(text, w=normal(8, 8), big=1e6, small=1e-6))
    assert {"Mul_a", "Mul_b"} <= result.full()
    assert not result.report.facts["clamped"]
    assert result.sqnr({"x": normal(3, 8)}) > 50.0
