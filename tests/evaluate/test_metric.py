"""What holds for every metric."""

from __future__ import annotations

import numpy as np
import pytest

from slimctl.core.errors import OptionError
from slimctl.evaluate.metric import Measured, hit_records
from slimctl.evaluate.metrics import metric_kinds, metric_names, open_metric, options_of

NAMES = (
    *("top1", "top5", "agreement", "cosine", "ctc-cer", "ctc-exact", "f1", "map", "map50"),
    *("mean-iou", "perplexity", "si-sdr", "spearman"),
)


def test_metrics_by_name():
    assert tuple(metric_names()) == NAMES
    with pytest.raises(OptionError, match="Unknown metric 'top-1'") as caught:
        open_metric("top-1")
    assert "'top1'" in caught.value.fix and "module:function" in caught.value.fix


@pytest.mark.parametrize("name", NAMES)
def test_metrics_explain_themselves(name):
    kind = metric_kinds()[name]
    assert kind.name == name and open_metric(name).name == name
    assert kind.summary[0].isupper() and not kind.summary.endswith(".") and len(kind.summary) < 90
    assert kind.reads.endswith(".")
    assert all(kind.model_fields[option].description for option in options_of(kind))


def test_output_and_options():
    metric = open_metric("ctc-cer:probs/Softmax:0?blank=-1&layout=tnc").metric
    assert metric.model_dump() == {"output": "probs/Softmax:0", "blank": -1, "layout": "tnc"}
    assert open_metric("top1:what?").metric.output == "what?"
    assert open_metric("mean-iou?background=no").metric.model_dump()["background"] is False
    with pytest.raises(OptionError, match="'output'"):
        open_metric("f1?output=y")


def labeled(name: str) -> Measured:
    """A metric that has seen 12 samples, some right and some wrong."""
    generator = np.random.default_rng(5)
    metric = open_metric(name)
    for _ in range(3):
        outputs, labels = made(name, generator)
        metric.update({"y": outputs}, labels, 4, reference={"y": outputs[::-1]})
    return metric


def made(name: str, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Outputs and labels of four samples."""
    scores = generator.integers(0, 9, (4, 6, 7)).astype(np.float32)  # with ties
    tokens = generator.integers(1, 7, (4, 6))
    if name.startswith("map"):
        return detected(generator)
    if name.startswith("ctc"):
        spelled = np.where(generator.random((4, 6)) < 0.8, tokens, 0) * [1, 0, 1, 0, 0, 0]
        return np.eye(7, dtype=np.float32)[spelled], tokens[:, [0, 2]]
    if name == "mean-iou":
        return scores.swapaxes(1, 2)[..., None], tokens[..., None]
    if name in ("si-sdr", "cosine", "spearman"):
        return scores[:, 0] + 1, tokens.repeat(2, axis=1)[:, :7]
    return scores, tokens


def detected(generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Six detections and six objects in each of four images."""
    corners = generator.integers(0, 6, (4, 6, 2))
    boxes = np.concatenate([corners, corners + generator.integers(2, 6, (4, 6, 2))], axis=-1)
    kinds = generator.integers(0, 2, (4, 6, 1))
    rows = np.concatenate([boxes, generator.random((4, 6, 1)), kinds], axis=-1)
    return rows.astype(np.float32), np.concatenate([kinds, boxes[:, ::-1]], axis=-1)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "spearman"])
def test_weights_are_copies_of_samples(name):
    """The value with weights is that of the records, each repeated as often as its weight says."""
    metric = labeled(name)
    count = len(metric.records)
    assert count == 12
    weights = np.random.default_rng(7).multinomial(count, np.full(count, 1 / count), 5)
    found = metric.weighted()(weights.astype(np.float64))
    for row, value in zip(weights, found, strict=True):
        copies = Measured(metric.metric)
        copies.records = [r for r, n in zip(metric.records, row, strict=True) for _ in range(n)]
        assert copies.value() == pytest.approx(value, rel=1e-12)
    assert len(set(np.round(found, 9))) > 1, "the draws should differ"


@pytest.mark.parametrize("name", NAMES)
def test_without_a_sample(name):
    assert open_metric(name).value() == 0.0


def test_hits_that_do_not_divide_by_samples():
    rows = hit_records(np.array([True, False, True]), 2)
    assert [row.tolist() for row in rows] == [[2, 3]]
    assert [row.tolist() for row in hit_records(np.eye(2, dtype=bool), 2)] == [[1, 2], [1, 2]]


def test_hits_or_shares():
    metric = open_metric("top1")
    metric.update({"y": np.eye(3, dtype=np.float32)}, np.array([0, 2, 2]), 3)
    found = metric.outcomes()
    assert found is not None and found.tolist() == [True, False, True]
    sequences = open_metric("top1")
    sequences.update({"y": np.zeros((2, 3, 4), np.float32)}, np.zeros((2, 3), int), 2)
    assert sequences.outcomes() is None
    assert open_metric("top1").outcomes() is None
    assert labeled("perplexity").outcomes() is None
