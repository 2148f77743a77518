from __future__ import annotations

import os
import stat
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import numpy_helper

from slimctl.core.errors import OptionError, SampleError, SourceError
from slimctl.data.sources import open_source

FLOAT = ir.DataType.FLOAT


@pytest.fixture
def line_model(interface):
    """Text lines: batch and width are open."""
    return interface(("x", FLOAT, ("N", 3, 8, "W")))


@pytest.fixture
def lines(tmp_path) -> tuple[Path, list[np.ndarray]]:
    """Eleven batches of different widths; their names sort differently as text."""
    folder = tmp_path / "lines"
    folder.mkdir()
    generator = np.random.default_rng(0)
    arrays = [generator.normal(size=(2, 3, 8, 10 + i)).astype(np.float32) for i in range(11)]
    for index, array in enumerate(arrays):
        np.savez(folder / f"batch{index}.npz", x=array)
    (folder / "README.txt").write_text("not data")
    return folder, arrays


def test_one_batch_per_file_in_natural_order(lines, line_model):
    folder, arrays = lines
    source = open_source(str(folder), interface=line_model)
    batches = list(source.batches())
    assert len(batches) == 11
    for batch, array in zip(batches, arrays, strict=True):
        np.testing.assert_array_equal(batch.feeds["x"], array)
    assert [batch.first for batch in batches] == list(range(0, 22, 2))
    assert source.sample_count == 22
    assert source.describe()["samples"] == 22


def test_batches_are_cut_but_never_merged(lines, line_model):
    folder, _ = lines
    source = open_source(str(folder), interface=line_model, batch_size=1)
    assert [batch.size for batch in source.batches()] == [1] * 22
    source = open_source(str(folder), interface=line_model, batch_size=4)
    assert [batch.size for batch in source.batches()] == [2] * 11


def test_first_samples_of_a_folder(lines, line_model):
    folder, arrays = lines
    source = open_source(str(folder), interface=line_model, samples=5)
    batches = list(source.batches())
    assert [batch.size for batch in batches] == [2, 2, 1]
    np.testing.assert_array_equal(batches[2].feeds["x"], arrays[2][:1])
    assert source.sample_count == 5


def test_npy_files_and_labels(tmp_path, interface):
    model = interface(("x", FLOAT, ("N", 4)))
    np.save(tmp_path / "a.npy", np.ones((3, 4), np.float32))
    np.save(tmp_path / "b.npy", np.ones((1, 4), np.float32))
    assert [b.size for b in open_source(str(tmp_path), interface=model).batches()] == [3, 1]


def test_labels_of_a_folder(tmp_path, interface):
    model = interface(("x", FLOAT, ("N", 4)))
    for index in range(3):
        labels = np.array([index, index + 1])
        np.savez(tmp_path / f"{index}.npz", x=np.ones((2, 4), np.float32), labels=labels)
    source = open_source(str(tmp_path), interface=model, samples=5)
    assert source.labeled
    labels = np.concatenate([batch.labels for batch in source.batches()])
    np.testing.assert_array_equal(labels, [0, 1, 1, 2, 2])


def test_labels_that_are_arrays(tmp_path, interface):
    """Files may differ in how many objects they have at most."""
    model = interface(("x", FLOAT, ("N", 4)))
    for index, most in enumerate((3, 1)):
        labels = np.full((2, most, 5), index)
        np.savez(tmp_path / f"{index}.npz", x=np.ones((2, 4), np.float32), labels=labels)
    source = open_source(str(tmp_path), interface=model)
    assert [batch.labels.shape for batch in source.batches()] == [(2, 3, 5), (2, 1, 5)]


def test_some_files_without_labels(tmp_path, interface):
    model = interface(("x", FLOAT, ("N", 4)))
    np.savez(tmp_path / "0.npz", x=np.ones((2, 4), np.float32), labels=np.array([0, 1]))
    np.savez(tmp_path / "1.npz", x=np.ones((2, 4), np.float32))
    with pytest.raises(SourceError, match="has no array 'labels'") as caught:
        open_source(str(tmp_path), interface=model)
    assert "1.npz" in caught.value.source


def test_not_one_label_per_sample(tmp_path, interface):
    model = interface(("x", FLOAT, ("N", 4)))
    np.savez(tmp_path / "0.npz", x=np.ones((2, 4), np.float32), labels=np.arange(3))
    with pytest.raises(SampleError, match="found 3 labels, wanted 2"):
        open_source(str(tmp_path), interface=model)


@pytest.mark.parametrize(
    ("arrays", "found", "fix"),
    [
        ({"y": np.ones((1, 3, 8, 9), np.float32)}, "'y'", "if 'y' is meant"),
        ({"x": np.ones((3, 8, 9), np.float32)}, "[3,8,9]", "array[None]"),
        ({"x": np.ones((1, 8, 9, 3), np.float32)}, "[1,8,9,3]", "transpose(0, 3, 1, 2)"),
        ({"x": np.ones((1, 3, 8, 9))}, "float64", 'astype("float32")'),
    ],
)
def test_a_file_that_does_not_fit_is_named_before_any_work(lines, line_model, arrays, found, fix):
    folder, _ = lines
    np.savez(folder / "batch7.npz", **arrays)
    with pytest.raises(SampleError) as caught:
        open_source(str(folder), interface=line_model)
    error = caught.value
    assert error.sample.endswith("batch7.npz")
    assert found in error.found and fix in error.fix


def test_bad_sample_within_a_file(lines, line_model):
    folder, arrays = lines
    arrays[3][1, 2, 4, 5] = np.nan
    np.savez(folder / "batch3.npz", x=arrays[3])
    source = open_source(str(folder), interface=line_model)
    with pytest.raises(SampleError) as caught:
        list(source.batches())
    assert caught.value.sample == f"{folder / 'batch3.npz'}[1]"
    assert "1 NaN (the first at [2,4,5])" in caught.value.found
    skipping = open_source(str(folder), interface=line_model, skip_bad=True)
    assert [b.size for b in skipping.batches()] == [2, 2, 2, 1, 2, 2, 2, 2, 2, 2, 2]
    assert skipping.describe()["skipped_bad"] == 1


def test_bad_batch_of_a_fixed_size_is_skipped_whole(tmp_path, interface):
    model = interface(("x", FLOAT, (2, 4)))
    for index, value in enumerate((1.0, np.nan, 2.0)):
        np.savez(tmp_path / f"{index}.npz", x=np.array([[1.0] * 4, [value] * 4], np.float32))
    source = open_source(str(tmp_path), interface=model, skip_bad=True)
    assert [batch.feeds["x"][1, 0] for batch in source.batches()] == [1.0, 2.0]
    assert source.describe()["skipped_bad"] == 2


def test_inputs_that_share_no_batch_axis_count_as_one_sample(tmp_path, interface):
    model = interface(("x", FLOAT, (None, None)), ("state", FLOAT, (2, None, 3)))
    for index in range(4):
        state = np.zeros((2, 1, 3), np.float32)
        np.savez(tmp_path / f"{index}.npz", x=np.ones((1, 5), np.float32), state=state)
    source = open_source(str(tmp_path), interface=model, samples=3)
    assert [batch.size for batch in source.batches()] == [1, 1, 1]


def test_one_damaged_file(lines, line_model):
    folder, _ = lines
    path = folder / "batch5.npz"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(SourceError, match="truncated or damaged") as caught:
        open_source(str(folder), interface=line_model)
    assert caught.value.source == str(path)


def test_folder_without_data(tmp_path, line_model):
    with pytest.raises(SourceError, match="The folder is empty") as caught:
        open_source(str(tmp_path), interface=line_model)
    assert "valid kinds" in caught.value.fix
    (tmp_path / "notes.md").write_text("nothing")
    with pytest.raises(SourceError, match="holds no data"):
        open_source(str(tmp_path), interface=line_model)


def test_folder_with_two_kinds(lines, line_model):
    folder, _ = lines
    (folder / "page.png").write_bytes(b"")
    with pytest.raises(SourceError, match="more than one kind"):
        open_source(str(folder), interface=line_model)


def test_unreadable_folder(lines, line_model, monkeypatch):
    """Made by the operating system's error, since the superuser may read everything."""
    folder, _ = lines

    def refuse(self):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(SourceError, match="cannot be read: Permission denied") as caught:
        open_source(str(folder), interface=line_model)
    assert "permission" in caught.value.fix


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may read everything")
def test_folder_without_permission(lines, line_model):
    folder, _ = lines
    folder.chmod(0)
    try:
        with pytest.raises(SourceError, match="Permission denied"):
            open_source(str(folder), interface=line_model)
    finally:
        folder.chmod(stat.S_IRWXU)


def test_unreadable_file(lines, line_model, monkeypatch):
    folder, _ = lines

    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("zipfile.ZipFile", refuse)
    with pytest.raises(SourceError, match="No permission"):
        open_source(str(folder), interface=line_model)


def test_preprocessing_of_arrays(lines, line_model):
    folder, _ = lines
    with pytest.raises(OptionError, match="only images"):
        open_source(str(folder), interface=line_model, preprocess="imagenet")


# ONNX test data


def write_set(folder: Path, arrays: list[np.ndarray], names: list[str] | None = None) -> None:
    folder.mkdir(parents=True)
    for index, array in enumerate(arrays):
        name = names[index] if names else ""
        tensor = numpy_helper.from_array(array, name)
        (folder / f"input_{index}.pb").write_bytes(tensor.SerializeToString())
    (folder / "output_0.pb").write_bytes(b"not looked at")


@pytest.fixture
def two_inputs(interface):
    return interface(("ids", ir.DataType.INT64, ("N", "T")), ("mask", FLOAT, ("N", "T")))


def test_test_data_sets(tmp_path, two_inputs):
    for index in (0, 2, 10):
        ids = np.full((1, index + 1), index)
        write_set(tmp_path / f"test_data_set_{index}", [ids, np.ones((1, index + 1), np.float32)])
    source = open_source(str(tmp_path), interface=two_inputs)
    batches = list(source.batches())
    assert [batch.feeds["ids"][0, 0] for batch in batches] == [0, 2, 10]
    assert batches[2].feeds["mask"].shape == (1, 11)
    assert source.describe()["kind"] == "test-data-sets"


def test_a_single_test_data_set(tmp_path, two_inputs):
    write_set(
        tmp_path / "test_data_set_0", [np.ones((1, 2), np.int64), np.ones((1, 2), np.float32)]
    )
    source = open_source(str(tmp_path / "test_data_set_0"), interface=two_inputs)
    assert len(list(source.batches())) == 1


def test_names_in_the_tensors_win_over_positions(tmp_path, two_inputs):
    mask, ids = np.ones((1, 2), np.float32), np.ones((1, 2), np.int64)
    write_set(tmp_path / "test_data_set_0", [mask, ids], ["mask", "ids"])
    feeds = next(open_source(str(tmp_path), interface=two_inputs).batches()).feeds
    assert feeds["mask"].dtype == np.float32 and feeds["ids"].dtype == np.int64


def test_too_few_inputs_in_a_set(tmp_path, two_inputs):
    write_set(tmp_path / "test_data_set_0", [np.ones((1, 2), np.int64)])
    with pytest.raises(SampleError, match="found 1 files input") as caught:
        open_source(str(tmp_path), interface=two_inputs)
    assert caught.value.input_name == "mask"


def test_wrong_shape_in_a_set(tmp_path, two_inputs):
    write_set(tmp_path / "test_data_set_0", [np.ones(2, np.int64), np.ones((1, 2), np.float32)])
    with pytest.raises(SampleError, match=r"found shape \[2\], wanted shape \[N,T\]"):
        open_source(str(tmp_path), interface=two_inputs)


@pytest.mark.parametrize(
    "content", [b"\xff\xff\xff\xff", onnx.SequenceProto(name="s").SerializeToString(), b""]
)
def test_no_tensor_in_a_set(tmp_path, two_inputs, content):
    write_set(
        tmp_path / "test_data_set_0", [np.ones((1, 2), np.int64), np.ones((1, 2), np.float32)]
    )
    (tmp_path / "test_data_set_0" / "input_0.pb").write_bytes(content)
    with pytest.raises((SourceError, SampleError)) as caught:
        open_source(str(tmp_path), interface=two_inputs)
    assert "test_data_set_0" in str(caught.value)
