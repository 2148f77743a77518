from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from slimctl.runtime.kernels.linear import einsum, gemm, matmul
from tests.runtime.kernels.one_node import assert_agrees, assert_close

_RNG = np.random.default_rng(12)


def _floats(*shape: int) -> np.ndarray:
    return _RNG.standard_normal(shape, dtype=np.float32)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((3, 4), (4, 5)),
        ((4,), (4,)),
        ((4,), (4, 5)),
        ((3, 4), (4,)),
        ((2, 3, 4), (4, 5)),
        ((2, 3, 4), (4,)),
        ((6, 2, 3, 4), (4, 5)),
        ((6, 2, 3, 4), (2, 4, 5)),
        ((3, 4), (6, 2, 4, 5)),
        ((6, 1, 3, 4), (2, 4, 5)),
        ((2, 0, 4), (4, 5)),
        ((3, 0), (0, 5)),
    ],
)
def test_matmul_as_onnxruntime(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    assert_agrees("MatMul", [_floats(*a), _floats(*b)], opset=13)


@pytest.mark.parametrize("kind", [np.int32, np.int64, np.uint32, np.uint64])
def test_matmul_of_integers_wraps(kind: Any) -> None:
    limits = np.iinfo(kind)
    a = _RNG.integers(limits.min, limits.max, (2, 3, 4), kind, endpoint=True)
    b = _RNG.integers(limits.min, limits.max, (4, 5), kind, endpoint=True)
    exact = a.astype(object) @ b.astype(object)
    unsigned = np.dtype(f"u{limits.bits // 8}")
    expected = (exact % 2**limits.bits).astype(unsigned).view(kind)
    np.testing.assert_array_equal(matmul(a, b), expected, strict=True)


@pytest.mark.parametrize("opset", [9, 11, 13])
@pytest.mark.parametrize(("turn_a", "turn_b"), [(0, 0), (0, 1), (1, 0), (1, 1)])
@pytest.mark.parametrize("c", [(), (1,), (5,), (3, 1), (1, 5), (3, 5)])
def test_gemm_as_onnxruntime(opset: int, turn_a: int, turn_b: int, c: tuple[int, ...]) -> None:
    a = _floats(4, 3) if turn_a else _floats(3, 4)
    b = _floats(5, 4) if turn_b else _floats(4, 5)
    node = {"opset": opset, "transA": turn_a, "transB": turn_b, "alpha": 0.7, "beta": 1.3}
    assert_agrees("Gemm", [a, b, _floats(*c)], **node)


def test_gemm_without_c() -> None:
    a, b = _floats(3, 4), _floats(4, 5)
    assert_agrees("Gemm", [a, b], opset=13, alpha=2.0)


def test_gemm_of_integers_takes_integer_factors_only() -> None:
    a, b, c = np.array([[2, 3]]), np.array([[5], [7]]), np.array([1])
    np.testing.assert_array_equal(gemm(a, b, c, alpha=2.0, beta=3.0), [[65]])
    with pytest.raises(ValueError, match="not an integer"):
        gemm(a, b, c, alpha=0.5)


def test_gemm_with_beta_0_ignores_c() -> None:
    a, b = _floats(3, 4), _floats(4, 5)
    found = gemm(a, b, np.full(5, np.nan, np.float32), beta=0.0)
    assert_close(found, a @ b, rtol=1e-6)


@pytest.mark.parametrize(
    ("equation", "shapes"),
    [
        ("ij,jk->ik", ((3, 4), (4, 5))),
        ("bhid,bhjd->bhij", ((2, 3, 4, 5), (2, 3, 6, 5))),
        ("bhij, bhjd -> bhid", ((2, 3, 4, 6), (2, 3, 6, 5))),
        ("...ij->...ji", ((2, 3, 4),)),
        ("...ij,...jk", ((2, 3, 4), (1, 4, 5))),
        ("ii->i", ((4, 4),)),
        ("ii", ((4, 4),)),
        ("ij->", ((3, 4),)),
        ("i,j", ((3,), (4,))),
        ("ab,bc,cd->ad", ((2, 3), (3, 4), (4, 5))),
        ("bA,cA->cb", ((2, 3), (4, 3))),
    ],
)
def test_einsum_as_onnxruntime(equation: str, shapes: Any) -> None:
    assert_agrees("Einsum", [_floats(*s) for s in shapes], opset=12, equation=equation)


@pytest.mark.parametrize("kind", [np.float16, ml_dtypes.bfloat16])
def test_narrow_floats_are_rounded_once(kind: Any) -> None:
    a, b = _floats(3, 64).astype(kind), _floats(64, 5).astype(kind)
    exact = (a.astype(np.float64) @ b.astype(np.float64)).astype(np.float32).astype(kind)
    for found in (matmul(a, b), gemm(a, b), einsum(a, b, equation="ij,jk->ik")):
        assert found.dtype == kind
        # a sum in float32 that falls beside a border of two roundings may be rounded the other way
        assert (found != exact).mean() < 0.2
        assert_close(found, exact, rtol=2.0**-8 if kind == np.float16 else 2.0**-7)


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"mismatch|dimension"):
        matmul(_floats(3, 4), _floats(5, 4))
    with pytest.raises(ValueError, match=r"broadcast|shape"):
        gemm(_floats(3, 4), _floats(4, 5), _floats(2, 3, 5))
