"""Runs ONNX graphs in torch, for what needs gradients. The only place that imports torch.

Importing this package does not import torch; its modules do. Whoever uses them calls
:func:`require_torch` first.
"""

from __future__ import annotations

from importlib.util import find_spec

from slimctl.core.errors import MissingExtraError


def require_torch(purpose: str) -> None:
    """Makes sure that the modules of this package can be imported.

    Args:
        purpose: What needs torch, as the beginning of a sentence.

    Raises:
        MissingExtraError: torch is not installed.
    """
    if find_spec("torch") is None:
        raise MissingExtraError("torch", purpose)
