"""Other quantizers behind one command, for the Python that ``PEERS_PYTHON`` names.

``python -m benchmarks.peers PEER MODEL DATA OUTPUT`` quantizes; without arguments it prints which
packages are there. Each peer gets the network with its normalizations folded (some do not fold them
themselves) and settings for a server processor: 8 bits, weights per channel, activations
asymmetric where it can. Besides onnx and numpy nothing of slimctl is needed here::

    pip install nncf amd-quark nvidia-modelopt aimet-onnx onnxruntime onnxslim \\
        onnx-graphsurgeon polygraphy onnxconverter-common lief cppimport
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.onnxruntime_quantize import samples

PACKAGES = ("nncf", "amd-quark", "nvidia-modelopt", "aimet-onnx", "onnxruntime", "onnx")


def nncf(model: Path, data: Path, output: Path) -> None:
    """NNCF's default for convolutional networks with the mixed preset, bias correction included."""
    import nncf  # type: ignore[import-not-found]  # only there
    import onnx

    feeds = list(samples(data))
    quantized = nncf.quantize(
        onnx.load(model),
        nncf.Dataset(feeds),
        preset=nncf.QuantizationPreset.MIXED,
        target_device=nncf.TargetDevice.CPU,
        subset_size=len(feeds),
    )
    onnx.save(quantized, output)


def quark_percentile(model: Path, data: Path, output: Path) -> None:
    """AMD Quark with percentile calibration."""
    _quark(model, data, output, rounding_trained=False)


def quark_adaround(model: Path, data: Path, output: Path) -> None:
    """The same with AdaRound: minutes where the others take seconds."""
    _quark(model, data, output, rounding_trained=True)


def _quark(model: Path, data: Path, output: Path, *, rounding_trained: bool) -> None:
    from quark import onnx as quark  # type: ignore[import-not-found]  # only there

    class Reader:
        def __init__(self) -> None:
            self.reset_iter()

        def reset_iter(self) -> None:
            self.samples = samples(data)

        def get_next(self) -> dict[str, NDArray[Any]] | None:
            return next(self.samples, None)

    per_channel = quark.quantization.config.spec.QuantGranularity.Channel
    layers = quark.QLayerConfig(
        activation=quark.UInt8Spec(), weight=quark.Int8Spec(quant_granularity=per_channel)
    )
    algorithms = [quark.AdaRoundConfig()] if rounding_trained else []
    quantizer = quark.ModelQuantizer(quark.QConfig(layers, algo_config=algorithms))
    quantizer.quantize_model(str(model), str(output), Reader())


def modelopt(model: Path, data: Path, output: Path) -> None:
    """NVIDIA ModelOpt with its default calibration, entropy."""
    from modelopt.onnx.quantization import quantize  # type: ignore[import-not-found]  # only there

    images = np.concatenate([feeds["image"] for feeds in samples(data)])
    quantize(
        str(model),
        quantize_mode="int8",
        calibration_data={"image": images},
        calibration_eps=["cpu"],
        output_path=str(output),
        high_precision_dtype="fp32",
        use_zero_point=True,
    )


def aimet(model: Path, data: Path, output: Path) -> None:
    """Qualcomm AIMET with its default calibration; it writes 8-bit activations as uint8."""
    import aimet_onnx  # type: ignore[import-not-found]  # only there
    import onnx

    simulation = aimet_onnx.QuantizationSimModel(onnx.load(model))
    simulation.compute_encodings(samples(data))
    quantized = simulation.to_onnx_qdq(export_int32_bias=True, prequantize_constants=True)
    onnx.save(quantized, output)


Quantizer = Callable[[Path, Path, Path], None]
PEERS: dict[str, tuple[str, Quantizer]] = {
    "nncf": ("nncf", nncf),
    "quark percentile": ("amd-quark", quark_percentile),
    "quark adaround": ("amd-quark", quark_adaround),
    "modelopt": ("nvidia-modelopt", modelopt),
    "aimet": ("aimet-onnx", aimet),
}


def installed() -> dict[str, str]:
    """Versions of the packages that are here."""
    distributions = {name: _version(name) for name in PACKAGES}
    return {name: version for name, version in distributions.items() if version}


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def main(arguments: list[str]) -> None:
    if not arguments:
        print(json.dumps(installed()))
        return
    peer, *files = arguments
    model, data, output = map(Path, files)
    PEERS[peer][1](model, data, output)


if __name__ == "__main__":
    main(sys.argv[1:])
