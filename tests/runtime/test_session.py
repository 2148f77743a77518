"""What holds while a model runs."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper
from threadpoolctl import threadpool_info, threadpool_limits

from slimctl.core.errors import ModelExecutionError
from slimctl.graph.load import load_model
from slimctl.runtime.session import Runtime


@pytest.fixture
def runtime(tmp_path) -> Runtime:
    """``y = x x``"""
    kinds = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["N", "N"]) for n in ("x", "y")]
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "x"], ["y"], "product")], "g", kinds[:1], kinds[1:]
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    path = tmp_path / "model.onnx"
    path.write_bytes(proto.SerializeToString())
    return Runtime(load_model(path))


def threads() -> set[int]:
    """Threads of each BLAS that is loaded."""
    return {one["num_threads"] for one in threadpool_info() if one["user_api"] == "blas"}


@pytest.mark.skipif(not threads(), reason="numpy's BLAS has no threads that could be counted")
def test_blas_has_one_thread_while_a_model_runs_and_as_many_as_before_afterwards(
    runtime: Runtime,
) -> None:
    seen = []

    def probe(step, name, value):
        seen.append(threads())
        return value

    with threadpool_limits(limits=2, user_api="blas"):
        assert threads() == {2}
        runtime.run({"x": np.ones((2, 2), np.float32)}, probe=probe)
        assert threads() == {2}
        with pytest.raises(ModelExecutionError):
            runtime.run({"x": np.ones((2, 3), np.float32)})
        assert threads() == {2}
    assert seen == [{1}]
