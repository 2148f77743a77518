"""Sessions of onnxruntime that show what a model is worth, whatever the processor.

x86 processors without VNNI saturate sums of uint8 x int8 products. There the weights are written as
uint8, which changes nothing else; everywhere else this is a plain session.
"""

from __future__ import annotations

from pathlib import Path

import onnxruntime as ort

from slimctl.core.cpu import products_saturate
from slimctl.graph.exact_products import has_int8_activations, with_exact_products
from slimctl.graph.load import load_model
from slimctl.graph.save import serialize


def exact_session(path: Path, options: ort.SessionOptions | None = None) -> ort.InferenceSession:
    """Opens a model with exact integer products."""
    options = options or ort.SessionOptions()
    given: str | bytes = str(path)
    if products_saturate():
        model = load_model(Path(path))
        if has_int8_activations(model):
            options.add_session_config_entry("session.qdqisint8allowed", "1")
        exact = with_exact_products(model)
        given = given if exact is None else serialize(exact)
    return ort.InferenceSession(given, options, providers=["CPUExecutionProvider"])
