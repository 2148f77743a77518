"""Every operator: what may go, and that the rest computes what it did."""

from __future__ import annotations

import numpy as np
import pytest

from tests.graph.channels.exactness import AssertExact
from tests.graph.channels.table import Case, check, images, ints, scalar


def _silent(op_type: str, opset: int = 17) -> Case:
    """Zero stays zero: even the zeros of a padding are no obstacle."""
    return images(
        f"{op_type} keeps zero", f"u = {op_type}(t)", opset=opset, last="<pads = [1,1,1,1]>"
    )


def _constant(op_type: str, attributes: str = "") -> list[Case]:
    """Zero becomes a number: it moves into the next bias, unless that sees a padding too."""
    nodes = f"[f] u = {op_type}{attributes}(t)"
    return [
        images(f"{op_type} gives a number", nodes),
        images(f"{op_type} before a padding", nodes, 0, "behind 'f'", last="<pads = [1,1,1,1]>"),
    ]


ONE_OPERAND = [
    *map(
        _silent,
        [
            "Abs", "Asinh", "Atan", "Ceil", "Celu", "Elu", "Erf", "Floor", "HardSwish", "Identity",
            "LeakyRelu", "Neg", "Relu", "Round", "Selu", "Shrink", "Sign", "Sin", "Sinh",
            "Softsign", "Tanh", "ThresholdedRelu",
        ],
    ),
    _silent("Gelu", 20),
    _silent("Mish", 18),
    images("Asin, Atanh, Tan", "a = Tanh(t) b = Asin(a) c = Mul(a, half) d = Atanh(c) e = Tan(d) "
           "u = Add(b, e)", half=scalar(0.5)),
    *_constant("Sigmoid"),
    *_constant("HardSigmoid"),
    *_constant("HardSigmoid", "<alpha = 0.3, beta = 0.7>"),
    *_constant("Cos"),
    *_constant("Cosh"),
    *_constant("Exp"),
    *_constant("Softplus"),
    images("Acos", "a = Tanh(t) u = Acos(a)"),
    images("Sqrt", "a = Relu(t) u = Sqrt(a)"),
    images("Sqrt of what may be negative", "m = ReduceMax<axes = [1]>(x) n = Abs(m) a = Abs(t) "
           "b = Add(a, n) [s] c = Sqrt(b) u = Mul(c, t)", 0, "s: it is not defined"),
    images("Log of zero", "a = Abs(t) [l] u = Log(a)", 0, "l: it is not defined"),
    images("Log behind a scale that would hide it",
           "a = Abs(t) [l] b = Log(a) c = Mul(b, zero) u = Add(c, t)", 0, "l: it is not defined",
           zero=scalar(0.0)),
    images("Log of one and more", "a = Exp(t) u = Log(a)"),
    images("Reciprocal of zero", "[r] u = Reciprocal(t)", 0, "r: it is not defined"),
    images("Reciprocal of a constant", "a = Sigmoid(t) u = Reciprocal(a)"),
    images("SiLU", "a = Sigmoid(t) u = Mul(t, a)", last="<pads = [1,1,1,1]>"),
    images("HardSwish in parts", "a = Add(t, three) b = Clip(a, zero, six) c = Mul(t, b) "
           "u = Div(c, six)", last="<pads = [1,1,1,1]>",
           three=scalar(3), zero=scalar(0), six=scalar(6)),
    images("GELU in parts", "a = Div(t, root) b = Erf(a) c = Add(b, one) d = Mul(t, c) "
           "u = Mul(d, half)", last="<pads = [1,1,1,1]>",
           root=scalar(1.41421), one=scalar(1), half=scalar(0.5)),
    images("Clip", "u = Clip(t, low, high)", low=scalar(-1), high=scalar(1)),
    images("Clip away from zero", "u = Clip(t, low, high)", low=scalar(0.25), high=scalar(1)),
    images("Clip away from zero before a padding", "[k] u = Clip(t, low)", 0, "behind 'k'",
           last="<pads = [1,1,1,1]>", low=scalar(0.25)),
    images("Clip without a lower bound", "u = Clip(t,,high)", high=scalar(-0.5)),
    images("Clip without an upper bound", "u = Clip(t, low)", low=scalar(0.5)),
    images("Clip without bounds", "u = Clip(t)"),
    images("Clip with a bound of shape [1]", "u = Clip(t, low)",
           low=np.array([0.5], np.float32)),
    images("Clip with a computed bound", "b = ReduceMax<keepdims = 0>(x) [k] u = Clip(t, b)", 0,
           "behind 'k'"),
    images("Clip with attributes", "u = Clip<min = 0.5, max = 6.0>(t)", opset=7),
    images("Cast to a narrower float", "a = Sigmoid(t) b = Cast<to = 10>(a) u = Cast<to = 1>(b)"),
    images("Cast to integers cuts off", "a = Sigmoid(t) b = Cast<to = 7>(a) u = Cast<to = 1>(b)"),
    images("Cast to bool", "a = Sigmoid(t) b = Cast<to = 9>(a) u = Cast<to = 1>(b)"),
    images("Cast to bool of zero", "b = Cast<to = 9>(t) u = Cast<to = 1>(b)",
           last="<pads = [1,1,1,1]>"),
    images("Not", "b = Cast<to = 9>(t) [n] c = Not(b) u = Cast<to = 1>(c)"),
    images("IsNaN", "b = IsNaN(t) c = Cast<to = 1>(b) u = Add(c, t)", 0, "behind"),
    images("Dropout", "u = Dropout(t)"),
    images("Dropout whose mask is read", "d, m = Dropout(t) a = Cast<to = 1>(m) "
           "b = ReduceSum(a) u = Add(d, b)", 0, "the mask"),
]  # fmt: skip

SEVERAL_OPERANDS = [
    # a constant for each channel shrinks along
    images("Add a vector", "u = Add(t, k)", k=(1, 8, 1, 1), last="<pads = [1,1,1,1]>"),
    images("Add a vector of lower rank", "u = Add(k, t)", k=(8, 1, 1)),
    images("Sub from a vector", "u = Sub(k, t)", k=(8, 1, 1), last="<pads = [1,1,1,1]>"),
    images("Mul by a vector", "u = Mul(t, k)", k=(8, 1, 1), last="<pads = [1,1,1,1]>"),
    images("Div by a vector", "u = Div(t, k)", k=(8, 1, 1), last="<pads = [1,1,1,1]>"),
    images("Pow of a vector", "a = Relu(t) u = Pow(a, k)", k=np.full((8, 1, 1), 2, np.float32)),
    images("Max with a vector", "u = Max(t, k)", k=(8, 1, 1)),
    images("Min with a vector", "[e] u = Min(t, k)", 6, "behind 'e'", k=(8, 1, 1),
           last="<pads = [1,1,1,1]>"),
    images("Min with a vector of positive numbers", "u = Min(t, k)", last="<pads = [1,1,1,1]>",
           k=np.linspace(0.1, 0.8, 8, dtype=np.float32).reshape(8, 1, 1)),
    images("PRelu", "u = PRelu(t, k)", k=(8, 1, 1), last="<pads = [1,1,1,1]>"),
    images("PRelu of what is negative at rest", "a = Sub(t, n) [p] u = PRelu(a, k)", 0,
           "behind", k=(8, 1, 1), n=scalar(0.3)),
    images("PRelu of what is positive at rest", "a = Add(t, n) u = PRelu(a, k)", k=(8, 1, 1),
           n=scalar(0.3)),
    images("PRelu with one slope", "u = PRelu(t, k)", k=(1,), last="<pads = [1,1,1,1]>"),
    images("Sigmoid times a vector", "a = Sigmoid(t) u = Mul(a, k)", k=(8, 1, 1)),
    # one number
    images("Add a number", "u = Add(t, k)", k=scalar(0.3)),
    images("Add a number, padding", "[f] u = Add(t, k)", 0, "behind 'f'", k=scalar(0.3),
           last="<pads = [1,1,1,1]>"),
    images("Add zero, padding", "u = Add(t, k)", k=scalar(0), last="<pads = [1,1,1,1]>"),
    images("Add a number for every channel alike", "u = Add(t, k)", k=np.full((1, 1, 1), 0.5, "f")),
    images("Sub a number and add it", "a = Sub(t, k) u = Add(a, k)", k=scalar(0.25),
           last="<pads = [1,1,1,1]>"),
    images("Mul by a number", "u = Mul(k, t)", k=scalar(0.3), last="<pads = [1,1,1,1]>"),
    images("Div by a number", "u = Div(t, k)", k=scalar(0.3), last="<pads = [1,1,1,1]>"),
    images("Div of a number", "[q] u = Div(k, t)", 0, "q: it is not defined", k=scalar(0.3)),
    images("Div by zero where a channel is zero", "[q] a = Div(t, t) u = Relu(a)", 0,
           "q: it is not defined"),
    images("Div by zero, hidden by a maximum", "a = Abs(t) b = Neg(a) [q] c = Div(k, b) "
           "d = Relu(c) u = Add(d, t)", 0, "q: it is not defined", k=scalar(0.3)),
    images("Div by a constant that a channel becomes", "a = Sigmoid(t) u = Div(t, a)",
           last="<pads = [1,1,1,1]>"),
    images("Div by what has no channels", "a = Abs(t) b = ReduceSum(a, axes) u = Div(t, b)",
           axes=ints(1), last="<pads = [1,1,1,1]>"),
    images("Pow squares", "u = Pow(t, k)", k=scalar(2), last="<pads = [1,1,1,1]>"),
    images("Pow to zero", "u = Pow(t, k)", k=scalar(0)),
    images("Pow to a negative number", "a = Exp(t) u = Pow(a, k)", k=scalar(-1)),
    images("Pow of zero to a negative number", "[p] u = Pow(t, k)", 0, "p: it is not defined",
           k=scalar(-2)),
    images("Max with a number", "u = Max(t, k)", k=scalar(0.3)),
    images("Max with a negative number", "u = Max(t, k)", k=scalar(-0.3),
           last="<pads = [1,1,1,1]>"),
    # values that differ from place to place
    images("Add a plane", "[f] u = Add(t, k)", 0, "behind 'f'", height="6", width="5", k=(6, 5)),
    images("Mul by a plane", "u = Mul(t, k)", height="6", width="5", k=(6, 5),
           last="<pads = [1,1,1,1]>"),
    images("Add a plane for each channel", "u = Add(t, k)", height="6", width="5", k=(8, 6, 5),
           last="<pads = [1,1,1,1]>"),
    images("Mul by a plane for each channel", "u = Mul(t, k)", height="6", width="5", k=(8, 6, 5),
           last="<pads = [1,1,1,1]>"),
    images("Mul by a plane that is computed", "m = ReduceMean<axes = [1]>(x) u = Mul(t, m)",
           last="<pads = [1,1,1,1]>"),
    images("Add a plane that is computed", "m = ReduceMean<axes = [1]>(x) [f] u = Add(t, m)", 0,
           "behind 'f'"),
    # the same tensor twice, several tensors
    images("Add the same twice", "u = Add(t, t)", last="<pads = [1,1,1,1]>"),
    images("Sub the same twice", "a = Sigmoid(t) u = Sub(a, a)", last="<pads = [1,1,1,1]>"),
    images("Mul the same twice", "a = Sigmoid(t) u = Mul(a, a)"),
    images("Sum of three", "a = Relu(t) b = Tanh(t) u = Sum(t, a, b)", last="<pads = [1,1,1,1]>"),
    images("Mean of three", "a = Sigmoid(t) b = Tanh(t) u = Mean(t, a, b)"),
    images("Max of three", "a = Sigmoid(t) b = Tanh(t) u = Max(t, a, b)"),
    images("Add ties two layers", "[c3] s = Conv<pads = [1,1,1,1]>(x, W3) u = Add(t, s)",
           {"c1": 8, "c3": 8}, W3=(8, 3, 3, 3), last="<pads = [1,1,1,1]>"),
    images("Add an input of the model", "a = Concat<axis = 1>(x, x) b = Pad(a, p) u = Add(t, b)",
           0, "what it is combined with does not change", p=ints(0, 2, 0, 0, 0, 0, 0, 0)),
    images("Where with a constant condition for each channel", "u = Where(k, t, s)",
           k=np.arange(8).reshape(8, 1, 1) % 2 == 0, s=scalar(0.0), last="<pads = [1,1,1,1]>"),
    images("Where with another number", "z = Cast<to = 9>(x) m = ReduceMax<axes = [1]>(x) "
           "k = Greater(m, s) [w] u = Where(k, t, s)", 0, "behind 'w'", s=scalar(0.2)),
    images("Where that masks with zero", "m = ReduceMax<axes = [1]>(x) k = Greater(m, s) "
           "u = Where(k, t, s)", s=scalar(0.0), last="<pads = [1,1,1,1]>"),
    images("comparison as a mask", "b = Greater(t, s) c = Cast<to = 1>(b) u = Mul(t, c)",
           s=scalar(0.1), last="<pads = [1,1,1,1]>"),
    images("comparison as a condition", "b = GreaterOrEqual(t, s) u = Where(b, t, s)",
           s=scalar(0.0), last="<pads = [1,1,1,1]>"),
    images("comparison as a value", "[g] b = Less(t, s) u = Cast<to = 1>(b)", 0, "behind 'g'",
           s=scalar(0.1)),
    images("And, Or, Xor", "a = Cast<to = 9>(t) b = Less(t, s) c = And(a, b) d = Or(b, a) "
           "e = Xor(d, a) f = And(c, e) u = Cast<to = 1>(f)", s=scalar(0.1),
           last="<pads = [1,1,1,1]>"),
    images("BitwiseAnd of constants", "a = Sigmoid(t) b = Mul(a, six) c = Cast<to = 7>(b) "
           "d = BitwiseAnd(c, five) u = Cast<to = 1>(d)", 0, "behind", opset=18,
           six=scalar(6), five=np.array(5, np.int64)),
    images("Div of integers cuts off", "a = Exp(t) b = Add(a, two) c = Cast<to = 7>(b) "
           "d = Div(c, k) u = Cast<to = 1>(d)", two=scalar(2.1), k=np.array(2, np.int64)),
    images("Mod by a constant", "u = Mod<fmod = 1>(t, k)", 0, "behind", k=scalar(0.7)),
    images("squeeze and excitation",
           "p = GlobalAveragePool(t) [d] q = Conv(p, Wd, Bd) r = Relu(q) [e] s = Conv(r, We, Be) "
           "g = Sigmoid(s) u = Mul(t, g)", {"c1": 8, "d": 4, "e": 8},
           Wd=(4, 8, 1, 1), Bd=(4,), We=(8, 4, 1, 1), Be=(8,), last="<pads = [1,1,1,1]>"),
    images("squeeze and excitation with HardSigmoid",
           "p = GlobalAveragePool(t) [d] q = Conv(p, Wd) r = Relu(q) [e] s = Conv(r, We) "
           "g = HardSigmoid<alpha = 0.1666667>(s) u = Mul(g, t)", {"c1": 8, "d": 4, "e": 8},
           Wd=(4, 8, 1, 1), We=(8, 4, 1, 1), last="<pads = [1,1,1,1]>"),
]  # fmt: skip


@pytest.mark.parametrize("case", ONE_OPERAND, ids=str)
def test_one_operand(case: Case, assert_exact: AssertExact) -> None:
    check(case, assert_exact)


@pytest.mark.parametrize("case", SEVERAL_OPERANDS, ids=str)
def test_several_operands(case: Case, assert_exact: AssertExact) -> None:
    check(case, assert_exact)
