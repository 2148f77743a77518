"""onnxruntime's exceptions in our words: what it says, the node it means, what to do."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import onnx_ir as ir

from slimctl.core.errors import ModelExecutionError
from slimctl.graph.edit import all_nodes


@contextmanager
def translated(
    failures: tuple[type[Exception], ...],
    what: str,
    *,
    where: str = "",
    model: ir.Model | None = None,
) -> Iterator[None]:
    """Turns exceptions of onnxruntime inside the block into ours.

    Args:
        failures: Which exceptions.
        what: What onnxruntime was to do, as in "cannot load the model".
        where: The place, for when onnxruntime names no node.
        model: Helps to find the node when onnxruntime names its operator only.

    Raises:
        ModelExecutionError: With onnxruntime's text.
    """
    try:
        yield
    except failures as error:
        text = _readable(str(error))
        node = _node_in(text) or _node_of_operator(text, model)
        raise ModelExecutionError(
            f"onnxruntime {what}: {text}",
            where=f"node '{node}'" if node else where,
            fix=_remedy(text),
        ) from error


_NOISE = re.compile(
    r"^\[ONNXRuntimeError\] : \d+ : [A-Z_]+ : "  # code, which our class says already
    r"|/onnxruntime_src/\S+ "  # source file of onnxruntime
    r"|\b[\w:<>*&]+ onnxruntime::[^)]*\) "  # its C++ function
    r"|\b\w+\.(?:cc|h):\d+ \w+ "
)
_NODE = re.compile(
    r"""running\ \S+\ node\.\ Name:'(?P<running>[^']+)'
    | In\ Node,\ \("(?P<checked>[^"]+)"
    | node\ with\ name\ '(?P<lacking>[^']+)'
    | [Nn]ode\ ?\((?P<typed>[^)]+)\)""",
    re.VERBOSE,
)
_OPERATOR = re.compile(r"Fatal error: (?P<domain>[^:]*):(?P<op_type>\w+)\(")


def _readable(text: str) -> str:
    return " ".join(_NOISE.sub("", text).split())


def _node_in(text: str) -> str:
    found = _NODE.search(text)
    return next(filter(None, found.groups()), "") if found else ""


def _node_of_operator(text: str, model: ir.Model | None) -> str:
    found = _OPERATOR.search(text)
    if found is None or model is None:
        return ""
    domain = "" if found["domain"] == "ai.onnx" else found["domain"]
    same = (n for n in all_nodes(model) if (n.domain, n.op_type) == (domain, found["op_type"]))
    return next((node.name or "" for node in same), "")


_REMEDIES = (
    (
        "missing from input feed|Invalid input name|Invalid rank for input|input data type"
        "|invalid dimensions for input|^Input must be",
        "give inputs with the names, shapes and types that 'slimctl inspect' lists",
    ),
    (
        "not a registered function|No Op registered|Could not find an implementation",
        "onnxruntime cannot run this operator: export the model without it",
    ),
    (
        "Opset|IR version",
        "export the model for an older operator set, or update onnxruntime",
    ),
    ("doesn't exist|Protobuf parsing failed", "give an .onnx file"),
    (
        "invalid model|ShapeInferenceError|Type Error",
        "export the model again; this one contradicts itself",
    ),
)


def _remedy(text: str) -> str:
    fitting = (fix for pattern, fix in _REMEDIES if re.search(pattern, text))
    return next(fitting, "check that the original model runs in onnxruntime on the same inputs")
