"""all-MiniLM-L6-v2 as ONNX, built from its published tensors.

A BERT encoder (Devlin et al. 2018): 6 layers, 384 wide, 12 heads of 32, feed-forward 1536. The
graph is what exporters write: attention taken apart into MatMul, Reshape, Transpose and Softmax,
shapes computed from the size of the input, GELU by way of Erf.

Names: B sequences, S positions, N heads, d width of a head.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

OPSET = 17
IR_VERSION = 8
WIDTH = 384
HEADS = 12
LAYERS = 6
EPSILON = 1e-12
WORDS = "embeddings.word_embeddings.weight"

_HEADER_BYTES = 8
_DTYPES = {"F32": "<f4", "I64": "<i8"}

Tensors = Mapping[str, NDArray[Any]]


def load_safetensors(path: Path) -> dict[str, NDArray[Any]]:
    """The tensors of a safetensors file, mapped and not read.

    The format: 8 bytes with the length of a JSON header, little-endian; the header, which says of
    each tensor its type, shape and place; the raw bytes.

    Raises:
        KeyError: A tensor has a type that no benchmark needs.
    """
    content = np.memmap(path, np.uint8, "r")
    start = _HEADER_BYTES + int(content[:_HEADER_BYTES].view("<u8")[0])
    header = json.loads(content[_HEADER_BYTES:start].tobytes())
    header.pop("__metadata__", None)
    tensors: dict[str, NDArray[Any]] = {}
    for name, entry in header.items():
        begin, end = (start + offset for offset in entry["data_offsets"])
        flat = content[begin:end].view(_DTYPES[entry["dtype"]])
        tensors[name] = flat.reshape(entry["shape"])
    return tensors


class _Encoder:
    """Appends nodes and weights; every method returns the name of its output."""

    def __init__(self, tensors: Tensors) -> None:
        self.tensors = tensors
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, NDArray[Any]] = {}

    def node(self, op_type: str, inputs: list[str], name: str, **attributes: Any) -> str:
        output = f"{name}_output"
        self.nodes.append(helper.make_node(op_type, inputs, [output], name, **attributes))
        return output

    def constant(self, name: str, value: Any, kind: Any = np.float32) -> str:
        self.constants[name] = np.asarray(value, kind)
        return name

    def weight(self, name: str) -> str:
        return self.constant(name, self.tensors[name])

    def linear(self, data: str, name: str) -> str:
        """[B, S, inputs] -> [B, S, outputs]; exporters store the weight transposed."""
        weight = self.constant(f"{name}.weight", self.tensors[f"{name}.weight"].T)
        product = self.node("MatMul", [data, weight], f"{name}.MatMul")
        return self.node("Add", [self.weight(f"{name}.bias"), product], f"{name}.Add")

    def normalization(self, data: str, name: str) -> str:
        parts = [self.weight(f"{name}.weight"), self.weight(f"{name}.bias")]
        return self.node("LayerNormalization", [data, *parts], name, axis=-1, epsilon=EPSILON)

    def size(self, source: str, axis: int, name: str) -> str:
        """One size of a tensor, int64 [1]."""
        shape = self.node("Shape", [source], f"{name}.Shape")
        place = self.constant(f"axis_{axis}", axis, np.int64)
        size = self.node("Gather", [shape, place], f"{name}.Gather", axis=0)
        return self.node("Unsqueeze", [size, self._first_axis()], f"{name}.Unsqueeze")

    def _first_axis(self) -> str:
        return self.constant("first_axis", [0], np.int64)

    def reshaped(self, data: str, source: str, tail: list[int], name: str) -> str:
        """To [B, S, *tail], B and S computed from a tensor [B, S, ...]."""
        sizes = [self.size(source, axis, f"{name}.size_{axis}") for axis in (0, 1)]
        rest = self.constant(f"{name}.rest", tail, np.int64)
        shape = self.node("Concat", [*sizes, rest], f"{name}.Concat", axis=0)
        return self.node("Reshape", [data, shape], name)

    # parts of the network

    def embeddings(self) -> str:
        """Words, positions and types of tokens (all of type 0), [B, S, 384]."""
        words = self.node("Gather", [self.weight(WORDS), "input_ids"], "word_embeddings")
        table = self.weight("embeddings.token_type_embeddings.weight")
        shape = self.node("Shape", ["input_ids"], "token_types.Shape")
        types = self.node("ConstantOfShape", [shape], "token_types", value=_zero())
        typed = self.node("Gather", [table, types], "token_type_embeddings")
        positions = self.node(
            "Slice",
            [
                self.constant("position_ids", np.arange(self._positions())[np.newaxis], np.int64),
                self._first_axis(),
                self.size("input_ids", 1, "positions.size"),
                self.constant("second_axis", [1], np.int64),
            ],
            "positions",
        )
        table = self.weight("embeddings.position_embeddings.weight")
        placed = self.node("Gather", [table, positions], "position_embeddings")
        total = self.node("Add", [words, typed], "embeddings.Add")
        total = self.node("Add", [total, placed], "embeddings.Add_1")
        return self.normalization(total, "embeddings.LayerNorm")

    def _positions(self) -> int:
        return len(self.tensors["embeddings.position_embeddings.weight"])

    def mask(self) -> str:
        """What is added to the scores, [B, 1, 1, S]: nothing, or the smallest number there is."""
        axes = self.constant("mask_axes", [1, 2], np.int64)
        wide = self.node("Unsqueeze", ["attention_mask", axes], "mask.Unsqueeze")
        number = self.node("Cast", [wide], "mask.Cast", to=TensorProto.FLOAT)
        away = self.node("Sub", [self.constant("one", 1), number], "mask.Sub")
        lowest = self.constant("lowest", np.finfo(np.float32).min)
        return self.node("Mul", [away, lowest], "mask.Mul")

    def heads(self, data: str, name: str, order: tuple[int, ...]) -> str:
        """[B, S, N*d] -> [B, N, S, d], or [B, N, d, S] for the keys."""
        projected = self.linear(data, name)
        split = self.reshaped(projected, projected, [HEADS, WIDTH // HEADS], f"{name}.Reshape")
        return self.node("Transpose", [split], f"{name}.Transpose", perm=order)

    def attention(self, data: str, mask: str, name: str) -> str:
        query = self.heads(data, f"{name}.self.query", (0, 2, 1, 3))
        key = self.heads(data, f"{name}.self.key", (0, 2, 3, 1))
        value = self.heads(data, f"{name}.self.value", (0, 2, 1, 3))
        scores = self.node("MatMul", [query, key], f"{name}.scores")  # [B, N, S, S]
        root = self.constant("root_of_head_width", math.sqrt(WIDTH // HEADS))
        scaled = self.node("Div", [scores, root], f"{name}.Div")
        masked = self.node("Add", [scaled, mask], f"{name}.Add")
        weights = self.node("Softmax", [masked], f"{name}.Softmax", axis=-1)
        mixed = self.node("MatMul", [weights, value], f"{name}.mixed")  # [B, N, S, d]
        mixed = self.node("Transpose", [mixed], f"{name}.Transpose", perm=(0, 2, 1, 3))
        joined = self.reshaped(mixed, mixed, [WIDTH], f"{name}.Reshape")
        out = self.linear(joined, f"{name}.output.dense")
        total = self.node("Add", [out, data], f"{name}.output.residual")
        return self.normalization(total, f"{name}.output.LayerNorm")

    def gelu(self, data: str, name: str) -> str:
        """x (1 + erf(x / sqrt 2)) / 2, Hendrycks and Gimpel 2016."""
        scaled = self.node("Div", [data, self.constant("root_of_two", math.sqrt(2))], f"{name}.Div")
        error = self.node("Erf", [scaled], f"{name}.Erf")
        raised = self.node("Add", [error, self.constant("one", 1)], f"{name}.Add")
        product = self.node("Mul", [data, raised], f"{name}.Mul")
        return self.node("Mul", [product, self.constant("half", 0.5)], f"{name}.Mul_1")

    def layer(self, data: str, mask: str, name: str) -> str:
        data = self.attention(data, mask, f"{name}.attention")
        inner = self.gelu(self.linear(data, f"{name}.intermediate.dense"), f"{name}.gelu")
        out = self.linear(inner, f"{name}.output.dense")
        total = self.node("Add", [out, data], f"{name}.output.residual")
        return self.normalization(total, f"{name}.output.LayerNorm")


def _zero() -> onnx.TensorProto:
    return numpy_helper.from_array(np.zeros(1, np.int64))


def minilm(tensors: Tensors) -> onnx.ModelProto:
    """The encoder: ``input_ids`` and ``attention_mask`` int64 [B, S] to [B, S, 384].

    Args:
        tensors: As ``transformers`` names those of a BertModel. The table of words may be cut.
    """
    network = _Encoder(tensors)
    data, mask = network.embeddings(), network.mask()
    for layer in range(LAYERS):
        data = network.layer(data, mask, f"encoder.layer.{layer}")
    network.nodes.append(helper.make_node("Identity", [data], ["last_hidden_state"], "output"))
    tokens = ["batch", "positions"]
    graph = helper.make_graph(
        network.nodes,
        "minilm",
        [
            helper.make_tensor_value_info(name, TensorProto.INT64, tokens)
            for name in ("input_ids", "attention_mask")
        ],
        [helper.make_tensor_value_info("last_hidden_state", TensorProto.FLOAT, [*tokens, WIDTH])],
        [numpy_helper.from_array(array, key) for key, array in network.constants.items()],
    )
    opset = helper.make_opsetid("", OPSET)
    model = helper.make_model(graph, opset_imports=[opset], ir_version=IR_VERSION)
    onnx.checker.check_model(model, full_check=True)
    return model
