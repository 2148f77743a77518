from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from slimctl.core.contract import Context, Effect, Pass, PassReport
from slimctl.graph.load import load_model
from slimctl.pipeline.context import PipelineContext
from slimctl.pipeline.run import PipelineResult, run_steps
from slimctl.targets import load_target

Edit = Callable[[ir.Model, Context], Any]


def build_network(seed: int = 0, *, opset: int = 17) -> onnx.ModelProto:
    """x [N,3,8,8] -> Conv -> Relu -> GlobalAveragePool -> Flatten -> Gemm -> y [N,5]."""
    random = np.random.default_rng(seed)

    def weight(name: str, *shape: int) -> TensorProto:
        return numpy_helper.from_array(random.standard_normal(shape).astype(np.float32), name)

    graph = helper.make_graph(
        [
            helper.make_node("Conv", ["x", "w"], ["c"], name="conv", pads=[1, 1, 1, 1]),
            helper.make_node("Relu", ["c"], ["r"], name="relu"),
            helper.make_node("GlobalAveragePool", ["r"], ["p"], name="pool"),
            helper.make_node("Flatten", ["p"], ["f"], name="flatten"),
            helper.make_node("Gemm", ["f", "g", "b"], ["y"], name="gemm"),
        ],
        "network",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 3, 8, 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 5])],
        [weight("w", 8, 3, 3, 3), weight("g", 8, 5), weight("b", 5)],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


@pytest.fixture
def network(tmp_path: Path) -> Path:
    path = tmp_path / "network.onnx"
    onnx.save(build_network(), path)
    return path


@pytest.fixture
def calibration(tmp_path: Path) -> Path:
    path = tmp_path / "calib.npz"
    x = np.random.default_rng(1).standard_normal((12, 3, 8, 8)).astype(np.float32)
    labels = np.arange(12, dtype=np.int64) % 5
    np.savez(path, x=x, labels=labels)
    return path


@pytest.fixture
def make_pass() -> Callable[..., Pass]:
    """A pass that does what a function says."""

    def make(
        edit: Edit | None = None,
        *,
        name: str = "edit",
        effect: Effect = Effect.EXACT,
        changed: Mapping[str, int] | None = None,
        **attributes: Any,
    ) -> Pass:
        def apply(self: Pass, model: ir.Model, context: Context) -> PassReport:
            result = edit(model, context) if edit else None
            if isinstance(result, PassReport):
                return result
            return PassReport(changed={"edit": 1} if changed is None else changed)

        body = {
            "name": name,
            "summary": "For a test",
            "effect": effect,
            "apply": apply,
            "__module__": __name__,
            **attributes,
        }
        return type("Edited", (Pass,), body)()

    return make


@pytest.fixture
def run_chain(network: Path, tmp_path: Path) -> Callable[..., PipelineResult]:
    """Runs passes on the network, or on another model."""

    def run(*steps: Pass, model: Path = network, **settings: Any) -> PipelineResult:
        workspace = tmp_path / "work"
        workspace.mkdir(exist_ok=True)
        measure = settings.pop("measure", None)
        context = PipelineContext(load_target("cpu"), use_cache=False, threads=1, **settings)
        return run_steps(
            load_model(model),
            steps,
            context,
            source=model,
            workspace=workspace,
            measure=measure,
        )

    return run


@pytest.fixture
def set_weight() -> Callable[[ir.Model, str, np.ndarray], None]:
    """Replaces the values of an initializer in place."""

    def replace(model: ir.Model, name: str, array: np.ndarray) -> None:
        model.graph.initializers[name].const_value = ir.Tensor(array, name=name)

    return replace
