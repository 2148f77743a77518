"""Operators that pick, place or sample by index: channels pass along the other axes."""

from __future__ import annotations

import numpy as np
import pytest

from tests.graph.channels.conftest import AssertExact
from tests.graph.channels.table import Case, images, ints, tokens

SECOND = "[m0] r = MatMul(x, W0)"
_PLACES = np.stack([np.repeat(np.arange(2), 7), np.tile(np.arange(7)[::-1], 2)], -1)

TOKENS = [
    tokens(
        "GatherElements along positions",
        "u = GatherElements<axis = 1>(t, rows)",
        rows=np.random.default_rng(0).integers(0, 7, (2, 7, 8)),
        length="7",
    ),
    tokens(
        "GatherElements, the same for all channels",
        "e = Expand(rows, size) u = GatherElements<axis = 1>(t, e)",
        rows=np.random.default_rng(0).integers(0, 7, (2, 7, 1)),
        size=ints(1, 1, 8),
        length="7",
    ),
    tokens(
        "GatherElements, repeated",
        "e = Tile(rows, size) u = GatherElements<axis = 1>(t, e)",
        rows=np.random.default_rng(0).integers(0, 7, (2, 7, 1)),
        size=ints(1, 1, 8),
        length="7",
    ),
    tokens(
        "GatherElements, repeated for two",
        "e = Expand(rows, size) v = GatherElements<axis = 1>(t, e) "
        "[m0] r = MatMul(x, W0) w = GatherElements<axis = 1>(r, e) u = Add(v, w)",
        {},
        "by indices that do not change",
        rows=np.random.default_rng(0).integers(0, 7, (2, 7, 1)),
        size=ints(1, 1, 8),
        W0=(6, 8),
        length="7",
    ),
    tokens(
        "GatherElements of channels",
        "u = GatherElements<axis = -1>(t, rows)",
        {},
        "it is indexed along this axis",
        rows=np.random.default_rng(0).integers(0, 8, (2, 7, 8)),
        length="7",
    ),
    tokens(
        "GatherND",
        "v = GatherND(t, places) u = Unsqueeze(v, nil)",
        places=_PLACES,
        nil=ints(0),
        length="7",
    ),
    tokens(
        "GatherND in each batch",
        "u = GatherND<batch_dims = 1>(t, places)",
        places=np.random.default_rng(0).integers(0, 7, (2, 4, 1)),
        length="7",
    ),
    tokens(
        "GatherND of channels in each batch",
        "v = Transpose<perm = [0, 2, 1]>(t) w = GatherND<batch_dims = 1>(v, places) "
        "u = Transpose<perm = [0, 2, 1]>(w)",
        {},
        "it is indexed along this axis",
        places=np.random.default_rng(0).integers(0, 8, (2, 8, 1)),
        length="7",
    ),
    tokens(
        "GatherND of channels",
        "v = GatherND(t, places) u = Unsqueeze(v, nil)",
        {},
        "it is indexed along this axis",
        places=np.concatenate([_PLACES[:8], np.arange(8)[:, None]], -1),
        nil=ints(0, 1),
        length="7",
    ),
    tokens(
        "ScatterND",
        f"{SECOND} f = Reshape(r, flat) u = ScatterND(t, places, f)",
        {"m0": 8, "m1": 8},
        places=_PLACES,
        flat=ints(-1, 8),
        W0=(6, 8),
        length="7",
    ),
    tokens(
        "ScatterND of a constant",
        "u = ScatterND(t, places, f)",
        places=_PLACES[:3],
        f=(3, 8),
        length="7",
    ),
    tokens(
        "ScatterND into a constant",
        "f = Reshape(t, flat) u = ScatterND(data, places, f)",
        places=_PLACES,
        flat=ints(-1, 8),
        data=(2, 7, 8),
        length="7",
    ),
    tokens(
        "ScatterND that adds",
        'u = ScatterND<reduction = "add">(t, places, f)',
        places=_PLACES[:3],
        f=(3, 8),
        length="7",
        opset=18,
    ),
    tokens(
        "ScatterND of what does not change",
        "z = Slice(x, nil, one, nil) g = Slice(z, nil, one, one) v = Squeeze(g, both) "
        "w = Concat<axis = -1>(v, v) f = Slice(w, nil, eight, nil) p = Unsqueeze(f, nil) "
        "u = ScatterND(t, places, p)",
        {},
        "by indices that do not change",
        places=_PLACES[:1],
        nil=ints(0),
        one=ints(1),
        eight=ints(8),
        both=ints(0, 1),
        length="7",
    ),
    tokens(
        "ScatterND of channels",
        "u = ScatterND(t, places, f)",
        {},
        "it is indexed along this axis",
        places=np.concatenate([_PLACES[:8], np.arange(8)[:, None]], -1),
        f=(8,),
        length="7",
    ),
    tokens(
        "ScatterElements",
        f"{SECOND} u = ScatterElements<axis = 1>(t, rows, r)",
        {"m0": 8, "m1": 8},
        rows=np.argsort(np.random.default_rng(0).random((2, 7, 8)), axis=1),
        W0=(6, 8),
        length="7",
    ),
    tokens(
        "ScatterElements of one for all channels",
        "p = ReduceMean<axes = [2]>(x) e = Expand(p, size) "
        "u = ScatterElements<axis = 1>(t, rows, e)",
        {},
        "a channel is not zero",
        rows=np.argsort(np.random.default_rng(0).random((2, 7, 8)), axis=1),
        size=ints(1, 1, 8),
        length="7",
    ),
    tokens(
        "ScatterElements of channels",
        f"{SECOND} u = ScatterElements<axis = -1>(t, rows, r)",
        {},
        "it is indexed along this axis",
        rows=np.argsort(np.random.default_rng(0).random((2, 7, 8)), axis=-1),
        W0=(6, 8),
        length="7",
    ),
    tokens("TopK of positions", "u, i = TopK<axis = 1>(t, three)", three=ints(3)),
    tokens(
        "TopK, the places used",
        "v, i = TopK<axis = 1>(t, three) [f] u = Cast<to = 1>(i)",
        {},
        "a channel is not zero",
        three=ints(3),
    ),
    tokens("TopK of channels", "u, i = TopK(t, eight)", {}, "compared", eight=ints(8)),
    tokens(
        "Compress",
        "[k] u = Compress<axis = -1>(t, mask)",
        mask=np.arange(8) > 2,
        reads=5,
    ),
    tokens(
        "Compress of positions",
        "u = Compress<axis = 1>(t, mask)",
        mask=np.array([True, False, True]),
    ),
    tokens(
        "Compress by a short mask",
        "u = Compress<axis = -1>(t, mask)",
        {},
        "which of them are picked",
        mask=np.array([True, False, True]),
        reads=2,
    ),
    tokens(
        "Compress of everything",
        "v = Compress(t, mask) u = Unsqueeze(v, both)",
        {},
        "it is flattened",
        mask=np.arange(8) < 8,
        both=ints(0, 1),
    ),
    tokens("ReverseSequence", "u = ReverseSequence<batch_axis = 0, time_axis = 1>(t, all)",
           all=ints(3, 7), length="7"),
    tokens("Trilu", "v = Transpose<perm = [2, 0, 1]>(t) w = Trilu(v) "
           "u = Transpose<perm = [1, 2, 0]>(w)"),
    tokens("Trilu of channels", "u = Trilu(t)", {}, "it is indexed along this axis"),
]  # fmt: skip


def check(case: Case, assert_exact: AssertExact, feeds: dict[str, np.ndarray]) -> None:
    found = assert_exact(case.proto(), feeds=feeds)
    layers = {node.name for group in found.groups for node in group.layers}
    free = {name: count for name in layers if (count := found.free_of(name))}
    assert free == dict(case.free), found.reasons
    if case.reason:
        assert any(case.reason in reason for reason in found.reasons), found.reasons


@pytest.mark.parametrize("case", TOKENS, ids=str)
def test_channels_pass_along_the_other_axes(case: Case, assert_exact: AssertExact) -> None:
    x = np.random.default_rng(0).standard_normal((2, 7, 6)).astype(np.float32)
    check(case, assert_exact, {"x": x})


_GRID = np.random.default_rng(0).uniform(-1.2, 1.2, (2, 4, 5, 2)).astype(np.float32)
_ROIS = np.array([[0, 0, 5, 5], [2, 1, 8, 8]], np.float32)
IMAGES = [
    images("GridSample", "u = GridSample(t, grid)", grid=_GRID),
    images("GridSample, computed places", "m = ReduceMean<axes = [1, 2, 3]>(x) "
           "g = Add(grid, m) u = GridSample(t, g)", grid=_GRID),
    images("RoiAlign", "u = RoiAlign<output_height = 3, output_width = 3>(t, rois, batch)",
           rois=_ROIS, batch=ints(1, 0)),
    images("MaxRoiPool", "u = MaxRoiPool<pooled_shape = [3, 3]>(t, rois)",
           rois=np.concatenate([np.array([[1], [0]], np.float32), _ROIS], 1)),
    images("GridSample of a constant", "s = Sigmoid(t) [f] u = GridSample(s, grid)", 0,
           "a channel is not zero", grid=_GRID),
    images("Col2Im", "f = Reshape(t, flat) [k] u = Col2Im(f, size, block)", {"c1": 2},
           flat=ints(0, 0, 81), size=ints(10, 10), block=ints(2, 2), reads=2, opset=18,
           height="9", width="9"),
    images("DeformConv", "[co] o = Conv(x, O) [d] u = DeformConv(t, W, o, B)",
           {"c1": 8, "d": 6}, "d: it says where to sample",
           O=(2, 3, 1, 1), W=(6, 8, 1, 1), B=(6,), reads=6, opset=19),
    images("DeformConv in groups", "[co] o = Conv(x, O) [d] u = DeformConv<group = 2>(t, W, o, B)",
           {"d": 3}, "d: it is sampled in groups",
           O=(2, 3, 1, 1), W=(6, 4, 1, 1), B=(6,), reads=6, opset=19),
]  # fmt: skip


@pytest.mark.parametrize("case", IMAGES, ids=str)
def test_channels_are_sampled_alike(case: Case, assert_exact: AssertExact) -> None:
    x = np.random.default_rng(0).standard_normal((2, 3, 9, 9)).astype(np.float32)
    check(case, assert_exact, {"x": x})
