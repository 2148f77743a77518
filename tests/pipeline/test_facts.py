"""What the manifest says about files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from slimctl.pipeline import facts


@pytest.mark.parametrize("place", range(20))
def test_a_word_is_found_wherever_blocks_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: int
) -> None:
    monkeypatch.setattr(facts, "_BLOCK_BYTES", 8)
    file = tmp_path / "file"
    file.write_bytes(b"." * place + b"location" + b"." * (20 - place))
    assert facts._mentions(file, b"location")
    file.write_bytes(b"." * place + b"locatio" + b"." * 20 + b"n")
    assert not facts._mentions(file, b"location")


def test_bytes_are_counted_by_data_type() -> None:
    values = [
        ir.Value(name=name, const_value=ir.tensor(array, name=name))
        for name, array in (
            ("a", np.zeros(3, np.float32)),
            ("b", np.zeros(5, np.float32)),
            ("c", np.zeros(7, np.int8)),
            ("d", np.zeros(0, np.int64)),
        )
    ]
    graph = ir.Graph([], [], nodes=[], initializers=values, opset_imports={"": 17})
    assert facts.dtype_bytes(ir.Model(graph, ir_version=9)) == {"float32": 32, "int8": 7}
