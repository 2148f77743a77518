"""LSTM, GRU, RNN: a hidden unit goes from all gates, both directions, and the states."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx.reference import ReferenceEvaluator

from slimctl.graph.channels import analyze, group_units, remove_channels, silence_channels
from slimctl.graph.edit import clone_model
from slimctl.graph.shapes import infer_shapes
from tests.graph.channels.conftest import AssertExact, Exactness
from tests.graph.channels.table import Weight, ints, parsed

_GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
_HIDDEN = 10


def recurrent(
    op_type: str,
    arguments: str = "t, W, R, B",
    attributes: str = "",
    *,
    before: str = "",
    outputs: str = "h",
    after: str = "s = Squeeze(h, one)",
    inputs: str = "",
    directions: int = 1,
    reads: int = _HIDDEN,
    **weights: Weight,
) -> onnx.ModelProto:
    """A matrix (m1: t, width 8), a recurrent layer (rnn: h), and a matrix of s (m2)."""
    text = f"""(float[T,N,6] x{inputs}) => (float[a,b,c] y) {{
      [m1] t = MatMul(x, W1)
      {before}
      [rnn] {outputs} = {op_type}<hidden_size = {_HIDDEN}{attributes}>({arguments})
      {after}
      [m2] y = MatMul(s, W2)
    }}"""
    rows = _GATES[op_type] * _HIDDEN
    known: dict[str, Weight] = {
        "W1": (6, 8),
        "W2": (reads, 5),
        "W": (directions, rows, 8),
        "R": (directions, rows, _HIDDEN),
        "B": (directions, 2 * rows),
        "P": (directions, 3 * _HIDDEN),
        "one": ints(1),
        **weights,
    }
    used = {name for node in onnx.parser.parse_graph(f"g {text}").node for name in node.input}
    return parsed(text, {name: weight for name, weight in known.items() if name in used})


def bidirectional(
    op_type: str, arguments: str = "t, W, R, B", **weights: Weight
) -> onnx.ModelProto:
    """As exporters join two directions: [T, 2, N, H] -> [T, N, 2*H]."""
    return recurrent(
        op_type,
        arguments,
        ', direction = "bidirectional"',
        after="q = Transpose<perm = [0, 2, 1, 3]>(h) s = Reshape(q, joined)",
        directions=2,
        reads=2 * _HIDDEN,
        joined=ints(0, 0, -1),
        **weights,
    )


def assert_free(found: Exactness, free: Mapping[str, int], reason: str = "") -> None:
    layers = {node.name for group in found.groups for node in group.layers}
    counts = {name: found.free_of(name) for name in layers}
    assert {name: count for name, count in counts.items() if count} == dict(free), found.reasons
    if reason:
        assert any(reason in given for given in found.reasons), found.reasons


def assert_half(found: Exactness) -> None:
    """Half of the hidden units are gone, in every place that has them."""
    node = next(node for node in found.model.graph if node.name == "rnn")
    half = _HIDDEN // 2
    gates = _GATES[node.op_type]
    shapes = {name: found.model.graph.initializers[name].shape for name in ("W", "R")}
    assert node.attributes["hidden_size"].as_int() == half
    assert list(shapes["W"] or ())[1:] == [gates * half, 4]  # m1 lost half of its 8
    assert list(shapes["R"] or ())[1:] == [gates * half, half]


ALL = {"m1": 8, "rnn": _HIDDEN}

FREE = {
    "LSTM": recurrent("LSTM"),
    "LSTM without bias": recurrent("LSTM", "t, W, R"),
    "LSTM backward": recurrent("LSTM", attributes=', direction = "reverse"'),
    "LSTM in both directions": bidirectional("LSTM"),
    "LSTM with peepholes": recurrent("LSTM", "t, W, R, B, , , , P"),
    "LSTM in both directions with peepholes": bidirectional("LSTM", "t, W, R, B, , , , P"),
    "LSTM with coupled gates": recurrent("LSTM", attributes=", input_forget = 1"),
    "LSTM with clipping": recurrent("LSTM", attributes=", clip = 0.3"),
    "LSTM with other gates": recurrent(
        "LSTM", attributes=', activations = ["HardSigmoid", "Softsign", "Relu"]'
    ),
    "GRU": recurrent("GRU"),
    "GRU, reset before": recurrent("GRU", attributes=", linear_before_reset = 1"),
    "GRU in both directions": bidirectional("GRU"),
    "GRU with any gate": recurrent("GRU", attributes=', activations = ["Softplus", "Tanh"]'),
    "RNN": recurrent("RNN"),
    "RNN in both directions": bidirectional("RNN"),
    "RNN with Relu": recurrent("RNN", attributes=', activations = ["Relu"]'),
}


@pytest.mark.parametrize("name", FREE)
def test_hidden_units_go_from_gates_and_directions(name: str, assert_exact: AssertExact) -> None:
    found = assert_exact(FREE[name])
    assert_free(found, ALL)
    assert_half(found)


@pytest.mark.parametrize("whole_blocks", [False, True])
def test_the_final_states_have_the_units_too(whole_blocks: bool, assert_exact: AssertExact) -> None:
    model = recurrent("LSTM", outputs=", h, c", after="[add] s = Add(h, c)", reads=_HIDDEN)
    found = assert_exact(model, whole_blocks=whole_blocks)
    assert_free(found, ALL)
    assert_half(found)


def test_lengths_of_sequences_are_no_obstacle(assert_exact: AssertExact) -> None:
    model = recurrent("LSTM", "t, W, R, B, lengths", inputs=", int32[N] lengths")
    rng = np.random.default_rng(0)
    x = rng.standard_normal((5, 3, 6)).astype(np.float32)
    feeds = {"x": x, "lengths": np.array([5, 2, 4], np.int32)}
    assert_free(assert_exact(model, feeds=feeds), ALL)


# initial states

ZEROS = """
  shape = Shape(x) n = Gather<axis = 0>(shape, one) size = Concat<axis = 0>(one, n, hidden)
  zeros = ConstantOfShape(size)
"""
ZERO_STATES = {
    "a constant": ("z, z", "", {"z": np.zeros((1, 3, _HIDDEN), np.float32)}),
    "as large as the batch": ("zeros, zeros", ZEROS, {"hidden": ints(_HIDDEN)}),
    "cut out of more": (
        "one_state, one_state",
        ZEROS.replace("Concat<axis = 0>(one,", "Concat<axis = 0>(four,")
        + "one_state = Slice(zeros, one, two, nil)",
        {"hidden": ints(_HIDDEN), "four": ints(4), "two": ints(2), "nil": ints(0)},
    ),
    "expanded": (
        "zeros, zeros",
        ZEROS.replace("ConstantOfShape(size)", "Expand(z, size)"),
        {"hidden": ints(_HIDDEN), "z": np.zeros((1, 1, 1), np.float32)},
    ),
    "joined": (
        "both, both",
        ZEROS + "p = Slice(zeros, nil, three, two) q = Slice(zeros, three, hidden, two) "
        "both = Concat<axis = 2>(p, q)",
        {"hidden": ints(_HIDDEN), "nil": ints(0), "two": ints(2), "three": ints(3)},
    ),
    "moved about": (
        "moved, moved",
        ZEROS + "f = Transpose<perm = [1, 0, 2]>(zeros) g = Squeeze(f, one) "
        "i = Identity(g) moved = Unsqueeze(i, nil)",
        {"hidden": ints(_HIDDEN), "nil": ints(0)},
    ),
}


@pytest.mark.parametrize("name", ZERO_STATES)
def test_zeros_are_left_away_with_the_units(name: str, assert_exact: AssertExact) -> None:
    states, before, weights = ZERO_STATES[name]
    model = recurrent("LSTM", f"t, W, R, B, , {states}", before=before, **weights)
    found = assert_exact(model, feeds=_feeds())
    assert_free(found, ALL)
    assert_half(found)
    node = next(node for node in found.model.graph if node.name == "rnn")
    assert all(value is None for value in node.inputs[4:])


def _feeds(**others: np.ndarray) -> dict[str, np.ndarray]:
    x = np.random.default_rng(0).standard_normal((5, 3, 6)).astype(np.float32)
    return {"x": x, **others}


def test_zeros_stay_where_no_unit_goes(assert_exact: AssertExact) -> None:
    states, before, weights = ZERO_STATES["as large as the batch"]
    model = recurrent("LSTM", f"t, W, R, B, , {states}", before=before, **weights)
    found = assert_exact(model, ratio=0.0, feeds=_feeds())
    node = next(node for node in found.model.graph if node.name == "rnn")
    assert [value and value.name for value in node.inputs[5:]] == ["zeros", "zeros"]


def test_two_layers_share_zeros_but_no_units(assert_exact: AssertExact) -> None:
    states, before, weights = ZERO_STATES["as large as the batch"]
    model = recurrent(
        "LSTM",
        f"t, W, R, B, , {states}",
        before=before,
        after="q = Squeeze(h, one) [gru] h2 = GRU<hidden_size = 10>(q, V, Q, , , zeros) "
        "s = Squeeze(h2, one)",
        V=(1, 30, 10),
        Q=(1, 30, 10),
        **weights,
    )
    found = assert_exact(model, feeds=_feeds())
    assert_free(found, {**ALL, "gru": 10})
    assert not {"rnn", "gru"} <= {node.name for group in found.groups[:2] for node in group.layers}


LEARNED = {
    "a constant": ("h0, c0", "", {"h0": (1, 3, _HIDDEN), "c0": (1, 3, _HIDDEN)}),
    "one for both": ("h0, h0", "", {"h0": (1, 3, _HIDDEN)}),
    "expanded": (
        "h1, c0",
        ZEROS.replace("zeros = ConstantOfShape(size)", "h1 = Expand(h0, size)"),
        {"hidden": ints(_HIDDEN), "h0": (1, 1, _HIDDEN), "c0": (1, 3, _HIDDEN)},
    ),
    "expanded by a vector": (
        "h1, c0",
        "h1 = Expand(h0, size)",
        {"size": ints(1, 3, 1), "h0": (_HIDDEN,), "c0": (1, 3, _HIDDEN)},
    ),
}


@pytest.mark.parametrize("name", LEARNED)
def test_learned_states_lose_the_units(name: str, assert_exact: AssertExact) -> None:
    states, before, weights = LEARNED[name]
    model = recurrent("LSTM", f"t, W, R, B, , {states}", before=before, **weights)
    found = assert_exact(model, feeds=_feeds())
    assert_free(found, ALL)
    assert_half(found)
    initial = found.model.graph.initializers["h0"]
    assert list(initial.shape or ())[-1] == _HIDDEN // 2


def test_a_computed_state_goes_along(assert_exact: AssertExact) -> None:
    model = recurrent(
        "GRU",
        "t, W, R, B, , h0",
        inputs=", float[N,4] context",
        before="[m0] c = MatMul(context, W0) u = Tanh(c) h0 = Unsqueeze(u, nil)",
        W0=(4, _HIDDEN),
        nil=ints(0),
    )
    found = assert_exact(model, feeds=_fitting(model))
    assert_free(found, {**ALL, "m0": _HIDDEN})
    assert_half(found)
    assert {"m0", "rnn"} in [{node.name for node in group.layers} for group in found.groups]


def test_a_decoder_begins_where_the_encoder_ended(assert_exact: AssertExact) -> None:
    model = recurrent(
        "LSTM",
        outputs=", h, c",
        after="[decoder] d = LSTM<hidden_size = 10>(t, V, Q, , , h, c) s = Squeeze(d, one)",
        V=(1, 40, 8),
        Q=(1, 40, 10),
    )
    found = assert_exact(model)
    assert_free(found, {**ALL, "decoder": _HIDDEN})
    assert_half(found)


BLOCKED = {
    "a state that comes from outside": (
        recurrent("GRU", "t, W, R, B, , h0", inputs=", float[1,N,10] h0"),
        "rnn: its initial state 'h0' may not be zero",
    ),
    "a state that is computed": (
        recurrent(
            "GRU",
            "t, W, R, B, , h0",
            inputs=", float[1,N,10] state",
            before="h0 = Tanh(state)",
        ),
        "rnn: its initial state 'h0' may not be zero",
    ),
    "a state that is not silent": (
        recurrent(
            "GRU",
            "t, W, R, B, , h0",
            inputs=", float[N,4] context",
            before="[m0] c = MatMul(context, W0) [f] u = Sigmoid(c) h0 = Unsqueeze(u, nil)",
            W0=(4, _HIDDEN),
            nil=ints(0),
        ),
        "behind 'f' a channel is not zero",
    ),
    "zeros joined with something else": (
        recurrent(
            "GRU",
            "t, W, R, B, , h0",
            inputs=", float[1,N,4] state",
            before="h0 = Concat<axis = 2>(state, z)",
            z=np.zeros((1, 3, 6), np.float32),
        ),
        "rnn: its initial state 'h0' may not be zero",
    ),
    "a constant that is not zero, expanded for two": (
        recurrent(
            "LSTM",
            "t, W, R, B, , h1, h1",
            before="h1 = Expand(h0, size)",
            h0=(_HIDDEN,),
            size=ints(1, 3, 1),
        ),
        "its initial state 'h1' may not be zero",
    ),
    "a cell input that is not zero": (
        recurrent("LSTM", attributes=', activations = ["Sigmoid", "Sigmoid", "Tanh"]'),
        "its activation Sigmoid does not keep a silent unit at zero",
    ),
    "a cell output that is not zero": (
        recurrent("LSTM", attributes=', activations = ["Sigmoid", "Tanh", "Softplus"]'),
        "its activation Softplus does not keep a silent unit at zero",
    ),
    "a candidate that is not zero": (
        recurrent("GRU", attributes=', activations = ["Sigmoid", "HardSigmoid"]'),
        "its activation HardSigmoid does not keep a silent unit at zero",
    ),
    "an activation that is not zero": (
        recurrent("RNN", attributes=', activations = ["Sigmoid"]'),
        "its activation Sigmoid does not keep a silent unit at zero",
    ),
}


@pytest.mark.parametrize("name", BLOCKED)
def test_units_stay_that_would_not_be_silent(name: str, assert_exact: AssertExact) -> None:
    model, reason = BLOCKED[name]
    assert_free(assert_exact(model, feeds=_fitting(model)), {"m1": 8}, reason)


def _fitting(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    sizes = {"T": 5, "N": 3}
    return {
        value.name: rng.standard_normal(
            [sizes.get(d.dim_param, d.dim_value) for d in value.type.tensor_type.shape.dim]
        ).astype(np.float32)
        for value in model.graph.input
    }


def test_weights_that_are_computed_block_what_they_read(assert_exact: AssertExact) -> None:
    model = recurrent("GRU", "t, V, R, B", before="V = Mul(W, x1)", inputs=", float[1,1,1] x1")
    assert_free(assert_exact(model), {}, "rnn: its weights are computed at run time")


def test_units_behind_a_sigmoid_are_not_read(assert_exact: AssertExact) -> None:
    model = recurrent("GRU", "u, W, R, B", before="[f] u = Sigmoid(t)")
    assert_free(assert_exact(model), {"rnn": _HIDDEN}, "behind 'f' a channel is not zero")


def test_time_and_batch_never_shrink(assert_exact: AssertExact) -> None:
    text = """(float[N,6,7] x) => (float[a,b,c] y) {
      [m1] t = Conv(x, K)
      [rnn] h = RNN<hidden_size = 10>(t, W, R)
      s = Squeeze(h, one)
      [m2] y = MatMul(s, W2)
    }"""
    weights = {"K": (8, 6, 1), "W": (1, 10, 7), "R": (1, 10, 10), "W2": (10, 5), "one": ints(1)}
    found = assert_exact(parsed(text, weights))
    assert_free(found, {"rnn": _HIDDEN}, "the time or the batch of a recurrent layer")


def test_one_matrix_for_two_layers_has_one_set_of_units(assert_exact: AssertExact) -> None:
    model = recurrent(
        "RNN",
        after="q = Squeeze(h, one) [second] h2 = RNN<hidden_size = 10>(t, W, R, B) "
        "r = Squeeze(h2, one) s = Concat<axis = -1>(q, r)",
        reads=2 * _HIDDEN,
    )
    found = assert_exact(model)
    assert_free(found, {**ALL, "second": _HIDDEN})
    assert {"rnn", "second"} in [{node.name for node in group.layers} for group in found.groups]


def test_final_states_that_the_model_gives_keep_all_units(assert_exact: AssertExact) -> None:
    model = recurrent("LSTM", outputs="h, hn")
    model.graph.output.append(onnx.helper.make_tensor_value_info("hn", 1, [1, "N", _HIDDEN]))
    assert_free(assert_exact(model), {"m1": 8}, "hn: it is an output of the model")


def test_steps_and_batch_may_be_joined(assert_exact: AssertExact) -> None:
    """How many there are is computed; that the units follow them is known all the same."""
    text = """(float[T,N,6] x) => (float[a,b] y) {
      [rnn] h = RNN<hidden_size = 10>(x, W, R)
      q = Squeeze<axes = [1]>(h)
      size = Shape(q)
      steps = Gather(size, first)
      batch = Gather(size, second)
      both = Mul(steps, batch)
      rows = Unsqueeze<axes = [0]>(both)
      flat = Concat<axis = 0>(rows, hidden)
      s = Reshape(q, flat)
      [m2] y = MatMul(s, W2)
    }"""
    weights: dict[str, Weight] = {
        "W": (1, _HIDDEN, 6),
        "R": (1, _HIDDEN, _HIDDEN),
        "W2": (_HIDDEN, 5),
        "first": np.array(0),
        "second": np.array(1),
        "hidden": ints(_HIDDEN),
    }
    assert_free(assert_exact(parsed(text, weights, 11)), {"rnn": _HIDDEN})


def test_batch_first_has_the_same_axes_for_units() -> None:
    """onnxruntime runs no such layers on the CPU; the reference of ONNX does."""
    model = recurrent(
        "LSTM",
        "t, W, R, B, , h0, c0",
        ", layout = 1",
        after="s = Squeeze(h, two)",
        two=ints(2),
        h0=(3, 1, _HIDDEN),
        c0=(3, 1, _HIDDEN),
    )
    pruned = ir.from_proto(model)
    silenced = clone_model(pruned)
    for one in (pruned, silenced):
        infer_shapes(one)
    channels = analyze(pruned)
    groups = group_units(channels)
    gone = np.concatenate([group.free[::2] for group in groups])
    assert gone.size == (8 + _HIDDEN) // 2
    remove_channels(pruned, channels, gone)
    silence_channels(analyze(silenced), gone)
    x = np.random.default_rng(0).standard_normal((3, 5, 6)).astype(np.float32)
    ours, theirs = (
        ReferenceEvaluator(ir.to_proto(one)).run(None, {"x": x})[0] for one in (pruned, silenced)
    )
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5 * float(np.abs(theirs).max()))
