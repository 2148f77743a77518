from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import ClassVar, Literal, Self

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper
from pydantic import Field

from slimctl.core import registry
from slimctl.core.contract import Context, Effect, Pass, PassReport, Skipped
from slimctl.core.target import Target


class Tidy(Pass):
    name: ClassVar[str] = "tidy"
    summary: ClassVar[str] = "Changes nothing"
    effect: ClassVar[Effect] = Effect.EXACT

    def apply(self, model: ir.Model, context: Context) -> PassReport:
        return PassReport(skipped=(Skipped("gemm", "nothing to tidy"),))


class Shrink(Pass):
    """Rounds the weights to a grid."""

    name: ClassVar[str] = "shrink"
    summary: ClassVar[str] = "Rounds weights"
    effect: ClassVar[Effect] = Effect.APPROXIMATE
    needs_data: ClassVar[bool] = True
    not_after: ClassVar[frozenset[str]] = frozenset({"shrink"})

    grid: float | None = Field(None, gt=0, le=10, description="Distance of the values.")
    mode: Literal["near", "down"] = Field("near", description="Where to.")
    tidy: bool = Field(True, description="Run tidy first.")

    def resolve(self, target: Target) -> Self:
        return self if self.grid is not None else self.model_copy(update={"grid": 0.01})

    def expand(self) -> tuple[Pass, ...]:
        alone = self.model_copy(update={"tidy": False})
        return (Tidy(), alone, Repair()) if self.tidy else (self,)

    def apply(self, model: ir.Model, context: Context) -> PassReport:
        assert self.grid is not None
        for value in model.graph.initializers.values():
            tensor = value.const_value
            assert tensor is not None
            rounded = (np.rint(tensor.numpy() / self.grid) * self.grid).astype(np.float32)
            value.const_value = ir.Tensor(rounded, name=value.name)
        return PassReport(changed={"weights": len(model.graph.initializers)})


class Repair(Pass):
    name: ClassVar[str] = "repair"
    summary: ClassVar[str] = "Changes nothing"
    effect: ClassVar[Effect] = Effect.APPROXIMATE
    after: ClassVar[frozenset[str]] = frozenset({"shrink"})

    def apply(self, model: ir.Model, context: Context) -> PassReport:
        return PassReport()


@pytest.fixture(autouse=True)
def known_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three passes that recipes of these tests can name."""
    module = ModuleType("passes_of_recipe_tests")
    for kind in (Tidy, Shrink, Repair):
        setattr(module, kind.__name__, kind)
        entry = registry.Entry(f"{module.__name__}:{kind.__name__}", kind.summary)
        monkeypatch.setitem(registry.BUILT_IN, kind.name, entry)
    monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with model.onnx (x [N,4] -> scores [N,3]), calib.npz and val.npz with labels."""
    random = np.random.default_rng(0)
    weights = random.standard_normal((4, 3)).astype(np.float32)
    graph = helper.make_graph(
        [helper.make_node("Gemm", ["x", "w"], ["scores"], name="gemm")],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 4])],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["N", 3])],
        [numpy_helper.from_array(weights, "w")],
    )
    opsets = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), tmp_path / "model.onnx")
    for name, count in (("calib", 8), ("val", 20)):
        x = random.standard_normal((count, 4)).astype(np.float32)
        np.savez(tmp_path / f"{name}.npz", x=x, labels=np.argmax(x @ weights, axis=1))
    return tmp_path


@pytest.fixture
def write_recipe(folder: Path) -> Callable[[str], Path]:
    """Writes recipe.yaml beside the model."""

    def write(text: str) -> Path:
        path = folder / "recipe.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write
