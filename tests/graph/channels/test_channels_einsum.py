"""Einsum: letters that go together, letters that are summed over, letters of weights only."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir
import pytest

from slimctl.graph.channels import Role, analyze
from slimctl.graph.shapes import infer_shapes
from tests.graph.channels.conftest import AssertExact
from tests.graph.channels.table import Case, Weight, parsed, scalar, tokens


def einsum(
    name: str,
    equation: str,
    operands: str,
    *,
    before: str = "",
    output: str = "u",
    after: str = "",
    free: Mapping[str, int] | None = None,
    reason: str = "",
    length: str = "S",
    reads: int = 8,
    **weights: Weight,
) -> Case:
    """A matrix (m1: t, [N, S, 8]), an Einsum (e: u), a matrix of u."""
    nodes = f'{before} [e] {output} = Einsum<equation = "{equation}">({operands}) {after}'
    free = {"m1": 8, "e": 10} if free is None else free
    return tokens(name, nodes, free, reason, length=length, reads=reads, **weights)


SECOND = "[m0] r = MatMul(x, W0)"
CASES = [
    einsum("matrix product", "nsi,io->nso", "t, W", W=(8, 10), reads=10),
    einsum("matrix product, implicit", "abc,cd", "t, W", W=(8, 10), reads=10),
    einsum("matrix product, spaces", "n s i, i o -> n s o", "t, W", W=(8, 10), reads=10),
    einsum("matrix product, transposed", "nsi,oi->nso", "t, W", W=(10, 8), reads=10),
    einsum("weights first", "oi,nsi->nso", "W, t", W=(10, 8), reads=10),
    einsum(
        "two constants",
        "nsi,ir,ro->nso",
        "t, W, V",
        W=(8, 4),
        V=(4, 10),
        reads=10,
    ),
    einsum("a factor for each channel", "nsi,i->nsi", "t, W", free={"m1": 8}, W=(8,)),
    einsum("a factor broadcast", "nsi,i->nsi", "t, W", free={"m1": 8}, W=(1,)),
    einsum("one operand", "nsi->sni", "t", free={"m1": 8}),
    einsum(
        "a sum over channels",
        "nsi,io->ns",
        "t, W",
        free={"m1": 8},
        output="sums",
        after="u = Unsqueeze(sums, end)",
        W=(8, 7),
        end=np.full(1, -1),
        reads=1,
    ),
    einsum(
        "two tensors, channel by channel",
        "nsi,nsi->nsi",
        "t, r",
        before=SECOND,
        free={"m0": 8, "m1": 8},
        W0=(6, 8),
    ),
    einsum(
        "inner products",
        "nsi,nti->nst",
        "t, r",
        before=SECOND,
        free={"m0": 8, "m1": 8},
        W0=(6, 8),
        length="7",
        reads=7,
    ),
    einsum(
        "outer products",
        "nsi,nsj->nij",
        "t, r",
        before=SECOND,
        free={"m0": 9},
        reason="y: it is an output of the model",
        W0=(6, 9),
        reads=9,
    ),
    einsum(
        "one silent side is enough",
        "nsi,nsi->nsi",
        "t, q",
        before=f"{SECOND} [f] q = Sigmoid(r)",
        free={"m0": 8, "m1": 8},
        W0=(6, 8),
    ),
    einsum(
        "a side that is not silent",
        "nsi,io->nso",
        "q, W",
        before="[f] q = Sigmoid(t)",
        free={"e": 10},
        reason="behind 'f' a channel is not zero",
        W=(8, 10),
        reads=10,
    ),
    einsum(
        "an input that does not change",
        "nsi,nsj->nij",
        "x, t",
        free={"m1": 8},
    ),
    einsum(
        "a product with an input",
        "nsi,nsi->nsi",
        "t, q",
        before="p = Slice(x, nil, two, end) q = Concat<axis = -1>(x, p)",
        free={},
        reason="e: what it is multiplied with does not change",
        nil=np.zeros(1, np.int64),
        two=np.full(1, 2),
        end=np.full(1, -1),
    ),
    einsum(
        "an ellipsis",
        "...i,io->...o",
        "t, W",
        free={},
        reason="e: its equation has an ellipsis",
        W=(8, 10),
        reads=10,
    ),
    einsum(
        "a diagonal",
        "nii->ni",
        "q",
        before=f'{SECOND} q = Einsum<equation = "nsi,nsj->nij">(t, r) ',
        free={},
        reason="e: its equation has an ellipsis or a diagonal",
        W0=(6, 8),
    ),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_letters_that_are_tied_and_read(case: Case, assert_exact: AssertExact) -> None:
    found = assert_exact(case.proto())
    layers = {node.name for group in found.groups for node in group.layers}
    free = {name: count for name in layers if (count := found.free_of(name))}
    assert free == dict(case.free), found.reasons
    if case.reason:
        assert any(case.reason in reason for reason in found.reasons), found.reasons


def test_the_constant_shrinks_on_both_sides(assert_exact: AssertExact) -> None:
    found = assert_exact(CASES[0].proto())
    assert list(found.model.graph.initializers["W"].shape or ()) == [4, 5]


def test_one_side_reads_and_the_other_computes() -> None:
    model = ir.from_proto(CASES[0].proto())
    infer_shapes(model)
    members = analyze(model).members
    roles = {member.axis: member.role for member in members if member.value.name == "W"}
    assert roles == {0: Role.CONSUME, 1: Role.PRODUCE}


def test_heads_as_letters(assert_exact: AssertExact) -> None:
    """Attention as einops writes it: weights have an axis of heads and one of their width."""
    text = """(float[N,S,6] x) => (float[a,b,c] y) {
      [eq] q = Einsum<equation = "nsi,ihd->nhsd">(x, Q)
      [ek] k = Einsum<equation = "nsi,ihd->nhsd">(x, K)
      [ev] v = Einsum<equation = "nsi,ihe->nhse">(x, V)
      scores = Einsum<equation = "nhsd,nhtd->nhst">(q, k)
      scaled = Mul(scores, scale)
      weights = Softmax<axis = -1>(scaled)
      u = Einsum<equation = "nhst,nhte->nshe">(weights, v)
      [eo] y = Einsum<equation = "nshe,heo->nso">(u, O)
    }"""
    weights = {
        "Q": (6, 4, 6),
        "K": (6, 4, 6),
        "V": (6, 4, 5),
        "O": (4, 5, 7),
        "scale": scalar(0.4),
    }
    found = assert_exact(parsed(text, weights))
    assert found.free_of("eq") == found.free_of("ek") == 4 + 6
    assert found.free_of("ev") == 4 + 5
    names = [{node.name for node in group.layers} for group in found.groups]
    assert {"eq", "ek", "ev"} in names  # heads
    assert {"eq", "ek"} in names  # their width
    shapes = {n: list(v.shape or ()) for n, v in found.model.graph.initializers.items()}
    assert shapes["Q"] == shapes["K"] == [6, 2, 3]
    assert shapes["V"] == [6, 2, 3]
    assert shapes["O"] == [2, 3, 7]
