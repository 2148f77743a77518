"""Which function computes which operator, from which version of its operator set on.

A kernel is a plain function. Its positional parameters are the inputs of the ONNX schema, in their
order and under their names in lower case; those that may be left out default to None, a variadic
input is ``*args``. Its keyword-only parameters are the attributes, with the defaults of the schema.
It returns an array, or a tuple of arrays for several outputs (None for one that it does not make)::

    @operator("LeakyRelu", since=6)
    def leaky_relu(x: Array, *, alpha: float = 0.01) -> Array:
        return np.where(x < 0, x * x.dtype.type(alpha), x)

A function serves every version of its operator from ``since`` on, until another function of the
same operator has a later one. A test compares all signatures with the schemas.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from numpy.typing import NDArray

from slimctl.runtime.kernels import load_all

Array: TypeAlias = NDArray[Any]
Value: TypeAlias = Any
"""An array, a list (a sequence) or None (an empty optional)."""

Function: TypeAlias = Callable[..., Any]
_F = TypeVar("_F", bound=Function)

MICROSOFT = "com.microsoft"
"""The domain of onnxruntime's own operators."""

OWN = "slimctl"
"""The domain of integer operators that neither ONNX nor onnxruntime have."""

OUTPUTS = "outputs"
"""Keyword-only parameter of functions that must know how many outputs the node has."""

ENGINE = "engine"
"""Keyword-only parameter of functions that compute with integers: an ``Engine``."""


@dataclass(frozen=True)
class Kernel:
    """A function that computes an operator.

    Attributes:
        domain: Of the operator; empty for ONNX's own.
        op_type: Its name.
        since: First version of the operator set that the function implements.
        run: The function.
        extras: Which of :data:`OUTPUTS` and :data:`ENGINE` it asks for.
    """

    domain: str
    op_type: str
    since: int
    run: Function
    extras: frozenset[str]


_KERNELS: dict[tuple[str, str], dict[int, Kernel]] = {}


def operator(op_type: str, *, since: int, domain: str = "") -> Callable[[_F], _F]:
    """Registers a function as a kernel."""

    def register(function: _F) -> _F:
        versions = _KERNELS.setdefault((domain, op_type), {})
        assert since not in versions, f"{op_type} {since} has a function already"
        extras = frozenset({OUTPUTS, ENGINE} & set(inspect.signature(function).parameters))
        versions[since] = Kernel(domain, op_type, since, function, extras)
        return function

    return register


def find_kernel(domain: str, op_type: str, version: int) -> Kernel | None:
    """The kernel of an operator in a version of its operator set, None if there is none."""
    load_all()
    versions = _KERNELS.get((domain, op_type), {})
    known = [since for since in versions if since <= version]
    return versions[max(known)] if known else None


def registered() -> list[Kernel]:
    """All kernels, by domain, operator and version."""
    load_all()
    found = [kernel for versions in _KERNELS.values() for kernel in versions.values()]
    return sorted(found, key=lambda kernel: (kernel.domain, kernel.op_type, kernel.since))
