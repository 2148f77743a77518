from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from slimctl.graph.edit import Interface, Port
from slimctl.pipeline.probe import Probes, cut_samples, random_candidates, random_like

FLOAT, INT64 = ir.DataType.FLOAT, ir.DataType.INT64
IMAGES = Interface((Port("x", FLOAT, ("N", 3, "H", "W")),), ())


def test_images_get_a_size_that_is_divided_by_32() -> None:
    feeds = next(random_candidates(IMAGES, 0))
    assert feeds["x"].shape == (1, 3, 32, 32)
    assert feeds["x"].dtype == np.float32
    assert feeds["x"].min() < -1 < 1 < feeds["x"].max()


def test_recurrent_states_get_a_batch_of_one_in_the_end() -> None:
    state = Port("state", FLOAT, (2, None, 128))
    speech = Interface((Port("x", FLOAT, (None, None)), state, Port("sr", INT64, ())), ())
    shapes = [{k: v.shape for k, v in feeds.items()} for feeds in random_candidates(speech, 0)]
    assert {"x": (1, 512), "state": (2, 1, 128), "sr": ()} in shapes
    assert all(feeds["sr"] in (0, 1) for feeds in random_candidates(speech, 0))


@pytest.mark.parametrize("port", [Port("x", None, (1,)), Port("x", FLOAT, None)])
def test_what_is_no_tensor_has_no_random_input(port: Port) -> None:
    assert list(random_candidates(Interface((port,), ()), 0)) == []


def test_random_inputs_take_after_a_sample() -> None:
    sample = {
        "x": np.random.default_rng(0).normal(5.0, 2.0, (1, 3, 50, 50)).astype(np.float16),
        "ids": np.array([[7, 9]]),
        "empty": np.zeros((0, 3), np.float32),
        "constant": np.full((4, 4), 3.0, np.float32),
    }
    made = random_like(sample, 0)
    assert made["x"].dtype == np.float16
    assert made["x"].mean() == pytest.approx(5.0, abs=0.2)
    assert made["x"].std() == pytest.approx(2.0, abs=0.2)
    np.testing.assert_array_equal(made["ids"], sample["ids"])
    assert made["empty"].shape == (0, 3)
    assert made["constant"].std() > 0.5


def test_a_batch_is_cut_into_single_samples() -> None:
    batch = {"x": np.arange(6 * 3 * 4).reshape(6, 3, 2, 2).astype(np.float32)}
    parts = cut_samples(batch, IMAGES, 6)
    assert [part["x"].shape for part in parts] == [(1, 3, 2, 2)] * 6
    np.testing.assert_array_equal(np.concatenate([part["x"] for part in parts]), batch["x"])


def test_a_batch_that_cannot_be_cut_stays_whole() -> None:
    fixed = Interface((Port("x", FLOAT, (6, 3, 2, 2)),), ())
    batch = {"x": np.zeros((6, 3, 2, 2), np.float32)}
    assert cut_samples(batch, fixed, 6) == (batch,)
    scalar = Interface((Port("x", FLOAT, ("N", 2)), Port("sr", INT64, ())), ())
    mixed = {"x": np.zeros((6, 2), np.float32), "sr": np.array(1)}
    assert cut_samples(mixed, scalar, 6) == (mixed,)


def test_random_inputs_are_for_exact_claims_and_for_want_of_samples() -> None:
    sample, noise = {"x": np.zeros(1)}, {"x": np.ones(1)}
    assert Probes((sample,), noise).chosen(exact=True) == (sample, noise)
    assert Probes((sample,), noise).chosen(exact=False) == (sample,)
    assert Probes((), noise).chosen(exact=False) == (noise,)
    assert Probes().chosen(exact=True) == ()
