from __future__ import annotations

import gzip
import struct
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from slimctl.core.errors import ConfigError, MissingExtraError, OptionError, SourceError
from slimctl.data.idx import IdxFile
from slimctl.data.preprocess import preset_names
from slimctl.data.sources import open_source
from slimctl.graph.edit import Interface

pytest.importorskip("PIL.Image", reason="pillow is not installed")

FLOAT = ir.DataType.FLOAT
CODES = {"u1": 8, "i1": 9, "i2": 11, "i4": 12, "f4": 13, "f8": 14}


def idx_bytes(array: np.ndarray) -> bytes:
    """A file by hand: magic, sizes, values, big-endian."""
    code = CODES[array.dtype.str[1:]]
    sizes = struct.pack(f">{array.ndim}I", *array.shape)
    values = array.astype(array.dtype.newbyteorder(">")).tobytes()
    return bytes([0, 0, code, array.ndim]) + sizes + values


def write(path: Path, array: np.ndarray) -> Path:
    data = idx_bytes(array)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


@pytest.fixture
def pixels() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (7, 28, 28), np.uint8)


@pytest.fixture
def labels() -> np.ndarray:
    return np.array([9, 0, 1, 2, 3, 4, 5], np.uint8)


@pytest.fixture
def model(interface: Callable[..., Interface]) -> Interface:
    return interface(("x", FLOAT, ("N", 1, 28, 28)))


@pytest.fixture
def folder(tmp_path: Path, pixels: np.ndarray, labels: np.ndarray) -> Path:
    write(tmp_path / "mnist" / "train-images-idx3-ubyte.gz", pixels)
    write(tmp_path / "mnist" / "train-labels-idx1-ubyte.gz", labels)
    return tmp_path / "mnist"


def test_pixels_are_normalized_and_labels_found(folder, model, pixels, labels):
    source = open_source(str(folder), interface=model, preprocess="fashion-mnist", batch_size=3)
    batches = list(source.batches())
    assert [batch.feeds["x"].shape for batch in batches] == [(3, 1, 28, 28)] * 2 + [(1, 1, 28, 28)]
    got = np.concatenate([batch.feeds["x"] for batch in batches])
    wanted = (pixels[:, None] / 255 - 0.286) / 0.353
    np.testing.assert_allclose(got, wanted, atol=1e-5)
    np.testing.assert_array_equal(np.concatenate([b.labels for b in batches]), labels)
    described = source.describe()
    assert (described["kind"], described["samples"], described["labeled"]) == ("idx", 7, True)
    assert described["preprocess"]["channels"] == "L" and described["preprocess"]["std"] == [0.353]
    assert source.sample_count == 7


@pytest.mark.parametrize(
    "name",
    [
        "train-images-idx3-ubyte",
        "train-images-idx3-ubyte.gz",
        "train-images.idx3-ubyte",
        "emnist-digits-test-images-idx3-ubyte.gz",
    ],
)
def test_a_file_by_itself(tmp_path, model, pixels, labels, name):
    path = write(tmp_path / name, pixels)
    unlabeled = open_source(str(path), interface=model, preprocess="raw")
    assert not unlabeled.labeled and next(unlabeled.batches()).labels is None
    beside = name.replace("images", "labels").replace("idx3", "idx1")
    write(tmp_path / beside, labels)
    source = open_source(str(path), interface=model, preprocess="raw")
    assert [int(batch.labels[0]) for batch in source.batches()] == labels.tolist()
    first = next(source.batches()).feeds["x"]
    np.testing.assert_array_equal(first[0, 0], pixels[0])


def test_packed_images_beside_plain_labels(folder, model, labels):
    (folder / "train-labels-idx1-ubyte.gz").unlink()
    write(folder / "train-labels-idx1-ubyte", labels)
    assert open_source(str(folder), interface=model, preprocess="raw").labeled


def test_a_file_that_was_unpacked_and_kept_its_suffix(tmp_path, model, pixels):
    path = tmp_path / "train-images-idx3-ubyte.gz"
    path.write_bytes(idx_bytes(pixels))
    source = open_source(str(path), interface=model, preprocess="raw")
    assert len(list(source.batches())) == 7


def test_a_split_is_chosen_behind_the_sharp(folder, model, pixels):
    write(folder / "t10k-images-idx3-ubyte.gz", pixels[:2])
    write(folder / "t10k-images-idx3-ubyte", pixels[:2])  # the same, unpacked
    counts = [
        open_source(f"{folder}#{name}", interface=model, preprocess="raw").sample_count
        for name in ("train", "t10k")
    ]
    assert counts == [7, 2]
    with pytest.raises(SourceError, match="more than one file of IDX images: 't10k', 'train'") as e:
        open_source(str(folder), interface=model, preprocess="raw")
    assert e.value.source == str(folder) and e.value.fix.endswith(f"{folder}#t10k")
    with pytest.raises(SourceError, match="no images of 'trian', but of") as caught:
        open_source(f"{folder}#trian", interface=model, preprocess="raw")
    assert caught.value.source == f"{folder}#trian" and "did you mean 'train'" in caught.value.fix


def test_a_split_of_a_folder_without_idx_files(tmp_path, model):
    np.save(tmp_path / "a.npy", np.ones((1, 1, 28, 28), np.float32))
    with pytest.raises(SourceError, match="holds no IDX images") as caught:
        open_source(f"{tmp_path}#train", interface=model)
    assert caught.value.source == f"{tmp_path}#train"
    assert "train-images-idx3-ubyte.gz" in caught.value.fix


def test_two_kinds_in_a_folder(folder, model):
    np.save(folder / "a.npy", np.ones((1, 1, 28, 28), np.float32))
    with pytest.raises(SourceError, match="more than one kind") as caught:
        open_source(str(folder), interface=model, preprocess="raw")
    assert "IDX files" in caught.value.fix


def test_preprocessing_is_never_guessed(folder, model):
    with pytest.raises(OptionError, match="A file of IDX images needs to know") as caught:
        open_source(str(folder), interface=model)
    assert caught.value.option == "--preprocess"
    assert all(name in caught.value.fix for name in preset_names())


def test_presets_for_colors_become_gray_for_one_channel_only(folder, interface, model):
    gray = open_source(str(folder), interface=model, preprocess="0-1")
    assert next(gray.batches()).feeds["x"].shape == (1, 1, 28, 28)
    colored = interface(("x", FLOAT, ("N", 3, 14, 14)))
    got = next(open_source(str(folder), interface=colored, preprocess="0-1").batches()).feeds["x"]
    assert got.shape == (1, 3, 14, 14)
    np.testing.assert_array_equal(got[:, 0], got[:, 2])
    with pytest.raises(ConfigError, match="which axis holds the 3 channels"):
        open_source(str(folder), interface=model, preprocess="imagenet")


def test_fixed_batch(folder, interface):
    model = interface(("x", FLOAT, (3, 1, 28, 28)))
    source = open_source(str(folder), interface=model, preprocess="raw")
    assert [batch.size for batch in source.batches()] == [3, 3]
    assert source.describe()["dropped"] == 1


def test_hash_covers_what_is_used_however_it_is_packed(folder, model, pixels, labels):
    def digest(**options):
        options = {"preprocess": "fashion-mnist"} | options
        return open_source(str(folder), interface=model, **options).content_hash()

    base, first = digest(), digest(samples=3)
    assert len({base, first, digest(preprocess="raw")}) == 3
    (folder / "train-images-idx3-ubyte.gz").unlink()
    write(folder / "train-images-idx3-ubyte", pixels)
    assert digest() == base
    labels[5] = 8
    write(folder / "train-labels-idx1-ubyte.gz", labels)
    assert digest() != base and digest(samples=3) == first
    pixels[2, 0, 0] ^= 1
    write(folder / "train-images-idx3-ubyte", pixels)
    assert digest(samples=3) != first and digest(samples=2) != first


def test_values_are_read_in_native_order(tmp_path):
    for kind in ("i1", "i2", "i4", "f4", "f8"):
        array = np.array([[1, -2], [3, 100]], kind)
        rows = list(IdxFile(write(tmp_path / kind, array)).rows())
        assert all(row.dtype == array.dtype and row.dtype.isnative for row in rows)
        np.testing.assert_array_equal(rows, array)


def test_rows_are_read_one_by_one(folder):
    """A file is read no further than it is used: what follows may even be missing."""
    path = folder / "train-images-idx3-ubyte.gz"
    noise = np.random.default_rng(1).integers(0, 256, (400, 28, 28), np.uint8)
    path.write_bytes(gzip.compress(idx_bytes(noise))[:100_000])
    rows = IdxFile(path).rows()
    np.testing.assert_array_equal(next(rows), noise[0])
    with pytest.raises(SourceError, match="truncated or damaged"):
        list(rows)


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_truncated_file(tmp_path, model, pixels, suffix):
    path = tmp_path / f"train-images-idx3-ubyte{suffix}"
    data = idx_bytes(pixels)
    path.write_bytes(gzip.compress(data)[:-2000] if suffix else data[:-10])
    what = "truncated or damaged" if suffix else "truncated: it should have 5504 bytes and has 5494"
    with pytest.raises(SourceError, match=what) as caught:
        list(open_source(str(path), interface=model, preprocess="raw").batches())
    assert caught.value.source == str(path) and caught.value.fix == "write or copy the file again"


def test_header_that_promises_more_than_a_packed_file_holds(tmp_path, model, pixels):
    path = tmp_path / "train-images-idx3-ubyte.gz"
    path.write_bytes(gzip.compress(idx_bytes(pixels)[:-10]))
    source = open_source(str(path), interface=model, preprocess="raw")
    with pytest.raises(SourceError, match="784 bytes expected, 774 found"):
        list(source.batches())


@pytest.mark.parametrize(
    ("start", "shown"),
    [
        (b"\x01\x00\x08\x03", "01 00 08 03"),
        (b"\x00\x00\x07\x03", "00 00 07 03"),
        (b"\x00\x00\x08\x00", "00 00 08 00"),
        (b"\x00\x00", "00 00"),
        (b"", ""),
    ],
)
def test_wrong_magic(tmp_path, model, pixels, start, shown):
    path = tmp_path / "train-images-idx3-ubyte"
    path.write_bytes(start + (idx_bytes(pixels)[4:] if len(start) == 4 else b""))
    with pytest.raises(SourceError, match=f"no IDX file: it begins with the bytes '{shown}'") as e:
        open_source(str(path), interface=model, preprocess="raw")
    assert e.value.source == str(path) and "00 00 08 03" in e.value.fix


def test_header_that_ends_early(tmp_path, model):
    path = tmp_path / "train-images-idx3-ubyte"
    path.write_bytes(b"\x00\x00\x08\x03\x00\x00")
    with pytest.raises(SourceError, match="12 bytes expected, 2 found"):
        open_source(str(path), interface=model, preprocess="raw")


def test_labels_given_as_images(folder, model):
    path = folder / "train-labels-idx1-ubyte.gz"
    with pytest.raises(SourceError, match=r"holds uint8 \[7\], grayscale images are uint8") as e:
        open_source(str(path), interface=model, preprocess="raw")
    assert e.value.source == str(path) and "file of images" in e.value.fix


def test_number_of_labels_differs(folder, model, labels):
    write(folder / "train-labels-idx1-ubyte.gz", labels[:6])
    with pytest.raises(SourceError, match="6 labels for the 7 images of 'train-images") as caught:
        open_source(str(folder), interface=model, preprocess="raw")
    assert caught.value.source.endswith("train-labels-idx1-ubyte.gz")
    assert "same download" in caught.value.fix


def test_labels_that_are_none(folder, model):
    write(folder / "train-labels-idx1-ubyte.gz", np.ones(7, np.float32))
    with pytest.raises(SourceError, match=r"holds float32 \[7\], labels are integers") as caught:
        open_source(str(folder), interface=model, preprocess="raw")
    assert caught.value.source.endswith("train-labels-idx1-ubyte.gz") and caught.value.fix


def test_no_images_at_all(tmp_path, model):
    path = write(tmp_path / "train-images-idx3-ubyte", np.zeros((0, 28, 28), np.uint8))
    with pytest.raises(SourceError, match="empty"):
        open_source(str(path), interface=model, preprocess="raw")


def test_model_with_two_inputs(folder, interface):
    two = interface(("x", FLOAT, ("N", 1, 28, 28)), ("y", FLOAT, ("N",)))
    with pytest.raises(SourceError, match="2 inputs, a file of IDX images fills one") as caught:
        open_source(str(folder), interface=two, preprocess="raw")
    assert "module:function" in caught.value.fix


def test_without_pillow(folder, model, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(MissingExtraError, match=r"slimctl\[data\]"):
        open_source(str(folder), interface=model, preprocess="raw")
