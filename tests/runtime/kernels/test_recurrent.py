from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

from slimctl.runtime.kernels.recurrent import gru, lstm
from tests.runtime.kernels.one_node import assert_agrees, assert_close, ours

_RNG = np.random.default_rng(15)
_TERMS = 0.2
"""A gate sums numbers near one in float32, and an activation of it can be near zero everywhere."""

_HIDDEN, _INPUT, _BATCH, _LENGTH = 4, 3, 3, 5
_GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
_ACTIVATIONS = {"RNN": 1, "GRU": 2, "LSTM": 3}
_DIRECTIONS = {"forward": 1, "reverse": 1, "bidirectional": 2}
_OUTPUTS = {"RNN": 2, "GRU": 2, "LSTM": 3}


def _floats(*shape: int) -> np.ndarray:
    return _RNG.standard_normal(shape, dtype=np.float32)


def _inputs(
    op_type: str, directions: int, *, bias: bool = True, lengths: bool = False, states: bool = True
) -> list[Any]:
    """Inputs of a layer; peepholes of an LSTM go with its biases."""
    rows = _GATES[op_type] * _HIDDEN
    first = _floats(directions, _BATCH, _HIDDEN) if states else None
    inputs = [
        _floats(_LENGTH, _BATCH, _INPUT),
        _floats(directions, rows, _INPUT) / 2,
        _floats(directions, rows, _HIDDEN) / 2,
        _floats(directions, 2 * rows) if bias else None,
        np.array([5, 3, 1], np.int32) if lengths else None,
        first,
    ]
    if op_type == "LSTM":
        cells = _floats(directions, _BATCH, _HIDDEN) if states else None
        inputs += [cells, _floats(directions, 3 * _HIDDEN) if bias else None]
    return inputs


def _forms(op_type: str) -> list[dict[str, Any]]:
    if op_type == "GRU":
        return [
            {},
            {"clip": 0.3},
            {"linear_before_reset": 1},
            {"linear_before_reset": 1, "clip": 0.3},
        ]
    if op_type == "LSTM":
        return [{}, {"clip": 0.3}, {"input_forget": 1}]
    return [{}, {"clip": 0.3}]


@pytest.mark.parametrize("op_type", sorted(_GATES))
@pytest.mark.parametrize("direction", sorted(_DIRECTIONS))
@pytest.mark.parametrize("opset", [9, 14, 22])
def test_layers_as_onnxruntime(op_type: str, direction: str, opset: int) -> None:
    for form, bias, lengths, states in product(_forms(op_type), *[(False, True)] * 3):
        directions = _DIRECTIONS[direction]
        assert_agrees(
            op_type,
            _inputs(op_type, directions, bias=bias, lengths=lengths, states=states),
            opset=opset,
            outputs=_OUTPUTS[op_type],
            direction=direction,
            hidden_size=_HIDDEN,
            **form,
        )


@pytest.mark.parametrize("op_type", sorted(_GATES))
@pytest.mark.parametrize("direction", ["forward", "bidirectional"])
@pytest.mark.parametrize(
    ("name", "alphas", "betas"),
    [
        ("Relu", [], []),
        ("Softsign", [], []),
        ("Sigmoid", [], []),
        ("LeakyRelu", [], []),
        ("LeakyRelu", [0.3, 0.4], []),
        ("HardSigmoid", [], []),
        ("HardSigmoid", [0.3, 0.4], [0.6, 0.7]),
        ("Elu", [0.3, 0.4], []),
        ("Affine", [0.3, 0.4], [0.1, 0.2]),
        ("ScaledTanh", [0.3, 0.4], [0.6, 0.7]),
        ("ThresholdedRelu", [0.3, 0.4], []),
        ("Softplus", [], []),
    ],
)
def test_activations_as_onnxruntime(
    op_type: str, direction: str, name: str, alphas: list[float], betas: list[float]
) -> None:
    """Where there are several, the first takes no parameter: the others take them in turn."""
    several, directions = _ACTIVATIONS[op_type] > 1, _DIRECTIONS[direction]
    with_parameters = _ACTIVATIONS[op_type] - several
    names = (["Tanh"] * several + [name] * with_parameters) * directions
    # Softplus and its like make states grow: small weights keep them where float32 is exact enough
    inputs = _inputs(op_type, directions)
    inputs[2] = inputs[2] / 4
    more = {"activation_alpha": alphas[:with_parameters] * directions} if alphas else {}
    more |= {"activation_beta": betas[:with_parameters] * directions} if betas else {}
    assert_agrees(
        op_type,
        inputs,
        opset=14,
        outputs=_OUTPUTS[op_type],
        direction=direction,
        hidden_size=_HIDDEN,
        activations=names,
        terms=_TERMS,
        **more,
    )


@pytest.mark.parametrize("op_type", sorted(_GATES))
@pytest.mark.parametrize("direction", sorted(_DIRECTIONS))
def test_layout_1_is_layout_0_with_the_batch_first(op_type: str, direction: str) -> None:
    """onnxruntime has layout 0 only."""
    inputs = _inputs(op_type, _DIRECTIONS[direction], lengths=True)
    node = {"opset": 14, "outputs": _OUTPUTS[op_type], "direction": direction}
    expected = ours(op_type, inputs, **node)
    turned = [
        value.swapaxes(0, 1) if i in (0, 5, 6) and value is not None else value
        for i, value in enumerate(inputs)
    ]
    found = ours(
        op_type, [None if v is None else np.ascontiguousarray(v) for v in turned], layout=1, **node
    )
    assert_close(found[0], expected[0].transpose(2, 0, 1, 3))
    for last, other in zip(found[1:], expected[1:], strict=True):
        assert_close(last, other.swapaxes(0, 1))


def test_weights_must_have_the_directions() -> None:
    inputs = _inputs("LSTM", 2)
    with pytest.raises(ValueError, match="2 directions, the direction is forward"):
        lstm(*inputs)


def test_unknown_activations_are_refused() -> None:
    with pytest.raises(ValueError, match="no activation 'Swish'"):
        gru(*_inputs("GRU", 1), activations=("Sigmoid", "Swish"))
