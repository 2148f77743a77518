"""SmolLM2-135M-Instruct as ONNX, built from the tensors of its GGUF.

A decoder of the Llama kind (Touvron et al. 2023; Allal et al. 2025): 30 layers, 576 wide, 9 heads
of 64 that share 3 heads of keys and values (Ainslie et al. 2023), feed-forward 1536, one table for
words and for logits. The graph is what exporters write, without a cache of keys: normalization,
rotation and attention taken apart into standard operators.

Names: B sequences, S positions, N heads of queries, K heads of keys and values, R = N / K, d width
of a head.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from benchmarks.gguf import Gguf

OPSET = 21
IR_VERSION = 10

Tensors = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class Sizes:
    """Of a network of this kind.

    Attributes:
        layers: How many.
        width: Of what runs between layers.
        heads: Heads of queries.
        shared_heads: Heads of keys and of values.
        words: Rows of the table.
        epsilon: Of the normalizations.
        base: Of the frequencies of the rotation.
    """

    layers: int
    width: int
    heads: int
    shared_heads: int
    words: int
    epsilon: float
    base: float

    @property
    def head_width(self) -> int:
        return self.width // self.heads


def sizes(metadata: Mapping[str, Any]) -> Sizes:
    """As the file says."""
    return Sizes(
        layers=metadata["llama.block_count"],
        width=metadata["llama.embedding_length"],
        heads=metadata["llama.attention.head_count"],
        shared_heads=metadata["llama.attention.head_count_kv"],
        words=metadata["llama.vocab_size"],
        epsilon=metadata["llama.attention.layer_norm_rms_epsilon"],
        base=metadata["llama.rope.freq_base"],
    )


def halves_apart(weight: NDArray[Any], heads: int) -> NDArray[Any]:
    """Rows of a projection from pairs (0, 1), (2, 3) ... to pairs (i, i + d/2), per head.

    llama.cpp rotates neighbors and so stores queries and keys permuted (``permute`` of its
    ``convert_hf_to_gguf.py``); exported graphs rotate halves. Both compute the same scores.
    """
    pairs = weight.reshape(heads, -1, 2, weight.shape[1])  # [heads, d/2, 2, inputs]
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(weight.shape)


class _Decoder:
    """Appends nodes and weights; every method returns the name of its output."""

    def __init__(self, tensors: Tensors, of: Sizes) -> None:
        self.tensors = tensors
        self.of = of
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, NDArray[Any]] = {}

    def node(self, op_type: str, inputs: list[str], name: str, **attributes: Any) -> str:
        output = f"{name}_output"
        self.nodes.append(helper.make_node(op_type, inputs, [output], name, **attributes))
        return output

    def constant(self, name: str, value: Any, kind: Any = np.float32) -> str:
        self.constants[name] = np.asarray(value, kind)
        return name

    def axes(self, *places: int) -> str:
        name = "_".join(["axes", *(f"{place}".replace("-", "m") for place in places)])
        return self.constant(name, places, np.int64)

    # parts of the network

    def linear(self, data: str, name: str) -> str:
        """[B, S, inputs] -> [B, S, outputs]; exporters store the weight transposed."""
        weight = self.constant(f"{name}.weight", self.tensors[f"{name}.weight"].T)
        return self.node("MatMul", [data, weight], f"{name}.MatMul")

    def normalization(self, data: str, name: str) -> str:
        """``w x / sqrt(mean(x^2) + epsilon)``, Zhang and Sennrich 2019."""
        square = self.node("Pow", [data, self.constant("two", 2)], f"{name}.Pow")
        mean = self.node("ReduceMean", [square, self.axes(-1)], f"{name}.ReduceMean", keepdims=1)
        above = self.node("Add", [mean, self.constant("epsilon", self.of.epsilon)], f"{name}.Add")
        root = self.node("Sqrt", [above], f"{name}.Sqrt")
        factor = self.node("Div", [self.constant("one", 1), root], f"{name}.Div")
        even = self.node("Mul", [data, factor], f"{name}.Mul")
        weight = self.constant(f"{name}.weight", self.tensors[f"{name}.weight"])
        return self.node("Mul", [weight, even], f"{name}.Mul_1")

    def positions(self) -> str:
        """Number of positions, int64 []."""
        shape = self.node("Shape", ["input_ids"], "input_ids.Shape")
        return self.node("Gather", [shape, self.constant("second", 1, np.int64)], "positions")

    def rotation(self, positions: str) -> tuple[str, str]:
        """Cosines and sines [S, d] of ``position * base^(-2 i / d)``, Su et al. 2021."""
        width = self.of.head_width
        frequencies = self.of.base ** (-np.arange(0, width, 2, dtype=np.float64) / width)
        numbers = [self.constant(n, v, np.int64) for n, v in (("start", 0), ("step", 1))]
        places = self.node("Range", [numbers[0], positions, numbers[1]], "rotation.Range")
        place = self.node("Cast", [places], "rotation.Cast", to=TensorProto.FLOAT)
        column = self.node("Unsqueeze", [place, self.axes(1)], "rotation.Unsqueeze")
        row = self.constant("rotation.frequencies", frequencies[np.newaxis])
        half = self.node("Mul", [column, row], "rotation.Mul")  # [S, d/2]
        angles = self.node("Concat", [half, half], "rotation.Concat", axis=-1)
        return self.node("Cos", [angles], "cosines"), self.node("Sin", [angles], "sines")

    def rotated(self, data: str, rotation: tuple[str, str], name: str) -> str:
        """``x cos + (-x2, x1) sin`` of the halves x1 and x2; [B, heads, S, d]."""
        half = self.of.head_width // 2
        first = self._part(data, 0, half, f"{name}.first")
        second = self._part(data, half, 2 * half, f"{name}.second")
        negative = self.node("Neg", [second], f"{name}.Neg")
        turned = self.node("Concat", [negative, first], f"{name}.Concat", axis=-1)
        along = self.node("Mul", [data, rotation[0]], f"{name}.Mul")
        across = self.node("Mul", [turned, rotation[1]], f"{name}.Mul_1")
        return self.node("Add", [along, across], f"{name}.Add")

    def _part(self, data: str, start: int, stop: int, name: str) -> str:
        ends = [self.constant(f"place_{end}", [end], np.int64) for end in (start, stop)]
        return self.node("Slice", [data, *ends, self.axes(-1)], name)

    def mask(self, positions: str) -> str:
        """What is added to the scores, [S, S]: the smallest number there is above the diagonal."""
        column = self.node("Unsqueeze", [positions, self.axes(0)], "mask.Unsqueeze")
        square = self.node("Concat", [column, column], "mask.Concat", axis=0)
        lowest = numpy_helper.from_array(np.array([np.finfo(np.float32).min], np.float32))
        full = self.node("ConstantOfShape", [square], "mask.ConstantOfShape", value=lowest)
        return self.node("Trilu", [full, self.constant("diagonal", 1, np.int64)], "mask", upper=1)

    def heads(self, data: str, name: str, heads: int) -> str:
        """[B, S, inputs] -> [B, heads, S, d]."""
        projected = self.linear(data, name)
        shape = self.constant(f"split_{heads}", [0, 0, heads, self.of.head_width], np.int64)
        split = self.node("Reshape", [projected, shape], f"{name}.Reshape")
        return self.node("Transpose", [split], f"{name}.Transpose", perm=(0, 2, 1, 3))

    def repeated(self, data: str, name: str) -> str:
        """[B, K, S, d] -> [B, N, S, d]: a head of keys or values for R heads of queries."""
        of = self.of
        wide = self.node("Unsqueeze", [data, self.axes(2)], f"{name}.Unsqueeze")
        times = self.constant("repeats", [1, 1, of.heads // of.shared_heads, 1, 1], np.int64)
        copies = self.node("Expand", [wide, times], f"{name}.Expand")  # [B, K, R, S, d]
        shape = self.constant("merged_heads", [0, of.heads, -1, of.head_width], np.int64)
        return self.node("Reshape", [copies, shape], f"{name}.Reshape_1")

    def attention(self, data: str, mask: str, rotation: tuple[str, str], name: str) -> str:
        """Causal attention, [B, S, width]."""
        query = self.heads(data, f"{name}.attn_q", self.of.heads)
        key = self.heads(data, f"{name}.attn_k", self.of.shared_heads)
        value = self.heads(data, f"{name}.attn_v", self.of.shared_heads)
        query = self.rotated(query, rotation, f"{name}.attn_q")
        key = self.repeated(self.rotated(key, rotation, f"{name}.attn_k"), f"{name}.attn_k")
        value = self.repeated(value, f"{name}.attn_v")
        key = self.node("Transpose", [key], f"{name}.attn_k.Transpose_1", perm=(0, 1, 3, 2))
        scores = self.node("MatMul", [query, key], f"{name}.scores")  # [B, N, S, S]
        scale = self.constant("scale", 1 / math.sqrt(self.of.head_width))
        scaled = self.node("Mul", [scores, scale], f"{name}.scores.Mul")
        masked = self.node("Add", [scaled, mask], f"{name}.scores.Add")
        weights = self.node("Softmax", [masked], f"{name}.Softmax", axis=-1)
        mixed = self.node("MatMul", [weights, value], f"{name}.mixed")  # [B, N, S, d]
        mixed = self.node("Transpose", [mixed], f"{name}.mixed.Transpose", perm=(0, 2, 1, 3))
        shape = self.constant("joined", [0, 0, self.of.width], np.int64)
        joined = self.node("Reshape", [mixed, shape], f"{name}.mixed.Reshape")
        return self.linear(joined, f"{name}.attn_output")

    def feed_forward(self, data: str, name: str) -> str:
        """``W (silu(G x) * (U x))``, SwiGLU of Shazeer 2020."""
        gate = self.linear(data, f"{name}.ffn_gate")
        sigmoid = self.node("Sigmoid", [gate], f"{name}.Sigmoid")
        open_ = self.node("Mul", [gate, sigmoid], f"{name}.silu")
        inner = self.node("Mul", [open_, self.linear(data, f"{name}.ffn_up")], f"{name}.gated")
        return self.linear(inner, f"{name}.ffn_down")

    def layer(self, data: str, mask: str, rotation: tuple[str, str], name: str) -> str:
        inner = self.normalization(data, f"{name}.attn_norm")
        attended = self.attention(inner, mask, rotation, name)
        data = self.node("Add", [data, attended], f"{name}.attn_residual")
        inner = self.feed_forward(self.normalization(data, f"{name}.ffn_norm"), name)
        return self.node("Add", [data, inner], f"{name}.ffn_residual")

    def logits(self) -> None:
        """Everything; the table of words is stored once."""
        table = self.constant("token_embd.weight", self.tensors["token_embd.weight"])
        data = self.node("Gather", [table, "input_ids"], "token_embd")
        positions = self.positions()
        mask, rotation = self.mask(positions), self.rotation(positions)
        for layer in range(self.of.layers):
            data = self.layer(data, mask, rotation, f"blk.{layer}")
        data = self.normalization(data, "output_norm")
        turned = self.node("Transpose", [table], "output.Transpose", perm=(1, 0))
        self.nodes.append(helper.make_node("MatMul", [data, turned], ["logits"], "output"))


def smollm2(tensors: Tensors, of: Sizes) -> onnx.ModelProto:
    """The decoder: ``input_ids`` int64 [B, S] to ``logits`` [B, S, words].

    Args:
        tensors: As a GGUF names them, queries and keys with :func:`halves_apart`.
        of: Sizes of the network.
    """
    network = _Decoder(tensors, of)
    network.logits()
    tokens = ["batch", "positions"]
    graph = helper.make_graph(
        network.nodes,
        "smollm2",
        [helper.make_tensor_value_info("input_ids", TensorProto.INT64, tokens)],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, [*tokens, of.words])],
        [numpy_helper.from_array(array, key) for key, array in network.constants.items()],
    )
    opset = helper.make_opsetid("", OPSET)
    model = helper.make_model(graph, opset_imports=[opset], ir_version=IR_VERSION)
    onnx.checker.check_model(model, full_check=True)
    return model


def from_gguf(file: Gguf) -> onnx.ModelProto:
    """The decoder with the weights of a file."""
    of = sizes(file.metadata)
    tensors = file.tensors()
    for layer in range(of.layers):
        for part, heads in (("attn_q", of.heads), ("attn_k", of.shared_heads)):
            name = f"blk.{layer}.{part}.weight"
            tensors[name] = halves_apart(tensors[name], heads)
    return smollm2(tensors, of)
