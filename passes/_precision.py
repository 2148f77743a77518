"""What a precision is: one entry of a table, and what it is asked about the layers of a model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

import onnx_ir as ir

from slimctl.core.target import Target

if TYPE_CHECKING:
    from slimctl.passes._attempt import Work

Aim = Literal["time", "size", "operations"]
"""What layers are counted by: time that is measured here, bytes, or bits that are multiplied."""

Carrier = Literal["codes", "wide", "real"]
"""What a layer reads and writes: codes of 8 bits, floats that a Q and a DQ of 16 bits have rounded,
or floats as they are."""

FLOAT = "float"
"""The precision that every layer can have."""


@dataclass(frozen=True)
class Layers:
    """The layers of a model, and what the options alone would make of them.

    Attributes:
        work: Of the float model.
        usual: What the options stand for.
        integer: Names of those that the options let compute in integers.
        stored: Names of those whose weights the options store as integers.
        nodes: The layers by name, in the order of the graph.
        able: The precisions that each of them can have by its form, once that is known.
    """

    work: Work
    usual: str
    integer: frozenset[str]
    stored: frozenset[str]
    nodes: Mapping[str, ir.Node]
    able: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def made(self, layer: str) -> str:
        """What the options make of a layer."""
        if layer in self.integer:
            return self.usual
        return "int8-weights" if layer in self.stored else FLOAT


class Kind(ABC):
    """One precision. A new one is a subclass, and a line in the table.

    Attributes:
        name: The word of plans and reports.
        meaning: Of the word, for people.
        stored_bits: Of one weight, with its share of scales and zero points.
        multiplied_bits: Bits of both factors of a product, multiplied: what counts where time
            cannot be measured.
        carrier: What stands at its borders; conversions cost by that.
        in_pairs: Static quantization writes it, with Q/DQ pairs. All others are left in float by
            it, and :meth:`write` goes on from there.
    """

    name: ClassVar[str]
    meaning: ClassVar[str]
    stored_bits: ClassVar[float]
    multiplied_bits: ClassVar[int]
    carrier: ClassVar[Carrier]
    in_pairs: ClassVar[bool] = False

    @abstractmethod
    def against(self, layer: str, layers: Layers) -> str:
        """Why a layer cannot have it by its form or by the options; empty where it can.

        What the target's provider says is not asked here: its profile judges the model.
        """

    def passed_over(self, layers: Layers, aim: Aim) -> str:
        """Why it is not looked at in a search, though a plan may ask for it; empty where it is."""
        del layers, aim
        return ""

    def keeps_itself(self, target: Target) -> bool:
        """Whether onnxruntime finds nothing to quantize in such a layer between Q/DQ pairs."""
        del target
        return False

    def write(self, model: ir.Model, layers: Collection[str], work: Work) -> None:
        """Gives it to layers of a model in which they are float and all others are done."""
        del model, layers, work
