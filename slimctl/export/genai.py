"""onnxruntime-genai: the model with its ``genai_config.json``.

Follows what the model builder of onnxruntime-genai 0.18 writes for a decoder
(``onnxruntime_genai/models/builders/base.py``, ``make_genai_config``) and
https://onnxruntime.ai/docs/genai/reference/config.html. What the graph tells is taken from it;
what it cannot tell (tokens, heads of queries, context) from Hugging Face's files.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import Field

from slimctl.core.errors import OptionError, UnsupportedModelError
from slimctl.export.common import Export, copy_model, register
from slimctl.graph.edit import Interface, Port, interface
from slimctl.graph.load import load_model

if TYPE_CHECKING:
    from slimctl.pipeline.artifact import Artifact

_OPTION = "--huggingface"

_PAST = "past_key_values.%d.{}"
_PRESENT = "present.%d.{}"
_PARTS = ("key", "value")
_ALWAYS = ("input_ids", "attention_mask")
_OPTIONAL = ("position_ids",)

_TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
"""Files that ``onnxruntime_genai.Tokenizer`` may read beside the model."""


class Cache(NamedTuple):
    """The keys and values that a decoder keeps.

    Attributes:
        layers: How many layers have them.
        heads: Heads of keys.
        head_size: Width of a head.
    """

    layers: int
    heads: int
    head_size: int


@register
class Genai(Export):
    """``model.onnx``, ``genai_config.json`` and the tokenizer's files in a folder."""

    name = "genai"
    summary = "Folder for onnxruntime-genai, of decoders with a cache"

    huggingface: Path | None = Field(
        None,
        description="Folder with the original's config.json, generation_config.json and tokenizer.",
        json_schema_extra={"metavar": "FOLDER", "unset": "required"},
    )

    def write(self, artifact: Artifact, target: Path) -> Sequence[str]:
        """Copies model and tokenizer, and writes the configuration."""
        ports = interface(load_model(artifact.model))
        cache = decoder_cache(ports)
        if self.huggingface is None:
            raise OptionError(
                _OPTION,
                "The graph does not say which tokens begin and end a text, how many heads ask, and"
                " how long a context may be",
                fix="name the folder of the original's config.json with --huggingface",
            )
        facts = huggingface_facts(self.huggingface)
        _check_same(cache, facts)
        target.mkdir()
        copy_model(artifact, target)
        text = json.dumps(genai_config(ports, cache, facts), indent=4) + "\n"
        (target / "genai_config.json").write_text(text, encoding="utf-8")
        return list(_copy_tokenizer(self.huggingface, target))


def decoder_cache(ports: Interface) -> Cache:
    """The cache of a decoder, after a check that it has all that onnxruntime-genai asks for.

    Raises:
        UnsupportedModelError: Names what is missing, and what is too much.
    """
    inputs = {port.name: port for port in ports.inputs}
    outputs = {port.name: port for port in ports.outputs}
    layers = sum(1 for name in inputs if re.fullmatch(r"past_key_values\.\d+\.key", name))
    past = _names(_PAST, layers)
    wanted = [*_ALWAYS, *(past or [_PAST.format(part) for part in _PARTS])]
    given = ["logits", *(_names(_PRESENT, layers) or [_PRESENT.format(part) for part in _PARTS])]
    missing = [f"input {name}" for name in wanted if name not in inputs]
    missing += [f"output {name}" for name in given if name not in outputs]
    strange = [f"input {name}" for name in inputs if name not in {*wanted, *_OPTIONAL}]
    if missing or strange:
        raise UnsupportedModelError(
            "onnxruntime-genai cannot drive this model: " + _complaint(missing, strange),
            where=f"{len(inputs)} inputs, {len(outputs)} outputs",
            fix="export a decoder with a cache of keys and values (optimum calls the task"
            " text-generation-with-past), and compress that",
        )
    return _cache_of(layers, inputs[past[0]])


def _names(template: str, layers: int) -> list[str]:
    return [template.format(part) % layer for layer in range(layers) for part in _PARTS]


def _complaint(missing: Sequence[str], strange: Sequence[str]) -> str:
    parts = []
    if missing:
        parts.append(f"it lacks {_few(missing)}")
    if strange:
        parts.append(f"nothing feeds {_few(strange)}")
    return "; ".join(parts)


def _few(names: Sequence[str], most: int = 6) -> str:
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest


def _cache_of(layers: int, key: Port) -> Cache:
    """Sizes from the shape of a key: [batch, heads, positions, head size]."""
    shape = key.shape or ()
    if len(shape) != 4 or not isinstance(shape[1], int) or not isinstance(shape[3], int):
        raise UnsupportedModelError(
            f"The shape of '{key.name}' does not tell its heads and their size",
            where=f"input '{key.name}'",
            fix="export the model with the shape [batch, heads, positions, head size], heads and"
            " head size as numbers",
        )
    return Cache(layers, shape[1], shape[3])


def huggingface_facts(folder: Path) -> dict[str, Any]:
    """``config.json``, with what ``generation_config.json`` says about tokens on top.

    Raises:
        OptionError: A file cannot be read, or a field is missing.
    """
    facts = _read(folder / "config.json")
    generation = folder / "generation_config.json"
    if generation.is_file():
        tokens = ("bos_token_id", "eos_token_id", "pad_token_id")
        facts |= {k: v for k, v in _read(generation).items() if k in tokens and v is not None}
    needed = (
        "architectures",
        "bos_token_id",
        "eos_token_id",
        "hidden_size",
        "max_position_embeddings",
        "num_attention_heads",
        "num_hidden_layers",
        "vocab_size",
    )
    missing = [name for name in needed if facts.get(name) in (None, [])]
    if missing:
        raise OptionError(
            _OPTION,
            f"'{folder / 'config.json'}' does not say {', '.join(missing)}",
            fix="name the folder that the model was exported from",
        )
    return facts


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise OptionError(
            _OPTION,
            f"Cannot read '{path}': {reason}",
            fix="name a folder with the config.json of a Hugging Face model",
        ) from error
    if not isinstance(found, dict):
        raise OptionError(_OPTION, f"'{path}' holds no object", fix="name another folder")
    return found


def _check_same(cache: Cache, facts: Mapping[str, Any]) -> None:
    """Refuses the configuration of another model.

    Raises:
        OptionError: It has other sizes than the graph.
    """
    heads = facts.get("num_key_value_heads") or facts["num_attention_heads"]
    pairs = (
        ("layers", cache.layers, facts["num_hidden_layers"]),
        ("heads of keys", cache.heads, heads),
    )
    for what, ours, theirs in pairs:
        if ours != theirs:
            raise OptionError(
                _OPTION,
                f"config.json is of another model: it has {theirs} {what}, the artifact {ours}",
                fix="name the folder that the artifact's original was exported from",
            )


def genai_config(ports: Interface, cache: Cache, facts: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration."""
    eos = facts["eos_token_id"]
    pad = facts.get("pad_token_id")
    return {
        "model": {
            "bos_token_id": facts["bos_token_id"],
            "context_length": facts["max_position_embeddings"],
            "decoder": _decoder(ports, cache, facts),
            "eos_token_id": eos,
            "pad_token_id": pad if pad is not None else eos[0] if isinstance(eos, list) else eos,
            "type": str(facts["architectures"][0]).partition("For")[0].lower(),
            "vocab_size": _vocabulary(ports, facts),
        },
        "search": _search(facts["max_position_embeddings"]),
    }


def _decoder(ports: Interface, cache: Cache, facts: Mapping[str, Any]) -> dict[str, Any]:
    names = [port.name for port in ports.inputs]
    inputs = {name: name for name in (*_ALWAYS, *_OPTIONAL) if name in names}
    past, present = (
        {f"{when}_{part}_names": template.format(part) for part in _PARTS}
        for when, template in (("past", _PAST), ("present", _PRESENT))
    )
    return {
        "session_options": {"log_id": "onnxruntime-genai", "provider_options": []},
        "filename": "model.onnx",
        "head_size": cache.head_size,
        "hidden_size": facts["hidden_size"],
        "inputs": inputs | past,
        "outputs": {"logits": "logits"} | present,
        "num_attention_heads": facts["num_attention_heads"],
        "num_hidden_layers": cache.layers,
        "num_key_value_heads": cache.heads,
    }


def _vocabulary(ports: Interface, facts: Mapping[str, Any]) -> int:
    """As wide as the logits are: tables of words are often padded."""
    shape = next(port.shape for port in ports.outputs if port.name == "logits")
    width = shape[-1] if shape else None
    return width if isinstance(width, int) else int(facts["vocab_size"])


def _search(context: int) -> dict[str, Any]:
    """Greedy search, the builder's default."""
    return {
        "diversity_penalty": 0.0,
        "do_sample": False,
        "early_stopping": True,
        "length_penalty": 1.0,
        "max_length": context,
        "min_length": 0,
        "no_repeat_ngram_size": 0,
        "num_beams": 1,
        "num_return_sequences": 1,
        # One buffer for both needs GroupQueryAttention; a graph that appends to its cache, too,
        # runs with two.
        "past_present_share_buffer": False,
        "repetition_penalty": 1.0,
        "temperature": 1.0,
        "top_k": 50,
        "top_p": 1.0,
    }


def _copy_tokenizer(source: Path, target: Path) -> Iterator[str]:
    copied = [name for name in _TOKENIZER if (source / name).is_file()]
    for name in copied:
        shutil.copyfile(source / name, target / name)
    if "tokenizer.json" not in copied:
        yield f"there is no tokenizer.json in '{source.name}': texts need it, token numbers do not"
