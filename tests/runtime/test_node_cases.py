"""The node cases of ONNX itself, for every operator that has a kernel."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from slimctl.core.errors import ModelError
from slimctl.graph._normalize import normalize
from slimctl.runtime.registry import find_kernel, registered
from slimctl.runtime.session import Runtime
from tests.runtime.excluded_cases import EXCLUDED

pytestmark = pytest.mark.xdist_group("onnx node cases")  # making them takes 20 s

_OPERATORS = sorted({k.op_type for k in registered() if k.domain in ("", "ai.onnx.ml")})


@cache
def _cases() -> dict[str, dict[str, Any]]:
    """Cases whose operators all have kernels: by the operator of the first node, by name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what the cases' own code says about numpy
        from onnx.backend.test.case.node import collect_testcases

        cases = collect_testcases(None)
    found: dict[str, dict[str, Any]] = {}
    for case in cases:
        if case.model.graph.node and _is_ours(case.model):
            found.setdefault(case.model.graph.node[0].op_type, {})[case.name] = case
    return found


def _is_ours(model: Any) -> bool:
    versions = {entry.domain: entry.version for entry in model.opset_import}
    return all(
        find_kernel(node.domain, node.op_type, versions.get(node.domain, 1)) is not None
        for node in model.graph.node
    )


@pytest.mark.parametrize("op_type", _OPERATORS)
def test_agrees_with_onnx(op_type: str) -> None:
    wrong: dict[str, str] = {}
    for name, case in _cases().get(op_type, {}).items():
        reason = _difference(case)
        if (name in EXCLUDED) != bool(reason):
            wrong[name] = reason or "it is excluded, and agrees"
    assert not wrong, "\n".join(f"{name}: {reason}" for name, reason in wrong.items())


def test_every_excluded_case_exists() -> None:
    names = {name for cases in _cases().values() for name in cases}
    assert not set(EXCLUDED) - names


def _difference(case: Any) -> str:
    """What is wrong in the first data set that is not computed right; empty if nothing is."""
    model = ir.serde.deserialize_model(case.model)
    normalize(model)
    for inputs, outputs in case.data_sets:
        names = [value.name or "" for value in model.graph.inputs]
        try:
            feeds = dict(zip(names, map(_value, inputs), strict=False))
            found = Runtime(model).run(feeds)
        except ModelError as error:
            return error.message
        for (name, value), expected in zip(found.items(), outputs, strict=True):
            reason = _unlike(value, _value(expected), rtol=case.rtol, atol=case.atol)
            if reason:
                return f"output '{name}' {reason}"
    return ""


def _value(stored: Any) -> Any:
    if isinstance(stored, list | tuple):
        return [_value(item) for item in stored]
    if hasattr(stored, "SerializeToString"):
        return ir.serde.deserialize_tensor(stored).numpy()
    return stored


def _unlike(found: Any, expected: Any, *, rtol: float, atol: float) -> str:
    if expected is None or isinstance(expected, list):
        if type(found) is not type(expected) or len(found or ()) != len(expected or ()):
            return f"is {found!r} instead of {expected!r}"
        pairs = zip(found or (), expected or (), strict=True)
        return next(filter(None, (_unlike(a, b, rtol=rtol, atol=atol) for a, b in pairs)), "")
    found, expected = np.asarray(found), np.asarray(expected)
    if found.shape != expected.shape:
        return f"has the shape {found.shape} instead of {expected.shape}"
    if expected.dtype.kind not in "OUST" and found.dtype != expected.dtype:
        return f"has the type {found.dtype} instead of {expected.dtype}"
    if expected.dtype.kind in "OUSTb":
        return "" if np.array_equal(found, expected) else "has other values"
    # the narrow floats of ml_dtypes know no tolerance
    wide = np.complex128 if expected.dtype.kind == "c" else np.float64
    same = np.allclose(found.astype(wide), expected.astype(wide), rtol, atol, equal_nan=True)
    return "" if same else "has other values"
