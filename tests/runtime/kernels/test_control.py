"""Branches and loops that read tensors around them, against onnxruntime and by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime as ort
import pytest
from numpy.typing import NDArray

from slimctl.core.errors import ModelExecutionError
from slimctl.graph._normalize import normalize
from slimctl.runtime.session import Runtime

_X = np.array([[1, 2], [3, 4], [5, 6]], np.float32)

_IF = """
g (bool c, float[3, 2] x) => (float[3, 2] y, float[3, 2] z) {
  twice = Add(x, x)
  y, z = If (c) <
    then_branch = t () => (float[3, 2] a, float[3, 2] b) {
      a = Add(twice, x)
      b = If (c) <
        then_branch = tt () => (float[3, 2] d) { d = Add(a, twice) },
        else_branch = te () => (float[3, 2] e) { e = Identity(x) }
      >
    },
    else_branch = e () => (float[3, 2] x1, float[3, 2] twice1) {
      x1 = Identity(x)
      twice1 = Identity(twice)
    }
  >
}
"""

_LOOP = """
g (int64 m, bool c, float[2] x, float[2] step) => (float[2] y, int64 n, float[t, 2] s, int64[t] i) {
  n0 = Constant <value = int64 {0}> ()
  y, n, s, i = Loop (m, c, x, n0) <
    body = b (int64 k, bool go, float[2] v, int64 u) =>
        (bool on, float[2] v1, int64 u1, float[2] seen, int64 at) {
      v1 = Add(v, step)
      u1 = Add(u, k)
      seen = Identity(v)
      at = Identity(k)
      five = Constant <value = int64 {5}> ()
      on = Less(k, five)
    }
  >
}
"""


def _model(text: str, opset: int) -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": {opset}]>\n{text}')


def _ours(text: str, opset: int = 16, **feeds: Any) -> list[Any]:
    model = ir.serde.deserialize_model(_model(text, opset))
    normalize(model)
    return list(Runtime(model).run(feeds).values())


def _theirs(text: str, opset: int = 16, **feeds: Any) -> list[Any]:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    session = ort.InferenceSession(_model(text, opset).SerializeToString(), options)
    return list(session.run(None, feeds))


def _assert_agrees(text: str, opset: int = 16, **feeds: Any) -> None:
    found, expected = _ours(text, opset, **feeds), _theirs(text, opset, **feeds)
    for mine, other in zip(found, expected, strict=True):
        assert mine.dtype == other.dtype
        np.testing.assert_array_equal(mine, other)


def _int(value: int) -> NDArray[np.int64]:
    return np.array(value, np.int64)


@pytest.mark.parametrize("condition", [True, False])
@pytest.mark.parametrize("opset", [11, 13, 16])
def test_if(opset: int, condition: bool) -> None:
    _assert_agrees(_IF, opset, c=np.array(condition), x=_X)


@pytest.mark.parametrize("branch", ["then", "else"])
def test_a_branch_may_give_what_it_has_not_made(branch: str) -> None:
    text = """
    g (bool c, float[3, 2] x) => (float[3, 2] y) {
      twice = Add(x, x)
      y = If (c) <
        then_branch = t () => (float[3, 2] twice) { },
        else_branch = e () => (float[3, 2] k) { k = Constant <value = float[1] {7.0}> () }
      >
    }
    """
    found = _ours(text, c=np.array(branch == "then"), x=_X)[0]
    np.testing.assert_array_equal(found, _X * 2 if branch == "then" else [7])


@pytest.mark.parametrize("trips", [1, 3, 6, 100])
@pytest.mark.parametrize("opset", [11, 13, 16])
def test_loop(opset: int, trips: int) -> None:
    feeds = {"x": np.array([1, 2], np.float32), "step": np.array([0.5, -1], np.float32)}
    _assert_agrees(_LOOP, opset, m=_int(trips), c=np.array(True), **feeds)


@pytest.mark.parametrize(("trips", "condition"), [(0, True), (-1, True), (3, False)])
def test_a_loop_without_a_round(trips: int, condition: bool) -> None:
    """What it would have given has the types and shapes that the body declares."""
    x = np.array([1, 2], np.float32)
    feeds = {"m": _int(trips), "c": np.array(condition), "x": x, "step": x}
    _assert_agrees(_LOOP, **feeds)
    y, n, s, i = _ours(_LOOP, **feeds)
    np.testing.assert_array_equal(y, x)
    assert n == 0
    assert (s.dtype, s.shape) == (np.float32, (0, 2))
    assert (i.dtype, i.shape) == (np.int64, (0,))


def test_axes_of_unknown_size_have_no_element_without_a_round() -> None:
    text = """
    g (int64 m, bool c, bool[n] x) => (bool[t, n] s) {
      s = Loop (m, c) <
        body = b (int64 k, bool go) => (bool on, bool[n] seen) {
          on = Identity(go)
          seen = Not(x)
        }
      >
    }
    """
    feeds = {"m": _int(0), "c": np.array(True), "x": np.ones(3, np.bool_)}
    _assert_agrees(text, **feeds)
    assert _ours(text, **feeds)[0].shape == (0, 0)


def test_a_scan_of_nothing() -> None:
    text = """
    g (float[2] start, int64[t, 3] x) => (float[2] last, int64[3, u] s) {
      last, s = Scan (start, x) <num_scan_inputs = 1, scan_output_axes = [1],
        body = b (float[2] state, int64[3] a) => (float[2] s1, int64[3] s2) {
          s1 = Identity(state)
          s2 = Identity(a)
        }
      >
    }
    """
    start = np.array([1, 2], np.float32)
    last, s = _ours(text, 11, start=start, x=np.zeros((0, 3), np.int64))
    np.testing.assert_array_equal(last, start)
    assert (s.dtype, s.shape) == (np.int64, (3, 0))


@pytest.mark.parametrize(
    ("given", "rounds"),
    [("(m, c, x, n0)", 4), ("(, c, x, n0)", 6), ("(m, , x, n0)", 4), ("(, , x, n0)", 6)],
)
def test_a_loop_may_lack_what_ends_it(given: str, rounds: int) -> None:
    text = _LOOP.replace("(m, c, x, n0)", given)
    feeds: dict[str, Any] = {"x": np.array([1, 2], np.float32), "step": np.ones(2, np.float32)}
    feeds |= {"m": _int(4), "c": np.array(True)}
    used = {name: value for name, value in feeds.items() if name in given or name in ("x", "step")}
    for name in feeds.keys() - used.keys():
        text = text.replace({"m": "int64 m, ", "c": "bool c, "}[name], "", 1)
    _assert_agrees(text, **used)
    assert len(_ours(text, **used)[3]) == rounds


def test_a_loop_carries_sequences() -> None:
    text = """
    g (int64 m, float[2] x) => (seq(float[2]) y) {
      empty = SequenceEmpty ()
      y = Loop (m, , empty) <
        body = b (int64 k, bool go, seq(float[2]) v) => (bool on, seq(float[2]) v1) {
          v1 = SequenceInsert(v, x)
          on = Identity(go)
        }
      >
    }
    """
    found = _ours(text, m=_int(3), x=_X[0])[0]
    assert [item.tolist() for item in found] == [[1, 2]] * 3


_SCAN = """
g (float[2] start, float[3, 2] x, float[2, 3] w, float[2] bias) =>
    (float[2] last, float[t, 2] sums, float[2, t] back) {
  last, sums, back = Scan (start, x, w) <num_scan_inputs = 2, ATTRIBUTES
    body = b (float[2] state, float[2] a, float[2] c) => (float[2] s1, float[2] s2, float[2] s3) {
      ac = Mul(a, c)
      s1 = Add(state, ac)
      s2 = Add(s1, bias)
      s3 = Identity(ac)
    }
  >
}
"""


@pytest.mark.parametrize("directions", [(0, 0), (1, 0), (0, 1), (1, 1)])
@pytest.mark.parametrize("axes", [(0, 1), (-2, -1)])
def test_scan(directions: tuple[int, int], axes: tuple[int, int]) -> None:
    attributes = (
        f"scan_input_axes = [{axes[0]}, {axes[1]}], scan_output_axes = [0, {axes[1]}],"
        f" scan_input_directions = [{directions[0]}, {directions[1]}],"
        f" scan_output_directions = [{directions[1]}, {directions[0]}],"
    )
    feeds = {"start": _X[0], "x": _X, "w": _X.T * 10, "bias": np.array([100, 200], np.float32)}
    _assert_agrees(_SCAN.replace("ATTRIBUTES", attributes), 11, **feeds)


def test_scan_refuses_sequences_of_different_lengths() -> None:
    text = _SCAN.replace("ATTRIBUTES", "scan_input_axes = [0, 1],").replace("[2, 3] w", "[2, 4] w")
    feeds = {"start": _X[0], "x": _X, "w": np.ones((2, 4), np.float32), "bias": _X[0]}
    with pytest.raises(ModelExecutionError, match=r"different lengths cannot be scanned: \[3, 4\]"):
        _ours(text, 11, **feeds)


def test_sequence_map() -> None:
    text = """
    g (seq(float[n]) x, seq(float[n]) y, float[1] z) => (seq(float[n]) sums, seq(int64[1]) shapes) {
      sums, shapes = SequenceMap (x, y, z) <
        body = b (float[n] a, float[n] c, float[1] d) => (float[n] s, int64[1] t) {
          ac = Add(a, c)
          s = Mul(ac, d)
          t = Shape(s)
        }
      >
    }
    """
    x = [np.ones(2, np.float32), np.ones(3, np.float32)]
    sums, shapes = _ours(text, 17, x=x, y=[_X[0], _X[:, 0]], z=np.array([2], np.float32))
    assert [item.tolist() for item in sums] == [[4, 6], [4, 8, 12]]
    assert [item.tolist() for item in shapes] == [[2], [3]]
    assert _ours(text, 17, x=[], y=[], z=np.array([2], np.float32)) == [[], []]


def test_optional() -> None:
    text = """
    g (float[3, 2] x) => (bool there, bool missing, float[3, 2] y) {
      some = Optional (x)
      none = Optional ()
      there = OptionalHasElement (some)
      missing = OptionalHasElement (none)
      y = OptionalGetElement (some)
    }
    """
    there, missing, y = _ours(text, 18, x=_X)
    assert (bool(there), bool(missing)) == (True, False)
    np.testing.assert_array_equal(y, _X)


def test_what_is_not_there_cannot_be_had() -> None:
    text = "g () => (float[n] y) {\n none = Optional ()\n y = OptionalGetElement (none)\n}"
    with pytest.raises(ModelExecutionError, match="the optional is empty"):
        _ours(text, 18)
