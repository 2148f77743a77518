from __future__ import annotations

from pathlib import Path

import numpy as np

from benchmarks.speech import save_samples


def test_samples_of_one_axis_are_one_file(tmp_path: Path) -> None:
    samples = [{"x": np.full((1, 2), n, np.float32)} for n in (1, 2, 3)]
    path = save_samples(samples, tmp_path / "data")
    assert path == tmp_path / "data.npz"
    with np.load(path) as archive:
        np.testing.assert_array_equal(archive["x"], [[1, 1], [2, 2], [3, 3]])


def test_samples_of_other_axes_are_a_folder(tmp_path: Path) -> None:
    one = {"x": np.ones((1, 4)), "state": np.ones((2, 1, 3)), "rate": np.array(16000)}
    path = save_samples([one, one], tmp_path / "data")
    assert [file.name for file in sorted(path.iterdir())] == ["0000.npz", "0001.npz"]
    with np.load(path / "0001.npz") as archive:
        assert archive["rate"] == 16000
        assert archive["state"].shape == (2, 1, 3)
