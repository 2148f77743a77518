from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from onnx import TensorProto

from slimctl.core.errors import OptionError, OutputError, UnsupportedModelError
from slimctl.evaluate.serving import Serving
from slimctl.export.common import Exported, export_artifact
from slimctl.export.triton import Triton, read_batching
from slimctl.passes.quantize import Quantize
from slimctl.recipe.run import run_passes
from tests.export.models import mean_over_rows, scaled_by_batch, through
from tests.export.triton_schema import parse


def exported(path: Path, target: Path, **options: Any) -> tuple[Any, Exported]:
    result = export_artifact(path, Triton(**options), target / "models")
    return parse((target / "models" / "net" / "config.pbtxt").read_text()), result


def serving(target: Path, **fields: Any) -> Path:
    (target / "serving.json").write_text(json.dumps(fields))
    return target / "serving.json"


def test_the_repository_serves_the_artifacts_bytes(made, target: Path) -> None:
    path = made()
    config, result = exported(path, target)
    assert [file.name for file in result.files] == ["net/1/model.onnx", "net/config.pbtxt"]
    copy = target / "models" / "net" / "1" / "model.onnx"
    assert copy.read_bytes() == (path / "model.onnx").read_bytes()
    assert (config.name, config.platform) == ("net", "onnxruntime_onnx")
    (image,), (logits,) = config.input, config.output
    assert (image.name, image.data_type, list(image.dims)) == ("image", 11, [3, 8, 8])
    assert (logits.name, logits.data_type, list(logits.dims)) == ("logits", 11, [4])
    assert [(group.count, group.kind) for group in config.instance_group] == [(1, 2)]


def test_an_open_batch_without_a_serving_file_is_tritons_default(made, target: Path) -> None:
    config, result = exported(made(), target)
    assert config.max_batch_size == 4
    assert config.HasField("dynamic_batching")
    assert any("nobody measured" in note for note in result.notes)


def test_the_serving_file_decides(made, target: Path) -> None:
    file = serving(
        target,
        max_batch_size=16,
        preferred_batch_size=[4, 16],
        max_queue_delay_microseconds=250,
        threads=2,
        rate=100.0,
    )
    config, _ = exported(made(), target, serving=file, instances=3)
    batching = config.dynamic_batching
    assert config.max_batch_size == 16
    assert list(batching.preferred_batch_size) == [4, 16]
    assert batching.max_queue_delay_microseconds == 250
    (threads,) = config.parameters
    assert (threads.key, threads.value.string_value) == ("intra_op_thread_count", "2")
    assert config.instance_group[0].count == 3


def test_what_bench_writes_is_read(target: Path) -> None:
    chosen = Serving(
        max_batch_size=8,
        preferred_batch_size=(8,),
        max_queue_delay_microseconds=1200,
        rate=50.0,
        p99_bound_ms=20.0,
        p99_ms=18.0,
        threads=1,
    )
    (target / "serving.json").write_text(chosen.model_dump_json())
    found = read_batching(target / "serving.json")
    assert found.model_dump() == {
        name: value
        for name, value in chosen.model_dump().items()
        if name in type(found).model_fields
    }


def test_one_request_at_a_time_joins_nothing(made, target: Path) -> None:
    config, _ = exported(made(), target, serving=serving(target, max_batch_size=1))
    assert config.max_batch_size == 1
    assert not config.HasField("dynamic_batching")


def test_a_fixed_batch_is_none(made, target: Path) -> None:
    config, result = exported(made(through({"x": [2, 3]})), target)
    assert config.max_batch_size == 0
    assert list(config.input[0].dims) == [2, 3]
    assert not config.HasField("dynamic_batching")
    assert any("fixed to 2" in note for note in result.notes)


def test_batches_of_a_model_that_takes_none_are_an_error(made, target: Path) -> None:
    with pytest.raises(OptionError, match="fixed to 2"):
        exported(made(through({"x": [2, 3]})), target, serving=serving(target, max_batch_size=8))


def test_inputs_with_first_axes_of_their_own_are_no_batch(made, target: Path) -> None:
    config, _ = exported(made(through({"a": ["N", 3], "b": ["M", 3]})), target)
    assert config.max_batch_size == 0
    assert [list(port.dims) for port in config.input] == [[-1, 3], [-1, 3]]


def test_open_axes_and_tensors_without_further_axes(made, target: Path) -> None:
    config, _ = exported(made(through({"a": ["N", "T", 3], "b": ["N"]})), target)
    a, b = config.input
    assert list(a.dims) == [-1, 3]
    assert not a.HasField("reshape")
    assert list(b.dims) == [1]
    assert b.HasField("reshape")
    assert list(b.reshape.shape) == []


@pytest.mark.parametrize("kept", [0, 1])
def test_an_axis_that_is_no_batch_is_found_out(kept: int, made, target: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="still no batch"):
        exported(made(mean_over_rows(kept=kept)), target)


def test_requests_that_see_each_other_are_said(made, target: Path) -> None:
    _, result = exported(made(scaled_by_batch()), target)
    assert any("depends on what else is in its batch" in note for note in result.notes)


def test_requests_that_do_not_are_not(made, target: Path) -> None:
    _, result = exported(made(), target)
    assert not any("depends" in note for note in result.notes)


@pytest.mark.parametrize(
    ("kind", "number"),
    [
        (TensorProto.FLOAT16, 10),
        (TensorProto.INT64, 9),
        (TensorProto.INT32, 8),
        (TensorProto.DOUBLE, 12),
    ],
)
def test_types(kind: int, number: int, made, target: Path) -> None:
    config, _ = exported(made(through({"x": ["N", 3]}, kind=kind)), target)
    assert config.input[0].data_type == config.output[0].data_type == number


def test_names_are_quoted(made, target: Path) -> None:
    name = 'say "x" \\ y'
    config, _ = exported(made(through({name: ["N", 3]})), target)
    assert config.input[0].name == name


@pytest.mark.parametrize(
    ("made_for", "kind", "accelerators"),
    [("cuda", 1, []), ("tensorrt", 1, ["tensorrt"]), ("openvino", 2, ["openvino"])],
)
def test_the_target_decides_the_device(made_for, kind, accelerators, made, target: Path) -> None:
    config, _ = exported(made(target=made_for), target)
    listed = config.optimization.execution_accelerators
    assert config.instance_group[0].kind == kind
    found = listed.gpu_execution_accelerator if kind == 1 else listed.cpu_execution_accelerator
    assert [one.name for one in found] == accelerators


def test_tensorrt_may_use_integers_for_a_quantized_model(
    quantized: Path, target: Path, tmp_path: Path
) -> None:
    run_passes(
        tmp_path / "model.onnx",
        [Quantize(mode="fp16")],
        output=tmp_path / "half",
        target="tensorrt",
    )
    for source, precision in ((tmp_path / "half", "FP16"),):
        export_artifact(source, Triton(served_name="net"), target / "models")
        config = parse((target / "models" / "net" / "config.pbtxt").read_text())
        (one,) = config.optimization.execution_accelerators.gpu_execution_accelerator
        assert [(p.key, p.value) for p in one.parameters] == [("precision_mode", precision)]


def test_a_provider_that_triton_lacks_is_said(made, target: Path) -> None:
    _, result = exported(made(target="xnnpack"), target)
    assert any("does not offer the provider of target xnnpack" in note for note in result.notes)


def test_a_repository_is_added_to(made, target: Path) -> None:
    path = made()
    export_artifact(path, Triton(served_name="one"), target / "models")
    export_artifact(path, Triton(served_name="two"), target / "models")
    for name in ("one", "two"):  # the server refuses a folder of another name than its model's
        text = (target / "models" / name / "config.pbtxt").read_text()
        assert parse(text).name == name
    with pytest.raises(OutputError, match="exists already"):
        export_artifact(path, Triton(served_name="one"), target / "models")


@pytest.mark.parametrize("name", ["a/b", "..", ""])
def test_names_that_are_no_folder_are_refused(name: str, made, target: Path) -> None:
    with pytest.raises(OptionError, match="cannot be the name"):
        exported(made(), target, served_name=name)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "no serving configuration"),
        ('{"preferred_batch_size": [2]}', "max_batch_size: Field required"),
        ('{"max_batch_size": 0}', "max_batch_size"),
        ('{"max_batch_size": 4, "preferred_batch_size": [8]}', "preferred_batch_size 8"),
    ],
)
def test_serving_files_that_say_nothing_useful(text: str, says: str, target: Path) -> None:
    (target / "serving.json").write_text(text)
    with pytest.raises(OptionError, match=says):
        read_batching(target / "serving.json")


def test_a_serving_file_that_is_not_there(target: Path) -> None:
    with pytest.raises(OptionError, match="No such file"):
        read_batching(target / "none.json")
