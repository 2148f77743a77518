"""Real models in the built-in runtime and in onnxruntime: floats, integers, optimized graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import onnx
import pytest

from benchmarks import networks
from benchmarks.minilm import WORDS, load_safetensors, minilm
from benchmarks.pruning_models import tokens
from benchmarks.pth import load_tensors
from benchmarks.samples import SAMPLES, Feeds
from slimctl.evaluate.replay import Replay, replay
from slimctl.graph._normalize import normalize
from slimctl.graph.load import load_model
from slimctl.graph.session import Level, open_session, optimized, run
from slimctl.passes.quantize import Quantize
from slimctl.recipe.run import run_passes
from slimctl.recipe.schema import DataSpec
from slimctl.runtime.device import EXACT, host_device
from slimctl.runtime.session import Arithmetic, Runtime

CALIBRATION, COMPARED = 2, 2
TOLERANCE = 1e-4
"""Of the largest output: the rounding of some fifty layers in float32."""
LOOSER = {
    "basic-pitch": 5e-4,  # the logarithm of a spectrum whose filters, of 256 taps, cancel out
}
IDENTICAL = 0.999
ORDER = 2e-5
"""Relative difference of one node's floats by the order of its sums, of 256 terms that cancel."""

STATIC = {"calibration": "minmax", "min_sqnr": 0.0, "bias_correction": False}
"""The defaults place Q/DQ pairs; the search for thresholds, which takes minutes, only decides what
numbers they hold."""

_DYNAMIC = {"mode": "dynamic", "min_sqnr": 0.0}
WAYS: dict[str, dict[str, dict[str, object]]] = {
    "efficientnet-lite0": {"static": STATIC},
    "mobilenet-v2": {"static": STATIC},
    "ocr-rec": {"static": STATIC},
    "ocr-det": {"static": STATIC},
    "orientation": {"static": STATIC, "qoperator": {**STATIC, "format": "qoperator"}},
    "minilm": {"static": STATIC, "dynamic": _DYNAMIC},
    "silero-vad": {"static": STATIC, "dynamic": _DYNAMIC},
    "basic-pitch": {"static": STATIC},
    "magika": {"static": STATIC},
}
_WORDS = 2000


def _small_minilm(path: Path) -> onnx.ModelProto:
    """MiniLM of its first words: half of its weights are the table of all of them."""
    tensors = load_safetensors(path)
    return minilm({**tensors, WORDS: tensors[WORDS][:_WORDS]})


_BUILT = {
    "efficientnet-lite0": lambda path: networks.efficientnet_lite0(load_tensors(path)),
    "mobilenet-v2": lambda path: networks.mobilenet_v2(load_tensors(path)),
    "minilm": _small_minilm,
}


@dataclass
class Case:
    """A model, samples, and what it is quantized to.

    Attributes:
        name: Of the model.
        path: Its file.
        samples: To compare on.
        folder: Where results lie.
    """

    name: str
    path: Path
    samples: list[Feeds]
    folder: Path

    def quantized(self, way: str) -> Path:
        """The file of a result, made once."""
        output = self.folder / f"{way}.onnx"
        if not output.exists():
            run_passes(
                self.path,
                [Quantize.model_validate(WAYS[self.name][way])],
                output=output,
                calibration=DataSpec(source=str(self.folder / "calibration")),
                threads=1,
                use_cache=False,
            )
        return output


def _feeds(name: str, path: Path, fonts: list[Path], seed: int) -> Iterator[Feeds]:
    if name == "minilm":
        yield from tokens(np.random.default_rng(seed), _WORDS)
    elif name == "ocr-rec":
        for line in SAMPLES[name](path, fonts, seed):
            yield {"x": np.ascontiguousarray(line["x"][..., :256])}
    elif name in SAMPLES:
        yield from SAMPLES[name](path, fonts, seed)
    else:
        for page in SAMPLES["orientation"](path, fonts, seed):
            yield {"image": page["x"]}


@pytest.fixture(
    scope="module",
    # One worker per model: quantizing it is most of the work.
    params=[pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in WAYS],
)
def case(
    request: pytest.FixtureRequest,
    asset: Callable[[str], Path],
    fonts: list[Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Case:
    name, folder = request.param, tmp_path_factory.mktemp(request.param)
    path = asset(name)
    if name in _BUILT:
        onnx.save(_BUILT[name](path), folder / "float.onnx")
        path = folder / "float.onnx"
    (folder / "calibration").mkdir()
    for index, feeds in enumerate(islice(_feeds(name, path, fonts, 0), CALIBRATION)):
        np.savez(folder / "calibration" / f"{index}.npz", **feeds)
    return Case(name, path, list(islice(_feeds(name, path, fonts, 1), COMPARED)), folder)


def test_float_model(case: Case) -> None:
    model = load_model(case.path)
    ours, theirs = Runtime(model), open_session(model, level=Level.DISABLED, threads=1)
    tolerance = LOOSER.get(case.name, TOLERANCE)
    for feeds in case.samples:
        found = ours.run(feeds)
        for name, expected in run(theirs, feeds).items():
            assert found[name].dtype == expected.dtype
            bound = tolerance * np.abs(expected).max()
            np.testing.assert_allclose(found[name], expected, rtol=0, atol=bound)


def _assert_same(found: Replay, order: float = ORDER) -> None:
    """Codes are the same but at ties, floats but for the order of sums."""
    wrong = [node for node in found.nodes if node.is_codes and not node.only_ties]
    assert not wrong
    assert found.identical >= IDENTICAL
    assert found.steps <= 1
    assert not [node for node in found.nodes if node.relative > order]


@pytest.mark.parametrize("level", [Level.DISABLED, Level.ALL])
def test_quantized_model(case: Case, level: Level) -> None:
    for way in WAYS[case.name]:
        model = load_model(case.quantized(way))
        samples = case.samples if way == "static" else case.samples[:1]
        found = replay(model, samples, level=level, device=host_device())
        _assert_same(found)
        if case.name == "silero-vad":  # all of its layers are in branches: nothing is observed
            assert min(found.outputs.values()) > 60.0
        else:
            assert found.nodes or way == "dynamic"


def test_integers_compute_what_the_nodes_say(case: Case) -> None:
    """Sums of integers in the runtime beside Q/DQ nodes in float in onnxruntime."""
    model = load_model(case.quantized("static"))
    found = replay(
        model,
        case.samples[:1],
        level=Level.DISABLED,
        device=EXACT,
        arithmetic=Arithmetic.INTEGER,
    )
    _assert_same(found)
    integers = [node for node in found.nodes if node.is_codes and node.op_type != "QuantizeLinear"]
    assert integers or case.name == "silero-vad"


def test_graph_that_onnxruntime_optimized(case: Case) -> None:
    """Its fused operators, one by one where it states the types of what they make."""
    ways = [way for way in WAYS[case.name] if way != "qoperator"]
    for path in (case.path, *map(case.quantized, ways)):
        model = optimized(path)
        normalize(model)
        found = replay(model, case.samples[:1], level=Level.DISABLED, device=host_device())
        _assert_same(found, LOOSER.get(case.name, TOLERANCE))
