from __future__ import annotations

import gc
import io
import json
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from slimctl.core.errors import MissingExtraError, OptionError, SampleError, SourceError
from slimctl.data import columns
from slimctl.data.columns import label_array, sample_array
from slimctl.data.inputs import InputSpec
from slimctl.data.sources import open_source
from slimctl.data.tables import file_table, hub_table

FLOAT, INT64, STRING = ir.DataType.FLOAT, ir.DataType.INT64, ir.DataType.STRING


@pytest.fixture(autouse=True)
def _cache_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def jsonl(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def parquet(path: Path, **data: Any) -> str:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table(data), path)
    return str(path)


def gathered(source: Any, name: str = "x") -> np.ndarray:
    return np.concatenate([batch.feeds[name] for batch in source.batches()])


@pytest.fixture
def vectors(interface: Callable[..., Any]) -> Any:
    """A model with vectors of 3 floats."""
    return interface(("x", FLOAT, ("N", 3)))


@pytest.fixture
def values() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(25, 3)).astype(np.float32)


# Values


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_rows_are_samples_and_labels_are_found(tmp_path, vectors, values, kind):
    labels = [index % 4 for index in range(25)]
    if kind == "jsonl":
        rows = [
            {"id": f"row {i}", "x": [float(v) for v in value], "label": label}
            for i, (value, label) in enumerate(zip(values, labels, strict=True))
        ]
        path = jsonl(tmp_path / "a.jsonl", rows)
    else:
        path = parquet(tmp_path / "a.parquet", x=list(values), id=labels, label=labels)
    source = open_source(path, interface=vectors, batch_size=10)
    batches = list(source.batches())
    assert [batch.size for batch in batches] == [10, 10, 5]
    np.testing.assert_array_equal(gathered(source), values)
    assert np.concatenate([batch.labels for batch in batches]).tolist() == labels
    described = source.describe()
    assert (described["kind"], described["samples"], described["labeled"]) == (kind, 25, True)
    assert described["columns"] == {"x": "x"} and described["datasets"]


def test_columns_of_numbers_feed_inputs_of_one_number(tmp_path, interface):
    model = interface(
        ("age", FLOAT, ("N", 1)), ("count", INT64, ("N",)), ("name", STRING, ("N", 1))
    )
    (tmp_path / "a.csv").write_text("count,name,age,other,labels\n3,ann,1.5,9,1\n4,bob,2,9,0\n")
    first, second = open_source(str(tmp_path / "a.csv"), interface=model).batches()
    assert first.feeds["age"].tolist() == [[1.5]] and first.feeds["age"].dtype == np.float32
    assert second.feeds["count"].tolist() == [4] and second.feeds["count"].dtype == np.int64
    assert second.feeds["name"].tolist() == [["bob"]]
    assert (first.labels.tolist(), second.labels.tolist()) == ([1], [0])


def test_nested_lists_of_any_length(tmp_path, interface):
    model = interface(("ids", INT64, ("N", "T")), ("x", FLOAT, ("N", 2, "T")))
    rows = [{"ids": [1] * n, "x": [[0.5] * n] * 2, "label": [[n, 1]]} for n in (3, 1, 3)]
    path = jsonl(tmp_path / "a.jsonl", rows)
    batches = list(open_source(path, interface=model).batches())
    assert [batch.feeds["x"].shape for batch in batches] == [(1, 2, 3), (1, 2, 1), (1, 2, 3)]
    assert [batch.labels.tolist() for batch in batches] == [[[[n, 1]]] for n in (3, 1, 3)]
    source = open_source(path, interface=model, batch_size=1)
    assert len(list(source.batches())) == 3
    with pytest.raises(SampleError, match=r"found shape \[1,1\], wanted shape \[1,3\]") as caught:
        open_source(path, interface=model, batch_size=2)
    assert caught.value.sample == f"{path}[1]" and "--batch-size 1" in caught.value.fix


def test_labels_of_different_shapes_are_not_put_together(tmp_path, vectors):
    rows = [{"x": [1.0, 2, 3], "label": [0] * n} for n in (2, 3)]
    path = jsonl(tmp_path / "a.jsonl", rows)
    with pytest.raises(SampleError, match="'labels': found shape"):
        open_source(path, interface=vectors, batch_size=2)


def test_an_input_named_label_is_fed(tmp_path, interface):
    model = interface(("label", INT64, ("N",)))
    source = open_source(jsonl(tmp_path / "a.jsonl", [{"label": 5}]), interface=model)
    assert not source.labeled and gathered(source, "label").tolist() == [5]


def test_fixed_batch_and_samples(tmp_path, interface):
    path = jsonl(tmp_path / "a.jsonl", [{"x": [float(i)]} for i in range(8)])
    fixed = open_source(path, interface=interface(("x", FLOAT, (3, 1))))
    assert [batch.size for batch in fixed.batches()] == [3, 3]
    assert fixed.describe()["dropped"] == 2
    some = open_source(path, interface=interface(("x", FLOAT, ("N", 1))), samples=5)
    assert gathered(some).ravel().tolist() == [0, 1, 2, 3, 4]


def test_hash_is_of_the_values(tmp_path, vectors, values):
    rows = [{"x": value.tolist()} for value in values]
    first = open_source(jsonl(tmp_path / "a.jsonl", rows), interface=vectors)
    same = open_source(parquet(tmp_path / "a.parquet", x=list(values)), interface=vectors)
    assert first.content_hash() == same.content_hash() == first.content_hash()
    fewer = open_source(str(tmp_path / "a.jsonl"), interface=vectors, samples=24)
    assert fewer.content_hash() != first.content_hash()
    rows[0]["x"][0] += 1
    other = open_source(jsonl(tmp_path / "b.jsonl", rows), interface=vectors)
    assert other.content_hash() != first.content_hash()


def test_missing_numbers_are_bad_samples(tmp_path, interface):
    model = interface(("a", FLOAT, ("N",)))
    (tmp_path / "a.csv").write_text("a,b\n1,1\n,1\n3,1\n")
    with pytest.raises(SampleError, match="1 NaN"):
        list(open_source(str(tmp_path / "a.csv"), interface=model).batches())
    source = open_source(str(tmp_path / "a.csv"), interface=model, skip_bad=True)
    assert gathered(source, "a").tolist() == [1, 3]
    assert source.describe()["skipped_bad"] == 1


def test_memory_does_not_grow_with_the_rows(tmp_path, interface):
    """8 MB in one row group: a pass holds a few rows of it, even packed."""
    wide = np.random.default_rng(0).normal(size=(2000, 1000)).astype(np.float32)
    path = parquet(tmp_path / "a.parquet", x=list(wide))
    source = open_source(path, interface=interface(("x", FLOAT, ("N", 1000))), samples=300)
    tracemalloc.start()
    for _ in source.batches():
        pass
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4e6


SPECS = {
    "floats": InputSpec("x", FLOAT, ("N", 2)),
    "halves": InputSpec("x", ir.DataType.FLOAT16, ("N", 2)),
    "brains": InputSpec("x", ir.DataType.BFLOAT16, ("N", 2)),
    "bytes": InputSpec("x", ir.DataType.UINT8, ("N", 2)),
    "flags": InputSpec("x", ir.DataType.BOOL, ("N", 2)),
    "texts": InputSpec("x", STRING, ("N", 2)),
    "one": InputSpec("x", FLOAT, ("N", 1, 1)),
    "any": InputSpec("x", FLOAT, None),
}


@pytest.mark.parametrize(
    ("spec", "value", "wanted"),
    [
        ("floats", [1, 2.5], [[1, 2.5]]),
        ("floats", [True, False], [[1, 0]]),
        ("halves", [1, 2.5], [[1, 2.5]]),
        ("brains", [1, 2.5], [[1, 2.5]]),
        ("bytes", [0, 255], [[0, 255]]),
        ("bytes", [True, 2], [[1, 2]]),
        ("flags", [True, False], [[True, False]]),
        ("texts", ["a", "bc"], [["a", "bc"]]),
        ("one", 3, [[[3]]]),
        ("any", [[1], [2]], [[[1], [2]]]),
    ],
)
def test_cells_that_fit(spec, value, wanted):
    array = sample_array(value, SPECS[spec], "a[0]")
    assert array.tolist() == wanted
    assert array.dtype == (object if spec == "texts" else SPECS[spec].dtype.numpy())


@pytest.mark.parametrize(
    ("spec", "value", "found", "wanted", "fix"),
    [
        ("floats", [1, 2, 3], "shape [3]", "shape [2] in each row", "nested lists"),
        ("floats", [[1, 2]], "shape [1,2]", "shape [2] in each row", "nested lists"),
        ("floats", None, "no value", "shape [2] in each row", "fill the cell"),
        ("floats", 1.0, "shape []", "shape [2] in each row", "nested lists"),
        ("floats", ["1", "2"], "['1', '2']", "float32", "numbers only"),
        ("floats", "[1, 2]", "'[1, 2]'", "float32", "numbers only"),
        ("floats", [[1], [1, 2]], "[[1], [1, 2]]", "float32", "same length"),
        ("floats", [{"a": 1}], "[{'a': 1}]", "float32", "numbers only"),
        ("bytes", [0, 256], "the number 256", "uint8, which does not hold it", "correct"),
        ("bytes", [-1, 2], "the number -1", "uint8, which does not hold it", "correct"),
        ("bytes", [0.5, 1], "[0.5, 1.0]", "uint8", "whole numbers"),
        ("bytes", [None, 1], "[None, 1]", "uint8", "no empty cells"),
        ("flags", [0, 1], "[0, 1]", "bool", "true and false"),
        ("texts", [0, 1], "[0, 1]", "string", "write text"),
        ("one", [1, 2], "shape [2]", "shape [1,1] in each row", "nested lists"),
    ],
)
def test_cells_that_do_not_fit(spec, value, found, wanted, fix):
    with pytest.raises(SampleError) as caught:
        sample_array(value, SPECS[spec], "a.csv[7]")
    error = caught.value
    assert (error.sample, error.input_name, error.found) == ("a.csv[7]", "x", found)
    assert error.wanted.startswith(wanted) and fix in error.fix


@pytest.mark.parametrize("value", [None, "cat", [[1], [1, 2]], {"a": 1}, [None, 1]])
def test_labels_that_are_no_numbers(value):
    with pytest.raises(SampleError) as caught:
        label_array(value, "a.csv[7]")
    error = caught.value
    assert (error.sample, error.input_name) == ("a.csv[7]", "labels")
    assert error.found == ("no value" if value is None else repr(value)) and "number" in error.fix


# Columns and files at fault


@pytest.mark.parametrize(
    ("row", "found", "fix"),
    [
        ({"xs": [1, 2, 3], "label": 1}, "columns 'xs'", "if 'xs' is meant, rename it to 'x'"),
        ({"a": [1, 2, 3], "b": 1, "label": 1}, "columns 'a', 'b'", "name a column 'x'"),
        ({"label": 1}, "no column", "name a column 'x'"),
    ],
)
def test_missing_column(tmp_path, vectors, row, found, fix):
    path = jsonl(tmp_path / "a.jsonl", [row])
    with pytest.raises(SampleError) as caught:
        open_source(path, interface=vectors)
    error = caught.value
    assert (error.sample, error.input_name, error.found) == (f"{path}[0]", "x", found)
    assert error.wanted == "a column named 'x'" and fix in error.fix


def test_two_columns_of_labels(tmp_path, vectors):
    path = jsonl(tmp_path / "a.jsonl", [{"x": [1, 2, 3], "label": 1, "labels": 1}])
    with pytest.raises(SourceError, match="two columns of labels") as caught:
        open_source(path, interface=vectors)
    assert caught.value.source == path and "remove one" in caught.value.fix


@pytest.mark.parametrize(
    ("inputs", "what"),
    [
        ([("x", FLOAT, ())], "'x' is a scalar"),
        ([("x", FLOAT, (2, 3)), ("y", FLOAT, (4, 3))], "fix different sizes"),
    ],
)
def test_models_whose_rows_cannot_be_put_together(tmp_path, interface, inputs, what):
    path = jsonl(tmp_path / "a.jsonl", [{"x": 1, "y": 1}])
    with pytest.raises(SourceError, match=what) as caught:
        open_source(path, interface=interface(*inputs))
    assert caught.value.source == path and "module:function" in caught.value.fix


@pytest.mark.parametrize(
    ("name", "content", "what"),
    [
        ("a.csv", b"x,y\n1,2\n1,2,3,4\n", "Expected 2 fields in line 3, saw 4"),
        ("a.csv", b"x\n\xff\xfe\x00\n", "UnicodeDecodeError"),
        ("a.csv", b"", "No columns to parse"),
        ("a.jsonl", b'{"x": [1, 2, 3]}\n{"x": \n', "JSON parse error"),
        ("a.parquet", b"PAR1", "Parquet file size is 4 bytes"),
    ],
)
def test_damaged_file(tmp_path, vectors, name, content, what):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(SourceError) as caught:
        open_source(str(path), interface=vectors)
    error = caught.value
    assert what in error.what and error.what.startswith("The datasets library cannot read it: ")
    assert error.source.startswith(str(path)) and path.suffix[1:].upper() in error.fix


def test_no_rows(tmp_path, vectors):
    for name, content in (("a.jsonl", ""), ("a.csv", "x\n")):
        (tmp_path / name).write_text(content)
        with pytest.raises(SourceError, match="The source is empty"):
            open_source(str(tmp_path / name), interface=vectors)


def test_a_name_that_is_a_pattern(tmp_path, interface):
    for name, value in (("a[1].csv", 1), ("a1.csv", 2)):
        (tmp_path / name).write_text(f"x\n{value}\n")
    source = open_source(str(tmp_path / "a[1].csv"), interface=interface(("x", FLOAT, ("N",))))
    assert gathered(source).tolist() == [1]


def test_arrays_are_not_preprocessed(tmp_path, vectors):
    path = jsonl(tmp_path / "a.jsonl", [{"x": [1, 2, 3]}])
    with pytest.raises(OptionError, match="only images") as caught:
        open_source(path, interface=vectors, preprocess="raw")
    assert caught.value.option == "--preprocess"


def test_without_datasets(tmp_path, vectors, monkeypatch):
    path = jsonl(tmp_path / "a.jsonl", [{"x": [1, 2, 3]}])
    monkeypatch.setitem(sys.modules, "datasets", None)
    for spec in (path, "hf:user/name#test"):
        with pytest.raises(MissingExtraError, match="CSV, JSONL, Parquet") as caught:
            open_source(spec, interface=vectors)
        assert caught.value.extra == "data" and caught.value.fix == 'pip install "slimctl[data]"'


def test_datasets_is_imported_late():
    code = "import sys, slimctl.data.sources; print({'datasets', 'pandas'} & set(sys.modules))"
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root
    )
    assert done.stdout.strip() == "set()"


# Images


@pytest.fixture
def pictures() -> list[np.ndarray]:
    generator = np.random.default_rng(0)
    return [generator.integers(0, 256, (8, 8, 3), np.uint8) for _ in range(3)]


def encoded(picture: np.ndarray) -> bytes:
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.fixture
def classifier(interface: Callable[..., Any]) -> Any:
    return interface(("pixels", FLOAT, ("N", 3, 8, 8)))


@pytest.mark.parametrize("form", ["feature", "struct", "bytes"])
@pytest.mark.parametrize("column", ["image", "pixels"])
def test_images_in_parquet(tmp_path, classifier, pictures, form, column):
    import datasets

    cells: list[Any] = [encoded(picture) for picture in pictures]
    path = tmp_path / "a.parquet"
    if form == "feature":
        features = datasets.Features({column: datasets.Image(), "label": datasets.Value("int64")})
        rows = {column: [{"bytes": cell, "path": None} for cell in cells], "label": [2, 0, 1]}
        datasets.Dataset.from_dict(rows, features=features).to_parquet(path)
    else:
        structs = cells if form == "bytes" else [{"bytes": cell, "path": None} for cell in cells]
        parquet(path, **{column: structs, "label": [2, 0, 1]})
    source = open_source(str(path), interface=classifier, preprocess="raw")
    wanted = np.stack(pictures).transpose(0, 3, 1, 2)
    np.testing.assert_array_equal(gathered(source, "pixels"), wanted)
    assert [int(batch.labels[0]) for batch in source.batches()] == [2, 0, 1]
    described = source.describe()
    assert described["columns"] == {"pixels": column} and described["preprocess"]["divisor"] == 1


def test_images_by_path_lie_beside_the_table(tmp_path, classifier, pictures):
    (tmp_path / "one.png").write_bytes(encoded(pictures[0]))
    path = jsonl(tmp_path / "a.jsonl", [{"image": {"path": "one.png"}}, {"image": {"path": "no"}}])
    source = open_source(path, interface=classifier, preprocess="raw", samples=1)
    np.testing.assert_array_equal(gathered(source, "pixels")[0], pictures[0].transpose(2, 0, 1))
    with pytest.raises(SourceError, match="No such file") as caught:
        list(open_source(path, interface=classifier, preprocess="raw").batches())
    assert caught.value.source == f"{path}[1]" and caught.value.fix


def test_images_need_preprocessing(tmp_path, classifier, pictures):
    path = parquet(tmp_path / "a.parquet", image=[encoded(pictures[0])])
    with pytest.raises(OptionError, match="A column of images needs to know") as caught:
        open_source(path, interface=classifier)
    assert "imagenet" in caught.value.fix


def test_images_at_fault(tmp_path, classifier, pictures):
    good = encoded(pictures[0])
    path = parquet(tmp_path / "a.parquet", image=[good, good[:60], None])
    source = open_source(path, interface=classifier, preprocess="raw")
    with pytest.raises(SourceError) as damaged:
        list(source.batches())
    assert damaged.value.source == f"{path}[1]" and damaged.value.fix
    path = parquet(tmp_path / "b.parquet", image=[good, None])
    source = open_source(path, interface=classifier, preprocess="raw")
    with pytest.raises(SampleError, match="found no value, wanted an image") as missing:
        list(source.batches())
    assert missing.value.sample == f"{path}[1]" and "fill the cell" in missing.value.fix


def test_a_damaged_image_that_the_library_decodes(tmp_path, classifier, pictures):
    import datasets

    cells = [{"bytes": data, "path": None} for data in (encoded(pictures[0]), b"no image")]
    features = datasets.Features({"image": datasets.Image()})
    path = tmp_path / "a.parquet"
    datasets.Dataset.from_dict({"image": cells}, features=features).to_parquet(path)
    source = open_source(str(path), interface=classifier, preprocess="raw")
    with pytest.raises(SourceError, match="UnidentifiedImageError") as caught:
        list(source.batches())
    assert caught.value.source == f"{path}[1]"


def test_two_columns_of_images(tmp_path, classifier, pictures):
    cells = [encoded(picture) for picture in pictures]
    path = parquet(tmp_path / "a.parquet", left=cells, right=cells)
    with pytest.raises(
        SourceError, match="More than one column holds images: 'left', 'right'"
    ) as e:
        open_source(path, interface=classifier, preprocess="raw")
    assert e.value.source == path and "'pixels'" in e.value.fix


def test_images_for_a_model_with_two_inputs(tmp_path, interface, pictures):
    model = interface(("image", FLOAT, ("N", 3, 8, 8)), ("y", FLOAT, ("N",)))
    path = parquet(tmp_path / "a.parquet", image=[encoded(pictures[0])], y=[1.0])
    with pytest.raises(SourceError, match="2 inputs, a column of images fills one"):
        open_source(path, interface=model, preprocess="raw")


# The hub


class Hub:
    """Stands for ``datasets.load_dataset``: remembers how it was called."""

    def __init__(self, answer: Any) -> None:
        self.answer, self.calls = answer, []

    def __call__(self, **arguments: Any) -> Any:
        self.calls.append(arguments)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], Hub]:
    def build(answer: Any) -> Hub:
        import datasets

        double = Hub(answer)
        monkeypatch.setattr(datasets, "load_dataset", double)
        return double

    return build


@pytest.mark.parametrize(
    ("spec", "arguments"),
    [
        ("hf:mnist#test", {"path": "mnist", "split": "test"}),
        ("hf:a-b/c.d_e#train", {"path": "a-b/c.d_e", "split": "train"}),
        ("hf:a/b:plain text#test", {"path": "a/b", "name": "plain text", "split": "test"}),
        ("hf:a/b@v1.0#test", {"path": "a/b", "revision": "v1.0", "split": "test"}),
        (
            "hf:a/b:en@refs/pr/1#test",
            {"path": "a/b", "name": "en", "revision": "refs/pr/1", "split": "test"},
        ),
    ],
)
def test_what_the_hub_is_asked_for(hub, vectors, spec, arguments):
    rows = [{"x": [1.0, 2.0, 3.0], "label": 4}, {"x": [4.0, 5.0, 6.0], "label": 5}]
    called = hub(rows)
    source = open_source(spec, interface=vectors)
    assert gathered(source).tolist() == [[1, 2, 3], [4, 5, 6]]
    assert called.calls and all(call == {**arguments, "streaming": True} for call in called.calls)
    described = source.describe()
    assert (described["kind"], described["source"]) == ("hf", spec)
    assert described["dataset"] == arguments and described["labeled"]


@pytest.mark.parametrize(
    "spec", ["hf:", "hf:mnist", "hf:#test", "hf:a/b/c#test", "hf:a/b#", "hf:a:b:c#d", "hf:../a#b"]
)
def test_malformed_names(vectors, spec):
    with pytest.raises(SourceError, match="not of the form hf:NAME") as caught:
        open_source(spec, interface=vectors)
    assert caught.value.source == spec and "hf:user/name#test" in caught.value.fix


def test_a_local_folder_is_not_taken_for_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mnist").mkdir()
    with pytest.raises(SourceError, match="There is a local 'mnist'") as caught:
        hub_table("hf:mnist#test")
    assert caught.value.source == "hf:mnist#test" and "another folder" in caught.value.fix


def test_errors_of_the_hub(hub, vectors):
    import datasets
    import huggingface_hub

    for error in (
        datasets.exceptions.DatasetNotFoundError("Dataset 'a/b' doesn't exist\non the Hub"),
        datasets.exceptions.DatasetGenerationError("An error occurred"),
        huggingface_hub.errors.EntryNotFoundError("no such entry"),
        ConnectionError("Couldn't reach 'a/b' on the Hub"),
        ValueError("Bad split: test. Available splits: ['train']"),
        ImportError("To support decoding audio data, please install 'torchcodec'."),
    ):
        hub(error)
        with pytest.raises(SourceError) as caught:
            open_source("hf:a/b#test", interface=vectors)
        text = " ".join(str(error).split())
        assert caught.value.what.endswith(f"{type(error).__name__}: {text}")
        assert caught.value.source == "hf:a/b#test" and "split" in caught.value.fix


def test_errors_while_streaming(hub, vectors):
    class Broken:
        def __iter__(self):
            yield {"x": [1, 2, 3]}
            raise TypeError("Couldn't cast array of type string to int64")

    hub(Broken())
    source = open_source("hf:a/b#test", interface=vectors)
    with pytest.raises(SourceError, match="TypeError: Couldn't cast") as caught:
        list(source.batches())
    assert caught.value.source == "hf:a/b#test[1]"


def test_errors_of_our_own_are_not_taken_for_the_library(hub, vectors, monkeypatch):
    hub([{"x": [1, 2, 3]}])

    def broken(*_: Any) -> None:
        raise LookupError("a defect")

    monkeypatch.setattr(columns, "sample_array", broken)
    with pytest.raises(LookupError, match="a defect"):
        open_source("hf:a/b#test", interface=vectors)


def test_a_csv_file_may_be_left_before_its_end(tmp_path):
    """The library leaves the file to the collector of cycles; that must not fail a later test."""
    (tmp_path / "a.csv").write_text("a\n" + "1\n" * 30_000)
    next(file_table(tmp_path / "a.csv").rows())
    gc.collect()
