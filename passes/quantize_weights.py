"""Weight-only quantization: matrices are stored with few bits, and computed with in float."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any, ClassVar, Final, Literal, NamedTuple, Self

import numpy as np
import onnx_ir as ir
from pydantic import Field, field_validator, model_validator

from slimctl.core.contract import Context, Effect, Pass, PassReport
from slimctl.core.target import Target
from slimctl.graph.edit import NameScope, const_array, remove_dead
from slimctl.graph.select import Patterns, Selection
from slimctl.numerics.blocks import Blocks
from slimctl.passes._weights_algorithms import Algorithm, Job, Settings
from slimctl.passes._weights_gptq import Correction
from slimctl.passes._weights_layers import Shared, Wanted, find
from slimctl.passes._weights_write import Editor, StoredType, write_kernels, write_standard

_TWO: Final = 2
_BYTE: Final = 8
_SMALLEST_BLOCK: Final = 16
_LARGEST_BLOCK: Final = 2048
_BLOCKWISE_OPSET: Final = 21
_PER_AXIS_OPSET: Final = 13
_TWO_BIT_OPSET: Final = 25


class _Stored(NamedTuple):
    """What became of a matrix.

    Attributes:
        weights: How many.
        before: Bytes of the constant.
        after: Bytes of codes, scales and zero points.
        decibels: Energy of the weights over that of their error; None when nothing was lost.
    """

    weights: int
    before: int
    after: int
    decibels: float | None


class QuantizeWeights(Pass):
    """Store matrices with 2, 4 or 8 bits per weight; activations stay float."""

    name: ClassVar[str] = "quantize-weights"
    summary: ClassVar[str] = "Store matrices with 2, 4 or 8 bits per weight; activations stay float"
    effect: ClassVar[Effect] = Effect.APPROXIMATE
    uses_data: ClassVar[bool] = True

    weight_type: StoredType = Field("uint4", description="Integer type of the weights.")
    block_size: int = Field(
        32,
        ge=0,
        le=_LARGEST_BLOCK,
        description="Inputs that share a scale, a power of two from 16; 0: one scale per output.",
    )
    format: Literal["nbits", "qdq"] = Field(
        "nbits",
        description="nbits: onnxruntime's MatMulNBits and GatherBlockQuantized; "
        "qdq: the standard DequantizeLinear, which onnxruntime fuses when it loads the model.",
    )
    algorithm: Algorithm = Field(
        "rtn",
        description="rtn: to nearest, with the scale of least squared error; hqq: with zero points "
        "that leave outliers aside; gptq: later weights make good for earlier ones; "
        "awq: strong inputs get large weights. The last two need calibration data.",
    )
    symmetric: bool | None = Field(
        None,
        description="No zero points.",
        json_schema_extra={"unset": "signed types only"},
    )
    accuracy_level: int = Field(
        0,
        ge=0,
        le=4,
        description="Least precision that MatMulNBits may compute in: 0 that of the model, "
        "1 float32, 2 float16, 3 bfloat16, 4 int8: activations are rounded to 8 bits per block, "
        "which is faster and costs about half a percent of error. With qdq it is not stored: "
        "onnxruntime takes 4 unless session.qdq_matmulnbits_accuracy_level says otherwise.",
    )
    embeddings: bool = Field(True, description="Tables of which rows are looked up, too.")
    damping: float = Field(
        0.1,
        gt=0.0,
        le=10.0,
        description="gptq: added to the second moment of each input, as a share of it.",
    )
    act_order: bool = Field(True, description="gptq: round the weights of strong inputs first.")
    include: Patterns = Field(
        (), description="Quantize only matching nodes: name glob, op:TYPE or re:REGEX; repeatable."
    )
    exclude: Patterns = Field(
        (), description="Leave matching nodes in float: as --include; repeatable."
    )

    @field_validator("block_size")
    @classmethod
    def _is_power_of_two(cls, size: int) -> int:
        if size and (size < _SMALLEST_BLOCK or size & (size - 1)):
            raise ValueError(f"{size} is not 0 and not a power of two from {_SMALLEST_BLOCK}")
        return size

    @model_validator(mode="after")
    def _options_agree(self) -> Self:
        if self.accuracy_level and self.format == "qdq":
            raise ValueError("accuracy_level cannot be stored with format qdq; leave it at 0")
        if self.algorithm == "hqq" and self._is_symmetric:
            raise ValueError(
                "hqq moves zero points, and symmetric weights have none; "
                "take an unsigned weight_type or symmetric: false"
            )
        return self

    @property
    def _bits(self) -> int:
        return int(self.weight_type.removeprefix("u").removeprefix("int"))

    @property
    def _is_symmetric(self) -> bool:
        signed = not self.weight_type.startswith("u")
        return signed if self.symmetric is None else self.symmetric

    @property
    def _wanted(self) -> Wanted:
        return Wanted(self.block_size, self._bits, self.format == "nbits", self.embeddings)

    def requires_data(self) -> bool:
        """Where weights are chosen for what layers read."""
        return self.algorithm in ("awq", "gptq")

    def minimum_opset(self, model: ir.Model, target: Target) -> int:
        """What the standard operators need: blocks came with 21, 2-bit types with 25."""
        del target
        if self.format == "nbits":
            return 0
        matrices, _ = find(model, self._wanted, Selection(self.include, self.exclude))
        if not matrices:
            return 0
        if self._bits == _TWO:
            return _TWO_BIT_OPSET
        tables = any(shared.has_table for shared in matrices)
        per_axis = self._bits == _BYTE and not self.block_size and not tables
        return _PER_AXIS_OPSET if per_axis else _BLOCKWISE_OPSET

    def apply(self, model: ir.Model, context: Context) -> PassReport:
        """Quantizes every matrix that can be."""
        selection = Selection(self.include, self.exclude)
        matrices, skipped = find(model, self._wanted, selection)
        names = NameScope(model)
        correction = Correction(self.damping, self.act_order)
        settings = Settings(
            self.algorithm, self._bits, self._is_symmetric, self.format == "nbits", correction
        )
        job = Job(model, settings, context, names)
        editor = Editor(model, names, self.name)
        changed: Counter[str] = Counter()
        stored: dict[str, _Stored] = {}
        for shared, blocks in job.run(matrices):
            changed.update(layer.node.op_type for layer in shared.layers)
            stored[shared.name] = _measure(shared, blocks)
            self._write(shared, blocks, editor)
        remove_dead(model)
        return PassReport(
            changed=dict(changed),
            skipped=tuple(skipped),
            notes=self._notes(stored, job.plain),
            warnings=tuple(f"no node matches '{p}'" for p in selection.unused()),
            facts=_facts(stored, job.plain),
        )

    def _write(self, shared: Shared, blocks: Blocks, editor: Editor) -> None:
        if self.format == "nbits":
            write_kernels(shared, blocks, self.accuracy_level, editor)
        else:
            write_standard(shared, blocks, self.weight_type, editor)

    def _notes(self, stored: dict[str, _Stored], plain: dict[str, str]) -> tuple[str, ...]:
        if not stored:
            return ()
        before, after, weights = (
            sum(getattr(item, part) for item in stored.values())
            for part in ("before", "after", "weights")
        )
        notes = [
            f"weights take {after:,} bytes instead of {before:,}: "
            f"{after * _BYTE / weights:.2f} bits each, scales and zero points included"
        ]
        notes += [
            f"{count} matrices {_LESS[self.algorithm]}: {reason}"
            for reason, count in Counter(plain.values()).items()
        ]
        if self.format == "qdq":
            notes.append(
                "onnxruntime rounds the activations of these products to 8 bits, unless the "
                "session sets session.qdq_matmulnbits_accuracy_level to 0"
            )
        return tuple(notes)


_LESS: Final = {"gptq": "rounded to nearest", "awq": "rounded as they are", "rtn": "", "hqq": ""}


def _measure(shared: Shared, blocks: Blocks) -> _Stored:
    matrix = shared.storage.matrix()
    noise = blocks.squared_error(matrix)
    signal = float(np.einsum("ok,ok->", matrix, matrix, dtype=np.float64))
    constant = const_array(shared.storage.value)
    assert constant is not None, "a matrix"
    grid, scale = blocks.grid, blocks.parameters.scale
    after = blocks.codes.size * grid.bits / _BYTE + scale.size * grid.dtype.itemsize
    if not grid.symmetric:
        whole = np.array_equal(np.rint(blocks.parameters.zero_point), blocks.parameters.zero_point)
        after += scale.size * (grid.bits / _BYTE if whole else grid.dtype.itemsize)
    decibels = 10 * math.log10(signal / noise) if noise and signal else None
    return _Stored(matrix.size, constant.nbytes, math.ceil(after), decibels)


def _facts(stored: dict[str, _Stored], plain: dict[str, str]) -> dict[str, Any]:
    return {
        "weight_sqnr_db": {
            name: None if item.decibels is None else round(item.decibels, 2)
            for name, item in stored.items()
        },
        "bytes_before": sum(item.before for item in stored.values()),
        "bytes_after": sum(item.after for item in stored.values()),
        "plain": plain,
    }
