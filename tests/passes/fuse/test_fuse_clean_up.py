"""Duplicates, branches that are always taken, dead code, unused imports, options."""

from __future__ import annotations

import numpy as np
import pytest
from pydantic import ValidationError

from slimctl.core.errors import OptionError
from slimctl.core.registry import BUILT_IN
from slimctl.passes.fuse import Fuse, Rewrite

# Duplicates


def test_equal_constants_are_stored_once(fuse_text):
    fused = fuse_text(
        """g (float[3] x) => (float[3] y) <float[3] a = {1,2,3}, float[3] b = {1,2,3},
            float[3] c = {1,2,4}, float[1,3] d = {1,2,3}, int32[3] e = {1,2,3}> {
            [one] p = Mul(x, a)
            [two] q = Mul(p, b)
            [three] r = Mul(q, c)
            [four] s = Mul(r, d)
            [five] t = Cast<to=1>(e)
            [six] u = Squeeze(s)
            [seven] y = Mul(u, t)
        }"""
    )
    assert list(fused.after.graph.initializers) == ["a", "c", "d"]
    assert fused.report.changed["Duplicate initializer merged"] == 2


def test_bytes_decide(fuse_text):
    """Minus zero is another number, and so is the same pattern in another type."""
    fused = fuse_text(
        """g (float[3] x) => (float[3] y, float[3] z)
            <float[3] a = {1,0,1}, float[3] b = {1,-0,1}> {
            [one] y = Div(x, a)
            [two] z = Div(x, b)
        }""",
        {"x": np.ones(3, np.float32)},
        run=False,
    )
    assert len(fused.after.graph.initializers) == 2


def test_a_difference_between_the_samples_is_seen(fuse_text):
    one = np.zeros(1000, np.float32)
    two = one.copy()
    two[501] = 1
    fused = fuse_text(
        """g (float[1000] x) => (float[1000] y) <float[1000] a, float[1000] b> {
            [one] p = Sub(a, x)
            [two] y = Sub(b, p)
        }""",
        {"a": one, "b": two},
    )
    assert len(fused.after.graph.initializers) == 2


BRANCHES = """g (float[{n}] x, bool flag) => (float[{n}] y) {{
    [if] y = If(flag) <
        then_branch = yes () => (float[{n}] p) <float[{n}] a> {{ [add] p = Add(x, a) }},
        else_branch = no () => (float[{n}] q) <float[{n}] b> {{ [mul] q = Mul(x, b) }}
    >
}}"""


def test_large_constants_of_two_branches_move_to_the_main_graph(fuse_text):
    array = np.arange(256, dtype=np.float32)
    fused = fuse_text(BRANCHES.format(n=256), {"a": array, "b": array})
    assert len(fused.after.graph.initializers) == 1
    assert not any(graph.initializers for graph in fused.after.graph.subgraphs())


def test_small_constants_of_two_branches_stay_there(fuse_text):
    array = np.arange(255, dtype=np.float32)
    fused = fuse_text(BRANCHES.format(n=255), {"a": array, "b": array})
    assert not fused.after.graph.initializers


@pytest.mark.parametrize("dtype", ["bfloat16", "float8e4m3fn", "int4"])
def test_types_without_a_plain_array(fuse_text, dtype):
    fused = fuse_text(
        f"""<ir_version: 10, opset_import: ["" : 21]>
        g (int64[1] x) => ({dtype}[1] y, {dtype}[1] z)
            <{dtype}[2] a = {{1,1}}, {dtype}[2] b = {{1,1}}> {{
            [one] y = Gather(a, x)
            [two] z = Gather(b, x)
        }}""",
        run=False,
    )
    assert len(fused.after.graph.initializers) == 1


def test_strings_are_left_alone(fuse_text):
    fused = fuse_text(
        """g (int64[1] x) => (string[1] y, string[1] z)
            <string[3] a = {"1", "2", "3"}, string[3] b = {"1", "2", "3"}> {
            [one] y = Gather(a, x)
            [same] c = Identity(b)
            [two] z = Gather(c, x)
        }"""
    )
    assert len(fused.after.graph.initializers) == 2


# Branches


def test_a_branch_that_is_always_taken(fuse_text):
    fused = fuse_text(
        """g (float[N,3] x) => (float[N,3] y) <int64 three = {3}, int64 axis = {1}, float[3] k> {
            [shape] s = Shape(x)
            [size] n = Gather(s, axis)
            [same] c = Equal(n, three)
            [before] r = Relu(x)
            [if] z = If(c) <
                then_branch = yes () => (float[N,3] p) <float[3] inner> {
                    [mul] m = Mul(r, inner)
                    [add] p = Add(m, k)
                },
                else_branch = no () => (float[N,3] q) { [neg] q = Neg(r) }
            >
            [after] y = Tanh(z)
        }"""
    )
    assert fused.op_types == ["Relu", "Mul", "Add", "Tanh"]
    assert fused.report.changed["If with a constant condition inlined"] == 1


@pytest.mark.parametrize("taken", [0, 1])
def test_names_that_repeat_in_other_branches(fuse_text, taken):
    fused = fuse_text(
        f"""g (float[3] x, bool flag) => (float[3] y, float[3] z) <bool go = {{{taken}}}> {{
            [if] y = If(go) <
                then_branch = yes () => (float[3] p) <float[3] k = {{1,2,3}}> {{
                    [n] m = Mul(x, k) [o] p = Neg(m) }},
                else_branch = no () => (float[3] q) {{ [n2] m2 = Mul(x, x) [o2] q = Neg(m2) }}
            >
            [if2] z = If(flag) <
                then_branch = yes2 () => (float[3] s) <float[3] k = {{4,5,6}}> {{
                    [n] m = Mul(x, k) [o] s = Tanh(m) }},
                else_branch = no2 () => (float[3] t) {{ [n2] m2 = Add(x, x) [o2] t = Tanh(m2) }}
            >
        }}"""
    )
    names = [node.name for node in fused.after.graph.all_nodes()]
    assert fused.op_types[:3] == ["Mul", "Neg", "If"]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("body", ["Identity(x)", "Identity(k)", "Identity(r)"])
def test_a_branch_that_gives_out_what_is_around_it(fuse_text, body):
    fused = fuse_text(
        f"""g (float[3] x) => (float[3] y, float[3] z) <bool go = {{1}}, float[3] k> {{
            [relu] r = Relu(x)
            [if] y, z = If(go) <
                then_branch = yes () => (float[3] p, float[3] q) {{
                    [one] p = {body} [two] q = Identity(r) }},
                else_branch = no () => (float[3] s, float[3] t) {{ [n] s = Neg(x) [o] t = Neg(x) }}
            >
        }}"""
    )
    assert "If" not in fused.op_types


def test_a_branch_in_a_loop(fuse_text):
    fused = fuse_text(
        """g (float[3] x) => (float[3] y) <int64 count = {4}, bool go = {1}> {
            [loop] y = Loop(count, go, x) <
                body = b (int64 i, bool c, float[3] state) => (bool d, float[3] next) {
                    [keep] d = Identity(c)
                    [if] next = If(go) <
                        then_branch = yes () => (float[3] p) { [n] p = Neg(state) },
                        else_branch = no () => (float[3] q) { [t] q = Tanh(state) }
                    >
                }
            >
        }"""
    )
    assert fused.op_types == ["Loop", "Identity", "Neg"]


# Dead code


def test_dead_nodes_weights_and_imports(fuse_text):
    fused = fuse_text(
        """<ir_version: 10, opset_import: ["" : 17, "my.domain" : 1]>
        g (float[3] x) => (float[3] y) <float[3] used, float[3] unused, float[3] lost> {
            [dead] d = my.domain.Magic(x, lost)
            [deader] e = Neg(d)
            [add] y = Add(x, used)
        }""",
        run=False,
    )
    assert fused.op_types == ["Add"]
    assert list(fused.after.graph.initializers) == ["used"]
    assert dict(fused.after.opset_imports) == {"": 17}
    assert fused.report.changed["Unused operator set removed"] == 1


def test_an_input_that_nothing_reads_stays(fuse_text):
    fused = fuse_text("g (float[3] x, float[3] z) => (float[3] y) { [neg] y = Neg(x) }", run=False)
    assert [value.name for value in fused.after.graph.inputs] == ["x", "z"]


def test_unused_functions(fuse_text):
    fused = fuse_text(
        """<ir_version: 10, opset_import: ["" : 17, "f" : 1]>
        g (float[3] x) => (float[3] y) { [neg] y = Neg(x) }
        <domain: "f", opset_import: ["" : 17]>
        twice (a) => (b) { b = Add(a, a) }"""
    )
    assert not fused.after.functions
    assert fused.report.changed["Unused function removed"] == 1


# Options


TEXT = """g (float[1,3,8,8] x) => (float[1,4,6,6] y) <float[4,3,3,3] w, float[4,1,1] s,
    float[4,1,1] t, float[4,1,1] u> {
    [a_same] i = Identity(x)
    [a_conv] c = Conv(i, w)
    [a_mul] m = Mul(c, s)
    [b_sum] v = Add(t, u)
    [b_add] y = Add(m, v)
}"""


def test_everything_by_default(fuse_text):
    assert fuse_text(TEXT).op_types == ["Conv"]


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ({"exclude": ("a_same",)}, ["Identity", "Conv"]),
        ({"exclude": ("op:Mul",)}, ["Conv", "Mul", "Add"]),
        ({"exclude": ("a_conv",)}, ["Conv", "Mul", "Add"]),
        ({"exclude": ("re:^b_",)}, ["Conv", "Add", "Add"]),
        ({"include": ("b_*",)}, ["Identity", "Conv", "Mul", "Add"]),
        ({"include": ("a_*",)}, ["Conv", "Add", "Add"]),
        (
            {"include": ("op:Identity",), "exclude": ("a_*",)},
            ["Identity", "Conv", "Mul", "Add", "Add"],
        ),
        ({"rewrites": ("constants",)}, ["Identity", "Conv", "Mul", "Add"]),
        ({"rewrites": ("no-ops",)}, ["Conv", "Mul", "Add", "Add"]),
        ({"rewrites": ("affine", "constants")}, ["Identity", "Conv"]),
        ({"rewrites": ()}, ["Identity", "Conv", "Mul", "Add", "Add"]),
    ],
)
def test_options(fuse_text, options, left):
    assert sorted(fuse_text(TEXT, **options).op_types) == sorted(left)


def test_reasons_name_the_pattern(fuse_text):
    fused = fuse_text(TEXT, exclude=("a_conv",))
    assert fused.reasons["a_mul"] == "'a_conv' is excluded by 'a_conv'"


def test_a_pattern_that_matches_nothing_is_mentioned(fuse_text):
    fused = fuse_text(TEXT, exclude=("a_convv",))
    assert fused.report.notes == ["pattern 'a_convv' matches no candidate"]


def test_a_malformed_pattern_is_refused():
    with pytest.raises(OptionError, match="not a regular expression"):
        Fuse(exclude=("re:(",))


@pytest.mark.parametrize(
    "options", [{"fold_limit_bytes": -1}, {"rewrites": ("everything",)}, {"unknown": 1}]
)
def test_wrong_options_are_refused(options):
    with pytest.raises(ValidationError):
        Fuse(**options)


def test_options_survive_a_round_trip():
    step = Fuse(fold_limit_bytes=7, rewrites=(Rewrite.PAD,), include=("a*",), exclude=("op:Conv",))
    assert Fuse.model_validate_json(step.model_dump_json()) == step


def test_every_option_is_described():
    assert all(field.description for field in Fuse.model_fields.values())


def test_the_registry_says_the_same():
    entry = BUILT_IN[Fuse.name]
    assert (entry.place, entry.summary) == ("slimctl.passes.fuse:Fuse", Fuse.summary)
