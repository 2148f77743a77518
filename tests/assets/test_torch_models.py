"""Real models in torch: the outputs of onnxruntime, and a gradient for everything that may go."""

# ruff: noqa: E402 # the check for torch comes before what needs it
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

torch = pytest.importorskip("torch", reason="torch is an extra")

from benchmarks.minilm import WORDS, load_safetensors, minilm
from benchmarks.pruning_models import SUBJECTS, Feeds, difference, tokens
from benchmarks.workload import NETWORKS
from slimctl.core.errors import UnsupportedModelError
from slimctl.graph.channels import analyze, group_units
from slimctl.graph.edit import add_initializer, all_nodes
from slimctl.graph.load import load_model
from slimctl.graph.session import Level, open_session, run, tapped
from slimctl.graph.shapes import infer_shapes
from slimctl.passes._first_order import unit_effects
from slimctl.passes.fuse import Fuse
from slimctl.runtime.session import Runtime
from slimctl.training.graph import TorchGraph
from slimctl.training.module import TrainableGraph

MODELS = (
    *("orientation", "ocr-rec", "ocr-det", "ocr-cls", "ocr-rec-v6", "ocr-det-v6"),
    *("captcha-rec", "captcha-det", "nsnet2", "basic-pitch"),
)
CLOSE = 1e-4
"""Of the largest value: a few hundred layers in single precision."""

_WORD_COUNT = 500
_SATURATING = ("Sigmoid", "Softmax")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tests run side by side."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def compare(model: ir.Model, feeds: Sequence[Feeds]) -> None:
    """Outputs, or what goes into a Sigmoid or Softmax there: onnxruntime's, and our runtime's."""
    names = [_telling(value) for value in model.graph.outputs]
    shown = tapped(model, names, only=True)
    session, runtime = open_session(shown, level=Level.DISABLED, threads=1), Runtime(shown)
    graph = TorchGraph(model)
    found = [
        {name: tensor.detach().numpy() for name, tensor in graph.run(feed, names).items()}
        for feed in feeds
    ]
    assert difference(found, [run(session, feed) for feed in feeds]) <= CLOSE
    assert difference(found[:1], [runtime.run(feeds[0])]) <= CLOSE


def _telling(value: ir.Value) -> str:
    node = value.producer()
    source = node.inputs[0] if node is not None and node.op_type in _SATURATING else value
    return (source and source.name) or ""


@pytest.mark.parametrize("name", MODELS)
def test_outputs_are_those_of_onnxruntime(name: str, asset: Callable[[str], Path]) -> None:
    compare(load_model(asset(name)), SUBJECTS[name].feeds(np.random.default_rng(0)))


@pytest.mark.parametrize("name", ["efficientnet-lite0", "mobilenet-v2"])
def test_so_are_those_of_image_networks(name: str, asset: Callable[[str], Path]) -> None:
    asset(name)
    image = np.random.default_rng(0).standard_normal((1, 3, 224, 224), np.float32)
    compare(ir.from_proto(NETWORKS[name].build()), [{NETWORKS[name].input_name: image}])


def encoder(asset: Callable[[str], Path]) -> ir.Model:
    """MiniLM with a few words."""
    tensors = load_safetensors(asset("minilm"))
    return ir.from_proto(minilm({**tensors, WORDS: tensors[WORDS][:_WORD_COUNT]}))


def test_so_are_those_of_an_encoder(asset: Callable[[str], Path]) -> None:
    compare(encoder(asset), tokens(np.random.default_rng(0), _WORD_COUNT))


def test_so_are_those_of_magika(asset: Callable[[str], Path]) -> None:
    content = np.random.default_rng(0).integers(0, 256, (2, 2048)).astype(np.int32)
    compare(load_model(asset("magika")), [{"bytes": content}])


def test_branches_of_silero_are_refused_by_name(asset: Callable[[str], Path]) -> None:
    """The sampling rate is an input, and decides."""
    with pytest.raises(UnsupportedModelError, match="If of operator set 16 cannot run") as caught:
        TorchGraph(load_model(asset("silero-vad")))
    assert caught.value.where == "node 'If_0'"


def silero(path: Path, rate: int) -> ir.Model:
    """For one sampling rate and two clips: then every If of it is decided."""
    model = load_model(path)
    clips, state, given = model.graph.inputs
    model.graph.inputs.remove(given)
    fixed = add_initializer(model.graph, "rate", np.array(rate))
    for node in all_nodes(model):
        for index, value in enumerate(node.inputs):
            if value is given:
                node.replace_input_with(index, fixed)
    clips.shape, state.shape = ir.Shape([2, rate // 1000 * 36]), ir.Shape([2, 2, 128])
    return model


@pytest.mark.parametrize("rate", [8000, 16000])
def test_silero_for_one_rate_runs_and_learns(rate: int, asset: Callable[[str], Path]) -> None:
    model = silero(asset("silero-vad"), rate)
    random = np.random.default_rng(0)
    shapes = {value.name or "": value.shape.numpy() for value in model.graph.inputs if value.shape}
    feeds = {n: random.standard_normal(s).astype(np.float32) * 0.1 for n, s in shapes.items()}
    compare(model, [feeds])
    module = TrainableGraph(model)
    assert module.write_back(model) == []
    recurrent = [weight for weight in module.weights if weight.shape == (512, 128)]
    assert len(recurrent) == 2  # of the LSTM, which has its gates in another order
    module({n: torch.from_numpy(a) for n, a in feeds.items()}, ["output"])[
        "output"
    ].sum().backward()
    assert all(bool(weight.grad.abs().sum() > 0) for weight in recurrent)
    with torch.no_grad():
        for weight in module.weights:
            weight.add_(1e-3)
    assert sorted(module.write_back(model)) == sorted(module.learned)
    compare(model, [feeds])


@pytest.mark.parametrize("name", ["ocr-rec", "ocr-det-v6", "captcha-rec", "nsnet2", "minilm"])
def test_whatever_may_go_has_a_gradient(
    name: str, asset: Callable[[str], Path], plain_context: Callable[..., Any]
) -> None:
    model = encoder(asset) if name == "minilm" else load_model(asset(name))
    random = np.random.default_rng(0)
    feeds = tokens(random, _WORD_COUNT) if name == "minilm" else SUBJECTS[name].feeds(random)
    Fuse().apply(model, None)  # type: ignore[arg-type]  # the pass asks its context for nothing
    infer_shapes(model)
    channels = analyze(model)
    free = np.concatenate([g.free for g in group_units(channels) if g.layers and g.free.size])
    scores = unit_effects(model, channels, plain_context(feeds[:1], model))
    assert np.all(np.isfinite(scores[free]))
    assert np.mean(scores[free] > 0) > 0.8  # some are silent on noise
