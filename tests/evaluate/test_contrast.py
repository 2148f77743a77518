"""Where the difference between two profiles comes from."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from slimctl.evaluate import profile as profile_module
from slimctl.evaluate.contrast import KindChange, contrast, in_words, kind_of
from slimctl.evaluate.profile import NodeTime, Profile, Turns, profile_in_turns
from slimctl.graph.cost import NodeCost
from slimctl.graph.session import Recording, record
from tests.cli.models import classifier

COST = NodeCost("", "", 0, 0, 0, 0, ())


def profiled(*operators: tuple[str, float]) -> Profile:
    """A profile of operators with milliseconds."""
    times = [
        NodeTime(kind, ms * 1e-3, 0.0, COST, (), ir.Node("", kind, [])) for kind, ms in operators
    ]
    total = sum(time.seconds for time in times)
    return Profile(tuple(times), 20, total, total, 0.0)


def turns(*operators: tuple[str, float], drift: float = 0.0) -> Turns:
    """The second half was slower than the first by a share."""
    halves = (
        profiled(*((kind, ms * (1 - drift / 2)) for kind, ms in operators)),
        profiled(*((kind, ms * (1 + drift / 2)) for kind, ms in operators)),
    )
    return Turns(profiled(*operators), halves)


FLOAT = (("Conv", 3.0), ("Conv", 2.0), ("Gemm", 1.0), ("Softmax", 0.5))
INTEGER = (
    *(("QuantizeLinear", 0.2), ("QLinearConv", 1.0), ("QLinearConv", 0.8)),
    *(("QGemm", 0.99), ("DequantizeLinear", 0.1), ("Softmax", 0.5)),
)


def test_the_same_work_is_compared_under_other_names() -> None:
    found = contrast(turns(*INTEGER), turns(*FLOAT))
    assert [one.kind for one in found[:2]] == ["convolutions", "conversions to and from integers"]
    convolutions, conversions = found[:2]
    assert convolutions.change == pytest.approx(-3.2e-3)
    assert convolutions.operators == {"QLinearConv": 2}
    assert convolutions.operators_against == {"Conv": 2}
    assert conversions.operators == {"QuantizeLinear": 1, "DequantizeLinear": 1}
    assert sum(one.change for one in found) == pytest.approx(
        sum(ms for _, ms in INTEGER) * 1e-3 - 6.5e-3
    )


def test_what_varies_by_itself_is_no_difference() -> None:
    steady = {one.kind: one for one in contrast(turns(*INTEGER), turns(*FLOAT))}
    drifting = {one.kind: one for one in contrast(turns(*INTEGER, drift=0.1), turns(*FLOAT))}
    assert steady["matrix products"].is_sure
    assert not drifting["matrix products"].is_sure  # 0.01 ms, of 0.099 between the halves
    assert drifting["convolutions"].is_sure
    assert not KindChange("Add", 2e-6, 1e-6, {}, {}, 0.0).is_sure  # one tick of the profiler


def test_words() -> None:
    found = contrast(turns(*INTEGER), turns(*FLOAT))
    said = in_words(("a", "b"), (3.59e-3, 6.5e-3), found)
    assert said == (
        "'a' spends 3.59 ms in kernels, 'b' 6.5: 2.91 ms less; it comes from convolutions, "
        "-3.2 ms (2 Conv became 2 QLinearConv); conversions to and from integers, +0.3 ms "
        "(1 QuantizeLinear, 1 DequantizeLinear more)"
    )
    back = in_words(("b", "a"), (6.5e-3, 3.59e-3), contrast(turns(*FLOAT), turns(*INTEGER)))
    assert "2.91 ms more" in back and "1 DequantizeLinear gone" in back
    slower = contrast(turns(("Conv", 2.0)), turns(("Conv", 1.0)))
    assert "+1 ms (1 Conv in both)" in in_words(("a", "b"), (2e-3, 1e-3), slower)
    nothing = contrast(turns(*FLOAT), turns(*FLOAT))
    assert "no kind of operators differs" in in_words(("a", "b"), (6.5e-3, 6.5e-3), nothing)


@pytest.mark.parametrize(
    ("op_type", "kind"),
    [
        ("QLinearConv", "convolutions"),
        ("MatMulNBits", "matrix products"),
        ("QLinearAdd", "Add"),
        ("ReorderInput", "changes of layout"),
        ("Add", "Add"),
    ],
)
def test_kinds(op_type: str, kind: str) -> None:
    assert kind_of(op_type) == kind


def test_models_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A B B A; the halves are those of one model, the first runs of each turn do not count."""
    onnx.save(classifier(), tmp_path / "a.onnx")
    onnx.save(classifier(), tmp_path / "b.onnx")
    order: list[str] = []

    def watched(model: Path, feeds: object, **options: object) -> Recording:
        order.append(model.stem)
        return record(model, feeds, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(profile_module, "record", watched)
    shape = onnx.load(tmp_path / "a.onnx").graph.input[0].type.tensor_type.shape
    sizes = [dim.dim_value or 1 for dim in shape.dim]
    feeds = {"image": np.zeros(sizes, np.float32)}
    found = profile_in_turns([tmp_path / "a.onnx", tmp_path / "b.onnx"], feeds, threads=1, runs=6)
    assert order == ["a", "b", "b", "a"]
    for one in found:
        assert one.whole.runs == 6
        assert [half.runs for half in one.halves] == [3, 3]
        assert len(one.whole.nodes) == len(one.halves[0].nodes) > 0
