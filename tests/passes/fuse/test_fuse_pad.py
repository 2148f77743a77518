"""Padding folded into what pads by itself."""

from __future__ import annotations

import pytest

KERNEL = "float[4,3,3,3] w, int64[8] pads = {0,0,1,2,0,0,3,0}"


@pytest.mark.parametrize(
    ("attributes", "own"),
    [
        ("group=1", [1, 2, 3, 0]),
        ("pads=[1,1,1,1]", [2, 3, 4, 1]),
        ('auto_pad="VALID"', [1, 2, 3, 0]),
    ],
)
def test_into_conv(fuse_text, attributes, own):
    fused = fuse_text(
        f"""g (float[1,3,8,8] x) => (float[1,4,A,B] y) <{KERNEL}> {{
            [pad] p = Pad(x, pads)
            [conv] y = Conv<{attributes}>(p, w)
        }}"""
    )
    assert fused.op_types == ["Conv"]
    assert list(fused.after.graph[0].attributes.get_ints("pads")) == own
    assert fused.report.changed["Pad folded into Conv"] == 1


def test_strided_dilated_grouped_and_wide(fuse_text):
    fused = fuse_text(
        """g (float[2,4,9,9] x) => (float[2,4,A,B] y) <float[4,2,3,3] w,
            int64[8] pads = {0,0,5,4,0,0,6,7}> {
            [pad] p = Pad(x, pads)
            [conv] y = Conv<group=2, strides=[2,3], dilations=[2,1], pads=[1,0,1,0]>(p, w)
        }"""
    )
    assert fused.op_types == ["Conv"]


@pytest.mark.parametrize("rank", [1, 3])
def test_other_ranks(fuse_text, rank):
    space, kernel = ",".join("6" * rank), ",".join("3" * rank)
    amounts = ",".join(["0,0", *"1" * rank, "0,0", *"2" * rank])
    fused = fuse_text(
        f"""g (float[1,3,{space}] x) => (float[1,4,{",".join("ABC"[:rank])}] y)
            <float[4,3,{kernel}] w, int64[{4 + 2 * rank}] pads = {{{amounts}}}> {{
            [pad] p = Pad(x, pads)
            [conv] y = Conv(p, w)
        }}"""
    )
    assert fused.op_types == ["Conv"]


def test_amounts_for_some_axes(fuse_text):
    fused = fuse_text(
        """<ir_version: 10, opset_import: ["" : 18]>
        g (float[1,3,8,8] x) => (float[1,4,A,B] y) <float[4,3,3,3] w, int64[4] pads = {1,2,3,0},
            int64[2] axes = {-1, 2}> {
            [pad] p = Pad(x, pads, , axes)
            [conv] y = Conv(p, w)
        }"""
    )
    assert list(fused.after.graph[0].attributes.get_ints("pads")) == [2, 1, 0, 3]


def test_amounts_as_attribute(fuse_text):
    fused = fuse_text(
        """<ir_version: 4, opset_import: ["" : 10]>
        g (float[1,3,8,8] x) => (float[1,4,A,B] y) <float[4,3,3,3] w> {
            [pad] p = Pad<pads=[0,0,1,2,0,0,3,0]>(x)
            [conv] y = Conv(p, w)
        }"""
    )
    assert fused.op_types == ["Conv"]


@pytest.mark.parametrize(
    ("attributes", "counted"),
    [("kernel_shape=[3,3]", 1), ("kernel_shape=[3,3], count_include_pad=1, pads=[1,1,1,1]", 1)],
)
def test_into_average_pooling(fuse_text, attributes, counted):
    fused = fuse_text(
        f"""g (float[1,3,8,8] x) => (float[1,3,A,B] y) <int64[8] pads = {{0,0,1,1,0,0,1,0}}> {{
            [pad] p = Pad(x, pads)
            [pool] y = AveragePool<{attributes}>(p)
        }}"""
    )
    assert fused.op_types == ["AveragePool"]
    assert fused.after.graph[0].attributes.get_int("count_include_pad") == counted


@pytest.mark.parametrize(
    ("pad", "reader", "reason"),
    [
        ("Pad(x, pads, one)", "Conv(p, w)", "constant zero"),
        ("Pad(x, pads, fed)", "Conv(p, w)", "constant zero"),
        ('Pad<mode="reflect">(x, pads)', "Conv(p, w)", "mode 'reflect'"),
        ("Pad(x, channels)", "Conv(p, v)", "batch or channel axis"),
        ("Pad(x, crop)", "Conv(p, w)", "it crops"),
        ("Pad(x, given)", "Conv(p, w)", "not known"),
        ("Pad(x, pads)", 'Conv<auto_pad="SAME_UPPER">(p, w)', "auto_pad"),
        (
            "Pad(x, pads)",
            "AveragePool<kernel_shape=[4,4], pads=[1,1,1,1]>(p)",
            "does not count its own padding",
        ),
        ("Pad(x, pads)", "AveragePool<kernel_shape=[4,4], ceil_mode=1>(p)", "rounds its size up"),
        ("Pad(x, pads)", "AveragePool<kernel_shape=[2,2]>(p)", "no larger than the padding"),
    ],
)
def test_stays(fuse_text, pad, reader, reason):
    fused = fuse_text(
        f"""g (float[1,3,8,8] x, float fed, int64[8] given) => (float[1,A,B,C] y)
            <float[4,3,3,3] w, float[4,5,3,3] v, float one = {{1}},
            int64[8] pads = {{0,0,1,2,0,0,3,0}}, int64[8] channels = {{0,1,0,0,0,1,0,0}},
            int64[8] crop = {{0,0,-1,0,0,0,0,0}}> {{
            [pad] p = {pad}
            [reader] y = {reader}
        }}""",
        run="given" not in pad,
    )
    assert len(fused.op_types) == 2
    assert reason in fused.reasons["pad"]


def test_another_reader(fuse_text):
    fused = fuse_text(
        f"""g (float[1,3,8,8] x) => (float[1,4,A,B] y, float[1,3,C,D] z) <{KERNEL}> {{
            [pad] p = Pad(x, pads)
            [conv] y = Conv(p, w)
            [relu] z = Relu(p)
        }}"""
    )
    assert fused.op_types == ["Pad", "Conv", "Relu"]
    assert fused.reasons["pad"] == "its result is also read elsewhere"


def test_a_transposed_convolution_does_not_pad(fuse_text):
    fused = fuse_text(
        """g (float[1,3,4,4] x) => (float[1,4,A,B] y) <float[3,4,3,3] w,
            int64[8] pads = {0,0,1,1,0,0,1,1}> {
            [pad] p = Pad(x, pads)
            [up] y = ConvTranspose(p, w)
        }"""
    )
    assert fused.op_types == ["Pad", "ConvTranspose"]
