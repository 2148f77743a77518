"""Which tensors of a student are compared with which of its teacher."""

from __future__ import annotations

from typing import Any

import onnx
import onnx_ir as ir
import pytest

pytest.importorskip("torch")

from slimctl.core.errors import OptionError
from slimctl.graph.shapes import infer_shapes
from slimctl.training.pairs import (
    AttentionPair,
    FeaturePair,
    OutputPair,
    find_attention,
    find_features,
    match_inputs,
    match_outputs,
    named_features,
)

HEAD = '<ir_version: 8, opset_import: ["": 17]>\n'


def parsed(text: str) -> ir.Model:
    model = ir.from_proto(onnx.parser.parse_model(HEAD + text))
    infer_shapes(model)
    return model


def ending(operator: str, output: str = "y", shape: str = "N,4") -> ir.Model:
    last = f"{output} = {operator}(s)" if operator else f"{output} = Identity(s)"
    return parsed(f"g (float[{shape}] x) => (float[{shape}] {output}) {{ s = Neg(x) {last} }}")


@pytest.mark.parametrize(
    ("student", "teacher", "labels", "expected"),
    [
        ("Softmax", "Softmax", None, ("s", "s", "classes", -1)),
        ("LogSoftmax", "Softmax", None, ("s", "s", "classes", -1)),
        ("Softmax<axis=1>", "", None, ("s", "y", "classes", 1)),
        ("", "Softmax<axis=1>", None, ("y", "s", "classes", 1)),
        ("Sigmoid", "Sigmoid", ("", "cross-entropy"), ("s", "s", "sigmoid", 1)),
        ("", "", ("", "cross-entropy"), ("y", "y", "classes", 1)),
        ("", "", ("", "ctc"), ("y", "y", "classes", -1)),
        ("", "", ("", "bce"), ("y", "y", "sigmoid", 1)),
        ("", "", ("", "mse"), ("y", "y", "values", 1)),
        ("", "", None, ("y", "y", "values", 1)),
    ],
)
def test_the_end_of_the_graphs_or_the_loss_tells_what_an_output_holds(
    student: str, teacher: str, labels: Any, expected: Any
) -> None:
    found = match_outputs(ending(student), ending(teacher), kind=None, labels=labels)
    assert found == [OutputPair("y", *expected)]


def test_what_the_user_says_counts() -> None:
    found = match_outputs(ending("Softmax"), ending("Softmax"), kind="values", labels=None)
    assert found == [OutputPair("y", "y", "y", "values", -1)]


def test_only_the_labeled_output_is_taken_for_classes() -> None:
    text = "g (float[N,4] x) => (float[N,4] a, int64[2] n, float[N,4] b) {"
    model = parsed(text + "a = Neg(x) n = Shape(x) b = Abs(x) }")
    found = match_outputs(model, model, kind=None, labels=("b", "cross-entropy"))
    assert [(pair.name, pair.kind) for pair in found] == [("a", "values"), ("b", "classes")]


def test_other_names_are_matched_in_order() -> None:
    found = match_outputs(ending(""), ending("", output="z"), kind=None, labels=None)
    assert found == [OutputPair("y", "y", "z", "values")]
    other = parsed("g (float[M,4] z) => (float[M,4] y) { y = Neg(z) }")
    assert match_inputs(ending(""), other) == {"x": "z"}


@pytest.mark.parametrize(
    ("teacher", "message"),
    [
        ("g (float[N,5] x) => (float[N,5] y) { y = Neg(x) }", r"has the shape \['N', 4\], the"),
        ("g (float[N,4,1] x) => (float[N,4,1] y) { y = Neg(x) }", "input 'x' has the shape"),
        (
            "g (float[N,4] x, float[N,4] z) => (float[N,4] y) { y = Add(x, z) }",
            r"The teacher has 2 inputs \('x', 'z'\), the student 1 input \('x'\)",
        ),
    ],
)
def test_inputs_that_do_not_fit_are_named(teacher: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        match_inputs(ending(""), parsed(teacher))


CONVOLUTIONS = """
g (float[N,3,8,8] x, float[{c},3,3,3] w1, float[{c},{c},3,3] w2, float[{d},{c},3,3] w3,
   float[2,{d}] w4) => (float[N,2] y)
{{
    c1 = Conv<pads=[1,1,1,1]>(x, w1)
    r1 = Relu(c1)
    c2 = Conv<pads=[1,1,1,1]>(r1, w2)
    sum = Add(c2, r1)
    r2 = Relu(sum)
    c3 = Conv<pads=[1,1,1,1], strides=[2,2]>(r2, w3)
    r3 = Relu(c3)
    p = GlobalAveragePool(r3)
    f = Flatten(p)
    y = Gemm<transB=1>(f, w4)
}}
"""


def test_the_last_tensor_of_each_resolution_is_a_feature() -> None:
    student = parsed(CONVOLUTIONS.format(c=8, d=6))
    teacher = parsed(CONVOLUTIONS.format(c=16, d=6))
    assert find_features(student, teacher) == [
        FeaturePair("r2", "r2", 1, (8, 16)),
        FeaturePair("r3", "r3", 1, (6, 6)),
    ]


def test_other_names_or_sizes_are_no_features() -> None:
    student = parsed(CONVOLUTIONS.format(c=8, d=6))
    text = CONVOLUTIONS.format(c=8, d=6)
    renamed = text.replace("r2", "other2").replace("r3", "other3").replace("r1", "other1")
    assert [pair.student for pair in find_features(student, parsed(renamed))] == ["sum"]
    smaller = parsed(text.replace("3,8,8", "3,6,6"))
    assert find_features(student, smaller) == []


def test_named_features() -> None:
    student = parsed(CONVOLUTIONS.format(c=8, d=6))
    teacher = parsed(CONVOLUTIONS.format(c=16, d=6))
    found = named_features(student, teacher, ["c1=sum"])
    assert found == [FeaturePair("c1", "sum", 1, (8, 16))]


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        ("c9=c1", "The student has no tensor 'c9'"),
        ("c1=c9", "The teacher has no tensor 'c9'"),
        ("c1=c3", r"'c1=c3' pairs \['N', 8, 8, 8\] with \['N', 6, 4, 4\]"),
        ("c1=f", "'c1=f' pairs"),
    ],
)
def test_named_features_that_are_not_there_or_do_not_fit(pair: str, message: str) -> None:
    model = parsed(CONVOLUTIONS.format(c=8, d=6))
    with pytest.raises(OptionError, match=message):
        named_features(model, model, [pair])


def encoder(*, layers: int = 6, heads: int = 2) -> ir.Model:
    """Attention and a sum, again and again."""
    body, last = [], "x"
    for i in range(layers):
        body.append(
            f"""
    q{i} = MatMul({last}, w)
    v{i} = Reshape(q{i}, split)
    q4{i} = Transpose<perm=[0,2,1,3]>(v{i})
    k4{i} = Transpose<perm=[0,2,3,1]>(v{i})
    s{i} = MatMul(q4{i}, k4{i})
    map{i} = Softmax(s{i})
    o{i} = MatMul(map{i}, q4{i})
    m{i} = Transpose<perm=[0,2,1,3]>(o{i})
    j{i} = Reshape(m{i}, joined)
    h{i} = Add(j{i}, {last})
    n{i} = LayerNormalization(h{i}, scale)"""
        )
        last = f"n{i}"
    return parsed(
        f"""
g (float[2,5,8] x, float[8,8] w, float[8] scale) => (float[2,5,8] y)
<int64[4] split = {{2, 5, {heads}, {8 // heads}}},
 int64[3] joined = {{2, 5, 8}}>
{{{"".join(body)}
    y = Identity({last})
}}"""
    )


def test_of_a_transformer_some_sums_are_taken_evenly() -> None:
    found = find_features(encoder(), encoder())
    assert [pair.student for pair in found] == ["h0", "h2", "h3", "h5"]
    assert {(pair.axis, pair.widths) for pair in found} == {(2, (8, 8))}


def test_attention_maps_are_compared_by_their_scores() -> None:
    found, different = find_attention(encoder(layers=2), encoder(layers=3))
    assert found == [AttentionPair("s0", "s0", -1), AttentionPair("s1", "s1", -1)]
    assert different == []


def test_maps_of_other_heads_are_left_out_and_named() -> None:
    assert find_attention(encoder(layers=1, heads=2), encoder(layers=1, heads=4)) == ([], ["map0"])
