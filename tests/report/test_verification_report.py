from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slimctl.core.errors import OutputError
from slimctl.evaluate.verification import Verdict
from slimctl.report.layers import limits
from slimctl.report.verification import render, write_report
from slimctl.report.words import decibel, share
from tests.report.reader import read

EVIL = "<script>alert('x')</script>&\""
LONG = "/model/encoder/" + "/".join(f"blocks.{place}" for place in range(40)) + "/MatMul_quantized"


def layer(name: str, **changes: Any) -> dict[str, Any]:
    return {
        "node": name,
        "op_type": "QLinearConv",
        "tensor": f"{name}_out",
        "own_db": 40.0,
        "best_db": 42.0,
        "total_db": 30.0,
        "cosine": 0.99991,
        "mean_steps": 0.01,
        "rms_steps": 0.25,
        "expected_steps": 0.375,
        "clipped": 0.0,
        "used_range": 0.9,
        "low": -1.5,
        "high": 2.25,
        "histogram": [0] * 20 + [7] * 20 + [0] * 24,
        "excess_db": 2.0,
        **changes,
    }


def judgment(node: str, verdict: Verdict, **changes: Any) -> dict[str, Any]:
    return {
        "node": node,
        "op_type": "Conv",
        "tensor": f"{node}_codes",
        "verdict": verdict.value,
        "reason": f"because of {node}",
        "level": "all",
        "steps": 3.0,
        **changes,
    }


def runtime(level: str, **changes: Any) -> dict[str, Any]:
    return {
        "provider": "CPUExecutionProvider",
        "level": level,
        "codes": 1234567,
        "identical": 1.0,
        "max_steps": 0,
        "outputs_db": {"logits": 200.0},
        **changes,
    }


def nodes(**changes: Any) -> dict[str, Any]:
    return {
        "samples": 4,
        "max_step_difference": 17,
        "runtimes": [runtime("disabled"), runtime("all", identical=0.98765, max_steps=17)],
        "judgments": [],
        "layers": [layer("stem"), layer("conv1"), layer("conv2")],
        "counts": {},
        **changes,
    }


def output(name: str, sqnr_db: float | None) -> dict[str, Any]:
    return {
        "name": name,
        "elements": 4,
        "equal": None,
        "sqnr_db": sqnr_db,
        "cosine": 0.99,
        "max_abs_error": 0.5,
        "top1_agreement": 1.0,
        "non_finite": 0,
    }


def document(**changes: Any) -> dict[str, Any]:
    return {
        "model": Path("folder/int8.onnx"),
        "reference": Path("float.onnx"),
        "data": "calib.npz",
        "random_data": False,
        "integrity": "1 file as the manifest describes",
        "passed": True,
        "failures": [],
        "samples": 9,
        "outputs": [output("boxes", 35.0), output("logits", 21.25), output("ids", None)],
        "metric": None,
        "nodes": nodes(),
        **changes,
    }


def text_of(**changes: Any) -> str:
    return read(render(document(**changes))).text


@pytest.mark.parametrize(
    "expected",
    [
        "folder/int8.onnx",
        "against float.onnx, on calib.npz; 1 file as the manifest describes",
        "passed: no bound is broken",
        "21.2 dBSQNR of the worst output, logits",
        "98.77%of the codes are the same in both runtimes at level all",
        "17quantization steps apart at most",
        "0nodes at which the model is wrong",
        "soundthe runtimes agree, but for rounding",
        "Outputs against the reference, 9 samples",
        "CPUall1,234,56798.77%17identical",
        "3 layers against the reference",
        "2conv1QLinearConv40.0 dB42.0 dB30.0 dB+0.0100.2500.3750.00%",
        "Values of the worst layers",
        "7 around",
    ],
)
def test_what_the_page_says(expected: str) -> None:
    assert expected in text_of()


def test_broken_bounds_are_listed() -> None:
    text = text_of(passed=False, failures=["output 'logits' has 9", "17 steps at node 'conv1'"])
    assert "failed: bounds that do not hold" in text
    assert "output 'logits' has 9" in text
    assert "17 steps at node 'conv1'" in text


def lost(output: str, model: float) -> dict[str, Any]:
    return {"output": output, "reference": 0.9, "model": model, "drop": 0.9 - model}


def metric(name: str = "top1", **changes: Any) -> dict[str, Any]:
    outputs = [lost("logits", 0.875), lost("aux", 0.9)]
    return {"metric": name, **outputs[0], "outputs": outputs, "layers": [], **changes}


def test_the_metric_has_a_card() -> None:
    assert "0.875top1, was 0.9" in text_of(metric=metric())


def test_the_metric_of_each_output() -> None:
    text = text_of(metric=metric())
    assert "What is lost of top1" in text
    assert "logits0.90000.8750+0.0250" in text
    assert "aux0.90000.9000+0.0000" in text
    assert "With one layer quantized" not in text


def test_the_metric_of_a_model_as_a_whole() -> None:
    whole = lost("", 0.5)
    assert "all0.90000.5000+0.4000" in text_of(metric=metric(**whole, outputs=[whole]))


def test_the_metric_of_single_layers() -> None:
    layers = [
        {"node": node, "op_type": "Conv", "own_db": 31.25, "drops": [lost("logits", model)]}
        for node, model in (("conv2", 0.5), ("stem", 0.89))
    ]
    text = text_of(metric=metric(layers=layers))
    first, second = "conv2Conv31.2 dBlogits0.90000.5000+0.4000", "stemConv31.2 dBlogits0.9000"
    assert text.index("With one layer quantized") < text.index(first) < text.index(second)


def test_random_data_are_named() -> None:
    assert "on random inputs" in text_of(data=None, random_data=True)
    assert "The data are random" in text_of(data="random", random_data=True)
    assert "random" not in text_of()


def test_a_fault_of_the_model_comes_before_what_runtimes_do() -> None:
    judgments = [
        judgment("stem", Verdict.SATURATION, steps=99.0),
        judgment("tie", Verdict.TIE, steps=1.0),
        judgment("conv1", Verdict.MODEL, level=None),
        judgment("conv1", Verdict.MODEL, level=None, reason="once more"),
    ]
    text = text_of(nodes=nodes(judgments=judgments))
    assert "1nodes at which the model is wrong" in text
    assert "model wrongfirst at conv1" in text
    assert text.index("because of conv1") < text.index("because of stem")
    parting = text_of(nodes=nodes(judgments=judgments[:2]))
    assert "saturationfirst at stem" in parting
    assert "soundthe runtimes agree" in text_of(nodes=nodes(judgments=judgments[1:2]))


def test_faults_are_marked_along_the_graph() -> None:
    by_node = judgment("conv1", Verdict.MODEL)
    by_tensor = judgment("conv2_out_DequantizeLinear", Verdict.MODEL, tensor="conv2_out")
    reader = read(render(document(nodes=nodes(judgments=[by_node, by_tensor]))))
    assert reader.values("class").count("flag") == 2
    first, second, third = reader.titles[:3]
    assert first == "1. stem (QLinearConv)\nat best 42.0 dB\nalone 40.0 dB\nin all 30.0 dB"
    assert second.endswith("in all 30.0 dB\nbecause of conv1")
    assert third.endswith("because of conv2_out_DequantizeLinear")
    assert reader.text.count("wrong") > reader.text.count("model wrong")


def test_layers_are_ranked_with_their_place_in_the_graph() -> None:
    found = [layer("calm"), layer("worst", rms_steps=9.0), layer("wrong", rms_steps=0.0)]
    judgments = [judgment("wrong", Verdict.MODEL)]
    text = text_of(nodes=nodes(layers=found, judgments=judgments))
    table = text[text.index("3 layers against") : text.index("Values of")]
    assert "3wrong wrongQLinearConv" in table
    assert table.index("3wrong") < table.index("2worst") < table.index("1calm")


def test_histograms_are_those_of_the_worst_and_of_those_that_clip_most() -> None:
    steps = [layer(f"steps{place}", rms_steps=10.0 - place, clipped=0.5) for place in range(6)]
    steps += [layer(f"steps{place}", rms_steps=10.0 - place) for place in (6, 7)]
    clips = [layer(f"clips{place}", clipped=(place + 1) / 100, rms_steps=0) for place in range(8)]
    text = text_of(nodes=nodes(layers=[*steps, *clips]))
    worst = text[text.index("Values of the worst") : text.index("Values of the other")]
    others = text[text.index("Values of the other") :]
    assert [f"steps{place}" in worst for place in range(8)] == [True] * 6 + [False] * 2
    assert [f"clips{place}" in others for place in range(8)] == [False] * 2 + [True] * 6
    assert others.index("clips7") < others.index("clips2")
    assert "-1.5" in worst and "2.25" in worst


def test_layers_whose_channels_have_scales_of_their_own_have_no_histogram() -> None:
    alone = layer("wide", low=None, high=None, histogram=[])
    assert "Values of" not in text_of(nodes=nodes(layers=[alone]))
    mixed = text_of(nodes=nodes(layers=[alone, layer("plain")]))
    assert "wide" not in mixed[mixed.index("Values of") :]


def test_without_a_reference() -> None:
    bare = document(reference=None, nodes=nodes(layers=[]))
    for key in ("outputs", "samples"):
        del bare[key]
    text = read(render(bare)).text
    assert "no reference" in text
    assert "17quantization steps" in text
    for absent in ("SQNR along", "layers against", "Values of", "Outputs against", "worst output"):
        assert absent not in text


def test_without_codes_nothing_is_said_about_them() -> None:
    floats = runtime("all", codes=0, outputs_db={})
    text = text_of(nodes=nodes(runtimes=[floats], layers=[]))
    assert "of the codes are the same" not in text
    assert "CPUall0---" in text


def test_long_tables_unfold() -> None:
    many = [layer(f"{LONG}{place}") for place in range(200)]
    reader = read(render(document(nodes=nodes(layers=many))))
    assert "180 more" in reader.text
    assert all(f"{LONG}{place}" in reader.text for place in range(200))
    assert "details" in reader.tags
    assert "details" not in read(render(document())).tags


def test_codes_at_integer_operators_are_listed() -> None:
    count = {
        "elements": 200,
        "at_low": 50,
        "at_high": 1,
        "overflowed": 3,
        "dead_channels": 2,
        "used_range": 0.5,
    }
    text = text_of(nodes=nodes(counts={"conv1": count}))
    assert "Codes at the output of 1 integer operators" in text
    assert "conv120025.00%0.50%50%23" in text


def test_everything_that_comes_from_outside_is_escaped() -> None:
    reader = read(
        render(
            document(
                model=EVIL,
                reference=EVIL,
                data=EVIL,
                integrity=EVIL,
                passed=False,
                failures=[EVIL],
                outputs=[output(EVIL, 9.0)],
                metric=metric(EVIL, outputs=[lost(EVIL, 0.5)]),
                nodes=nodes(
                    runtimes=[runtime("all", provider=EVIL)],
                    judgments=[judgment(EVIL, Verdict.MODEL, op_type=EVIL, reason=EVIL)],
                    layers=[layer(EVIL, op_type=EVIL)],
                ),
            )
        )
    )
    assert "script" not in reader.tags
    assert reader.text.count(EVIL) >= 12
    assert not any(name.startswith("on") for name, _ in reader.attributes)


def test_the_page_needs_nothing_else() -> None:
    reader = read(render(document()))
    assert not {"link", "script", "img", "iframe"} & reader.tags
    assert not {"src", "href"} & {name for name, _ in reader.attributes}
    assert "url(" not in render(document())


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], (0, 60)),
        ([200.0, -200.0], (0, 60)),
        ([31.0, 39.0, 200.0], (30, 40)),
        ([-3.0, 42.0], (-10, 50)),
        ([40.0, 40.0], (40, 50)),
    ],
)
def test_the_plot_shows_what_is_a_number_of_decibels(
    values: list[float], expected: tuple[float, float]
) -> None:
    assert limits(values) == expected


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (share(None), "-"),
        (share(0), "0.00%"),
        (share(1e-7), "< 0.01%"),
        (share(0.5), "50.00%"),
        (share(1 - 1e-7), "> 99.99%"),
        (share(1.0), "100.00%"),
        (decibel(None), "-"),
        (decibel(200.0), "identical"),
        (decibel(21.25), "21.2 dB"),
    ],
)
def test_words(found: str, expected: str) -> None:
    assert found == expected


class TestWriting:
    def test_a_report_is_replaced_as_a_whole(self, tmp_path: Path) -> None:
        path = tmp_path / "report.html"
        path.write_text("old")
        write_report(path, document())
        assert path.read_text(encoding="utf-8") == render(document())
        assert [item.name for item in tmp_path.iterdir()] == ["report.html"]

    def test_a_report_that_cannot_be_made_leaves_the_old_one(self, tmp_path: Path) -> None:
        path = tmp_path / "report.html"
        path.write_text("old")
        with pytest.raises(KeyError):
            write_report(path, {"model": "x"})
        assert path.read_text() == "old"

    def test_no_folder(self, tmp_path: Path) -> None:
        with pytest.raises(OutputError, match="Cannot write"):
            write_report(tmp_path / "none" / "report.html", document())
