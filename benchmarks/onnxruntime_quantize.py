"""Static quantization by onnxruntime's own tool, as one command.

``python -m benchmarks.onnxruntime_quantize METHOD MODEL DATA OUTPUT`` with the settings that its
documentation recommends for x86: preparation, Q/DQ, uint8 activations, int8 weights per channel.
METHOD is MinMax, Entropy or Percentile[:PERCENT], or ``inference`` to run the data through the
model and nothing else: the floor of every calibration.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_OPSET = 13
"""The first that quantizers can write weights per channel in."""


def prepare(model: Path, output: Path) -> None:
    """Shape inference and onnxruntime's basic graph optimizations, from opset 13 on.

    Constants become initializers by it, which most quantizers want. Symbolic inference is left out:
    it gives up on pages of any size, and ONNX's own inference does for these networks.
    """
    import onnx
    from onnx import version_converter
    from onnxruntime.quantization.shape_inference import quant_pre_process

    with tempfile.TemporaryDirectory() as folder:
        source = model
        proto = onnx.load(model)
        opsets = {opset.domain: opset.version for opset in proto.opset_import}
        if opsets[""] < _OPSET:
            source = Path(folder) / "converted.onnx"
            onnx.save(version_converter.convert_version(proto, _OPSET), source)
        quant_pre_process(source, output, skip_symbolic_shape=True)


def samples(data: Path) -> Iterator[dict[str, NDArray[Any]]]:
    """Yields the feeds of one sample each."""
    with np.load(data) as archive:
        arrays = dict(archive)
    for index in range(len(next(iter(arrays.values())))):
        yield {name: array[index : index + 1] for name, array in arrays.items()}


def quantize(method: str, model: Path, data: Path, output: Path) -> None:
    """Writes the quantized model."""
    from onnxruntime import quantization

    class Reader(quantization.CalibrationDataReader):  # type: ignore[misc]  # untyped base
        def __init__(self) -> None:
            self.samples = samples(data)

        def get_next(self) -> dict[str, NDArray[Any]] | None:
            return next(self.samples, None)

    name, _, percent = method.partition(":")
    with tempfile.TemporaryDirectory() as folder:
        prepared = Path(folder) / "prepared.onnx"
        prepare(model, prepared)
        quantization.quantize_static(
            prepared,
            output,
            Reader(),
            quant_format=quantization.QuantFormat.QDQ,
            per_channel=True,
            activation_type=quantization.QuantType.QUInt8,
            weight_type=quantization.QuantType.QInt8,
            calibrate_method=quantization.CalibrationMethod[name],
            extra_options={"CalibPercentile": float(percent)} if percent else {},
        )


def quantize_dynamic(model: Path, output: Path) -> None:
    """Writes a model with integer weights per channel, activations quantized at run time."""
    from onnxruntime import quantization

    quantization.quantize_dynamic(
        model, output, per_channel=True, weight_type=quantization.QuantType.QInt8
    )


def infer(model: Path, data: Path) -> None:
    """Runs every picture and keeps nothing."""
    from benchmarks.workload import open_session

    session = open_session(model)
    for feeds in samples(data):
        session.run(None, feeds)


def main(method: str, model: Path, data: Path, output: Path) -> None:
    if method == "inference":
        infer(model, data)
    elif method == "dynamic":
        quantize_dynamic(model, output)
    else:
        quantize(method, model, data, output)


if __name__ == "__main__":
    main(sys.argv[1], *map(Path, sys.argv[2:5]))
