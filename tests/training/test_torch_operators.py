"""Every operator in torch, against onnxruntime and against finite differences."""

# ruff: noqa: E402 # the check for torch comes before what needs it
from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

torch = pytest.importorskip("torch", reason="torch is an extra")

from slimctl.core.contract import Feeds
from slimctl.graph.session import Level, open_session, run
from slimctl.training.graph import TorchGraph
from slimctl.training.operator import Call
from slimctl.training.table import OPERATORS
from tests.training.operator_cases import CASES, OLDER, Case

_NOT_DIFFERENTIABLE = {
    *("ArgMax", "ArgMin", "Cast", "CastLike", "ConstantOfShape", "IsNaN", "Range", "Shape", "Size")
}


def _tolerance(array: np.ndarray) -> float:
    """A few single-precision roundings of the largest value."""
    return 2e-5 * max(float(np.abs(array).max(initial=0.0)), 1.0) if array.dtype.kind == "f" else 0


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_it_computes_what_onnxruntime_computes(case: Case) -> None:
    compare(case.model(), case.feeds)


@pytest.mark.parametrize("case", OLDER, ids=lambda case: case.id)
def test_so_do_forms_of_older_operator_sets(case: Case) -> None:
    compare(case.model(constants=True), {"x0": case.feeds["x0"]})


def compare(model: ir.Model, feeds: Feeds) -> None:
    wanted = run(open_session(model, level=Level.DISABLED, threads=1), feeds)
    found = TorchGraph(model).run(feeds, list(wanted))
    for name, array in wanted.items():
        ours = found[name].detach().numpy()
        assert ours.dtype == array.dtype
        assert ours.shape == array.shape
        np.testing.assert_allclose(ours, array, rtol=0, atol=_tolerance(array))


def test_every_operator_has_a_case() -> None:
    assert {case.op_type for case in CASES} == set(OPERATORS)


def _is_smooth(case: Case) -> bool:
    """Whether there are floats to differentiate by, away from the kinks of random numbers."""
    floats = [a for a in case.inputs if a is not None and a.dtype == np.float32 and a.size]
    rounded = case.op_type in ("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual")
    kinked = case.op_type in ("LpNormalization", "Round") and not np.any(floats[0] % 0.5)
    return bool(floats) and case.op_type not in _NOT_DIFFERENTIABLE and not rounded and not kinked


@pytest.mark.parametrize("case", list(filter(_is_smooth, CASES)), ids=lambda case: case.id)
def test_gradients_are_finite_differences(case: Case) -> None:
    call = Call(case.model().graph[0])
    fixed = _fixed_places(case)
    tensors = [
        None
        if array is None
        else torch.tensor(array.astype(np.float64) if array.dtype == np.float32 else array)
        for array in case.inputs
    ]
    free = [
        i
        for i, t in enumerate(tensors)
        if t is not None and t.is_floating_point() and i not in fixed
    ]

    def computed(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = list(tensors)
        for place, value in zip(free, values, strict=True):
            given[place] = value
        found = OPERATORS[case.op_type].run(call, *given)
        outputs = found if isinstance(found, tuple) else (found,)
        return tuple(output for output in outputs if output.is_floating_point())

    inputs = [tensors[place].detach().requires_grad_() for place in free]
    assert torch.autograd.gradcheck(computed, inputs, eps=1e-6, atol=1e-5, fast_mode=True)


def _fixed_places(case: Case) -> set[int]:
    """Inputs of floats that say what to do and are not computed with."""
    return {"Resize": {1, 2}, "Pad": {2}, "Dropout": {1}, "Mod": {1}}.get(case.op_type, set())
