"""Attention as one operator, with what onnxruntime fuses around it."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from tests.graph.channels.conftest import AssertExact, Exactness
from tests.graph.channels.table import Case, Weight, images, parsed, tokens

_HEADS, _WIDTH, _VALUES = 4, 6, 3
_KEYS = _HEADS * _WIDTH


def known(model: onnx.ModelProto, **shapes: tuple[int | str, ...]) -> onnx.ModelProto:
    """States shapes that inference does not find behind operators of other domains."""
    for name, shape in shapes.items():
        info = helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
        model.graph.value_info.append(info)
    return model


def assert_free(found: Exactness, free: Mapping[str, int], reason: str = "") -> None:
    layers = {node.name for group in found.groups for node in group.layers}
    counts = {name: found.free_of(name) for name in layers}
    assert {name: count for name, count in counts.items() if count} == dict(free), found.reasons
    if reason:
        assert any(reason in given for given in found.reasons), found.reasons


def number(found: Exactness, name: str) -> float | int | list[int] | None:
    """An attribute of the attention in the result."""
    node = next(node for node in found.model.graph if node.name == "att")
    attribute = node.attributes.get(name)
    return None if attribute is None else attribute.value


# weights of its own


def self_attention(
    attributes: str = "",
    arguments: str = "t, W, B",
    *,
    values: int = _WIDTH,
    inputs: str = "",
    outputs: str = "u",
    before: str = "",
    **weights: Weight,
) -> onnx.ModelProto:
    """A matrix (m1: t, width 8), an attention (att: u), a matrix (m2)."""
    columns = _HEADS * (2 * _WIDTH + values)
    text = f"""(float[N,S,6] x{inputs}) => (float[a,b,c] y) {{
      [m1] t = MatMul(x, W1)
      {before}
      [att] {outputs} = com.microsoft.Attention<num_heads = {_HEADS}{attributes}>({arguments})
      [m2] y = MatMul(u, W2)
    }}"""
    own: dict[str, Weight] = {
        "W1": (6, 8),
        "W": (8, columns),
        "B": (columns,),
        "W2": (_HEADS * values, 5),
        **weights,
    }
    used = {name for node in onnx.parser.parse_graph(f"g {text}").node for name in node.input}
    model = parsed(text, {name: weight for name, weight in own.items() if name in used})
    return known(model, u=("N", "S", _HEADS * values))


_SIZES = f", qkv_hidden_sizes = [{_KEYS}, {_KEYS}, {_HEADS * _VALUES}]"

SELF = {
    "plain": self_attention(),
    "without bias": self_attention(arguments="t, W"),
    "causal": self_attention(", unidirectional = 1"),
    "with a scale": self_attention(", scale = 0.7"),
    "with its own width of values": self_attention(_SIZES, values=_VALUES),
    "with a mask": self_attention(arguments="t, W, B, mask", inputs=", int32[N,S] mask"),
    "with scores for all heads": self_attention(
        arguments="t, W, B, , , scores", inputs=", float[1,1,S,S] scores"
    ),
}


@pytest.mark.parametrize("name", SELF)
def test_whole_heads_go(name: str, assert_exact: AssertExact) -> None:
    found = assert_exact(SELF[name], whole_blocks=True, feeds=_square(SELF[name]))
    assert_free(found, {"m1": 8, "att": _HEADS})
    assert number(found, "num_heads") == _HEADS // 2
    before, after = (v.dims[1] for v in SELF[name].graph.initializer if v.name == "W"), None
    weight = found.model.graph.initializers["W"].shape
    after = None if weight is None else weight[1]
    assert 2 * (after or 0) == next(before)


@pytest.mark.parametrize("name", SELF)
def test_heads_become_narrower(name: str, assert_exact: AssertExact) -> None:
    values = _VALUES if "own width" in name else _WIDTH
    found = assert_exact(SELF[name], feeds=_square(SELF[name]))
    assert_free(found, {"m1": 8, "att": _WIDTH + values})
    assert number(found, "num_heads") == _HEADS
    scale = 0.7 if "scale" in name else 1 / math.sqrt(_WIDTH)
    assert number(found, "scale") == pytest.approx(scale)
    sizes = number(found, "qkv_hidden_sizes")
    assert (sizes and list(sizes)) == (
        [12, 12, 8] if "own width" in name else None
    )  # 1 of 3 values, 3 of 6 keys


def _square(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    """Random inputs: 2 sequences, 7 positions."""
    rng = np.random.default_rng(0)
    sizes = {"N": 2, "S": 7, "T": 9}
    feeds = {}
    for value in model.graph.input:
        shape = [sizes.get(d.dim_param, d.dim_value) for d in value.type.tensor_type.shape.dim]
        if value.type.tensor_type.elem_type == TensorProto.FLOAT:
            feeds[value.name] = rng.standard_normal(shape).astype(np.float32)
        else:
            feeds[value.name] = (rng.random(shape) < 0.7).astype(np.int32)
    return feeds


def test_scores_of_each_head_go_with_it(assert_exact: AssertExact) -> None:
    model = self_attention(arguments="t, W, B, , , scores", scores=(1, _HEADS, 7, 7))
    found = assert_exact(model, whole_blocks=True, feeds=_square(model))
    assert_free(found, {"m1": 8, "att": _HEADS})
    assert list(found.model.graph.initializers["scores"].shape or ()) == [1, 2, 7, 7]


def test_computed_scores_of_each_head_go_with_it(assert_exact: AssertExact) -> None:
    """Relative positions, looked up: the table computes one number for each head."""
    model = self_attention(
        arguments="t, W, B, , , scores",
        before="[look] r = Gather(table, places) q = Transpose<perm = [2, 0, 1]>(r) "
        "scores = Unsqueeze(q, nil)",
        table=(5, _HEADS),
        places=np.random.default_rng(0).integers(0, 5, (7, 7)),
        nil=np.zeros(1, np.int64),
    )
    found = assert_exact(model, whole_blocks=True, feeds=_square(model))
    assert_free(found, {"m1": 8, "att": _HEADS, "look": _HEADS})
    narrower = assert_exact(model, feeds=_square(model))
    assert_free(narrower, {"m1": 8, "att": 2 * _WIDTH}, "it attends over this axis")


SELF_BLOCKED = {
    "scores of each head from outside": (
        self_attention(arguments="t, W, B, , , scores", inputs=", float[1,4,S,S] scores"),
        True,
        "what is added to its scores has a part for each head",
    ),
    "a cache": (
        self_attention(
            arguments="t, W, B, , past", inputs=", float[2,N,4,T,6] past", outputs="u, present"
        ),
        True,
        "it keeps the keys and values of earlier steps",
    ),
    "a cache, narrower": (
        self_attention(
            arguments="t, W, B, , past", inputs=", float[2,N,4,T,6] past", outputs="u, present"
        ),
        False,
        "it keeps the keys and values of earlier steps",
    ),
}


@pytest.mark.parametrize("name", SELF_BLOCKED)
def test_heads_stay_for_a_reason(name: str, assert_exact: AssertExact) -> None:
    model, whole_blocks, reason = SELF_BLOCKED[name]
    found = assert_exact(model, whole_blocks=whole_blocks, feeds=_square(model))
    assert_free(found, {"m1": 8}, reason)


def test_weights_that_are_computed_block(assert_exact: AssertExact) -> None:
    model = self_attention(arguments="t, V", inputs=", float[1,1] s", before="V = Mul(W, s)")
    found = assert_exact(model, whole_blocks=True, feeds=_square(model))
    assert_free(found, {}, "att: its weights are computed at run time")


# query, key and value


def attention(
    operator: str,
    attributes: str,
    arguments: str = "q, k, v",
    *,
    queries: int = _HEADS,
    shared: int = _HEADS,
    width: int = _WIDTH,
    values: int = _WIDTH,
    before: str = "",
    after: str = "",
    inputs: str = "",
    outputs: str = "u",
    opset: int = 17,
    **weights: Weight,
) -> onnx.ModelProto:
    """Three matrices (mq: q, mk: k, mv: v), an attention (att: u), a matrix (m2)."""
    text = f"""(float[N,S,6] x, float[N,T,5] z{inputs}) => (float[a,b,c] y) {{
      [mq] q = MatMul(x, Q)
      [mk] k = MatMul(z, K)
      [mv] v = MatMul(z, V)
      {before}
      [att] {outputs} = {operator}<{attributes}>({arguments})
      {after}
      [m2] y = MatMul(u, W2)
    }}"""
    own: dict[str, Weight] = {
        "Q": (6, queries * width),
        "K": (5, shared * width),
        "V": (5, shared * values),
        "W2": (queries * values, 5),
        **weights,
    }
    model = known(parsed(text, own, opset), u=("N", "S", queries * values))
    read = {name for node in model.graph.node for name in node.input}
    for node in [node for node in model.graph.node if not read.union("y") & set(node.output)]:
        model.graph.node.remove(node)
    return model


def multi_head(
    attributes: str = "", arguments: str = "q, k, v", **others: object
) -> onnx.ModelProto:
    return attention(
        "com.microsoft.MultiHeadAttention",
        f"num_heads = {_HEADS}{attributes}",
        arguments,
        **others,  # type: ignore[arg-type]  # passed on as they are
    )


def standard(
    attributes: str = "", arguments: str = "q, k, v", *, queries: int = _HEADS, **others: object
) -> onnx.ModelProto:
    return attention(
        "Attention",
        f"q_num_heads = {queries}, kv_num_heads = {_HEADS}{attributes}",
        arguments,
        queries=queries,
        opset=23,
        **others,  # type: ignore[arg-type]  # passed on as they are
    )


_BIAS = (2 * _KEYS + _HEADS * _VALUES,)
PARTS = {
    "multi-head": multi_head(),
    "multi-head with a scale": multi_head(", scale = 0.7"),
    "multi-head with its own width of values": multi_head(values=_VALUES),
    "multi-head with a bias": multi_head(arguments="q, k, v, B", values=_VALUES, B=_BIAS),
    "multi-head with scores": multi_head(
        arguments="q, k, v, , , scores", inputs=", float[N,1,S,T] scores"
    ),
    "standard": standard(),
    "standard with its own width of values": standard(values=_VALUES),
    "standard with a mask": standard(arguments="q, k, v, mask", inputs=", float[S,T] mask"),
    "standard with softcap": standard(", softcap = 2.0"),
    "standard with shared keys": standard(queries=3 * _HEADS),
    "standard with shared keys and a mask": standard(
        queries=3 * _HEADS, arguments="q, k, v, mask", inputs=", float[N,1,S,T] mask"
    ),
}


@pytest.mark.parametrize("name", PARTS)
def test_heads_go_from_query_key_and_value(name: str, assert_exact: AssertExact) -> None:
    found = assert_exact(PARTS[name], whole_blocks=True, feeds=_square(PARTS[name]))
    assert_free(found, dict.fromkeys(("mq", "mk", "mv"), _HEADS))
    assert len([group for group in found.groups if group.free.size]) == 1
    if "standard" in name:
        queries = 3 * _HEADS if "shared" in name else _HEADS
        assert (number(found, "q_num_heads"), number(found, "kv_num_heads")) == (queries // 2, 2)
    else:
        assert number(found, "num_heads") == _HEADS // 2
    assert number(found, "scale") == (pytest.approx(0.7) if "scale" in name else None)


@pytest.mark.parametrize("name", PARTS)
def test_heads_of_query_and_key_become_narrower(name: str, assert_exact: AssertExact) -> None:
    values = _VALUES if PARTS[name].graph.initializer[2].dims[1] < _KEYS else _WIDTH
    found = assert_exact(PARTS[name], feeds=_square(PARTS[name]))
    assert_free(found, {"mq": _WIDTH, "mk": _WIDTH, "mv": values})
    assert {"mq", "mk"} in [{node.name for node in group.layers} for group in found.groups]
    scale = 0.7 if "scale" in name else 1 / math.sqrt(_WIDTH)
    assert number(found, "scale") == pytest.approx(scale)
    counts = [number(found, n) for n in ("num_heads", "q_num_heads")]
    assert [count for count in counts if count] == [12 if "shared" in name else _HEADS]


def test_a_mask_of_each_head_goes_with_it(assert_exact: AssertExact) -> None:
    for rank in (3, 4):
        mask = (_HEADS, 7, 9) if rank == 3 else (2, _HEADS, 7, 9)
        model = standard(arguments="q, k, v, mask", mask=mask)
        found = assert_exact(model, whole_blocks=True, feeds=_square(model))
        assert_free(found, dict.fromkeys(("mq", "mk", "mv"), _HEADS))
        assert list(found.model.graph.initializers["mask"].shape or ())[rank - 3] == 2


FOUR = {
    "heads": (True, {"mq": _HEADS, "mk": _HEADS, "mv": _HEADS}),
    "width": (False, {"mq": _WIDTH, "mk": _WIDTH, "mv": _VALUES}),
}


@pytest.mark.parametrize("name", FOUR)
@pytest.mark.parametrize("queries", [_HEADS, 2 * _HEADS])
def test_heads_may_be_an_axis(name: str, queries: int, assert_exact: AssertExact) -> None:
    whole_blocks, free = FOUR[name]
    model = attention(
        "Attention",
        "is_causal = 0",
        "q4, k4, v4",
        queries=queries,
        values=_VALUES,
        outputs="u4",
        opset=23,
        before="q3 = Reshape(q, sq) q4 = Transpose<perm = [0, 2, 1, 3]>(q3) "
        "k3 = Reshape(k, sk) k4 = Transpose<perm = [0, 2, 1, 3]>(k3) "
        "v3 = Reshape(v, sv) v4 = Transpose<perm = [0, 2, 1, 3]>(v3)",
        after="u3 = Transpose<perm = [0, 2, 1, 3]>(u4) u = Reshape(u3, joined)",
        sq=np.array([0, 0, queries, _WIDTH]),
        sk=np.array([0, 0, _HEADS, _WIDTH]),
        sv=np.array([0, 0, _HEADS, _VALUES]),
        joined=np.array([0, 0, -1]),
    )
    found = assert_exact(model, whole_blocks=whole_blocks, feeds=_square(model))
    assert_free(found, free)
    assert (number(found, "scale") is None) == whole_blocks


def grouped(attributes: str = "", arguments: str = "", **others: object) -> onnx.ModelProto:
    """8 query heads share 4 of keys and values; as wide as the rotation needs."""
    return attention(
        "com.microsoft.GroupQueryAttention",
        f"num_heads = 8, kv_num_heads = {_HEADS}{attributes}",
        arguments or "q, k, v, , , lengths, total",
        queries=8,
        width=16,
        values=16,
        outputs="u, pk, pv",
        inputs=", int32[N] lengths, int32 total",
        **others,  # type: ignore[arg-type]  # passed on as they are
    )


def _prompt(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    feeds = _square(model)
    feeds["z"] = feeds["z"][:, :7]
    return {**feeds, "lengths": np.full(2, 6, np.int32), "total": np.array(7, np.int32)}


_TABLES: dict[str, Weight] = {"cos": (16, 8), "sin": (16, 8)}
GROUPED = {
    "plain": grouped(),
    "rotated": grouped(", do_rotary = 1", "q, k, v, , , lengths, total, cos, sin", **_TABLES),
    "smooth": grouped(", smooth_softmax = 1"),
    "with a sink": grouped("", "q, k, v, , , lengths, total, , , , , sink", sink=(8,)),
    "with scores": grouped("", "q, k, v, , , lengths, total, , , , scores", scores=(1, 8, 7, 7)),
}


@pytest.mark.parametrize("name", GROUPED)
def test_grouped_heads_go_together(name: str, assert_exact: AssertExact) -> None:
    model = GROUPED[name]
    found = assert_exact(model, whole_blocks=True, feeds=_prompt(model))
    assert_free(found, dict.fromkeys(("mq", "mk", "mv"), _HEADS))
    assert (number(found, "num_heads"), number(found, "kv_num_heads")) == (4, 2)


def test_grouped_heads_keep_their_width(assert_exact: AssertExact) -> None:
    found = assert_exact(GROUPED["plain"], feeds=_prompt(GROUPED["plain"]))
    assert_free(found, {}, "att: its heads have one width for all")


BLOCKED = {
    "a cache": (
        multi_head(
            arguments="q, k, v, , , , pk, pv",
            inputs=", float[N,4,T,6] pk, float[N,4,T,6] pv",
            outputs="u, nk, nv",
        ),
        "it keeps the keys and values of earlier steps",
    ),
    "scores of each head": (
        multi_head(arguments="q, k, v, , , scores", inputs=", float[1,4,S,T] scores"),
        "what is added to its scores has a part for each head",
    ),
    "a computed bias": (
        multi_head(arguments="q, k, v, b", inputs=f", float[{3 * _KEYS}] b"),
        "its bias is computed at run time",
    ),
    "keys from outside": (
        multi_head(arguments="q, key, v", inputs=f", float[N,T,{_KEYS}] key"),
        "query, key and value do not all have heads",
    ),
    "keys in another layout": (
        multi_head(arguments="q, key, value", inputs=", float[N,4,T,6] key, float[N,4,T,6] value"),
        "query, key and value come packed",
    ),
    "keys that are given": (
        standard(outputs="u, present"),
        "it keeps the keys and values of earlier steps",
    ),
}


@pytest.mark.parametrize("name", BLOCKED)
def test_blocked_heads_have_a_reason(name: str, assert_exact: AssertExact) -> None:
    model, reason = BLOCKED[name]
    if "given" in name:
        present = helper.make_tensor_value_info("present", 1, ["N", _HEADS, "T", _WIDTH])
        model.graph.output.append(present)
    found = assert_exact(model, whole_blocks=True, feeds=_square(model))
    assert_free(found, {}, reason)


def test_values_become_narrower_without_the_keys(assert_exact: AssertExact) -> None:
    model, _ = BLOCKED["keys from outside"]
    found = assert_exact(model, feeds=_square(model))
    assert_free(found, {"mv": _WIDTH}, "what it is multiplied with does not change")


@pytest.mark.parametrize("whole_blocks", [True, False])
def test_values_behind_a_sigmoid_are_not_read(
    whole_blocks: bool, assert_exact: AssertExact
) -> None:
    """A mean of halves is not zero."""
    model = multi_head(arguments="q, k, w", before="[f] w = Sigmoid(v)")
    found = assert_exact(model, whole_blocks=whole_blocks, feeds=_square(model))
    free = {} if whole_blocks else {"mq": _WIDTH, "mk": _WIDTH}
    assert_free(found, free, "behind 'f' a channel is not zero")


def test_one_silent_side_of_a_product_is_enough(assert_exact: AssertExact) -> None:
    model = multi_head(arguments="p, k, v", before="[f] p = Sigmoid(q)")
    found = assert_exact(model, feeds=_square(model))
    assert_free(found, dict.fromkeys(("mq", "mk", "mv"), _WIDTH))
    both = multi_head(arguments="p, r, v", before="[f] p = Sigmoid(q) [g] r = Sigmoid(k)")
    found = assert_exact(both, feeds=_square(both))
    assert_free(found, {"mv": _WIDTH}, "a channel is not zero")


# rotation

_COS: dict[str, Weight] = {"cos": (16, _WIDTH // 2), "sin": (16, _WIDTH // 2)}
_ORDER = np.stack([np.arange(7), np.arange(7)])


def rotated(call: str, opset: int = 17, **weights: Weight) -> onnx.ModelProto:
    model = multi_head(
        arguments="r, k, v",
        before=f"[rot] r = {call}",
        opset=opset,
        places=_ORDER,
        **{**_COS, **weights},
    )
    return known(model, r=("N", "S", _KEYS))


_SHORT = {"cos": (16, 2), "sin": (16, 2)}
ROTATIONS = {
    "fused": rotated("com.microsoft.RotaryEmbedding(q, places, cos, sin)"),
    "fused, counted": rotated(
        "com.microsoft.RotaryEmbedding<num_heads = 4, rotary_embedding_dim = 4>"
        "(q, places, cos, sin)",
        **_SHORT,
    ),
    "standard": rotated("RotaryEmbedding<num_heads = 4>(q, cos, sin, places)", 23),
    "standard, interleaved": rotated(
        "RotaryEmbedding<num_heads = 4, interleaved = 1>(q, cos, sin, places)", 23
    ),
}


@pytest.mark.parametrize("name", ROTATIONS)
def test_heads_are_rotated_alone(name: str, assert_exact: AssertExact) -> None:
    found = assert_exact(ROTATIONS[name], whole_blocks=True, feeds=_square(ROTATIONS[name]))
    assert_free(found, dict.fromkeys(("mq", "mk", "mv"), _HEADS))
    rotation = next(node for node in found.model.graph if node.name == "rot")
    counted = rotation.attributes.get("num_heads")
    assert (counted is None) if name == "fused" else (counted and counted.as_int() == 2)


@pytest.mark.parametrize("name", ROTATIONS)
def test_rotated_channels_stay_in_pairs(name: str, assert_exact: AssertExact) -> None:
    found = assert_exact(ROTATIONS[name], feeds=_square(ROTATIONS[name]))
    assert_free(found, {"mv": _WIDTH}, "rot: it rotates these channels in pairs")


@pytest.mark.parametrize("whole_blocks", [True, False])
def test_heads_that_are_an_axis_are_rotated(whole_blocks: bool, assert_exact: AssertExact) -> None:
    model = multi_head(
        arguments="r, k, v",
        before="q3 = Reshape(q, split) q4 = Transpose<perm = [0, 2, 1, 3]>(q3) "
        "[rot] r4 = com.microsoft.RotaryEmbedding(q4, places, cos, sin) "
        "r3 = Transpose<perm = [0, 2, 1, 3]>(r4) r = Reshape(r3, joined)",
        places=_ORDER,
        split=np.array([0, 0, _HEADS, _WIDTH]),
        joined=np.array([0, 0, -1]),
        **_COS,
    )
    known(model, r4=("N", _HEADS, "S", _WIDTH))
    found = assert_exact(model, whole_blocks=whole_blocks, feeds=_square(model))
    if whole_blocks:
        assert_free(found, dict.fromkeys(("mq", "mk", "mv"), _HEADS))
    else:
        assert_free(found, {"mv": _WIDTH}, "rot: it rotates these channels in pairs")


# what is fused around it

_NORM = "com.microsoft.SkipLayerNormalization(t, r, g, b)"
_RMS = "com.microsoft.SkipSimplifiedLayerNormalization"
_SECOND = "[m0] r = MatMul(x, W0)"
AROUND = [
    tokens("Gelu", "u = com.microsoft.Gelu(t)"),
    tokens("QuickGelu", "u = com.microsoft.QuickGelu<alpha = 1.5>(t)"),
    tokens("FastGelu", "u = com.microsoft.FastGelu(t)"),
    tokens("FastGelu with bias", "u = com.microsoft.FastGelu(t, b)", b=(8,)),
    tokens("BiasGelu", "u = com.microsoft.BiasGelu(t, b)", b=(8,)),
    tokens(
        "FusedMatMul",
        "[f] u = com.microsoft.FusedMatMul<alpha = 0.3, transB = 1>(t, W)",
        {"m1": 8, "f": 10},
        W=(10, 8),
        reads=10,
    ),
    tokens(
        "FusedMatMul behind a Sigmoid",
        "s = Sigmoid(t) [f] u = com.microsoft.FusedMatMul<alpha = 0.3>(s, W)",
        {"m1": 8, "f": 10},
        W=(8, 10),
        reads=10,
    ),
    tokens(
        "FusedMatMul of two",
        f"{_SECOND} a = com.microsoft.FusedMatMul<transA = 1>(t, r) [m3] u = MatMul(r, a)",
        {"m0": 8, "m1": 8},
        W0=(6, 8),
    ),
    tokens(
        "FusedMatMul with transposed batch",
        "[f] u = com.microsoft.FusedMatMul<transBatchA = 1>(t, W)",
        {},
        "it transposes the batch of an operand",
        W=(7, 8, 10),
        reads=10,
    ),
    tokens(
        "SkipSimplifiedLayerNormalization",
        f"{_SECOND} u = {_RMS}<epsilon = 0.1>(t, r, g)",
        {"m0": 8, "m1": 8},
        W0=(6, 8),
        g=(8,),
    ),
    tokens(
        "SkipSimplifiedLayerNormalization, sum used",
        f"{_SECOND} n, , , s = {_RMS}<epsilon = 0.1>(t, r, g, b) u = Mul(n, s)",
        {"m0": 8, "m1": 8},
        W0=(6, 8),
        g=(8,),
        b=(8,),
    ),
    tokens(
        "SkipSimplifiedLayerNormalization of one",
        f"p = Slice(x, zero, two, last) q = Concat<axis = -1>(x, p) u = {_RMS}(t, q, g)",
        {},
        "it normalizes over these channels",
        g=(8,),
        zero=np.zeros(1, np.int64),
        two=np.full(1, 2),
        last=np.full(1, -1),
    ),
    tokens(
        "SkipLayerNormalization",
        f"{_SECOND} [n] u = {_NORM}",
        {},
        "n: it normalizes over these channels",
        W0=(6, 8),
        g=(8,),
        b=(8,),
    ),
    images(
        "FusedConv",
        '[f] u = com.microsoft.FusedConv<activation = "Relu">(t, W, B)',
        {"c1": 8, "f": 6},
        W=(6, 8, 1, 1),
        B=(6,),
        reads=6,
    ),
    images(
        "FusedConv with a sum",
        '[f] u = com.microsoft.FusedConv<activation = "LeakyRelu", activation_params = [0.2]>'
        "(t, W, B, t)",
        {"c1": 8, "f": 8},
        W=(8, 8, 1, 1),
        B=(8,),
    ),
    images(
        "FusedConv with a Sigmoid",
        '[f] u = com.microsoft.FusedConv<activation = "Sigmoid">(t, W, B)',
        {"c1": 8},
        "behind 'f' a channel is not zero",
        W=(6, 8, 1, 1),
        B=(6,),
        reads=6,
    ),
    images(
        "FusedConv with a clip around zero",
        '[f] u = com.microsoft.FusedConv<activation = "Clip", activation_params = [0.0, 6.0]>'
        "(t, W, B)",
        {"c1": 8, "f": 6},
        W=(6, 8, 1, 1),
        B=(6,),
        reads=6,
    ),
    images(
        "FusedConv with a clip above zero",
        '[f] u = com.microsoft.FusedConv<activation = "Clip", activation_params = [0.5, 6.0]>'
        "(t, W, B)",
        {"c1": 8},
        "behind 'f' a channel is not zero",
        W=(6, 8, 1, 1),
        B=(6,),
        reads=6,
    ),
    images(
        "FusedConv behind a Sigmoid",
        's = Sigmoid(t) [f] u = com.microsoft.FusedConv<activation = "Relu">(s, W, B)',
        {"c1": 8, "f": 6},
        W=(6, 8, 1, 1),
        B=(6,),
        reads=6,
    ),
    images(
        "FusedConv with a sum of something else",
        "e = ReduceMean<axes = [1]>(x) z = Expand(e, to) "
        '[f] u = com.microsoft.FusedConv<activation = "Relu">(t, W, B, z)',
        {"c1": 8},
        "f: what it is combined with does not change",
        W=(6, 8, 1, 1),
        B=(6,),
        to=np.array([1, 6, 1, 1]),
        reads=6,
    ),
    images(
        "FusedGemm",
        "m = GlobalAveragePool(t) f = Flatten(m) "
        '[f] g = com.microsoft.FusedGemm<activation = "Relu", alpha = 0.5, beta = 2.0, transB = 1>'
        "(f, W, B) "
        "u = Unsqueeze(g, ends)",
        {"c1": 8, "f": 6},
        W=(6, 8),
        B=(6,),
        ends=np.array([2, 3]),
        reads=6,
    ),
    images(
        "FusedGemm with a HardSigmoid",
        "m = GlobalAveragePool(t) f = Flatten(m) "
        '[f] g = com.microsoft.FusedGemm<activation = "HardSigmoid", activation_alpha = 0.2, '
        "activation_beta = 0.5, alpha = 1.0, beta = 1.0, transB = 1>(f, W, B) "
        "u = Unsqueeze(g, ends)",
        {"c1": 8},
        "behind 'f' a channel is not zero",
        W=(6, 8),
        B=(6,),
        ends=np.array([2, 3]),
        reads=6,
    ),
]


@pytest.mark.parametrize("case", AROUND, ids=str)
def test_fused_operators_pass_channels(case: Case, assert_exact: AssertExact) -> None:
    model = case.proto()
    fused = [node for node in model.graph.node if node.domain == "com.microsoft"]
    for node in fused:
        known(model, **{name: _shape(node, case) for name in node.output if name})
    found = assert_exact(model, feeds=_square_any(model))
    assert_free(found, dict(case.free), case.reason)


def _shape(node: onnx.NodeProto, case: Case) -> tuple[int | str, ...]:
    """Sizes of channels only: inference finds no more behind these operators."""
    matrix = case.weights["W2"]
    assert isinstance(matrix, tuple)
    if node.op_type == "FusedConv":
        return ("n", matrix[1], "h", "w")
    return ("n", matrix[1]) if node.op_type == "FusedGemm" else ("n", "s", matrix[0])


def _square_any(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    sizes = {"N": 7 if "transBatchA" in str(model.graph) else 2, "S": 7, "H": 9, "W": 9}
    return {
        value.name: rng.standard_normal(
            [sizes.get(d.dim_param, d.dim_value) for d in value.type.tensor_type.shape.dim]
        ).astype(np.float32)
        for value in model.graph.input
    }
