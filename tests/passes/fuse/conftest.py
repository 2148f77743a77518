"""Builds models from ONNX text, fuses them, and checks what holds for every rewrite."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import onnx
import onnx.parser
import onnx.printer
import onnx_ir as ir
import pytest

from slimctl.core.contract import PassReport
from slimctl.graph.edit import all_graphs, interface
from slimctl.graph.session import Level, open_session, run
from slimctl.passes.fuse import Fuse

Arrays = Mapping[str, np.ndarray]

_TOLERANCES = {np.dtype(np.float16): 4e-3, np.dtype(np.float32): 2e-5, np.dtype(np.float64): 1e-12}


@dataclass(frozen=True)
class Fused:
    """A model before and after."""

    before: ir.Model
    after: ir.Model
    report: PassReport

    @property
    def lines(self) -> list[str]:
        """The nodes as ONNX text, subgraphs inside their node."""
        proto = ir.to_proto(self.after)
        return [" ".join(onnx.printer.to_text(node).split()) for node in proto.graph.node]

    @property
    def op_types(self) -> list[str]:
        return [node.op_type for node in self.after.graph.all_nodes()]

    @property
    def reasons(self) -> dict[str, str]:
        return {skipped.node: skipped.reason for skipped in self.report.skipped}

    def array(self, name: str) -> np.ndarray:
        """The values of an initializer of any graph."""
        for graph in all_graphs(self.after):
            if name in graph.initializers:
                tensor = graph.initializers[name].const_value
                assert tensor is not None
                return tensor.numpy()
        raise AssertionError(f"no initializer {name}")


class FuseText(Protocol):
    def __call__(
        self, text: str, arrays: Arrays | None = None, *, run: bool = True, **options: Any
    ) -> Fused: ...


def parse(text: str, arrays: Arrays | None = None) -> ir.Model:
    """A model from ONNX text; tensors that are declared without values get random ones."""
    if not text.lstrip().startswith("<"):
        text = '<ir_version: 10, opset_import: ["" : 17]>\n' + text
    proto = onnx.parser.parse_model(text)
    rng = np.random.default_rng(7)
    _fill(proto.graph, dict(arrays or {}), rng)
    return ir.from_proto(proto)


def _fill(graph: onnx.GraphProto, arrays: dict[str, np.ndarray], rng: np.random.Generator) -> None:
    produced = {name for node in graph.node for name in node.output}
    for info in list(graph.value_info):
        if info.name in produced:
            continue
        array = arrays.get(info.name)
        if array is None:
            shape = [dim.dim_value for dim in info.type.tensor_type.shape.dim]
            dtype = onnx.helper.tensor_dtype_to_np_dtype(info.type.tensor_type.elem_type)
            array = _random(rng, shape, dtype)
        graph.initializer.append(onnx.numpy_helper.from_array(array, info.name))
        graph.value_info.remove(info)
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                _fill(attribute.g, arrays, rng)


def _random(rng: np.random.Generator, shape: list[int], dtype: np.dtype) -> np.ndarray:
    if dtype.kind == "b":
        return np.asarray(rng.integers(0, 2, shape), bool)
    if dtype.kind in "iu":
        return np.asarray(rng.integers(0, 3, shape), dtype)
    magnitude = np.asarray(rng.uniform(0.5, 1.5, shape))
    return np.asarray(magnitude * rng.choice([-1, 1], shape)).astype(dtype)


def feeds_for(model: ir.Model, seed: int = 0, size: int = 3) -> dict[str, np.ndarray]:
    """Random inputs; open sizes become ``size``."""
    rng = np.random.default_rng(seed)
    feeds = {}
    for value in model.graph.inputs:
        assert value.shape is not None and value.dtype is not None
        shape = [dim if isinstance(dim, int) and dim >= 0 else size for dim in value.shape]
        feeds[value.name or ""] = _random(rng, shape, value.dtype.numpy())
    return feeds


def assert_same(before: ir.Model, after: ir.Model, feeds: dict[str, np.ndarray]) -> None:
    """The outputs agree up to rounding, whether onnxruntime rewrites the graph or not."""
    for level in (Level.DISABLED, Level.ALL):
        wanted = run(open_session(before, level=level, threads=1), feeds)
        found = run(open_session(after, level=level, threads=1), feeds)
        for name, array in wanted.items():
            assert found[name].dtype == array.dtype and found[name].shape == array.shape
            if array.dtype.kind != "f":
                np.testing.assert_array_equal(found[name], array)
                continue
            largest = float(np.abs(array.astype(np.float64)).max(initial=1e-30))
            tolerance = _TOLERANCES[array.dtype] * largest
            np.testing.assert_allclose(
                found[name].astype(np.float64), array.astype(np.float64), rtol=0, atol=tolerance
            )


def apply_checked(model: ir.Model, *, run: bool = True, **options: Any) -> Fused:
    """Fuses a clone and checks what must hold for every model and every choice of options."""
    before, after = model, model.clone()
    report = Fuse(**options).apply(after, None)  # type: ignore[arg-type]  # the pass asks its context for nothing
    proto = ir.to_proto(after)
    onnx.checker.check_model(proto, full_check=run)
    assert interface(after) == interface(before)
    again = model.clone()
    Fuse(**options).apply(again, None)  # type: ignore[arg-type]  # as above
    assert ir.to_proto(again).SerializeToString(deterministic=True) == proto.SerializeToString(
        deterministic=True
    ), "the same model gives the same bytes"
    twice = Fuse(**options).apply(after, None)  # type: ignore[arg-type]  # as above
    assert not twice.changed, "twice equals once"
    assert twice.skipped == report.skipped
    if run:
        assert_same(before, after, feeds_for(before))
    return Fused(before, after, report)


@pytest.fixture
def fuse_text() -> FuseText:
    """Parses ONNX text, fuses, checks, and hands over both models."""

    def fuse(text: str, arrays: Arrays | None = None, *, run: bool = True, **options: Any) -> Fused:
        return apply_checked(parse(text, arrays), run=run, **options)

    return fuse


@pytest.fixture
def fuse_model() -> Callable[..., Fused]:
    """Fuses a model, with the same checks."""
    return apply_checked


@pytest.fixture
def same_outputs() -> Callable[[ir.Model, ir.Model, dict[str, np.ndarray]], None]:
    """Compares two models on given inputs."""
    return assert_same
