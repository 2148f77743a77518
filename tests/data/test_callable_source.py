from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from slimctl.core.errors import SampleError, SourceError
from slimctl.data.sources import open_source

FLOAT = ir.DataType.FLOAT


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Writes a module into the working directory; it is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    before = set(sys.modules)

    def write(text: str, name: str = "calib_module") -> str:
        Path(f"{name}.py").write_text("import numpy as np\n" + text)
        return name

    yield write
    for name in set(sys.modules) - before:
        del sys.modules[name]


@pytest.fixture
def model(interface):
    return interface(("x", FLOAT, ("N", 4)))


GOOD = """
def samples():
    for size in (2, 3, 1):
        yield {"x": np.full((size, 4), size, np.float32)}

def labeled():
    for batch in samples():
        yield batch, np.zeros(len(batch["x"]), np.int64)

class Data:
    @staticmethod
    def stored():
        return [{"x": np.ones((1, 4), np.float32)}]
"""


def test_a_generator_in_the_working_directory(module, model):
    name = module(GOOD)
    source = open_source(f"{name}:samples", interface=model)
    for _ in range(2):  # called anew for every pass
        assert [batch.feeds["x"][0, 0] for batch in source.batches()] == [2, 3, 1]
    assert not source.labeled
    assert source.sample_count is None
    assert source.describe()["samples"] == 6


def test_labels(module, model):
    source = open_source(f"{module(GOOD)}:labeled", interface=model)
    assert source.labeled
    assert sum(len(batch.labels) for batch in source.batches()) == 6


def test_labels_that_are_arrays(module, model):
    """Rows of objects, one per sample, cut with the batch."""
    name = module("""
def rows():
    yield {"x": np.ones((3, 4), np.float32)}, np.arange(30).reshape(3, 2, 5)

def lists():
    yield {"x": np.ones((2, 4), np.float32)}, [[1, 2], [3, -1]]
""")
    batches = open_source(f"{name}:rows", interface=model, batch_size=2).batches()
    assert [batch.labels.tolist() for batch in batches] == [
        np.arange(20).reshape(2, 2, 5).tolist(),
        np.arange(20, 30).reshape(1, 2, 5).tolist(),
    ]
    (batch,) = open_source(f"{name}:lists", interface=model).batches()
    assert batch.labels.tolist() == [[1, 2], [3, -1]]


def test_labels_of_different_lengths(module, model):
    name = module("""
def rows():
    yield {"x": np.ones((2, 4), np.float32)}, [[1, 2], [3]]
""")
    with pytest.raises(SampleError, match="rows of different lengths") as caught:
        open_source(f"{name}:rows", interface=model)
    assert caught.value.sample == f"{name}:rows[0]"
    assert "-1" in caught.value.fix


def test_a_list_from_a_static_method(module, model):
    assert len(list(open_source(f"{module(GOOD)}:Data.stored", interface=model).batches())) == 1


def test_a_path_to_a_file(module, model, tmp_path):
    module(GOOD, "elsewhere")
    source = open_source(f"{tmp_path}/elsewhere.py:samples", interface=model, samples=3)
    assert [batch.size for batch in source.batches()] == [2, 1]


def test_the_module_may_import_its_neighbor_late(module, model):
    module("VALUE = np.ones((1, 4), np.float32)\n", "neighbor_module")
    name = module("def samples():\n    import neighbor_module\n"
                  "    yield {'x': neighbor_module.VALUE}\n")  # fmt: skip
    assert len(list(open_source(f"{name}:samples", interface=model).batches())) == 1


def test_error_in_the_users_code_is_located(module, model):
    name = module("def samples():\n    yield {'x': np.ones((1, 4), np.float32)}\n    1 / 0\n")
    source = open_source(f"{name}:samples", interface=model)
    with pytest.raises(SourceError) as caught:
        list(source.batches())
    assert "calib_module.py:4 in samples: ZeroDivisionError" in str(caught.value)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_error_deep_inside_a_library_points_at_the_last_line(module, model):
    name = module("def samples():\n    yield {'x': np.zeros((2, 3)) @ np.zeros((2, 3))}\n")
    with pytest.raises(SourceError, match=r"calib_module.py:3 in samples: ValueError"):
        open_source(f"{name}:samples", interface=model)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("raise RuntimeError('no data today')\n", "calib_module.py:2 .*no data today"),
        ("def samples(:\n", "calib_module.py:2: SyntaxError"),
        ("import does_not_exist_anywhere\n", "No module named 'does_not_exist_anywhere'"),
    ],
)
def test_error_while_importing(module, model, text, expected):
    with pytest.raises(SourceError, match=expected):
        open_source(f"{module(text)}:samples", interface=model)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("samples = 3\n", "is a int, not a function"),
        ("def other(): pass\n", "has no 'samples'"),
        ("def samples():\n    yield np.ones((1, 4))\n", "yielded ndarray"),
        ("def samples():\n    return 5\n", "TypeError"),
        ("def samples():\n    return []\n", "The source is empty"),
        ("def samples(count):\n    return []\n", "TypeError.*count"),
    ],
)
def test_functions_that_do_not_do(module, model, text, expected):
    with pytest.raises(SourceError, match=expected):
        open_source(f"{module(text)}:samples", interface=model)


def test_what_it_yields_is_checked(module, model):
    name = module(
        "def samples():\n"
        "    yield {'x': np.ones((1, 4), np.float32)}\n"
        "    yield {'x': np.ones((1, 5), np.float32)}\n"
    )
    source = open_source(f"{name}:samples", interface=model)
    with pytest.raises(SampleError) as caught:
        list(source.batches())
    assert caught.value.sample == "calib_module:samples[1]"


def test_a_function_that_yields_only_once(module, model):
    name = module("stream = iter([{'x': np.ones((1, 4), np.float32)}])\n"
                  "def samples():\n    return stream\n")  # fmt: skip
    source = open_source(f"{name}:samples", interface=model)
    with pytest.raises(SourceError, match="empty"):
        list(source.batches())


@pytest.mark.parametrize(
    "spec", ["csv:data", "data.parquet", "x.txt", "not there", "missing:f", ""]
)
def test_unknown_kinds_list_the_valid_ones(module, model, spec):
    with pytest.raises(SourceError) as caught:
        open_source(spec, interface=model)
    assert "module:function" in caught.value.fix and "random" in caught.value.fix


def test_misspelled_path_is_recognized(tmp_path, model):
    np.savez(tmp_path / "calib.npz", x=np.ones((1, 4), np.float32))
    with pytest.raises(SourceError, match=r"calib\.npz"):
        open_source(str(tmp_path / "calb.npz"), interface=model)


def test_a_file_of_another_kind(tmp_path, model):
    (tmp_path / "data.tsv").write_text("1,2,3\n")
    with pytest.raises(SourceError, match="No kind of data source") as caught:
        open_source(str(tmp_path / "data.tsv"), interface=model)
    assert "valid kinds" in caught.value.fix
