"""Variants that start in the middle give what running them from end to end gives."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir
import pytest

from slimctl.evaluate.probing import Errors, Probing
from slimctl.evaluate.similarity import LIMIT_DB, sqnr_db
from slimctl.graph.edit import clone_model
from slimctl.graph.session import open_session, run
from slimctl.graph.shapes import infer_shapes
from tests.sensitivity.network import LAYERS, small_network


@pytest.fixture
def model() -> ir.Model:
    found = ir.from_proto(small_network())
    infer_shapes(found)
    return found


@pytest.fixture
def feeds() -> list[dict[str, np.ndarray]]:
    random = np.random.default_rng(1)
    return [{"x": random.standard_normal((1, 3, 8, 8)).astype(np.float32)} for _ in range(12)]


def _noisy(model: ir.Model, layer: str, deviation: float = 0.01) -> ir.Model:
    """A clone with noise on the weights of a layer."""
    clone = clone_model(model)
    node = next(node for node in clone.graph if node.name == layer)
    value = node.inputs[1]
    assert value is not None
    assert value.const_value is not None
    array = value.const_value.numpy()
    noise = np.random.default_rng(2).standard_normal(array.shape).astype(np.float32)
    value.const_value = ir.tensor(array + deviation * noise, name=value.name)
    return clone


@pytest.mark.parametrize("cuts", [0, 1, 3, 12])
@pytest.mark.parametrize("layer", LAYERS)
def test_outputs_are_those_of_the_whole_variant(
    model: ir.Model, feeds: list[dict[str, np.ndarray]], layer: str, cuts: int
) -> None:
    variant = _noisy(model, layer)
    probing = Probing(model, feeds, threads=1, cuts=cuts)
    session = open_session(variant, threads=1)
    for given, found in zip(feeds, probing.outputs(variant), strict=True):
        for name, expected in run(session, given).items():
            np.testing.assert_allclose(found[name], expected, rtol=1e-5, atol=1e-6)


def test_loss_is_the_sqnr_over_all_samples(
    model: ir.Model, feeds: list[dict[str, np.ndarray]]
) -> None:
    variant = _noisy(model, "conv1")
    probing = Probing(model, feeds, threads=1)
    whole, other = (open_session(m, threads=1) for m in (model, variant))
    expected = {
        name: sqnr_db(*(np.stack([run(s, f)[name] for f in feeds]) for s in (whole, other)))
        for name in ("y", "side")
    }
    loss = probing.loss(variant)
    assert loss.samples == len(feeds)
    assert {n: level.db for n, level in loss.outputs.items()} == pytest.approx(expected, abs=1e-3)
    assert loss.worst.db == min(level.db for level in loss.outputs.values())
    assert all(level.low < level.db < level.high for level in loss.outputs.values())


def test_only_the_model_itself_is_without_loss(
    model: ir.Model, feeds: list[dict[str, np.ndarray]]
) -> None:
    assert Probing(model, feeds, threads=1).loss(clone_model(model)).worst.db > 120


def test_sampling_stops_when_the_interval_is_narrow(
    model: ir.Model, feeds: list[dict[str, np.ndarray]]
) -> None:
    probing = Probing(model, feeds, threads=1)
    variant = _noisy(model, "head")
    assert probing.loss(variant, tolerance_db=100.0).samples == 4
    assert probing.loss(variant, tolerance_db=1e-9).samples == len(feeds)


def test_interval_covers_the_truth() -> None:
    """Noise of unit power on a signal of unit power: 0 dB. The share of intervals that hold it."""
    random = np.random.default_rng(0)
    held = 0
    for _ in range(400):
        errors = Errors()
        for _ in range(10):
            signal = random.standard_normal(40)
            errors.add({"y": signal}, {"y": signal + random.standard_normal(40)})
        level = errors.loss().outputs["y"]
        held += level.low <= 0.0 <= level.high
    assert 0.90 <= held / 400 <= 0.99


@pytest.mark.parametrize(
    ("reference", "found", "db"),
    [
        ([1.0, 2.0], [1.0, 2.0], LIMIT_DB),
        ([0.0, 0.0], [0.0, 1.0], -LIMIT_DB),
        ([1.0, math.nan], [1.0, 1.0], -LIMIT_DB),
        ([1.0, math.nan], [1.0, math.nan], LIMIT_DB),
        ([1.0, math.inf], [1.0, math.inf], LIMIT_DB),
        ([10.0, 0.0], [10.0, 1.0], 20.0),
    ],
)
def test_sqnr_of_special_values(reference: list[float], found: list[float], db: float) -> None:
    errors = Errors()
    errors.add({"y": np.array(reference)}, {"y": np.array(found)})
    assert errors.loss().outputs["y"].db == pytest.approx(db)


def test_outputs_without_floats_do_not_count() -> None:
    errors = Errors()
    errors.add({"n": np.array([1, 2])}, {"n": np.array([1, 3])})
    assert errors.loss().outputs == {}
    assert errors.loss().worst.db == LIMIT_DB
