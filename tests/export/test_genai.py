from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slimctl.core.errors import OptionError, UnsupportedModelError
from slimctl.export.common import export_artifact
from slimctl.export.genai import Genai
from tests.export.models import HEADS, SIZE, WIDTH, WORDS, decoder, through

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_size": WIDTH,
    "max_position_embeddings": 64,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "num_hidden_layers": 2,
    "vocab_size": WORDS,
}


@pytest.fixture
def original(tmp_path: Path) -> Path:
    """A folder as Hugging Face has it."""
    folder = tmp_path / "original"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "README.md").write_text("not for the runtime")
    return folder


def test_the_folder_describes_the_decoder(made, original: Path, target: Path) -> None:
    path = made(decoder())
    export_artifact(path, Genai(huggingface=original), target / "out")
    assert sorted(file.name for file in (target / "out").iterdir()) == [
        "genai_config.json",
        "model.onnx",
        "tokenizer.json",
    ]
    model = json.loads((target / "out" / "genai_config.json").read_text())["model"]
    assert (model["type"], model["vocab_size"], model["context_length"]) == ("llama", WORDS, 64)
    assert (model["bos_token_id"], model["eos_token_id"], model["pad_token_id"]) == (1, 2, 2)
    found = model["decoder"]
    assert (found["num_hidden_layers"], found["num_key_value_heads"]) == (2, HEADS)
    assert (found["head_size"], found["hidden_size"]) == (SIZE, WIDTH)
    assert found["inputs"] == {
        "input_ids": "input_ids",
        "attention_mask": "attention_mask",
        "past_key_names": "past_key_values.%d.key",
        "past_value_names": "past_key_values.%d.value",
    }


def test_generation_config_overrides_tokens(made, original: Path, target: Path) -> None:
    tokens = {"eos_token_id": [5, 7], "pad_token_id": None, "temperature": 0.2}
    (original / "generation_config.json").write_text(json.dumps(tokens))
    export_artifact(made(decoder()), Genai(huggingface=original), target / "out")
    model = json.loads((target / "out" / "genai_config.json").read_text())["model"]
    assert (model["eos_token_id"], model["pad_token_id"]) == ([5, 7], 5)


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (
            through({"x": ["N", 3]}),
            r"lacks input input_ids, .*output logits.*nothing feeds input x",
        ),
        (decoder(leave_out=["present.1.value"]), r"lacks output present\.1\.value$"),
        (decoder(leave_out=["logits"]), r"lacks output logits$"),
    ],
)
def test_what_is_missing_is_named(model, says: str, made, original: Path, target: Path) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        export_artifact(made(model), Genai(huggingface=original), target / "out")
    assert re.search(says, caught.value.what)


def test_what_the_graph_does_not_say_must_come_from_somewhere(made, target: Path) -> None:
    with pytest.raises(OptionError, match="does not say which tokens"):
        export_artifact(made(decoder()), Genai(), target / "out")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"num_hidden_layers": 3}, "another model: it has 3 layers, the artifact 2"),
        ({"num_key_value_heads": 1}, "it has 1 heads of keys"),
        ({"eos_token_id": None}, "does not say eos_token_id"),
        ({"architectures": []}, "does not say architectures"),
    ],
)
def test_a_config_of_another_model_is_refused(
    change: dict[str, Any], says: str, made, original: Path, target: Path
) -> None:
    (original / "config.json").write_text(json.dumps(CONFIG | change))
    with pytest.raises(OptionError, match=says):
        export_artifact(made(decoder()), Genai(huggingface=original), target / "out")


def test_a_missing_config_is_an_error(made, target: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="Cannot read"):
        export_artifact(made(decoder()), Genai(huggingface=tmp_path), target / "out")


def test_a_missing_tokenizer_is_said(made, original: Path, target: Path) -> None:
    (original / "tokenizer.json").unlink()
    notes = export_artifact(made(decoder()), Genai(huggingface=original), target / "out").notes
    assert any("no tokenizer.json" in note for note in notes)


_GENERATE = """
import sys
import onnxruntime_genai as og
model = og.Model(sys.argv[1])
params = og.GeneratorParams(model)
params.set_search_options(max_length=12)
generator = og.Generator(model, params)
generator.append_tokens([3, 4, 5])
while not generator.is_done():
    generator.generate_next_token()
print(*generator.get_sequence(0))
"""


def test_onnxruntime_genai_generates_with_it(made, original: Path, target: Path) -> None:
    export_artifact(made(decoder()), Genai(huggingface=original), target / "out")
    # In a process of its own: it loads the library of onnxruntime a second time.
    done = subprocess.run(
        [sys.executable, "-c", _GENERATE, str(target / "out")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    tokens = [int(word) for word in done.stdout.split()]
    assert tokens[:3] == [3, 4, 5]
    assert 3 < len(tokens) <= 12
