"""Probabilities are judged by the scores behind them."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from slimctl.evaluate.scores import score_views, seen_through
from slimctl.graph.session import open_session, run
from slimctl.pipeline.fidelity import sqnr_by_output


def _model(node: str) -> ir.Model:
    text = (
        f'<ir_version: 8, opset_import: ["": 17]> g (float[N,4] x) => (float[N,4] y) {{ {node} }}'
    )
    return ir.from_proto(onnx.parser.parse_model(text))


@pytest.mark.parametrize("spread", [1.0, 30.0])
def test_scores_of_a_softmax_come_back_centered(spread: float) -> None:
    model = _model("y = Softmax<axis=-1>(x)")
    scores = (spread * np.random.default_rng(0).normal(size=(5, 4))).astype(np.float32)
    outputs = run(open_session(model), {"x": scores})
    seen = seen_through(score_views(model), outputs)["y"]
    expected = scores - scores.mean(axis=1, keepdims=True)
    assert np.allclose(seen, expected, rtol=1e-4, atol=1e-4 * spread)


def test_scores_of_a_sigmoid_come_back() -> None:
    model = _model("y = Sigmoid(x)")
    scores = np.linspace(-14, 10, 20).reshape(5, 4).astype(np.float32)
    outputs = run(open_session(model), {"x": scores})
    seen = seen_through(score_views(model), outputs)["y"]
    assert np.allclose(seen, scores, rtol=1e-2, atol=1e-2)


def test_scores_beyond_what_a_sigmoid_tells_apart_are_equal() -> None:
    model = _model("y = Sigmoid(x)")
    scores = np.array([[-100.0, -30.0, 30.0, 100.0]], np.float32)
    outputs = run(open_session(model), {"x": scores})
    low, low_too, high, high_too = seen_through(score_views(model), outputs)["y"][0]
    assert low == low_too < -16
    assert high == high_too > 16


def test_saturated_probabilities_are_finite() -> None:
    for node in ("y = Softmax<axis=-1>(x)", "y = Sigmoid(x)"):
        model = _model(node)
        hard = np.array([[0.0, 1.0, 0.0, 0.0]], np.float32)
        assert np.isfinite(seen_through(score_views(model), {"y": hard})["y"]).all()


def test_an_error_that_probabilities_hide_is_seen() -> None:
    model = _model("y = Softmax<axis=-1>(x)")
    scores = np.array([[20.0, 0.0, 1.0, 2.0]], np.float32)
    off = scores + np.array([[0.0, 2.0, 0.0, 0.0]], np.float32)
    exact, wrong = (run(open_session(model), {"x": x}) for x in (scores, off))
    views = score_views(model)
    assert sqnr_by_output([exact], [wrong])["y"] > 120
    seen = [seen_through(views, outputs) for outputs in (exact, wrong)]
    assert sqnr_by_output(seen[:1], seen[1:])["y"] < 25


def test_other_outputs_are_seen_as_they_are() -> None:
    model = _model("y = Relu(x)")
    assert score_views(model) == {}
