"""Operators that compute in float32 even where the rest of a model is narrower."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

MOVEMENT: Final = frozenset(
    {
        "Concat",
        "DepthToSpace",
        "Expand",
        "Flatten",
        "Gather",
        "GatherElements",
        "GatherND",
        "Identity",
        "Pad",
        "Reshape",
        "Reverse",
        "ScatterElements",
        "ScatterND",
        "Slice",
        "SpaceToDepth",
        "Split",
        "Squeeze",
        "Tile",
        "Transpose",
        "Trilu",
        "Unsqueeze",
        "Where",
    }
)
"""Operators that hand values on unchanged."""

CHEAP: Final = MOVEMENT | {
    "Abs",
    "Add",
    "Cast",
    "Ceil",
    "Clip",
    "Div",
    "Elu",
    "Erf",
    "Exp",
    "Floor",
    "Gelu",
    "HardSigmoid",
    "HardSwish",
    "LeakyRelu",
    "Log",
    "Max",
    "Mean",
    "Min",
    "Mish",
    "Mod",
    "Mul",
    "Neg",
    "Pow",
    "PRelu",
    "Reciprocal",
    "Relu",
    "Round",
    "Sigmoid",
    "Sign",
    "Softplus",
    "Softsign",
    "Sqrt",
    "Sub",
    "Sum",
    "Swish",
    "Tanh",
}
"""Operators that cost about as much as a Cast."""

REDUCTIONS: Final = frozenset(
    {
        "GlobalAveragePool",
        "ReduceL1",
        "ReduceLogSumExp",
        "ReduceMean",
        "ReduceSum",
        "Softmax",
        "LogSoftmax",
    }
)
"""Operators that add up many values. A sum of 1024 terms of 64 is more than float16 holds."""

SQUARES: Final = frozenset(
    {
        "GlobalLpPool",
        "GroupNormalization",
        "InstanceNormalization",
        "LpNormalization",
        "LpPool",
        "LRN",
        "MeanVarianceNormalization",
        "ReduceL2",
        "ReduceSumSquare",
    }
)
"""Operators that add up squares: values above 255 are enough to overflow float16."""

STEEP: Final = frozenset({"Exp", "Pow", "ReduceLogSum", "ReduceProd", "Softplus"})
"""Operators whose result leaves the range of float16 for moderate inputs."""

PRECISE: Final = frozenset(
    {
        "AffineGrid",
        "Acosh",
        "Asinh",
        "BlackmanWindow",
        "Cos",
        "CumSum",
        "CumProd",
        "DFT",
        "Det",
        "HammingWindow",
        "HannWindow",
        "Log",
        "MelWeightMatrix",
        "MaxRoiPool",
        "NonMaxSuppression",
        "Range",
        "RoiAlign",
        "STFT",
        "Sin",
        "Tan",
    }
)
"""Operators that need more than eleven bits: angles, positions, running sums, spectra,
what a logarithm makes visible."""

PRECISE_ARGUMENTS: Final = {
    "Cos": (0,),
    "CumSum": (0,),
    "GridSample": (1,),
    "Log": (0,),
    "Resize": (1, 2),
    "RoiAlign": (1,),
    "Sin": (0,),
    "Tan": (0,),
    "Upsample": (1,),
}
"""Inputs that must come from float32 already: a Cast in front of the operator would be too late."""

CPU: Final = "CPUExecutionProvider"
"""The provider that every onnxruntime has."""

FLOAT32_ONLY: Final[Mapping[str, tuple[str, ...]]] = {
    # onnxruntime 1.32 casts around operators without a float16 kernel, but not where there is no
    # float input to cast; and its expansion of MeanVarianceNormalization mixes both types.
    CPU: ("EyeLike", "MeanVarianceNormalization", "RandomNormal", "RandomUniform"),
    "CUDAExecutionProvider": ("MeanVarianceNormalization",),
}
"""By execution provider: operators that it does not run in float16. Those of the target profile
are added."""


HALF_PROVIDERS: Final[Mapping[str, str]] = {
    "CUDAExecutionProvider": "https://github.com/microsoft/onnxruntime/blob/main/docs/OperatorKernels.md",
    "CoreMLExecutionProvider": "onnxruntime/tools/mobile_helpers/coreml_supported_mlprogram_ops.md",
    "DmlExecutionProvider": "https://github.com/microsoft/onnxruntime/blob/main/docs/OperatorKernels.md",
    "OpenVINOExecutionProvider": (
        "https://onnxruntime.ai/docs/execution-providers/OpenVINO-ExecutionProvider.html"
    ),
    "QNNExecutionProvider": (
        "https://onnxruntime.ai/docs/execution-providers/QNN-ExecutionProvider.html"
    ),
    "TensorrtExecutionProvider": (
        "https://docs.nvidia.com/deeplearning/tensorrt/latest/inference-library/"
        "accuracy-considerations.html"
    ),
}
"""Execution providers that compute float16 in hardware, and where that is written. Others take
float32 (NNAPI, XNNPACK), bfloat16 (Vitis AI), or cast in front of every layer (CPU)."""


def provider_block_list(provider: str) -> tuple[str, ...]:
    """Operators that a provider runs in float32 only."""
    return FLOAT32_ONLY.get(provider, ())
