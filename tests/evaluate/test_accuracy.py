from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

from slimctl.core.errors import OptionError, SourceError
from slimctl.data.sources import open_source
from slimctl.evaluate.accuracy import accuracy
from slimctl.evaluate.compare import outputs_of
from slimctl.graph.edit import interface
from slimctl.graph.load import load_model
from slimctl.graph.save import save_model


@pytest.fixture
def model(chain):
    return chain()


@pytest.fixture
def source(tmp_path, model):
    """Thirty samples; the labels are right for two thirds of them."""
    x = np.random.default_rng(3).normal(size=(30, 8)).astype(np.float32)
    best = outputs_of(model, {"x": x})["y"].argmax(axis=1)
    labels = np.where(np.arange(30) % 3 == 0, (best + 1) % 8, best)
    np.savez(tmp_path / "val.npz", x=x, labels=labels)
    return open_source(str(tmp_path / "val.npz"), interface=interface(model), batch_size=7)


def test_top1(model, source, tmp_path):
    score = accuracy(model, source, "top1", threads=1)
    assert (score.metric, score.samples, score.higher_is_better) == ("top1", 30, True)
    assert score.value == pytest.approx(20 / 30)
    path = tmp_path / "m.onnx"
    save_model(model, path)
    assert accuracy(path, source, "top1", threads=1) == score


def test_top5_is_at_least_top1(model, source):
    assert accuracy(model, source, "top5", threads=1).value >= 20 / 30


def test_agreement(model, source, chain):
    assert accuracy(model, source, "agreement", reference=model, threads=1).value == 1.0
    other = chain(noisy=1)
    x = np.concatenate([batch.feeds["x"] for batch in source.batches()])
    same = outputs_of(other, {"x": x})["y"].argmax(1) == outputs_of(model, {"x": x})["y"].argmax(1)
    assert 0 < same.mean() < 1
    score = accuracy(other, source, "agreement", reference=model, threads=1)
    assert score.value == pytest.approx(same.mean())


def test_agreement_without_a_reference(model, source):
    with pytest.raises(OptionError, match="needs a model to agree with") as caught:
        accuracy(model, source, "agreement")
    assert "--against" in caught.value.fix


def test_data_without_labels(model, tmp_path):
    np.savez(tmp_path / "x.npz", x=np.ones((3, 8), np.float32))
    source = open_source(str(tmp_path / "x.npz"), interface=interface(model))
    with pytest.raises(SourceError, match="top1 needs labels") as caught:
        accuracy(model, source, "top1")
    assert "'labels'" in caught.value.fix


def passed_on(folder: Path, *sizes: int) -> Path:
    """A model that gives its input [N, ...] on as its output."""
    shape = ["N", *sizes]
    ports = [helper.make_tensor_value_info(name, 1, shape) for name in "xy"]
    node = helper.make_node("Identity", ["x"], ["y"])
    graph = helper.make_graph([node], "identity", ports[:1], ports[1:])
    version = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=version, ir_version=9), folder / "m.onnx")
    return folder / "m.onnx"


BOXES = np.array([[2, 0, 0, 10, 10], [1, 5, 5, 9, 30]])
SYMBOLS = np.eye(4)[[[1, 0, 2], [3, 3, 0]]]


@pytest.mark.parametrize(
    ("metric", "outputs", "labels", "expected"),
    [
        ("f1", np.eye(3), np.arange(3), 1),
        ("mean-iou", np.eye(3)[[[[0, 1]], [[2, 2]]]].swapaxes(1, 3), [[[0], [1]], [[2], [255]]], 1),
        ("ctc-exact", SYMBOLS, [[1, 2], [3, -1]], 1),
        ("ctc-cer", SYMBOLS, [[1, 2], [3, 1]], 1 / 4),
        (
            "map",
            np.concatenate([BOXES[:, 1:], [[1], [1]], BOXES[:, :1]], 1)[:, None],
            BOXES[:, None],
            1,
        ),
        ("perplexity", np.zeros((2, 3, 7)), [[1, 2, -100], [6, 5, 4]], 7),
        ("si-sdr", [[2.0, 1.0], [2.0, -1.0]], [[1.0, 0.0], [1.0, 0.0]], 10 * np.log10(4)),
    ],
)
def test_labels_of_any_shape(metric, outputs, labels, expected, tmp_path):
    """From a file through onnxruntime to the value."""
    outputs = np.asarray(outputs, np.float32)
    np.savez(tmp_path / "val.npz", x=outputs, labels=np.asarray(labels))
    path = passed_on(tmp_path, *outputs.shape[1:])
    source = open_source(str(tmp_path / "val.npz"), interface=interface(load_model(path)))
    score = accuracy(path, source, metric, threads=1)
    assert score.value == pytest.approx(expected)
    assert score.measured is not None and len(score.measured.records) == len(outputs)
