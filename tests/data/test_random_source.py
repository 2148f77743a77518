from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from slimctl.core.errors import OptionError, SampleError, SourceError, UnsupportedModelError
from slimctl.data.random_data import random_feeds
from slimctl.data.sources import open_source

FLOAT, INT64 = ir.DataType.FLOAT, ir.DataType.INT64


def test_follows_types_and_shapes(interface):
    model = interface(
        ("image", FLOAT, ("N", 3, 8, 8)),
        ("half", ir.DataType.FLOAT16, (None, 5)),
        ("ids", INT64, ("N", 7)),
        ("flag", ir.DataType.BOOL, ()),
        ("pixels", ir.DataType.UINT8, ("N", 2)),
    )
    source = open_source("random", interface=model)
    batch = next(source.batches())
    shapes = {name: (array.shape, array.dtype.name) for name, array in batch.feeds.items()}
    assert shapes == {
        "image": ((1, 3, 8, 8), "float32"),
        "half": ((1, 5), "float16"),
        "ids": ((1, 7), "int64"),
        "flag": ((), "bool"),
        "pixels": ((1, 2), "uint8"),
    }
    assert set(np.unique(batch.feeds["ids"])) <= {0, 1}


def test_is_called_uncalibrated(interface, npz):
    model = interface(("x", FLOAT, ("N", 4)))
    source = open_source("random", interface=model)
    assert source.uncalibrated and source.describe()["uncalibrated"]
    real = open_source(npz(x=np.ones((2, 4), np.float32)), interface=model)
    assert not real.uncalibrated


def test_same_seed_same_values(interface):
    model = interface(("x", FLOAT, ("N", 4)))
    hashes = [
        open_source("random", interface=model, seed=seed).content_hash() for seed in (1, 1, 2)
    ]
    assert hashes[0] == hashes[1] != hashes[2]
    batches = [batch.feeds["x"] for batch in open_source("random", interface=model).batches()]
    assert not np.array_equal(batches[0], batches[1])


def test_number_of_samples(interface):
    model = interface(("x", FLOAT, ("N", 4)))
    assert open_source("random", interface=model).describe()["samples"] == 8
    source = open_source("random", interface=model, samples=11, batch_size=4)
    assert [batch.size for batch in source.batches()] == [4, 4, 3]
    fixed = interface(("x", FLOAT, (4, 4)))
    assert [b.size for b in open_source("random", interface=fixed, samples=8).batches()] == [4, 4]


def test_sizes_are_given_by_name(interface):
    model = interface(("x", FLOAT, ("N", 3, "H", "W")), ("mask", FLOAT, ("N", "H", "W")))
    source = open_source("random:x=2x3x48x320", interface=model)
    feeds = next(source.batches()).feeds
    assert feeds["x"].shape == (2, 3, 48, 320)
    assert feeds["mask"].shape == (2, 48, 320)  # the symbols are the same


def test_open_sizes_must_be_given(interface):
    model = interface(("x", FLOAT, ("N", 3, "H", "W")))
    with pytest.raises(SourceError, match=r"\[N,3,H,W\]") as caught:
        open_source("random", interface=model)
    assert "random:x=1x3x1x1" in caught.value.fix
    with pytest.raises(SourceError, match="of any shape"):
        open_source("random", interface=interface(("x", FLOAT, None)))


def test_sizes_that_contradict_the_model(interface):
    model = interface(("x", FLOAT, ("N", 3, "H", "W")))
    with pytest.raises(SampleError, match=r"found shape \[1,4,8,8\]"):
        open_source("random:x=1x4x8x8", interface=model)
    with pytest.raises(SourceError, match="no input 'y'"):
        open_source("random:y=1x3x8x8", interface=model)
    with pytest.raises(SourceError, match="'3' is no size"):
        open_source("random:x=1,3", interface=model)
    with pytest.raises(OptionError, match="fixed to 2"):
        open_source("random", interface=interface(("x", FLOAT, (2, 4))), batch_size=3)


def test_input_that_is_no_tensor(interface):
    with pytest.raises(UnsupportedModelError, match="'x' is no tensor"):
        open_source("random", interface=interface(("x", None, None)))


def test_random_feeds_alone(interface):
    model = interface(("x", FLOAT, ("N", "T")))
    first = random_feeds(model, seed=3, sizes={"x": (2, 5)})
    again = random_feeds(model, seed=3, sizes={"x": (2, 5)})
    other = random_feeds(model, seed=3, sizes={"x": (2, 5)}, index=1)
    np.testing.assert_array_equal(first["x"], again["x"])
    assert first["x"].shape == (2, 5) and not np.array_equal(first["x"], other["x"])
