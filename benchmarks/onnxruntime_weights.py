"""Weights of 4 bits by onnxruntime's own tool, as one command.

``python -m benchmarks.onnxruntime_weights ALGORITHM BLOCK MODEL OUTPUT`` with ALGORITHM rtn, hqq or
k_quant; zero points in every block. Products whose weight is an initializer are quantized, nothing
else; hqq needs torch.
"""

from __future__ import annotations

import sys
from pathlib import Path

BITS = 4


def quantize(algorithm: str, block: int, model: Path, output: Path) -> None:
    """Writes the model with MatMulNBits."""
    import onnx
    from onnxruntime.quantization import matmul_nbits_quantizer as tool

    settings = {
        "rtn": tool.RTNWeightOnlyQuantConfig,
        "hqq": lambda: tool.HQQWeightOnlyQuantConfig(block_size=block, bits=BITS),
        "k_quant": tool.KQuantWeightOnlyQuantConfig,
    }
    quantizer = tool.MatMulNBitsQuantizer(
        onnx.load(model), bits=BITS, block_size=block, algo_config=settings[algorithm]()
    )
    quantizer.process()
    # rtn and k_quant leave the bare model, the others a wrapper around it
    made = getattr(quantizer.model, "model", quantizer.model)
    onnx.save(made, output)


if __name__ == "__main__":
    quantize(sys.argv[1], int(sys.argv[2]), *map(Path, sys.argv[3:5]))
