"""A moved tensor that a branch reads: onnxruntime must not be driven into its own bug."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

from tests.cases.siblings import build, normal

ROOT = Path(__file__).parents[2]
MOVES = {
    "Transpose": "m = Transpose(h)",
    "Reshape": "m = Reshape(h, s)",
}


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
def test_static_quantization_survives(move: str, tmp_path: Path) -> None:
    text = f"""g (float[1,4,4,4] x, bool c) => (float[K,L,M,N] y) {{
        h = Conv(x, W) {move}
        y = If (c) <
            then_branch = t () => (float[K,L,M,N] p) {{ p = Neg(m) }},
            else_branch = e () => (float[K,L,M,N] q) {{ q = Abs(m) }} >
    }}"""
    used = {"s": np.array([4, 1, 4, 4])} if "s)" in move else {}
    onnx.save(build(17, text, W=normal(4, 4, 1, 1), **used), tmp_path / "model.onnx")
    samples = np.random.default_rng(0).normal(size=(4, 1, 4, 4, 4)).astype(np.float32)
    (tmp_path / "samples").mkdir()
    for index, x in enumerate(samples):
        np.savez(tmp_path / "samples" / f"{index}.npz", x=x, c=np.array(index % 2 == 0))
    # In a process of its own: an abort would end the tests.
    files = [str(tmp_path / name) for name in ("model.onnx", "out.onnx", "samples")]
    command = [sys.executable, "-m", "slimctl", "quantize", files[0], "-o", files[1]]
    done = subprocess.run(
        [*command, "--calib", files[2]], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-500:]
