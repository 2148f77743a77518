"""The model that is learned from: it runs once per sample where that fits on disk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

torch = pytest.importorskip("torch")

from slimctl.training import teacher as teacher_module  # noqa: E402
from slimctl.training.samples import Part  # noqa: E402
from slimctl.training.teacher import Teacher  # noqa: E402

TEXT = """
<ir_version: 8, opset_import: ["": 17]>
g (float[N,3] x) => (float[N,3] y)
{{
    double = Add(x, x)
    y = {operator}(double)
}}
"""


def model(*, batch: str = "N", kind: str = "float", operator: str = "Relu") -> ir.Model:
    text = TEXT.format(operator=operator).replace("float[N", f"{kind}[{batch}")
    return ir.from_proto(onnx.parser.parse_model(text))


X = np.random.default_rng(0).standard_normal((10, 3)).astype(np.float32)


def part(*rows: int) -> Part:
    chosen = np.array(rows)
    return Part({"image": torch.from_numpy(X[chosen])}, None, chosen, len(rows))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("SLIMCTL_CACHE", str(tmp_path))
    yield tmp_path
    found = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert found == [], "nothing is left behind"


def opened(keep_bytes: int, of: ir.Model | None = None) -> Teacher:
    return Teacher(of or model(), ["y", "double"], {"image": "x"}, threads=1, keep_bytes=keep_bytes)


def check(teacher: Teacher, *rows: int) -> None:
    found = teacher(part(*rows))
    assert set(found) == {"y", "double"}
    expected = 2 * X[list(rows)]
    assert np.array_equal(found["double"].numpy(), expected)
    assert np.array_equal(found["y"].numpy(), np.maximum(expected, 0))


def test_each_sample_is_computed_once() -> None:
    with opened(10_000) as teacher:
        check(teacher, 0, 1, 2, 3)
        check(teacher, 3, 0, 1, 2)
        assert (teacher.asked, teacher.computed) == (8, 4)
        check(teacher, 5, 1, 4, 0)  # two of them are new
        check(teacher, 4, 5)
        assert (teacher.asked, teacher.computed) == (14, 6)
        assert "6 of the 14 samples" in teacher.saved()


def test_what_is_kept_has_a_bound() -> None:
    with opened(3 * 24) as teacher:  # of six floats a sample
        for _ in range(2):
            check(teacher, 0, 1, 2, 3, 4)
        assert teacher.computed == 5 + 2


def test_nothing_is_kept_when_that_is_wished(cache: Path) -> None:
    with opened(0) as teacher:
        for _ in range(2):
            check(teacher, 0, 1)
        assert teacher.computed == 4 and not (cache / "training").exists()
        assert "disk" not in teacher.saved()


def test_a_full_disk_costs_time_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        def seek(self, place: int) -> None:
            raise OSError(28, "No space left on device")

        def close(self) -> None:
            pass

    monkeypatch.setattr(teacher_module.tempfile, "TemporaryFile", lambda **_: Full())
    with opened(10_000) as teacher:
        for _ in range(2):
            check(teacher, 0, 1)
        assert teacher.computed == 4


@pytest.mark.parametrize("keep", [0, 10_000])
def test_a_teacher_of_fixed_batches_gets_what_it_takes(keep: int) -> None:
    with opened(keep, model(batch="4")) as teacher:
        check(teacher, 0, 1, 2, 3)
        check(teacher, 9, 8, 7, 6, 5, 0)
        check(teacher, 1)


def test_a_teacher_in_half_precision_reads_half_precision() -> None:
    with opened(10_000, model(kind="float16")) as teacher:
        found = teacher(part(0, 1))
    assert found["y"].dtype == torch.float32
    assert np.allclose(found["double"].numpy(), 2 * X[:2], rtol=1e-3)


def test_samples_of_other_shapes_are_computed_again() -> None:
    with opened(10_000, model(batch="N").clone()) as teacher:
        check(teacher, 0, 1)
        whole = Part({"image": torch.from_numpy(X[:6])}, None, np.arange(3), 3)
        assert len(teacher(whole)["y"]) == 6, "rows of the inputs that are no samples"
