"""Every operator in torch, against onnxruntime."""

# ruff: noqa: E402 # the check for torch comes before what needs it
from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

torch = pytest.importorskip("torch", reason="torch is an extra")

from slimctl.core.contract import Feeds
from slimctl.graph.session import Level, open_session, run
from slimctl.training import operators_quantize
from slimctl.training.graph import TorchGraph
from slimctl.training.table import OPERATORS
from tests.training.operator_cases import CASES, OLDER, Case


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
    assert {case.op_type for case in CASES} == set(OPERATORS) - set(operators_quantize.OPERATORS)
