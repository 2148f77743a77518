"""Networks and data on disk, built once per run and only when a benchmark asks for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from benchmarks import images, networks
from benchmarks.assets import fetch_one
from benchmarks.pth import load_tensors

CALIBRATION_IMAGES = 64
EVALUATION_IMAGES = 128


@dataclass(frozen=True)
class Network:
    """One network: its name in tables, how it is built and what it eats."""

    title: str
    build: Callable[[], onnx.ModelProto]
    preprocessing: images.Preprocessing


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
        """``image`` [count, 3, 224, 224] as npz, from the pictures for calibration."""
        how = NETWORKS[name].preprocessing
        path = self.folder / f"calibration-{how}-{count}.npz"
        return self._images(path, images.calibration_sources, count, how)

    def evaluation(self, name: str) -> Path:
        """``image`` [128, 3, 224, 224] as npz, from pictures that calibration does not see."""
        how = NETWORKS[name].preprocessing
        path = self.folder / f"evaluation-{how}.npz"
        return self._images(path, images.evaluation_sources, EVALUATION_IMAGES, how)

    def _images(
        self,
        path: Path,
        sources: Callable[[], images.Sources],
        count: int,
        how: images.Preprocessing,
    ) -> Path:
        if not path.exists():
            pictures = images.pictures(sources(), count)
            np.savez(path, image=np.stack([images.preprocess(one, how) for one in pictures]))
        return path

    def top1(self, name: str) -> str:
        """How many of the labeled photographs the float network knows: are its weights right?"""
        how = NETWORKS[name].preprocessing
        pictures, labels = zip(*images.labeled(), strict=True)
        batch = np.stack([images.preprocess(picture, how) for picture in pictures])
        (logits,) = open_session(self.model(name)).run(None, {"image": batch})
        return f"{np.sum(logits.argmax(axis=1) == labels)} of {len(labels)}"

    def logits(self, model: Path, name: str) -> NDArray[np.float32]:
        """What a model makes of the evaluation pictures of a network, [128, 1000]."""
        if model not in self._logits:
            session = open_session(model)
            with np.load(self.evaluation(name)) as data:
                batches = np.split(data["image"], EVALUATION_IMAGES // 8)
            (feed,) = session.get_inputs()
            outputs = [session.run(None, {feed.name: batch})[0] for batch in batches]
            self._logits[model] = np.concatenate(outputs)
        return self._logits[model]


def open_session(model: Path, threads: int = 0) -> Any:
    """An onnxruntime session on the processor, at its default optimization level."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
