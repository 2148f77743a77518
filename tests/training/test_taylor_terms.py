"""What elements contribute to the outputs: which outputs, and how they are weighed."""

# ruff: noqa: E402 # the check for torch comes before what needs it
from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import numpy_helper

torch = pytest.importorskip("torch", reason="torch is an extra")

from slimctl.core.errors import UnsupportedModelError
from slimctl.training.taylor import taylor_terms

_RANDOM = np.random.default_rng(0)
W, B = _RANDOM.normal(size=(3, 4)).astype(np.float32), _RANDOM.normal(size=4).astype(np.float32)
X = _RANDOM.normal(size=(2, 3)).astype(np.float32)


def linear(behind: str, *, w: np.ndarray = W, b: np.ndarray = B) -> ir.Model:
    """``x w + b``, and something behind it."""
    text = f"""
    <ir_version: 8, opset_import: ["": 17]>
    g (float[N,3] x) => (float[N,4] y) {{ a = MatMul(x, w)  s = Add(a, b)  y = {behind}(s) }}
    """
    model = onnx.parser.parse_model(text)
    model.graph.initializer.extend(
        [numpy_helper.from_array(w, "w"), numpy_helper.from_array(b, "b")]
    )
    return ir.from_proto(model)


def terms(model: ir.Model, *names: str, seed: int = 0) -> dict[str, np.ndarray]:
    (found,) = taylor_terms(model, names, [{"x": X}], seed=seed, threads=1)
    return found


def test_terms_are_value_times_gradient() -> None:
    found = terms(linear("Identity"), "w", "a")
    signs = np.random.default_rng((0, 0)).choice(np.array([-1.0, 1.0], np.float32), (2, 4))
    gradient = signs / np.linalg.norm(X @ W + B)
    np.testing.assert_allclose(found["w"], W * (X.T @ gradient), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(found["a"], (X @ W) * gradient, rtol=1e-4, atol=1e-6)


def test_outputs_count_relative_to_their_size() -> None:
    small, large = (terms(linear("Identity", w=W * f, b=B * f), "w")["w"] for f in (1.0, 1e3))
    np.testing.assert_allclose(small, large, rtol=1e-3, atol=1e-6)


def test_probabilities_count_as_the_scores_behind_them() -> None:
    scores = terms(linear("Identity", b=B + 50), "w")["w"]
    saturated = terms(linear("Sigmoid", b=B + 50), "w")["w"]
    np.testing.assert_array_equal(saturated, scores)


def test_a_shift_of_all_scores_does_not_change_a_softmax() -> None:
    shift = np.full(4, 0.7, np.float32)
    assert abs(terms(linear("Softmax", b=shift), "b")["b"].sum()) < 1e-6
    assert abs(terms(linear("Identity", b=shift), "b")["b"].sum()) > 1e-3
    assert np.abs(terms(linear("Softmax", b=shift), "w")["w"]).max() > 1e-2


def test_signs_depend_on_the_seed_and_the_batch() -> None:
    model = linear("Identity")
    np.testing.assert_array_equal(terms(model, "w")["w"], terms(model, "w")["w"])
    assert not np.array_equal(terms(model, "w")["w"], terms(model, "w", seed=1)["w"])
    first, second = taylor_terms(model, ["w"], [{"x": X}, {"x": X}], seed=0)
    assert not np.array_equal(first["w"], second["w"])


def test_what_no_output_depends_on_contributes_nothing() -> None:
    text = """
    <ir_version: 8, opset_import: ["": 17]>
    g (float[N,3] x) => (float[N,3] y, int64[2] s) { y = Mul(x, u)  z = Mul(x, v)  s = Shape(z) }
    """
    model = onnx.parser.parse_model(text)
    ones = np.ones(3, np.float32)
    model.graph.initializer.extend([numpy_helper.from_array(ones, name) for name in "uv"])
    found = terms(ir.from_proto(model), "u", "v")
    assert np.abs(found["u"]).min() > 0
    np.testing.assert_array_equal(found["v"], 0 * ones)


def test_outputs_without_floats_are_refused() -> None:
    text = """
    <ir_version: 8, opset_import: ["": 17]>
    g (float[N,3] x) => (int64[N,1] y) { a = Relu(x)  y = ArgMax<axis=1>(a) }
    """
    model = ir.from_proto(onnx.parser.parse_model(text))
    with pytest.raises(UnsupportedModelError, match="No output of the model holds floats"):
        next(iter(taylor_terms(model, ["a"], [{"x": X}], seed=0)))


def test_threads_are_given_back() -> None:
    before = torch.get_num_threads()
    list(taylor_terms(linear("Identity"), ["w"], [{"x": X}], seed=0, threads=before + 1))
    assert torch.get_num_threads() == before
