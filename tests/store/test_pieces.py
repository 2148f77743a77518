"""Cutting and joining: whatever is cut where, the bytes come back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import helper, numpy_helper

from slimctl.store import pieces
from slimctl.store.pieces import SMALLEST, cuts, frame, join
from slimctl.store.wire import NotProtobufError, Range, weights_inside, weights_outside
from tests.store.results import WIDTH, model, weight


def joined(data: bytes, spans: list[Range]) -> bytes:
    view = memoryview(data)
    parts = [(span.start, data[span.start : span.stop]) for span in spans]
    return b"".join(join(frame(view, spans), parts))


@st.composite
def ranges(draw: st.DrawFn, size: int) -> list[Range]:
    marks = sorted(draw(st.lists(st.integers(0, size), max_size=12)))
    pairs = zip(marks[::2], marks[1::2], strict=False)
    return [Range(*pair) for pair in pairs]


@given(st.data(), st.binary(max_size=300))
def test_what_is_cut_comes_back(data: st.DataObject, content: bytes) -> None:
    assert joined(content, data.draw(ranges(len(content)))) == content


@given(st.data())
def test_cuts_are_apart_and_of_a_useful_size(data: st.DataObject) -> None:
    size = data.draw(st.integers(0, 5000))
    marks = st.integers(-10, size + 100)
    spans = [Range(*pair) for pair in data.draw(st.lists(st.tuples(marks, marks), max_size=12))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "SMALLEST", 10)
        patch.setattr(pieces, "LARGEST", 100)
        found = pieces._tidied([span for span in spans if span.start >= 0], size)
    ends = [0, *(span.stop for span in found)]
    starts = [*(span.start for span in found), size]
    assert all(0 <= start - end <= 100 for start, end in zip(starts, ends, strict=True))
    assert all(0 < span.size <= 100 for span in found)
    content = np.random.default_rng(0).bytes(size)
    assert joined(content, found) == content


@given(st.binary(max_size=400))
def test_any_bytes_may_be_called_a_model(content: bytes) -> None:
    data = memoryview(content)
    for walk in (weights_inside, weights_outside):
        try:
            walk(data)
        except NotProtobufError:
            continue
    assert cuts({"model.onnx": data}) == {"model.onnx": []}


@given(st.data())
def test_a_damaged_model_comes_back_too(data: st.DataObject) -> None:
    content = bytearray(MODEL)
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    del content[data.draw(st.integers(0, len(content))) :]
    spans = cuts({"model.onnx": memoryview(bytes(content))})["model.onnx"]
    assert joined(bytes(content), spans) == bytes(content)


MODEL = model((1, 2, 3)).SerializeToString()


def test_each_large_weight_is_a_piece() -> None:
    spans = cuts({"model.onnx": memoryview(MODEL)})["model.onnx"]
    assert [MODEL[span.start : span.stop] for span in spans] == [
        weight(seed).tobytes() for seed in (1, 2, 3)
    ]


def test_weights_in_nodes_branches_functions_and_sparse_ones_are_found() -> None:
    def constant(seed: int) -> onnx.NodeProto:
        return helper.make_node(
            "Constant", [], [f"c{seed}"], value=numpy_helper.from_array(weight(seed))
        )

    branch = helper.make_graph([constant(11)], "branch", [], [])
    made = model((10,))
    made.graph.node.append(helper.make_node("If", ["b"], ["z"], then_branch=branch))
    made.graph.sparse_initializer.add().values.CopyFrom(numpy_helper.from_array(weight(12), "s"))
    made.functions.append(
        helper.make_function("d", "f", [], ["c13"], [constant(13)], [helper.make_opsetid("", 17)])
    )
    typed = onnx.TensorProto(data_type=onnx.TensorProto.FLOAT, dims=[WIDTH], name="typed")
    typed.float_data.extend(weight(14).tolist())
    made.graph.initializer.append(typed)
    content = made.SerializeToString()
    spans = cuts({"model.onnx": memoryview(content)})["model.onnx"]
    found = {content[span.start : span.stop] for span in spans}
    assert found == {weight(seed).tobytes() for seed in (10, 11, 12, 13, 14)}


def test_external_data_are_cut_where_the_model_says(tmp_path: Path) -> None:
    onnx.save(
        model((1, 2)),
        tmp_path / "m.onnx",
        save_as_external_data=True,
        location="m.data",
        size_threshold=16,
    )
    contents = {file.name: memoryview(file.read_bytes()) for file in tmp_path.iterdir()}
    spans = cuts(contents)
    assert spans["m.onnx"] == []
    data = contents["m.data"]
    assert [bytes(data[span.start : span.stop]) for span in spans["m.data"]] == [
        weight(seed).tobytes() for seed in (1, 2)
    ]


@pytest.mark.parametrize(
    "entries",
    [
        {"location": "m.data", "offset": "9" * 5000, "length": "9"},
        {"location": "m.data", "offset": "0", "length": str(10**18)},
        {"location": "../m.data", "offset": "0", "length": str(SMALLEST)},
        {"location": "m.data", "offset": "-5", "length": str(SMALLEST + 5)},
        {"offset": "x", "length": "y"},
    ],
)
def test_external_data_that_are_not_there(entries: dict[str, str]) -> None:
    made = model((1,))
    tensor = made.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key, value in entries.items():
        tensor.external_data.add(key=key, value=value)
    content = bytes(2 * SMALLEST)
    found = cuts({"m.onnx": memoryview(made.SerializeToString()), "m.data": memoryview(content)})
    assert joined(content, found["m.data"]) == content


def test_nothing_nests_too_deep() -> None:
    content = b""
    for _ in range(3000):  # a graph in an attribute in a node, and so on
        for field in (6, 5, 1):
            length = len(content)
            varint = bytearray()
            while length >= 128:
                varint.append(length & 127 | 128)
                length >>= 7
            content = bytes([field << 3 | 2, *varint, length]) + content
    head = bytearray()
    length = len(content)
    while length >= 128:
        head.append(length & 127 | 128)
        length >>= 7
    assert cuts({"m.onnx": memoryview(bytes([7 << 3 | 2, *head, length]) + content)})
