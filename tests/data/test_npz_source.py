from __future__ import annotations

import subprocess
import sys
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from slimctl.core.errors import OptionError, SampleError, SourceError
from slimctl.data.sources import open_source
from slimctl.graph.edit import interface as interface_of
from slimctl.graph.load import load_model

FLOAT = ir.DataType.FLOAT


def feeds_of(source):
    return [batch.feeds for batch in source.batches()]


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("batch_size", [None, 1, 3, 10, 32])
def test_rows_come_out_as_they_were_saved(npz, image_input, samples, compressed, batch_size):
    path = npz(compressed=compressed, x=samples)
    source = open_source(path, interface=image_input, batch_size=batch_size)
    batches = list(source.batches())
    np.testing.assert_array_equal(np.concatenate([b.feeds["x"] for b in batches]), samples)
    sizes = [batch.size for batch in batches]
    assert max(sizes) == min(batch_size or 1, 10)
    assert [batch.first for batch in batches] == list(np.cumsum([0, *sizes[:-1]]))
    assert source.sample_count == 10


def test_every_pass_is_the_same(npz, image_input, samples):
    source = open_source(npz(x=samples), interface=image_input)
    first, second = feeds_of(source), feeds_of(source)
    for one, two in zip(first, second, strict=True):
        np.testing.assert_array_equal(one["x"], two["x"])


def test_takes_the_first_samples(npz, image_input, samples):
    source = open_source(npz(x=samples), interface=image_input, samples=4)
    assert source.sample_count == 4
    np.testing.assert_array_equal(np.concatenate([f["x"] for f in feeds_of(source)]), samples[:4])
    assert source.describe()["samples"] == 4


def test_labels_go_along(npz, image_input, samples):
    path = npz(x=samples, labels=np.arange(10) * 7)
    source = open_source(path, interface=image_input, batch_size=4)
    assert source.labeled
    labels = [batch.labels for batch in source.batches()]
    np.testing.assert_array_equal(np.concatenate(labels), np.arange(10) * 7)


@pytest.mark.parametrize("shape", [(4, 4), (3, 5), (16000,), (0, 5)])
@pytest.mark.parametrize("kind", [np.int64, np.float32])
def test_labels_may_be_arrays(npz, image_input, samples, shape, kind):
    labels = np.random.default_rng(1).integers(0, 99, (10, *shape)).astype(kind)
    source = open_source(npz(x=samples, labels=labels), interface=image_input, batch_size=4)
    found = [batch.labels for batch in source.batches()]
    assert [len(part) for part in found] == [4, 4, 2]
    np.testing.assert_array_equal(np.concatenate(found), labels)
    assert found[0].dtype == kind
    assert len(source.content_hash()) == 64


def test_an_input_called_labels_is_an_input(npz, interface, samples):
    both = interface(("x", FLOAT, ("N", 3, 4, 4)), ("labels", ir.DataType.INT64, ("N",)))
    source = open_source(npz(x=samples, labels=np.arange(10)), interface=both)
    assert not source.labeled
    assert set(feeds_of(source)[0]) == {"x", "labels"}


def test_fortran_order_is_read_right_and_said(npz, image_input, samples):
    source = open_source(npz(x=np.asfortranarray(samples)), interface=image_input)
    np.testing.assert_array_equal(np.concatenate([f["x"] for f in feeds_of(source)]), samples)
    assert "Fortran order" in source.describe()["notes"][0]


def test_foreign_byte_order_is_the_same_data(npz, image_input, samples):
    source = open_source(npz(x=samples.astype(">f4")), interface=image_input)
    np.testing.assert_array_equal(np.concatenate([f["x"] for f in feeds_of(source)]), samples)
    assert feeds_of(source)[0]["x"].dtype.isnative


def test_npy_file_of_a_single_input_model(tmp_path, image_input, samples):
    np.save(tmp_path / "x.npy", samples)
    source = open_source(str(tmp_path / "x.npy"), interface=image_input)
    np.testing.assert_array_equal(np.concatenate([f["x"] for f in feeds_of(source)]), samples)


def test_npy_file_cannot_name_two_inputs(tmp_path, interface, samples):
    np.save(tmp_path / "x.npy", samples)
    two = interface(("a", FLOAT, ("N",)), ("b", FLOAT, ("N",)))
    with pytest.raises(SourceError, match="'a', 'b'") as caught:
        open_source(str(tmp_path / "x.npy"), interface=two)
    assert "np.savez" in caught.value.fix


def test_whole_inputs_stacked_where_axis_0_is_no_batch(npz, interface):
    """A recurrent model: state [2, N, 128] and a scalar beside the frames."""
    model = interface(
        ("frames", FLOAT, (None, None)),
        ("state", FLOAT, (2, None, 8)),
        ("rate", ir.DataType.INT64, ()),
    )
    frames = np.random.default_rng(0).normal(size=(5, 1, 16)).astype(np.float32)
    state = np.random.default_rng(1).normal(size=(5, 2, 1, 8)).astype(np.float32)
    rate = np.array([8000, 16000, 8000, 16000, 8000])
    path = npz(frames=frames, state=state, rate=rate)
    source = open_source(path, interface=model)
    batches = list(source.batches())
    assert len(batches) == 5
    for index, batch in enumerate(batches):
        np.testing.assert_array_equal(batch.feeds["frames"], frames[index])
        np.testing.assert_array_equal(batch.feeds["state"], state[index])
        assert batch.feeds["rate"] == rate[index] and batch.feeds["rate"].shape == ()
    with pytest.raises(OptionError, match="cannot be put together"):
        open_source(path, interface=model, batch_size=2)


def test_scalar_input_is_the_same_for_all_samples(npz, interface):
    model = interface(("x", FLOAT, ("N", 4)), ("rate", ir.DataType.INT64, ()))
    path = npz(x=np.ones((6, 4), np.float32), rate=np.array(16000))
    batches = list(open_source(path, interface=model, batch_size=4).batches())
    assert [batch.feeds["x"].shape for batch in batches] == [(4, 4), (2, 4)]
    assert all(batch.feeds["rate"] == 16000 for batch in batches)


def test_a_fixed_batch_is_filled_and_leftovers_are_counted(npz, interface, samples):
    model = interface(("x", FLOAT, (4, 3, 4, 4)))
    source = open_source(npz(x=samples), interface=model)
    assert [feed["x"].shape[0] for feed in feeds_of(source)] == [4, 4]
    described = source.describe()
    assert (described["samples"], described["dropped"]) == (8, 2)


def test_too_few_samples_for_a_fixed_batch(npz, interface, samples):
    model = interface(("x", FLOAT, (16, 3, 4, 4)))
    with pytest.raises(SourceError, match="10 samples do not fill one batch of the 16"):
        open_source(npz(x=samples), interface=model)


def test_batch_size_against_a_fixed_batch(npz, interface, samples):
    model = interface(("x", FLOAT, (1, 3, 4, 4)))
    with pytest.raises(OptionError, match="fixed to 1, 8 was asked for") as caught:
        open_source(npz(x=samples), interface=model, batch_size=8)
    assert "--batch-size" in caught.value.fix


@pytest.mark.parametrize("number", [0, -3])
def test_numbers_below_one(npz, image_input, samples, number):
    path = npz(x=samples)
    with pytest.raises(OptionError):
        open_source(path, interface=image_input, samples=number)
    with pytest.raises(OptionError):
        open_source(path, interface=image_input, batch_size=number)


# what does not fit


def test_unnamed_array_is_not_guessed(npz, image_input, samples, tmp_path):
    np.savez(tmp_path / "x.npz", samples)
    with pytest.raises(SampleError) as caught:
        open_source(str(tmp_path / "x.npz"), interface=image_input)
    error = caught.value
    assert error.input_name == "x"
    assert "arr_0" in error.found and "'x'" in error.wanted
    assert "if 'arr_0' is meant" in error.fix


def test_misspelled_name_is_recognized(npz, interface, samples):
    model = interface(("images", FLOAT, ("N", 3, 4, 4)), ("mask", FLOAT, ("N",)))
    with pytest.raises(SampleError) as caught:
        open_source(npz(image=samples, mask=np.ones(10, np.float32)), interface=model)
    assert "if 'image' is meant, save it under the name 'images'" in caught.value.fix


def test_missing_array(npz, interface, samples):
    model = interface(("x", FLOAT, ("N", 3, 4, 4)), ("mask", FLOAT, ("N",)))
    with pytest.raises(SampleError, match="'mask'"):
        open_source(npz(x=samples), interface=model)


def test_array_without_an_input(npz, image_input, samples):
    with pytest.raises(SampleError, match="'ids' that the model has no input for"):
        open_source(npz(x=samples, ids=np.arange(10)), interface=image_input)


@pytest.mark.parametrize(
    ("shape", "fix"),
    [
        ((10, 4, 4, 3), "array.transpose(0, 3, 1, 2)"),
        ((3, 4, 4), "array[None]"),
        ((10, 3, 4, 5), "[samples,3,4,4]"),
        ((10, 48), "[samples,3,4,4]"),
        ((), "[samples,3,4,4]"),
    ],
)
def test_wrong_shape_says_what_to_do(npz, image_input, shape, fix):
    with pytest.raises(SampleError) as caught:
        open_source(npz(x=np.zeros(shape, np.float32)), interface=image_input)
    error = caught.value
    assert error.input_name == "x" and fix in error.fix
    assert "[" + ",".join(map(str, shape)) + "]" in error.found
    assert "[samples,3,4,4]" in error.wanted


@pytest.mark.parametrize("dtype", [np.float64, np.float16, np.uint8, np.int64])
def test_wrong_dtype_is_never_cast_silently(npz, image_input, samples, dtype):
    with pytest.raises(SampleError) as caught:
        open_source(npz(x=samples.astype(dtype)), interface=image_input)
    assert np.dtype(dtype).name in caught.value.found
    assert "float32" in caught.value.wanted
    assert 'astype("float32")' in caught.value.fix


def test_different_numbers_of_samples(npz, interface, samples):
    model = interface(("x", FLOAT, ("N", 3, 4, 4)), ("mask", FLOAT, ("N",)))
    with pytest.raises(SampleError, match="found 9 samples along axis 0, wanted 10"):
        open_source(npz(x=samples, mask=np.ones(9, np.float32)), interface=model)


def test_no_samples(npz, image_input):
    with pytest.raises(SourceError, match="empty"):
        open_source(npz(x=np.zeros((0, 3, 4, 4), np.float32)), interface=image_input)


@pytest.mark.parametrize(
    ("value", "text"), [(np.nan, "1 NaN"), (np.inf, "1 Inf"), (-np.inf, "1 Inf")]
)
def test_non_finite_sample_is_named(npz, image_input, samples, value, text):
    samples[6, 1, 2, 3] = value
    path = npz(x=samples)
    source = open_source(path, interface=image_input, batch_size=4)
    with pytest.raises(SampleError) as caught:
        list(source.batches())
    error = caught.value
    assert error.sample == f"{path}[6]" and error.input_name == "x"
    assert text in error.found and "[0,1,2,3]" in error.found
    assert "--skip-bad-samples" in error.fix


@pytest.mark.parametrize("batch_size", [1, 4])
def test_non_finite_samples_are_skipped_and_counted(npz, image_input, samples, batch_size):
    samples[0, 0, 0, 0] = np.nan
    samples[6, 1, 2, 3] = np.inf
    path = npz(x=samples, labels=np.arange(10))
    source = open_source(path, interface=image_input, batch_size=batch_size, skip_bad=True)
    batches = list(source.batches())
    good = [1, 2, 3, 4, 5, 7, 8, 9]
    np.testing.assert_array_equal(np.concatenate([b.feeds["x"] for b in batches]), samples[good])
    np.testing.assert_array_equal(np.concatenate([b.labels for b in batches]), good)
    assert source.describe()["samples"] == 8
    assert source.describe()["skipped_bad"] == 2


def test_samples_counts_usable_ones(npz, image_input, samples):
    samples[1] = np.nan
    source = open_source(npz(x=samples), interface=image_input, samples=3, skip_bad=True)
    got = np.concatenate([feed["x"] for feed in feeds_of(source)])
    np.testing.assert_array_equal(got, samples[[0, 2, 3]])


def test_all_samples_bad(npz, image_input, samples):
    samples[:] = np.nan
    with pytest.raises(SourceError, match="all 10 hold NaN"):
        open_source(npz(x=samples), interface=image_input, skip_bad=True)


def test_large_finite_values_are_finite(npz, image_input, samples):
    samples[:] = np.finfo(np.float32).max
    assert len(feeds_of(open_source(npz(x=samples), interface=image_input))) == 10


# unreadable files


def test_truncated_archive(npz, image_input, samples):
    path = Path(npz(x=samples))
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(SourceError, match="truncated or damaged") as caught:
        open_source(str(path), interface=image_input)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("compressed", [False, True])
def test_damaged_values_are_noticed(npz, image_input, samples, compressed):
    path = Path(npz(x=samples, compressed=compressed))
    data = bytearray(path.read_bytes())
    middle = len(data) // 2
    data[middle : middle + 16] = bytes(16 * [0xA5])
    path.write_bytes(data)
    with pytest.raises(SourceError, match="damaged"):
        list(open_source(str(path), interface=image_input).batches())


def test_truncated_npy(tmp_path, image_input, samples):
    np.save(tmp_path / "x.npy", samples)
    data = (tmp_path / "x.npy").read_bytes()
    (tmp_path / "x.npy").write_bytes(data[:-100])
    with pytest.raises(SourceError, match="truncated: array 'x' should have 1920 bytes"):
        open_source(str(tmp_path / "x.npy"), interface=image_input)


def test_member_shorter_than_its_header_says(tmp_path, image_input, samples):
    np.save(tmp_path / "x.npy", samples)
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
        archive.writestr("x.npy", (tmp_path / "x.npy").read_bytes()[:-4])
    with pytest.raises(SourceError, match="truncated: array 'x'"):
        open_source(str(tmp_path / "x.npz"), interface=image_input)


@pytest.mark.parametrize("name", ["x.npz", "x.npy"])
@pytest.mark.parametrize("content", [b"", b"hello world, I am no archive" * 10, b"\x93NUMPY\x01"])
def test_no_array_file_at_all(tmp_path, image_input, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SourceError):
        open_source(str(tmp_path / name), interface=image_input)


def test_pickled_objects_are_refused(tmp_path, image_input):
    ragged = np.array([np.zeros(3), np.zeros(4)], dtype=object)
    np.savez(tmp_path / "x.npz", x=ragged)
    with pytest.raises(SourceError, match="pickled Python objects") as caught:
        open_source(str(tmp_path / "x.npz"), interface=image_input)
    assert "one file per batch" in caught.value.fix


def test_a_header_cannot_make_us_reserve_memory(tmp_path, image_input):
    """A file of a few bytes that claims 2^60 samples."""
    header = "{'descr': '<f4', 'fortran_order': True, 'shape': (1152921504606846976, 3, 4, 4), }"
    header += " " * (118 - len(header) - 1) + "\n"
    data = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + bytes(64)
    (tmp_path / "x.npy").write_bytes(data)
    with pytest.raises(SourceError, match="truncated"):
        open_source(str(tmp_path / "x.npy"), interface=image_input)


# the hash


def test_hash_depends_on_what_is_used(npz, image_input, samples):
    def digest(path, **options):
        return open_source(path, interface=image_input, **options).content_hash()

    base = digest(npz("a.npz", x=samples))
    assert digest(npz("b.npz", x=samples, compressed=True)) == base
    assert digest(npz("c.npz", x=np.asfortranarray(samples))) == base
    longer = npz("d.npz", x=np.concatenate([samples, samples]))
    assert digest(longer) != base
    assert digest(longer, samples=10) == base
    changed = samples.copy()
    changed[9, 2, 3, 3] += 1
    assert digest(npz("e.npz", x=changed)) != base


# memory


@pytest.mark.parametrize("compressed", [False, True])
def test_memory_does_not_grow_with_the_number_of_samples(npz, interface, compressed):
    model = interface(("x", FLOAT, ("N", 3, 64, 64)))
    peaks = {}
    for count in (16, 256):
        array = np.zeros((count, 3, 64, 64), np.float32)
        path = npz(f"{count}.npz", compressed=compressed, x=array)
        source = open_source(path, interface=model)
        tracemalloc.start()
        for _ in source.batches():
            pass
        peaks[count] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    row = 3 * 64 * 64 * 4
    assert peaks[256] < 8 * row  # the whole array is 256 rows
    assert peaks[256] < peaks[16] + 2 * row


def test_resident_memory_is_flat(npz, interface, tmp_path):
    """The same for the whole process: memory maps would pass the test above and fail this one."""
    path = npz(x=np.zeros((150, 3, 224, 224), np.float32))  # 90 MB
    script = tmp_path / "read.py"
    script.write_text(
        "import re, sys\n"
        "import onnx_ir as ir\n"
        "from slimctl.data.sources import open_source\n"
        "from slimctl.graph.edit import Interface, Port\n"
        "model = Interface((Port('x', ir.DataType.FLOAT, ('N', 3, 224, 224)),), ())\n"
        "source = open_source(sys.argv[1], interface=model)\n"
        "peak = lambda: int(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1])\n"
        "before = peak()\n"
        "total = sum(batch.size for batch in source.batches())\n"
        "print(total, peak() - before)\n"
    )
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, str(script), path],
        capture_output=True,
        text=True,
        check=True,
        cwd=root,
        env={"PYTHONPATH": root, "PATH": ""},
    )
    total, grown_kib = map(int, done.stdout.split())
    assert total == 150
    assert grown_kib < 10_000  # kB; the array has 90,000


# a public bug report


def test_calibration_data_with_one_bad_sample(tmp_path):
    """Case B18: calibration data with one NaN and one infinite entry."""
    cases = Path(__file__).parents[1] / "cases" / "data"
    model = interface_of(load_model(cases / "B18.onnx"))
    with np.load(cases / "B18.npz") as data:
        (name,) = [str(name) for name in data["names"]]
        stacked = np.concatenate([data[f"c{i}_0"] for i in range(int(data["n_calib"]))])
    np.savez(tmp_path / "calib.npz", **{name: stacked})
    bad = [i for i, row in enumerate(stacked) if not np.isfinite(row).all()]
    assert len(bad) == 2
    source = open_source(str(tmp_path / "calib.npz"), interface=model)
    with pytest.raises(SampleError) as caught:
        list(source.batches())
    assert caught.value.sample.endswith(f"calib.npz[{bad[0]}]")
    assert "1 NaN" in caught.value.found
    skipping = open_source(str(tmp_path / "calib.npz"), interface=model, skip_bad=True)
    counts = {key: skipping.describe()[key] for key in ("samples", "skipped_bad", "dropped")}
    # The model takes four at a time: 30 good samples fill seven batches.
    assert counts == {"samples": 28, "skipped_bad": 2, "dropped": 2}
