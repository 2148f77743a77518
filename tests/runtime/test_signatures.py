"""Every kernel has the signature of its operator's schema, in every version that it serves."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import onnx
import pytest

from slimctl.runtime.registry import ENGINE, OUTPUTS, Kernel, registered

OLDEST = 9
_Option = onnx.defs.OpSchema.FormalParameterOption
_KERNELS = [kernel for kernel in registered() if kernel.domain in ("", "ai.onnx.ml")]


def _versions(kernel: Kernel) -> list[int]:
    """Versions of the schema that the kernel serves, from the oldest operator set that we take."""
    schemas = [s for s in onnx.defs.get_all_schemas_with_history() if s.domain == kernel.domain]
    found = sorted({s.since_version for s in schemas if s.name == kernel.op_type})
    assert found, f"there is no operator {kernel.op_type}"
    others = [k.since for k in _KERNELS if (k.domain, k.op_type) == (kernel.domain, kernel.op_type)]
    until = min((since for since in others if since > kernel.since), default=10**6)
    served = [version for version in found if kernel.since <= version < until]
    before = [version for version in found if version < kernel.since]
    if kernel.since not in served:  # an old schema that is in force at this version
        served = before[-1:] + served
    return [v for v in served if v >= OLDEST or v == max(w for w in found if w <= OLDEST)]


def _parameters(kernel: Kernel, kind: Any) -> list[inspect.Parameter]:
    found = inspect.signature(kernel.run).parameters.values()
    return [p for p in found if p.kind == kind and p.name not in (OUTPUTS, ENGINE)]


def _plain(attribute: Any) -> Any:
    if attribute.required:
        return inspect.Parameter.empty
    if not attribute.default_value.name:
        return None
    value = onnx.helper.get_attribute_value(attribute.default_value)
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, list):
        return tuple(v.decode() if isinstance(v, bytes) else v for v in value)
    return np.float32(value) if isinstance(value, float) else value


def _id(kernel: Kernel) -> str:
    return f"{kernel.op_type}-{kernel.since}"


@pytest.mark.parametrize("kernel", _KERNELS, ids=_id)
def test_has_the_inputs_of_its_schema(kernel: Kernel) -> None:
    served = _versions(kernel)
    assert served, "no operator set from 9 on has this operator in this version"
    schema = onnx.defs.get_schema(kernel.op_type, served[-1], kernel.domain)
    positional = _parameters(kernel, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    variadic = _parameters(kernel, inspect.Parameter.VAR_POSITIONAL)
    plain = [i for i in schema.inputs if i.option != _Option.Variadic]
    assert [p.name for p in positional] == [i.name.lower() for i in plain]
    assert bool(variadic) == (len(plain) < len(schema.inputs))
    for parameter, expected in zip(positional, plain, strict=True):
        optional = expected.option == _Option.Optional or _was_optional(kernel, served, expected)
        found = parameter.default
        assert found is (None if optional else inspect.Parameter.empty), parameter.name


def _was_optional(kernel: Kernel, served: list[int], wanted: Any) -> bool:
    """An older version that the function serves lacks the input, or lets it be left out."""
    for version in served:
        schema = onnx.defs.get_schema(kernel.op_type, version, kernel.domain)
        found = [i for i in schema.inputs if i.name.lower() == wanted.name.lower()]
        if not found or found[0].option == _Option.Optional:
            return True
    return False


@pytest.mark.parametrize("kernel", _KERNELS, ids=_id)
def test_has_the_attributes_of_its_schema(kernel: Kernel) -> None:
    found = {p.name: p.default for p in _parameters(kernel, inspect.Parameter.KEYWORD_ONLY)}
    expected: dict[str, Any] = {}
    for version in _versions(kernel):
        schema = onnx.defs.get_schema(kernel.op_type, version, kernel.domain)
        expected |= {name.lower(): _plain(a) for name, a in schema.attributes.items()}
    assert set(found) == set(expected)
    for name, default in expected.items():
        if isinstance(default, np.floating):
            assert np.float32(found[name]) == default, name
        else:
            assert found[name] == default, name
