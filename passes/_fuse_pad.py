"""Folds padding with zeros into the convolution or the average pooling behind it.

Both pad by themselves, and without a copy of the tensor. A convolution pads with zeros; average
pooling counts its padding only with ``count_include_pad``.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from slimctl.graph.edit import const_array
from slimctl.passes._fuse_graph import (
    Workbench,
    input_of,
    integers,
    is_op,
    mark,
    only_reader,
    remove,
)


def fold_pad(bench: Workbench) -> None:
    """Folds Pad nodes into the nodes that read them."""
    for node in bench.nodes():
        if is_op(node, "Pad") and _feeds_padding_operator(node):
            reason = _fold(bench, node)
            if reason is not None:
                bench.skip(node, reason)


def _feeds_padding_operator(pad: ir.Node) -> bool:
    uses = pad.outputs[0].uses()
    return any(use.idx == 0 and is_op(use.node, "Conv", "AveragePool") for use in uses)


def _fold(bench: Workbench, pad: ir.Node) -> str | None:
    """Folds one Pad, or says why not."""
    reader = only_reader(pad.outputs[0])
    if reader is None:
        return "its result is also read elsewhere"
    amounts = _spatial_amounts(bench, pad, reader)
    if isinstance(amounts, str):
        return amounts
    total = _total(reader, amounts)
    if isinstance(total, str):
        return total
    if bench.may_touch(pad, reader):
        reader.attributes.add(ir.AttrInt64s("pads", total))
        reader.attributes.pop("auto_pad", None)
        if reader.op_type == "AveragePool":
            reader.attributes.add(ir.AttrInt64("count_include_pad", 1))
        reader.replace_input_with(0, pad.inputs[0])
        remove(pad)
        mark(reader)
        bench.count(f"Pad folded into {reader.op_type}")
    return None


def _spatial_amounts(bench: Workbench, pad: ir.Node, reader: ir.Node) -> list[int] | str:
    """What a Pad adds on the spatial axes, begins then ends."""
    mode = pad.attributes.get_string("mode", "constant")
    if mode != "constant":
        return f"it pads in mode '{mode}'"
    if not _pads_with_zero(pad):
        return "it does not pad with a constant zero"
    amounts = _amounts(bench, pad, reader)
    if amounts is None:
        return "its amounts or axes are not known"
    rank = len(amounts) // 2
    if any((*amounts[:2], *amounts[rank : rank + 2])):
        return "it pads the batch or channel axis"
    if min(amounts) < 0:
        return "it crops"
    return [*amounts[2:rank], *amounts[rank + 2 :]]


def _pads_with_zero(pad: ir.Node) -> bool:
    value = input_of(pad, 2)
    if value is None:
        return pad.attributes.get_float("value", 0.0) == 0.0
    array = const_array(value)
    return array is not None and array.size == 1 and not array.any()


def _amounts(bench: Workbench, pad: ir.Node, reader: ir.Node) -> list[int] | None:
    """Amounts on all axes, begins then ends."""
    amounts = integers(pad, 1, "pads")
    if amounts is None or not amounts:
        return None
    if input_of(pad, 3) is None:
        return list(amounts)
    axes = integers(pad, 3, "axes")
    rank = bench.rank(pad.inputs[0]) or _kernel_rank(reader)
    if axes is None or rank is None:
        return None
    result = [0] * (2 * rank)
    for place, axis in enumerate(axis % rank for axis in axes):
        result[axis] = amounts[place]
        result[axis + rank] = amounts[place + len(axes)]
    return result


def _kernel_rank(reader: ir.Node) -> int | None:
    kernel = reader.attributes.get_ints("kernel_shape", None)
    return None if kernel is None else len(kernel) + 2


def _total(reader: ir.Node, amounts: Sequence[int]) -> list[int] | str:
    """The ``pads`` with which the reader does both paddings, or why it cannot."""
    auto_pad = reader.attributes.get_string("auto_pad", "NOTSET")
    if auto_pad not in {"NOTSET", "VALID"}:
        return "the operator behind it pads by auto_pad"
    own = reader.attributes.get_ints("pads", None) if auto_pad == "NOTSET" else None
    own = tuple(own or [0] * len(amounts))
    if len(own) != len(amounts):
        return "the operator behind it has another number of axes"
    total = [mine + added for mine, added in zip(own, amounts, strict=True)]
    return total if reader.op_type == "Conv" else _pooling_total(reader, own, total)


def _pooling_total(reader: ir.Node, own: Sequence[int], total: list[int]) -> list[int] | str:
    about = "the pooling behind it "
    if reader.attributes.get_int("ceil_mode", 0):
        return about + "rounds its size up: windows reach beyond the padding"
    if any(dilation != 1 for dilation in reader.attributes.get_ints("dilations", ())):
        return about + "is dilated"
    if any(own) and not reader.attributes.get_int("count_include_pad", 0):
        return about + "does not count its own padding"
    kernel = reader.attributes.get_ints("kernel_shape", ())
    if any(pads >= kernel[place % len(kernel)] for place, pads in enumerate(total)):
        return about + "has a kernel no larger than the padding"
    return total
