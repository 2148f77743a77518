"""Whatever is given instead of a model: our error, naming the thing and the remedy."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import struct
import zipfile
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from slimctl.core.errors import ModelError, ModelLoadError
from slimctl.graph.load import load_model


def _model() -> onnx.ModelProto:
    proto = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["" : 13]>
    g (float[N,4] x) => (float[N,4] y) { [mm] h = MatMul(x, W) [act] y = Relu(h) }""")
    proto.graph.initializer.append(numpy_helper.from_array(np.eye(4, dtype=np.float32), "W"))
    return proto


def _refused(path: Path, message: str = "") -> ModelLoadError:
    with pytest.raises(ModelLoadError, match=message) as caught:
        load_model(path)
    error = caught.value
    assert str(path) in str(error)
    assert error.fix
    assert error.exit_code == 2
    return error


def _zip_bytes() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", b"x")
    return buffer.getvalue()


class _Bomb:
    def __reduce__(self) -> tuple[object, ...]:
        return (os.abort, ())


FILES = {
    "nothing": (b"", "is empty"),
    "text": (b"this is not a model\n", "a text file"),
    "yaml": ("name: modèle\n".encode(), "a text file"),
    "web page": (b"<!doctype html><title>404</title>", "a web page"),
    "git lfs pointer": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n",
        "a Git LFS pointer",
    ),
    "zip": (_zip_bytes(), "a zip archive; PyTorch"),
    "pickle": (pickle.dumps(_Bomb()), "a Python pickle"),
    "old checkpoint": (pickle.dumps({"w": 1}, protocol=2), "a Python pickle, such as an old PyTo"),
    "png": (b"\x89PNG\r\n\x1a\n" + bytes(64), "a PNG image"),
    "jpeg": (b"\xff\xd8\xff\xe0" + bytes(64), "a JPEG image"),
    "gzip": (gzip.compress(b"x" * 100), "a gzip archive"),
    "hdf5": (b"\x89HDF\r\n\x1a\n" + bytes(64), "Keras"),
    "tflite": (b"\x1c\0\0\0TFL3" + bytes(64), "TensorFlow Lite"),
    "ort": (b"\x1c\0\0\0ORTM" + bytes(64), "ORT format"),
    "gguf": (b"GGUF\x03\0\0\0" + bytes(64), "GGUF"),
    "safetensors": (struct.pack("<Q", 20) + b'{"w":{"dtype":"F32"}}', "safetensors"),
    "zeros": (bytes(4096), "no ONNX model"),
    "noise": (np.random.default_rng(0).bytes(4096), "no ONNX model"),
}


@pytest.mark.parametrize(("content", "message"), FILES.values(), ids=FILES)
def test_other_files(content, message, tmp_path):
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    _refused(path, message)


def test_npz(tmp_path):
    path = tmp_path / "calib.npz"
    np.savez(path, x=np.zeros(3))
    _refused(path, "a zip archive")


def test_missing_file(tmp_path):
    _refused(tmp_path / "nowhere.onnx", "no such file")


def test_folder(tmp_path):
    _refused(tmp_path, "a folder")


def test_special_file(tmp_path):
    path = tmp_path / "pipe.onnx"
    os.mkfifo(path)
    _refused(path, "not a regular file")


def test_dangling_link(tmp_path):
    path = tmp_path / "model.onnx"
    path.symlink_to("gone.onnx")
    _refused(path, "no such file")


def test_unreadable_file(tmp_path, monkeypatch):
    path = tmp_path / "model.onnx"
    path.write_bytes(_model().SerializeToString())

    def refuse(self: Path) -> bytes:  # the tests may run as root, who may read everything
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    _refused(path, "cannot be read: Permission denied")


def test_too_large_for_protobuf(tmp_path):
    path = tmp_path / "model.onnx"
    with path.open("wb") as stream:
        stream.write(b"\x08\x08")
        stream.truncate(1 << 31)  # sparse: takes no space
    _refused(path, "exceeds 2 GiB")


def test_truncated_anywhere(tmp_path):
    """Cut at every byte: refused or, where only trailing extras are missing, loaded."""
    whole = _model().SerializeToString()
    path = tmp_path / "model.onnx"
    loaded = []
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        try:
            load_model(path)
        except ModelLoadError as error:
            assert error.fix
        else:
            loaded.append(length)
    assert not loaded


def test_damaged_anywhere(tmp_path):
    """One byte flipped, everywhere: our error or a model, never anything else."""
    whole = _model().SerializeToString()
    path = tmp_path / "model.onnx"
    refused = 0
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 0xFF
        path.write_bytes(damaged)
        try:
            load_model(path)
        except ModelError:
            refused += 1
    assert refused > len(whole) // 3


def _broken(tmp_path: Path, proto: onnx.ModelProto) -> Path:
    path = tmp_path / "model.onnx"
    path.write_bytes(proto.SerializeToString())
    return path


def test_no_graph(tmp_path):
    proto = onnx.ModelProto(ir_version=8)
    _refused(_broken(tmp_path, proto), "no ONNX model")


def test_no_operators(tmp_path):
    proto = _model()
    proto.graph.ClearField("node")
    _refused(_broken(tmp_path, proto), "no operators")


def test_no_outputs(tmp_path):
    proto = _model()
    proto.graph.ClearField("output")
    _refused(_broken(tmp_path, proto), "no outputs")


def test_no_operator_set(tmp_path):
    proto = _model()
    proto.ClearField("opset_import")
    _refused(_broken(tmp_path, proto), "no operator set")


@pytest.mark.parametrize("version", [0, -1, 999, 1 << 40])
def test_strange_operator_set(version, tmp_path):
    proto = _model()
    proto.opset_import[0].version = version
    _refused(_broken(tmp_path, proto), f"operator set {version}")


@pytest.mark.parametrize("version", [0, 999])
def test_strange_ir_version(version, tmp_path):
    proto = _model()
    proto.ir_version = version
    _refused(_broken(tmp_path, proto), f"IR version {version}")


def test_cycle(tmp_path):
    proto = _model()
    proto.graph.node[0].input[0] = "y"
    _refused(_broken(tmp_path, proto), "cycle: .*mm.*act|cycle: .*act.*mm")


def test_cycle_through_a_branch(tmp_path):
    proto = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["" : 13]>
    g (float[4] x, bool c) => (float[4] y) {
      h = Relu(x)
      y = If (c) < then_branch = t () => (float[4] a) { a = Neg(h) },
                   else_branch = e () => (float[4] b) { b = Abs(h) } > }""")
    proto.graph.node[0].input[0] = "y"
    _refused(_broken(tmp_path, proto), "cycle")


def test_tensor_defined_twice(tmp_path):
    proto = _model()
    proto.graph.node[0].output[0] = "y"
    _refused(_broken(tmp_path, proto), "'y' is defined twice: by the MatMul node 'mm' and by the")


def test_node_overwrites_an_input(tmp_path):
    proto = _model()
    proto.graph.node[0].output[0] = "x"
    _refused(_broken(tmp_path, proto), "'x' is defined twice: by an input")


@pytest.mark.parametrize("field", ["input", "output", "initializer"])
def test_name_used_twice(field, tmp_path):
    proto = _model()
    listed = getattr(proto.graph, field)
    listed.append(listed[0])
    _refused(_broken(tmp_path, proto), f"belongs to 2 {field}s")


def test_output_that_nothing_produces(tmp_path):
    proto = _model()
    proto.graph.output[0].name = "z"
    _refused(_broken(tmp_path, proto), "Nothing produces the output 'z'")


def test_input_that_nothing_produces(tmp_path):
    proto = _model()
    proto.graph.node[1].input[0] = "lost"
    _refused(_broken(tmp_path, proto), "'lost', which the Relu node 'act' reads")


def test_node_without_operator(tmp_path):
    proto = _model()
    proto.graph.node[1].op_type = ""
    _refused(_broken(tmp_path, proto), "'act' names no operator")


def test_function_defined_twice(tmp_path):
    proto = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["" : 13, "my" : 1]>
    g (float[4] x) => (float[4] y) { y = my.F(x) }
    <domain: "my", opset_import: ["" : 13]> F (v) => (w) { w = Neg(v) }""")
    proto.functions.append(proto.functions[0])
    _refused(_broken(tmp_path, proto), "'my.F' is defined twice")


def test_deep_nesting(tmp_path):
    def field(number: int, content: bytes) -> bytes:
        size, length = len(content), b""
        while size > 0x7F:
            length += bytes([size & 0x7F | 0x80])
            size >>= 7
        return bytes([number << 3 | 2]) + length + bytes([size]) + content

    graph = b""
    for _ in range(1000):
        graph = field(1, field(5, field(6, graph)))  # graph.node.attribute.g
    path = tmp_path / "model.onnx"
    path.write_bytes(field(7, graph))
    _refused(path, "no ONNX model, or a truncated or damaged one")


@pytest.mark.parametrize("dims", [[1 << 40, 1 << 40], [5, 4], [-1], [4, -4], [0]])
def test_sizes_that_do_not_fit_the_data(dims, tmp_path):
    proto = _model()
    proto.graph.initializer[0].ClearField("dims")
    proto.graph.initializer[0].dims.extend(dims)
    _refused(_broken(tmp_path, proto), "The tensor 'W'")


@pytest.mark.parametrize(
    "tensor",
    [
        TensorProto(name="c", data_type=TensorProto.FLOAT, dims=[3], float_data=[1.0]),
        TensorProto(name="c", data_type=TensorProto.FLOAT, dims=[1 << 50]),
        TensorProto(name="c", data_type=TensorProto.FLOAT, dims=[1], int64_data=[1]),
        TensorProto(name="c", data_type=TensorProto.INT4, dims=[3], raw_data=b"x"),
        TensorProto(name="c", data_type=TensorProto.INT64, dims=[], raw_data=b"1234"),
        TensorProto(name="c", data_type=TensorProto.STRING, dims=[2], string_data=[b"x"]),
        TensorProto(name="c", data_type=TensorProto.COMPLEX64, dims=[2], float_data=[1, 2]),
    ],
    ids=["typed", "absent", "wrong field", "packed", "scalar", "strings", "complex"],
)
@pytest.mark.parametrize("place", ["initializer", "attribute"])
def test_data_that_do_not_fit_the_sizes(tensor, place, tmp_path):
    proto = _model()
    if place == "initializer":
        proto.graph.initializer.append(tensor)
    else:
        node = helper.make_node("Constant", [], ["c"], value=tensor)
        proto.graph.node.append(node)
    _refused(_broken(tmp_path, proto), "'c' of shape .* needs .* but holds")


@pytest.mark.parametrize(
    ("indices", "dims"),
    [([0, 99], [4]), ([-1, 2], [4]), ([0], [4]), ([0, 1], [1 << 40]), ([0, 1], [-4])],
)
def test_sparse_tensor_that_contradicts_itself(indices, dims, tmp_path):
    proto = _model()
    sparse = proto.graph.sparse_initializer.add(dims=dims)
    sparse.values.CopyFrom(helper.make_tensor("s", TensorProto.FLOAT, [2], [1.0, 2.0]))
    sparse.indices.CopyFrom(helper.make_tensor("i", TensorProto.INT64, [len(indices)], indices))
    _refused(_broken(tmp_path, proto), "sparse tensor 's' contradicts itself")


def _external(tmp_path: Path, location: str, **entries: object) -> Path:
    proto = _model()
    tensor = proto.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in {"location": location, **entries}.items():
        tensor.external_data.add(key=key, value=str(value))
    folder = tmp_path / "folder"
    folder.mkdir(exist_ok=True)
    return _broken(folder, proto)


def test_external_data_missing(tmp_path):
    error = _refused(_external(tmp_path, "gone.data"), "'W' lies in 'gone.data', but there is no")
    assert "one folder" in error.fix


@pytest.mark.parametrize(
    "location",
    [
        "../secret",
        "a/../../secret",
        "..\\secret",
        "/etc/passwd",
        "\\\\server\\share",
        "C:\\secret",
        "C:secret",
        "",
        "a\0b",
    ],
)
def test_external_data_outside_the_folder(location, tmp_path):
    (tmp_path / "secret").write_bytes(bytes(64))
    _refused(_external(tmp_path, location), "not a plain path inside the model's folder")


def test_external_data_behind_a_link_to_outside(tmp_path):
    (tmp_path / "secret").write_bytes(bytes(64))
    path = _external(tmp_path, "weights")
    (path.parent / "weights").symlink_to("../secret")
    _refused(path, "a link to .*secret' outside the model's folder")


def test_external_data_behind_a_linked_folder(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "secret").write_bytes(bytes(64))
    path = _external(tmp_path, "sub/secret")
    (path.parent / "sub").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    _refused(path, "outside the model's folder")


def test_external_data_in_a_folder_or_special_file(tmp_path):
    path = _external(tmp_path, "weights")
    (path.parent / "weights").mkdir()
    _refused(path, "no such file")
    (path.parent / "weights").rmdir()
    os.mkfifo(path.parent / "weights")
    _refused(path, "no such file")


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({}, "up to byte 64, but that file has 63 bytes"),
        ({"offset": 1}, "up to byte 65, but that file has 63 bytes"),
        ({"offset": 1 << 62}, "but that file has 63 bytes"),
        ({"offset": -4}, "offset -4"),
        ({"length": 12}, "length 12, but its shape needs 64 bytes"),
        ({"length": 1 << 62}, "its shape needs 64 bytes"),
        ({"length": -1}, "its shape needs 64 bytes"),
        ({"offset": "one"}, "no numeric place"),
    ],
)
def test_external_data_that_do_not_fit(entries, message, tmp_path):
    path = _external(tmp_path, "weights", **entries)
    (path.parent / "weights").write_bytes(bytes(63))
    _refused(path, message)


def test_external_data_that_end_after_the_file(tmp_path):
    path = _external(tmp_path, "weights", offset=4, length=64)
    (path.parent / "weights").write_bytes(bytes(67))
    _refused(path, "up to byte 68, but that file has 67 bytes")
    (path.parent / "weights").write_bytes(bytes(68))
    load_model(path)


def test_external_data_of_impossible_size(tmp_path):
    path = _external(tmp_path, "weights")
    proto = onnx.load(path, load_external_data=False)
    proto.graph.initializer[0].ClearField("dims")
    proto.graph.initializer[0].dims.extend([1 << 31, 1 << 31, 1 << 31])
    (path.parent / "weights").write_bytes(bytes(64))
    _refused(_broken(path.parent, proto), "but that file has 64 bytes")


def test_unreadable_external_data(tmp_path, monkeypatch):
    path = _external(tmp_path, "weights")
    (path.parent / "weights").write_bytes(bytes(64))
    original = Path.open

    def refuse(self: Path, *arguments: object, **named: object) -> object:
        if self.name == "weights":
            raise PermissionError(13, "Permission denied", str(self))
        return original(self, *arguments, **named)

    monkeypatch.setattr(Path, "open", refuse)
    _refused(path, "'weights' cannot be read: Permission denied")


def test_empty_tensor_needs_no_bytes(tmp_path):
    path = _external(tmp_path, "weights")
    proto = onnx.load(path, load_external_data=False)
    proto.graph.initializer[0].dims[0] = 0
    (path.parent / "weights").write_bytes(b"")
    model = load_model(_broken(path.parent, proto))
    assert model.graph.initializers["W"].const_value.shape == (0, 4)
