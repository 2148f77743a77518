"""Gradients of every operator against finite differences, in double precision."""

# ruff: noqa: E402 # the check for torch comes before what needs it
from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import pytest

torch = pytest.importorskip("torch", reason="torch is an extra")

from torch.autograd.gradcheck import GradcheckError

from slimctl.training.operator import Call, Operator
from slimctl.training.table import OPERATORS
from tests.training.operator_cases import CASES, IMAGE, Case, X, case, normal, positive

_COMPARES = "gives booleans"
_COUNTS = "gives sizes and places, whatever the values are"
_LOGIC = "takes booleans"
EXCLUDED = {
    "And": _LOGIC,
    "ArgMax": _COUNTS,
    "ArgMin": _COUNTS,
    "ConstantOfShape": "takes a size",
    "DequantizeLinear": "takes codes; test_operators_quantize.py",
    "Equal": _COMPARES,
    "Greater": _COMPARES,
    "GreaterOrEqual": _COMPARES,
    "IsNaN": _COMPARES,
    "Less": _COMPARES,
    "LessOrEqual": _COMPARES,
    "Not": _LOGIC,
    "Or": _LOGIC,
    "QuantizeLinear": "passes gradients on where it is constant; test_operators_quantize.py",
    "Range": "its bounds decide how many elements there are",
    "Shape": _COUNTS,
    "Size": _COUNTS,
    "Xor": _LOGIC,
}
"""Operators without a gradient by any input, with the reason."""

_NUMBERS = {"Clip": {1, 2}, "Dropout": {1}, "Mod": {1}, "Pad": {2}, "Resize": {1, 2}, "Range": {0}}
"""Inputs of floats that say what to do; bounds that are computed are checked further down."""

_TRAINING = case("BatchNormalization", IMAGE, normal(3), normal(3), normal(3), positive(3))


def _free(case: Case) -> list[int]:
    """Inputs that one can differentiate by."""
    numbers = _NUMBERS.get(case.op_type, set())
    return [
        place
        for place, array in enumerate(case.inputs)
        if array is not None and array.dtype.kind == "f" and array.size and place not in numbers
    ]


def _outputs(case: Case, given: list[torch.Tensor | None], call: Call) -> list[torch.Tensor]:
    found = OPERATORS[case.op_type].run(call, *given)
    outputs = found if isinstance(found, tuple) else (found,)
    return [output for output in outputs if output.is_floating_point()]


def _given(case: Case) -> list[torch.Tensor | None]:
    """The inputs, floats in double precision."""
    return [
        None
        if array is None
        else torch.tensor(array.astype(np.float64) if array.dtype.kind == "f" else array)
        for array in case.inputs
    ]


def _is_kinked(case: Case) -> bool:
    """Whether it stands where the operator has no derivative: halves, or nothing but zeros."""
    (first, *_) = (array for array in case.inputs if array is not None)
    return case.op_type in ("LpNormalization", "Round") and not np.any(first % 0.5)


def _has_gradient(case: Case) -> bool:
    free = _free(case)
    if case.op_type in EXCLUDED or not free or _is_kinked(case):
        return False
    return bool(_outputs(case, _given(case), _call(case)))


def _call(case: Case, *, constants: bool = False) -> Call:
    node: ir.Node = case.model(constants=constants).graph[0]
    return Call(node)


CHECKED = [case for case in CASES if _has_gradient(case)]


def check(case: Case, call: Call, run: Callable[..., object] | None = None) -> bool:
    """Compares along random directions, as gradcheck does in its fast mode."""
    given, free = _given(case), _free(case)

    def computed(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        inputs = list(given)
        for place, value in zip(free, values, strict=True):
            inputs[place] = value
        if run is not None:
            return (run(call, *inputs),)
        return tuple(_outputs(case, inputs, call))

    leaves = [given[place].detach().requires_grad_() for place in free]
    return torch.autograd.gradcheck(computed, leaves, eps=1e-6, atol=1e-5, fast_mode=True)


@pytest.mark.parametrize("case", CHECKED, ids=lambda case: case.id)
def test_gradients_are_finite_differences(case: Case) -> None:
    assert check(case, _call(case))


def test_every_operator_is_checked_or_excluded_with_a_reason() -> None:
    checked = {case.op_type for case in CHECKED}
    assert checked | set(EXCLUDED) == set(OPERATORS)


@pytest.mark.parametrize("op_type", sorted(EXCLUDED))
def test_no_exclusion_is_stale(op_type: str) -> None:
    """Nothing that is excluded has an input of floats by which its floats change."""
    for one in (found for found in CASES if found.op_type == op_type):
        floats = _outputs(one, _given(one), _call(one)) if _free(one) else []
        assert not floats or op_type in ("DequantizeLinear", "QuantizeLinear", "Range")


def test_so_are_those_of_batches_that_are_normalized_in_training() -> None:
    call = _call(_TRAINING)
    call.training = True
    given = _given(_TRAINING)
    leaves = [given[place].detach().requires_grad_() for place in (0, 1, 2)]

    def computed(*values: torch.Tensor) -> torch.Tensor:
        mean, variance = given[3].clone(), given[4].clone()
        return OPERATORS["BatchNormalization"].run(call, *values, mean, variance)

    assert torch.autograd.gradcheck(computed, leaves, eps=1e-6, atol=1e-5)


def test_constant_bounds_are_numbers() -> None:
    clip = case("Clip", X, -0.5, 0.7)
    call = _call(clip, constants=True)
    assert call.number(1) == -0.5
    assert check(clip, call)


def test_bounds_that_are_computed_have_gradients_as_well() -> None:
    bounds = [torch.tensor(value, dtype=torch.float64) for value in (-0.5, 0.7)]
    leaves = [torch.tensor(X.astype(np.float64)), *bounds]
    call = _call(case("Clip", X, -0.5, 0.7), constants=True)
    run = OPERATORS["Clip"].run
    assert torch.autograd.gradcheck(
        lambda *inputs: run(call, *inputs), [leaf.requires_grad_() for leaf in leaves]
    )


def test_a_scale_that_is_broadcast_is_learned_too() -> None:
    """What torch has no function for is computed in small steps."""
    wide = case("LayerNormalization", X, normal(4), normal(3, 4), axis=1)
    assert check(wide, _call(wide))


@pytest.mark.parametrize("place", [0, 1])
def test_a_gradient_that_is_cut_is_found(place: int) -> None:
    """The check itself: of two inputs one is cut off."""
    product = case("Mul", X, normal(3, 1))

    def run(call: Call, *inputs: torch.Tensor) -> torch.Tensor:
        del call
        return inputs[1 - place] * inputs[place].detach()

    with pytest.raises(GradcheckError, match=f"with respect to input {place}"):
        check(product, _call(product), Operator(run).run)
