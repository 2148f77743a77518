"""Real exports of small networks, and what must not be exported or opened."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

from slimctl.core.errors import OptionError, OutputError, SlimctlError, SourceError
from slimctl.core.errors import UnsupportedModelError as Unsupported
from slimctl.training.import_inputs import parse_inputs

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402 - behind the skip

from slimctl.training import import_export, import_parity, import_source  # noqa: E402
from slimctl.training.importing import Imported, Request, import_network  # noqa: E402

NETWORKS = """
import torch
from torch import nn


class Image(nn.Module):
    def __init__(self, classes=4):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(8, classes)

    def forward(self, x):
        print("not for the terminal")
        x = torch.relu(self.norm(self.conv(x)))
        return self.head(self.drop(x.mean((2, 3))))


class Speech(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(5, 7, 2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(14, 3)

    def forward(self, x):
        y, (h, c) = self.lstm(x)
        return self.head(y), h


class Text(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(20, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, tokens, scale=None, shift=None):
        x = self.table(tokens)
        x = x if shift is None else x + shift
        return {"logits": self.head(x), "pooled": x.mean(1)}


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(20, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

    def forward(self, tokens):
        return self.layer(self.table(tokens))


class Noise(nn.Module):
    def forward(self, x):
        return x + torch.rand_like(x)


class Counter(nn.Module):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return x * self.calls


class Frozen(nn.Module):
    def forward(self, x):
        return x.reshape(-1)[: int(x.shape[0]) * 2].reshape(int(x.shape[0]), 2) * 2


class Cut(nn.Module):  # tracing takes one branch, whatever the input
    def forward(self, x):
        return x * 2 if float(x.sum()) > 0 else x * 3


class OneSize(nn.Module):
    def forward(self, x):
        return x + torch.ones(2, 4)


class Words(nn.Module):
    def forward(self, x):
        return x * 2, "words"


seeded = torch.manual_seed(0)
image = Image().eval()


def large():
    return Image(7)


def nothing():
    return 5


def broken():
    raise KeyError("no such layer")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with networks in a file."""
    (tmp_path / "nets.py").write_text(NETWORKS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def imported(source: str, *inputs: str, **settings: object) -> Imported:
    request = Request(source, parse_inputs(inputs), **settings)
    return import_network(request, Path("out.onnx"), force=False)


def written() -> onnx.ModelProto:
    model = onnx.load("out.onnx")
    onnx.checker.check_model(model, full_check=True)
    return model


def shapes(values) -> dict[str, list[object]]:
    return {
        value.name: [d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim]
        for value in values
    }


def weight_names(model: onnx.ModelProto) -> set[str]:
    return {entry.name for entry in model.graph.initializer}


def assert_nothing_written(folder: Path) -> None:
    assert not [path.name for path in folder.iterdir() if "onnx" in path.name]
    assert not list(folder.glob(".slimctl-*"))


IMAGE = "x:Nx3x8x8"


class TestNetworks:
    def test_convolutions_with_a_dynamic_batch(self, folder: Path, capfd) -> None:
        found = imported("nets.py:Image", IMAGE, dynamo=False)
        model = written()
        assert found.passed
        assert shapes(model.graph.input) == {"x": ["N", 3, 8, 8]}
        assert shapes(model.graph.output) == {"output": ["N", 4]}
        assert model.opset_import[0].version == import_export.DEFAULT_OPSET
        assert found.size_bytes == Path("out.onnx").stat().st_size
        assert capfd.readouterr() == ("", "")

    def test_weights_are_called_as_in_the_state_dict(self, folder: Path) -> None:
        found = imported("nets.py:Image", IMAGE, dynamo=False)
        wanted = {"conv.weight", "conv.bias", "head.weight", "head.bias"}
        assert wanted <= weight_names(written())
        assert (found.named, found.renamed) == (3, 1)  # conv.bias comes from the normalization

    def test_it_is_checked_at_other_sizes(self, folder: Path) -> None:
        found = imported("nets.py:Image", "x:Nx3xH=8xW=8", dynamo=False)
        sizes = [tuple(check.sizes.values()) for check in found.checks]
        assert sizes == [*[(2, 8, 8)] * 3, (4, 16, 16), (1, 4, 4)]
        assert all(0 <= check.largest() < 1e-5 for check in found.checks)

    def test_recurrent_with_two_dynamic_axes(self, folder: Path) -> None:
        found = imported(
            "nets.py:Speech", "x:NxTx5", output_names=["logits", "state"], dynamo=False
        )
        model = written()
        assert found.passed
        assert list(shapes(model.graph.output)) == ["logits", "state"]
        assert shapes(model.graph.output)["logits"] == ["N", "T", 3]
        assert "head.weight" in weight_names(model)  # the transpose of it
        # The exporter does not know the size in the middle; it was seen.
        assert shapes(model.graph.output)["state"] == [4, "N", 7]
        assert found.notes == []

    def test_tokens_and_a_parameter_left_out(self, folder: Path) -> None:
        found = imported(
            "nets.py:Text", "shift:8", "tokens:NxT:int64", output_names=[], dynamo=False
        )
        model = written()
        assert found.passed
        assert shapes(model.graph.input) == {"tokens": ["N", "T"], "shift": [8]}
        assert model.graph.input[0].type.tensor_type.elem_type == onnx.TensorProto.INT64
        assert shapes(model.graph.output) == {"logits": ["N", "T", 3], "pooled": ["N", 8]}

    @pytest.mark.parametrize("source", ["nets.py:image", "nets.py:large", "nets.py:Image"])
    def test_an_object_a_function_or_a_class(self, source: str, folder: Path) -> None:
        assert imported(source, "picture:1x3x8x8", dynamo=False).passed
        assert list(shapes(written().graph.input)) == ["picture"]

    @pytest.mark.parametrize("opset", [13, 20])
    def test_the_operator_set(self, opset: int, folder: Path) -> None:
        imported("nets.py:Image", IMAGE, opset=opset, dynamo=False)
        assert written().opset_import[0].version == opset

    def test_the_same_bytes_again(self, folder: Path) -> None:
        imported("nets.py:image", IMAGE, dynamo=False)
        first = Path("out.onnx").read_bytes()
        Path("out.onnx").unlink()
        imported("nets.py:image", IMAGE, dynamo=False)
        assert Path("out.onnx").read_bytes() == first

    def test_the_data_given_are_compared_too(self, folder: Path) -> None:
        np.savez("x.npz", x=np.random.default_rng(0).normal(size=(3, 3, 8, 8)).astype(np.float32))
        found = imported("nets.py:Image", IMAGE, data="x.npz", dynamo=False)
        given = [check for check in found.checks if check.inputs.startswith("given")]
        assert [check.sizes for check in given] == [{"N": 1}] * 3

    def test_data_that_tell_graph_and_network_apart(self, folder: Path) -> None:
        np.savez("x.npz", x=-np.ones((1, 4), np.float32))
        found = imported("nets.py:Cut", "x:1x4", seed=1, tolerance=10, data="x.npz", dynamo=False)
        assert found.passed  # by a tolerance that takes anything
        strict = max(check.largest() for check in found.checks)
        assert strict == pytest.approx(1 / 3, rel=1e-3) or strict == pytest.approx(0.5, rel=1e-3)
        assert any("tracing fixed a value" in note and "nets.py" in note for note in found.notes)


@pytest.fixture
def onnxscript() -> None:
    pytest.importorskip("onnxscript")


@pytest.mark.usefixtures("onnxscript")
class TestTorchExport:
    def test_what_tracing_cannot_export(self, folder: Path) -> None:
        found = imported("nets.py:Transformer", "tokens:NxT:int64", dynamo=True)
        model = written()
        assert found.passed
        assert shapes(model.graph.output) == {"output": ["N", "T", 8]}
        # The transpose of it stands in the graph; torch.export calls it val_88 or so.
        assert {"table.weight", "layer.linear1.weight"} <= weight_names(model)
        assert str(folder).encode() not in Path("out.onnx").read_bytes()
        assert b"def forward" not in Path("out.onnx").read_bytes()

    def test_sizes_of_the_example_that_it_leaves_behind(self, folder: Path) -> None:
        # torch.export 2.13 states [N, 3, 3]: the steps of the example.
        assert imported("nets.py:Speech", "x:NxTx5", dynamo=True).passed
        assert shapes(written().graph.output)["output_0"] == ["N", "T", 3]

    def test_an_exported_program(self, folder: Path, capfd) -> None:
        save_program(folder / "net.pt2")
        found = imported("net.pt2", "x:Nx3", trust=True)
        assert found.passed
        assert found.kind == "exported program"
        assert shapes(written().graph.input) == {"x": ["N", 3]}
        assert shapes(written().graph.output) == {"output": ["N", 2]}
        assert capfd.readouterr() == ("", "")

    def test_an_axis_that_the_program_fixed(self, folder: Path) -> None:
        save_program(folder / "net.pt2", dynamic=False)
        with pytest.raises(Unsupported, match="Axis 0 of 'x' is 2"):
            imported("net.pt2", "x:Nx3", trust=True)
        assert_nothing_written(folder)


class TestParity:
    @pytest.mark.parametrize("source", ["nets.py:Noise", "nets.py:Counter"])
    def test_outputs_that_differ_between_calls(self, source: str, folder: Path) -> None:
        with pytest.raises(Unsupported, match="different outputs for the same inputs"):
            imported(source, "x:1x4", dynamo=False)
        assert_nothing_written(folder)

    def test_a_size_that_tracing_fixed(self, folder: Path) -> None:
        found = imported("nets.py:Frozen", "x:Nx4", dynamo=False)
        assert not found.passed
        assert found.files == []
        assert found.checks[0].largest() == 0
        assert found.checks[3].problem == "output 0 has the shape [2, 2] instead of [4, 2]"
        assert_nothing_written(folder)

    def test_a_fixed_size_is_fine_where_it_is_fixed(self, folder: Path) -> None:
        assert imported("nets.py:Frozen", "x:2x4", dynamo=False).passed

    def test_weights_that_are_slightly_off(self, folder: Path, monkeypatch) -> None:
        def spoiled(model, state) -> None:
            import onnx_ir as ir

            value = model.graph.initializers["head.weight"]
            value.const_value = ir.tensor(value.const_value.numpy() * 1.01, name=value.name)

        monkeypatch.setattr(import_export, "_name_weights", spoiled)
        found = imported("nets.py:Image", IMAGE, dynamo=False)
        assert not found.passed
        assert 1e-3 < max(check.largest() for check in found.checks) < 0.1
        assert_nothing_written(folder)

    def test_a_network_that_takes_one_size(self, folder: Path) -> None:
        with pytest.raises(Unsupported, match="takes no other size") as raised:
            imported("nets.py:OneSize", "x:2xC=4", dynamo=False)
        assert "H=64" in raised.value.fix
        assert_nothing_written(folder)

    @pytest.mark.parametrize(
        ("ours", "theirs", "expected"),
        [
            ([1.0, -4.0], [1.0, -3.0], 0.25),
            ([0.0, 0.0], [0.0, 0.5], 0.5),
            ([1.0, np.nan], [1.0, np.nan], 0.0),
            ([1.0, np.inf], [1.0, np.inf], 0.0),
            ([1.0, np.inf], [1.0, -np.inf], math.inf),
            ([1.0, 2.0], [1.0, np.nan], math.inf),
            ([], [], 0.0),
        ],
    )
    def test_the_difference(self, ours, theirs, expected: float) -> None:
        pair = np.array(ours, np.float32), np.array(theirs, np.float32)
        assert import_parity.difference(*pair) == expected

    def test_integers_must_be_equal(self) -> None:
        ours = np.array([1, 1000])
        assert import_parity.difference(ours, ours.copy()) == 0
        assert import_parity.difference(ours, np.array([1, 1001])) == math.inf


@pytest.mark.parametrize(
    ("stated", "seen", "expected"),
    [
        (["N", 3], [(2, 3), (4, 3)], ["N", 3]),
        (["N", 2], [(2, 2), (4, 4)], ["N", "N"]),  # a size of the example
        (["N", None], [(2, 7), (4, 7)], ["N", None]),  # it may still depend on values
        (["N", 3], [(2, 3), (4, 5)], ["N", None]),
        (["2*N"], [(4,), (8,)], ["2*N"]),
    ],
)
def test_what_is_stated_of_outputs_is_what_was_seen(stated, seen, expected) -> None:
    import onnx_ir as ir

    value = ir.Value(name="y", shape=ir.Shape(stated))
    model = ir.Model(ir.Graph([], [value], nodes=[]), ir_version=10)
    sizes = [{"N": 2}, {"N": 4}]
    changed = import_export.correct_outputs(
        model, [(size, [shape]) for size, shape in zip(sizes, seen, strict=True)]
    )
    found = [dim if isinstance(dim, int) else dim.value for dim in value.shape.dims]
    assert (found, changed) == (expected, stated != expected)


class TestMistakes:
    @pytest.mark.parametrize(
        ("source", "inputs", "says"),
        [
            ("nets.py:Image", ["x:Nx4x8x8"], "to have 3 channels"),
            ("nets.py:Image", ["x:Nx3x8x8", "y:1"], "takes 2 positional arguments"),
            ("nets.py:Words", ["x:1x4"], "returns str where tensors are wanted"),
            ("nets.py:nothing", [IMAGE], "returned int, not a torch.nn.Module"),
            ("nets.py:broken", [IMAGE], "KeyError: 'no such layer'"),
            ("nets.py:Nowhere", [IMAGE], "has no 'Nowhere'"),
            ("nowhere:Image", [IMAGE], "no module 'nowhere'"),
            ("none.pt2", [IMAGE], "no such file"),
            ("nets.py", [IMAGE], "not one that torch writes"),
        ],
    )
    def test_are_named(self, source: str, inputs: list[str], says: str, folder: Path) -> None:
        with pytest.raises(SlimctlError, match=says) as raised:
            imported(source, *inputs, dynamo=False)
        assert raised.value.exit_code == 2
        assert raised.value.fix
        assert_nothing_written(folder)

    @pytest.mark.parametrize(
        ("settings", "says"),
        [
            ({"output_names": ["a", "b"]}, "gives 1 outputs, 2 names"),
            ({"output_names": ["x"]}, "'x' is taken"),
            ({"opset": 21, "dynamo": False}, "Tracing writes no operator set 21"),
            ({"data": "none.npz"}, "none.npz"),
        ],
    )
    def test_options_that_do_not_fit(self, settings, says: str, folder: Path) -> None:
        with pytest.raises(SlimctlError, match=says):
            imported("nets.py:Image", IMAGE, **{"dynamo": False, **settings})
        assert_nothing_written(folder)

    def test_an_output_that_exists(self, folder: Path) -> None:
        Path("out.onnx").write_bytes(b"precious")
        with pytest.raises(OutputError, match="exists already"):
            imported("nets.py:Image", IMAGE, dynamo=False)
        assert Path("out.onnx").read_bytes() == b"precious"

    def test_what_tracing_refuses_names_the_other_way(self, folder: Path) -> None:
        with pytest.raises(Unsupported, match="cannot export the network") as raised:
            imported("nets.py:Transformer", "tokens:NxT:int64", dynamo=False)
        assert "--dynamo" in raised.value.fix

    def test_torch_export_without_onnxscript(self, folder: Path, monkeypatch) -> None:
        monkeypatch.setattr(import_export, "find_spec", lambda name: None)
        with pytest.raises(SlimctlError, match="needs onnxscript") as raised:
            imported("nets.py:Image", IMAGE, dynamo=True)
        assert raised.value.fix == "pip install onnxscript"
        assert imported("nets.py:Image", IMAGE).exporter == "TorchScript trace"

    def test_torch_export_has_an_oldest_operator_set(self, folder: Path, monkeypatch) -> None:
        monkeypatch.setattr(import_export, "find_spec", lambda name: True)
        with pytest.raises(OptionError, match="writes no operator set 17"):
            imported("nets.py:Image", IMAGE, opset=17)


class TestWeights:
    def test_are_those_of_the_file(self, folder: Path) -> None:
        network = import_source.load_network("nets.py:Image", weights=None, trust=False).exported
        nn.init.constant_(network.head.bias, 5.0)
        torch.save({"state_dict": network.state_dict(), "epoch": 3}, "w.pth")
        assert imported("nets.py:Image", IMAGE, weights=Path("w.pth"), dynamo=False).passed
        biases = [e for e in written().graph.initializer if e.name == "head.bias"]
        assert onnx.numpy_helper.to_array(biases[0]).tolist() == [5.0] * 4

    def test_of_another_network_are_named(self, folder: Path) -> None:
        state = import_source.load_network("nets.py:Image", weights=None, trust=False).state
        changed = {k: v for k, v in state.items() if k != "norm.bias"}
        changed |= {"head.weight": torch.zeros(9, 8), "extra": torch.zeros(1)}
        torch.save(changed, "w.pth")
        with pytest.raises(SourceError) as raised:
            imported("nets.py:Image", IMAGE, weights=Path("w.pth"), dynamo=False)
        assert raised.value.what.endswith(
            "the file lacks norm.bias; it has unknown extra; it has other shapes for head.weight"
            " [9, 8] instead of [4, 8]"
        )
        assert_nothing_written(folder)

    def test_alone_are_no_network(self, folder: Path) -> None:
        torch.save(nn.Linear(3, 2).state_dict(), "w.pth")
        with pytest.raises(SourceError, match="state dict") as raised:
            imported("w.pth", "x:1x3")
        assert "module:function --weights w.pth" in raised.value.fix

    def test_need_a_network_of_the_user(self, folder: Path) -> None:
        save_script(Path("net.pt"), nn.Linear(3, 2))
        with pytest.raises(OptionError, match="has its weights with it"):
            imported("net.pt", "x:1x3", weights=Path("w.pth"), trust=True)

    def test_cannot_be_a_program(self, folder: Path) -> None:
        torch.save(nn.Linear(3, 2), "net.pth")
        with pytest.raises(SourceError, match="no state dict but a pickled module"):
            imported("nets.py:Image", IMAGE, weights=Path("net.pth"), dynamo=False)

    def test_that_are_cut_off(self, folder: Path) -> None:
        torch.save(nn.Linear(3, 2).state_dict(), "w.pth")
        Path("w.pth").write_bytes(Path("w.pth").read_bytes()[:-100])
        with pytest.raises(SourceError):
            imported("w.pth", "x:1x3", trust=True)


class _Canary:
    """Runs a command when it is unpickled."""

    def __reduce__(self):
        return os.mkdir, ("ran",)


def pickled(path: Path, value: object) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    path.write_bytes(stream.getvalue())
    return stream.getvalue()


class _Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 2)

    def forward(self, x):
        return self.head(x)


class _Saving(_Linear):
    def forward(self, x):
        torch.save(x, "ran")
        return self.head(x)


def save_program(path: Path, *, dynamic: bool = True) -> None:
    shapes = ({0: torch.export.Dim("batch")},) if dynamic else None
    with import_export.quiet():
        program = torch.export.export(_Linear().eval(), (torch.zeros(2, 3),), dynamic_shapes=shapes)
        torch.export.save(program, path)


def save_script(path: Path, network: nn.Module) -> None:
    with import_export.quiet():  # it is deprecated, and people have such files
        torch.jit.script(network).save(str(path))


def rewritten(path: Path, ending: str, change: Callable[[bytes], bytes]) -> None:
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, change(data) if name.endswith(ending) else data)


def pickle_that_runs(path: Path) -> None:
    pickled(path, _Canary())


def old_pickle_that_runs(path: Path) -> None:
    torch.save(_Canary(), path, _use_new_zipfile_serialization=False)


def program_with_a_pickle(path: Path) -> None:
    save_program(path)
    data = pickled(path.with_suffix(".inner"), _Canary())
    path.with_suffix(".inner").unlink()
    rewritten(path, "sample_inputs/model.pt", lambda _: data)


def program_with_an_expression(path: Path) -> None:
    save_program(path)

    def evil(data: bytes) -> bytes:
        def walk(node):
            if isinstance(node, dict):
                return {
                    key: "__import__('os').mkdir('ran')" if key == "expr_str" else walk(value)
                    for key, value in node.items()
                }
            return [walk(item) for item in node] if isinstance(node, list) else node

        return json.dumps(walk(json.loads(data))).encode()

    rewritten(path, "models/model.json", evil)


def script_that_saves(path: Path) -> None:
    save_script(path, _Saving())


class TestTrust:
    """Each of these files runs something when it is trusted, and nothing when it is not."""

    @pytest.mark.parametrize(
        "make",
        [
            pickle_that_runs,
            old_pickle_that_runs,
            program_with_a_pickle,
            program_with_an_expression,
            script_that_saves,
        ],
    )
    def test_nothing_runs_without_it(self, make, folder: Path) -> None:
        make(folder / "net.pt")
        with pytest.raises(SourceError, match="holds a program") as raised:
            imported("net.pt", "x:Nx3")
        assert "add --trust" in raised.value.fix
        assert "\n" not in raised.value.fix
        assert not Path("ran").exists()
        # The canary is alive: it sings when it is let out, and what holds it is no network.
        with contextlib.suppress(SourceError), import_export.quiet():
            network = import_source.load_network("net.pt", weights=None, trust=True)
            network.run({"x": np.zeros((1, 3), np.float32)})
        assert Path("ran").exists()

    def test_a_pickle_is_no_state_dict_for_weights_either(self, folder: Path) -> None:
        pickle_that_runs(folder / "w.pth")
        with pytest.raises(SourceError, match="no state dict"):
            imported("nets.py:Image", IMAGE, weights=Path("w.pth"), trust=True, dynamo=False)
        assert not Path("ran").exists()

    def test_a_pickled_module(self, folder: Path) -> None:
        torch.save(nn.Sequential(nn.Linear(3, 2), nn.ReLU()), "net.pth")
        found = imported("net.pth", "x:Nx3", trust=True, dynamo=False)
        assert found.passed
        assert {"0.weight", "0.bias"} <= weight_names(written())

    @pytest.mark.parametrize("make", [torch.jit.script, None])
    def test_torchscript(self, make, folder: Path) -> None:
        network = _Linear()  # in train mode: eval is ours to set
        with import_export.quiet():
            script = make(network) if make else torch.jit.trace(network, torch.zeros(2, 3))
        script.save("net.bin")
        found = imported("net.bin", "x:Nx3", trust=True)
        assert (found.kind, found.exporter) == ("TorchScript", "TorchScript trace")
        assert shapes(written().graph.input) == {"x": ["N", 3]}
        assert {"head.weight", "head.bias"} <= weight_names(written())

    def test_torchscript_cannot_go_through_torch_export(self, folder: Path) -> None:
        save_script(Path("net.pt"), _Linear())
        with pytest.raises(OptionError, match="only be traced"):
            imported("net.pt", "x:Nx3", trust=True, dynamo=True)


class TestInputs:
    def test_are_read(self) -> None:
        found = parse_inputs(["tokens:NxT=16:int64", "mask:NxT:bool", "scale:1"])
        assert [(i.name, i.shape, i.dtype.name) for i in found.inputs] == [
            ("tokens", ("N", "T"), "int64"),
            ("mask", ("N", "T"), "bool"),
            ("scale", (1,), "float32"),
        ]
        assert found.sizes == {"N": 2, "T": 16}

    def test_a_later_size_counts_for_all(self) -> None:
        assert parse_inputs(["a:NxT", "b:NxT=9"]).sizes == {"N": 2, "T": 9}

    def test_dynamic_axes_have_different_sizes(self) -> None:
        assert parse_inputs(["a:AxBxC"]).sizes == {"A": 2, "B": 3, "C": 4}

    @pytest.mark.parametrize(
        ("texts", "says"),
        [
            ([], "No input"),
            (["x"], "'x' is no input"),
            (["x:"], "no input"),
            ([":1x2"], "no input"),
            (["x:1x-2"], "'-2' in"),
            (["x:1x"], "'' in"),
            (["x:0x2"], "size 0"),
            (["x:N=0x2"], "size 0"),
            (["x:1x2:float"], "'float' is no element type"),
            (["x:1", "x:2"], "given twice"),
            (["x:N=2", "y:N=3"], "the sizes 2 and 3"),
        ],
    )
    def test_of_another_form_are_named(self, texts: list[str], says: str) -> None:
        with pytest.raises(OptionError, match=says) as raised:
            parse_inputs(texts)
        assert raised.value.fix
