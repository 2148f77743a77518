"""The networks that the benchmarks run on, built as ONNX from plain tensors.

EfficientNet-lite0 and MobileNetV2 carry their published weights. The third has the shape of
ResNet-50 and seeded weights: it is there for time and memory, its accuracy means nothing.

BatchNormalization nodes stay in the graph, behind convolutions without bias, as in the training
framework; every quantizer has to fold them itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import NormalDist
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

OPSET = 17
IR_VERSION = 8
IMAGE_SIZE = 224
CLASSES = 1000

Tensors = Mapping[str, NDArray[Any]]
Pads = tuple[int, int, int, int]


class _Graph:
    """Appends nodes and weights; every method returns the name of its output."""

    def __init__(self, tensors: Tensors) -> None:
        self.tensors = tensors
        self.nodes: list[onnx.NodeProto] = []
        self.weights: dict[str, NDArray[Any]] = {}

    def weight(self, name: str) -> str:
        self.weights[name] = np.asarray(self.tensors[name], np.float32)
        return name

    def node(
        self, op_type: str, inputs: list[str], name: str, *, output: str = "", **attributes: Any
    ) -> str:
        output = output or f"{name}_output"
        self.nodes.append(helper.make_node(op_type, inputs, [output], name, **attributes))
        return output

    def convolution(
        self, data: str, name: str, *, stride: int = 1, pads: Pads = (0, 0, 0, 0), group: int = 1
    ) -> str:
        weight = self.weight(f"{name}.weight")
        kernel = self.weights[weight].shape[2:]
        return self.node(
            "Conv", [data, weight], name,
            kernel_shape=kernel, strides=(stride, stride), pads=pads, group=group,
        )  # fmt: skip

    def normalization(self, data: str, name: str, *, epsilon: float) -> str:
        parts = ("weight", "bias", "running_mean", "running_var")
        weights = [self.weight(f"{name}.{part}") for part in parts]
        return self.node("BatchNormalization", [data, *weights], name, epsilon=epsilon)

    def relu6(self, data: str, name: str) -> str:
        self.weights.setdefault("zero", np.asarray(0, np.float32))
        self.weights.setdefault("six", np.asarray(6, np.float32))
        return self.node("Clip", [data, "zero", "six"], name)

    def classifier(self, data: str, name: str) -> None:
        """Pooling and the fully connected layer behind the last convolution."""
        pooled = self.node("GlobalAveragePool", [data], "pool")
        flat = self.node("Flatten", [pooled], "flatten", axis=1)
        weights = [self.weight(f"{name}.weight"), self.weight(f"{name}.bias")]
        self.node("Gemm", [flat, *weights], name, output="logits", transB=1)

    def model(self, name: str) -> onnx.ModelProto:
        """Closes the graph: input ``image`` [N, 3, 224, 224], output ``logits`` [N, 1000]."""
        image: list[int | str | None] = ["N", 3, IMAGE_SIZE, IMAGE_SIZE]
        graph = helper.make_graph(
            self.nodes,
            name,
            [helper.make_tensor_value_info("image", TensorProto.FLOAT, image)],
            [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["N", CLASSES])],
            [numpy_helper.from_array(array, key) for key, array in self.weights.items()],
        )
        opset = helper.make_opsetid("", OPSET)
        model = helper.make_model(graph, opset_imports=[opset], ir_version=IR_VERSION)
        onnx.checker.check_model(model, full_check=True)
        return model


def _same_pads(size: int, kernel: int, stride: int) -> Pads:
    """TensorFlow's SAME padding: the odd element goes to the end."""
    total = max((math.ceil(size / stride) - 1) * stride + kernel - size, 0)
    begin, end = total // 2, total - total // 2
    return (begin, begin, end, end)


# Tan and Le 2019, table 1: (repeats, kernel, stride); expansion and channels are in the weights.
LITE0_STAGES = ((1, 3, 1), (2, 3, 2), (2, 5, 2), (3, 3, 2), (3, 5, 1), (4, 5, 2), (1, 3, 1))
LITE0_EPSILON = 1e-3


def efficientnet_lite0(tensors: Tensors) -> onnx.ModelProto:
    """EfficientNet-lite0: MBConv blocks with ReLU6 and no squeeze-and-excitation."""
    graph = _Graph(tensors)

    def layer(data: str, names: tuple[str, str], *, activate: bool = True, **conv: Any) -> str:
        out = graph.convolution(data, names[0], **conv)
        out = graph.normalization(out, names[1], epsilon=LITE0_EPSILON)
        return graph.relu6(out, f"{names[0]}.relu6") if activate else out

    def block(data: str, name: str, size: int, kernel: int, stride: int) -> str:
        out = data
        if f"{name}._expand_conv.weight" in tensors:
            out = layer(out, (f"{name}._expand_conv", f"{name}._bn0"))
        channels = len(tensors[f"{name}._depthwise_conv.weight"])
        pads = _same_pads(size, kernel, stride)
        names = (f"{name}._depthwise_conv", f"{name}._bn1")
        out = layer(out, names, stride=stride, pads=pads, group=channels)
        return layer(out, (f"{name}._project_conv", f"{name}._bn2"), activate=False)

    pads = _same_pads(IMAGE_SIZE, 3, 2)
    data = layer("image", ("_conv_stem", "_bn0"), stride=2, pads=pads)
    size, index = IMAGE_SIZE // 2, 0
    for repeats, kernel, first_stride in LITE0_STAGES:
        for repeat in range(repeats):
            stride = first_stride if repeat == 0 else 1
            name = f"_blocks.{index}"
            out = block(data, name, size, kernel, stride)
            data = out if repeat == 0 else graph.node("Add", [out, data], f"{name}.add")
            size, index = math.ceil(size / stride), index + 1
    data = layer(data, ("_conv_head", "_bn1"))
    graph.classifier(data, "_fc")
    return graph.model("efficientnet_lite0")


# Sandler et al. 2018, table 2: (repeats, stride of the first).
MOBILENET_V2_STAGES = ((1, 1), (2, 2), (3, 2), (4, 2), (3, 1), (3, 2), (1, 1))
MOBILENET_V2_EPSILON = 1e-5


def mobilenet_v2(tensors: Tensors) -> onnx.ModelProto:
    """MobileNetV2 as torchvision names its tensors."""
    graph = _Graph(tensors)

    def layer(data: str, names: tuple[str, str], *, activate: bool = True, **conv: Any) -> str:
        out = graph.convolution(data, names[0], **conv)
        out = graph.normalization(out, names[1], epsilon=MOBILENET_V2_EPSILON)
        return graph.relu6(out, f"{names[0]}.relu6") if activate else out

    def block(data: str, name: str, stride: int) -> str:
        depthwise, out = 0, data
        if f"{name}.3.weight" in tensors:  # conv.0 expands, conv.1 is depthwise, conv.2 projects
            depthwise, out = 1, layer(data, (f"{name}.0.0", f"{name}.0.1"))
        channels = len(tensors[f"{name}.{depthwise}.0.weight"])
        names = (f"{name}.{depthwise}.0", f"{name}.{depthwise}.1")
        out = layer(out, names, stride=stride, pads=(1, 1, 1, 1), group=channels)
        names = (f"{name}.{depthwise + 1}", f"{name}.{depthwise + 2}")
        return layer(out, names, activate=False)

    data = layer("image", ("features.0.0", "features.0.1"), stride=2, pads=(1, 1, 1, 1))
    index = 1
    for repeats, first_stride in MOBILENET_V2_STAGES:
        for repeat in range(repeats):
            name = f"features.{index}.conv"
            out = block(data, name, first_stride if repeat == 0 else 1)
            data = out if repeat == 0 else graph.node("Add", [out, data], f"{name}.add")
            index += 1
    data = layer(data, ("features.18.0", "features.18.1"))
    graph.classifier(data, "classifier.1")
    return graph.model("mobilenet_v2")


# He et al. 2015, table 1: (blocks, inner channels); the outer channels are four times as many.
RESNET_50_STAGES = ((3, 64), (4, 128), (6, 256), (3, 512))
RESNET_50_EPSILON = 1e-5


class _SeededTensors(dict[str, NDArray[Any]]):
    """Makes the tensors of a residual network and follows the size of its activations.

    With He-initialized weights, E[y^2] = 2 E[x^2] over the outputs y of a convolution of x (He et
    al. 2015, "Delving deep into rectifiers", before the halving by ReLU). The running variances
    say so, which keeps activations sane without a forward pass to measure them.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.random = np.random.default_rng(seed)

    def convolution(self, name: str, shape: tuple[int, int, int, int]) -> None:
        deviation = np.sqrt(2 / np.prod(shape[1:]))
        self[f"{name}.weight"] = deviation * self.random.standard_normal(shape, np.float32)

    def normalization(self, name: str, channels: int, mean_square: float) -> None:
        """Statistics of a convolution whose input has this mean square, with some scatter."""
        deviation = np.sqrt(2 * mean_square)
        self[f"{name}.weight"] = self.random.uniform(0.8, 1.2, channels)
        self[f"{name}.bias"] = self.random.normal(0, 0.1, channels)
        self[f"{name}.running_mean"] = deviation * self.random.normal(0, 0.1, channels)
        self[f"{name}.running_var"] = (deviation * self.random.uniform(0.8, 1.2, channels)) ** 2


def _mean_square_after_add(shortcut: float) -> float:
    """E[relu(z + b)^2] for a standard normal z and a shortcut b >= 0 of this mean square.

    It is (1 + b^2) cdf(b) + b pdf(b), with b taken as constant.
    """
    normal, root = NormalDist(), math.sqrt(shortcut)
    return (1 + shortcut) * normal.cdf(root) + root * normal.pdf(root)


class _Resnet:
    """ResNet-50 (stride in the 3x3 convolutions) while it is being built."""

    def __init__(self, seed: int) -> None:
        self.tensors = _SeededTensors(seed)
        self.graph = _Graph(self.tensors)

    def layer(
        self, data: str, name: str, shape: tuple[int, int, int], mean_square: float, stride: int = 1
    ) -> str:
        """A convolution of (inputs, outputs, kernel) and its normalization."""
        inputs, outputs, kernel = shape
        self.tensors.convolution(name, (outputs, inputs, kernel, kernel))
        self.tensors.normalization(f"{name}.bn", outputs, mean_square)
        half = kernel // 2
        out = self.graph.convolution(data, name, stride=stride, pads=(half, half, half, half))
        return self.graph.normalization(out, f"{name}.bn", epsilon=RESNET_50_EPSILON)

    def relu(self, data: str, name: str) -> str:
        return self.graph.node("Relu", [data], f"{name}.relu")

    def stem(self) -> str:
        data = self.relu(self.layer("image", "stem", (3, 64, 7), 1, stride=2), "stem")
        return self.graph.node(
            "MaxPool", [data], "maxpool", kernel_shape=(3, 3), strides=(2, 2), pads=(1, 1, 1, 1)
        )

    def branch(
        self, data: str, name: str, channels: tuple[int, int, int], mean_square: float, stride: int
    ) -> str:
        before, inner, outer = channels
        out = self.layer(data, f"{name}.conv1", (before, inner, 1), mean_square)
        out = self.relu(out, f"{name}.conv1")
        # Behind ReLU the mean square of a normalized signal is one half.
        out = self.layer(out, f"{name}.conv2", (inner, inner, 3), 0.5, stride)
        out = self.relu(out, f"{name}.conv2")
        return self.layer(out, f"{name}.conv3", (inner, outer, 1), 0.5)

    def stage(
        self, data: str, name: str, channels: tuple[int, int, int], blocks: int, mean_square: float
    ) -> tuple[str, float]:
        """Returns the output and its mean square; the first block projects its shortcut."""
        before, inner, outer = channels
        stride = 1 if name == "layer1" else 2
        out = self.branch(data, f"{name}.0", channels, mean_square, stride)
        shortcut = self.layer(data, f"{name}.0.down", (before, outer, 1), mean_square, stride)
        for block in range(blocks):
            if block > 0:
                shortcut = data
                inside = (outer, inner, outer)
                out = self.branch(data, f"{name}.{block}", inside, mean_square, 1)
            data = self.graph.node("Add", [out, shortcut], f"{name}.{block}.add")
            data = self.relu(data, f"{name}.{block}")
            # Two normalized signals are added first: mean square 2, halved by ReLU.
            mean_square = _mean_square_after_add(mean_square) if block > 0 else 1.0
        return data, mean_square


def resnet_50_shaped(seed: int = 0) -> onnx.ModelProto:
    """A network with the layers and sizes of ResNet-50 and random weights."""
    network = _Resnet(seed)
    data, before, mean_square = network.stem(), 64, 1.0
    for index, (blocks, inner) in enumerate(RESNET_50_STAGES):
        channels = (before, inner, 4 * inner)
        data, mean_square = network.stage(data, f"layer{index + 1}", channels, blocks, mean_square)
        before = 4 * inner
    scale = 1 / np.sqrt(before * mean_square)
    tensors = network.tensors
    tensors["fc.weight"] = tensors.random.normal(0, scale, (CLASSES, before))
    tensors["fc.bias"] = np.zeros(CLASSES)
    network.graph.classifier(data, "fc")
    return network.graph.model("resnet_50_shaped")
