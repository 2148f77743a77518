"""Merges neighbors that only move data: Transpose after Transpose, Reshape after Reshape."""

from __future__ import annotations

import onnx_ir as ir

from slimctl.passes._fuse_graph import Workbench, bypass, integers, is_op, mark


def merge_movement(bench: Workbench) -> None:
    """Lets the later of two nodes read what the earlier one read."""
    for node in bench.nodes():
        before = node.inputs[0].producer() if node.inputs and node.inputs[0] is not None else None
        if before is None or before.graph is not node.graph:
            continue
        if is_op(node, "Transpose") and is_op(before, "Transpose"):
            _merge_transpose(bench, before, node)
        elif is_op(node, "Reshape") and is_op(before, "Reshape", "Flatten", "Squeeze", "Unsqueeze"):
            _merge_reshape(bench, before, node)


def _merge_transpose(bench: Workbench, first: ir.Node, second: ir.Node) -> None:
    source = first.inputs[0]
    one, two = _order(bench, first), _order(bench, second)
    if source is None or one is None or two is None or not bench.may_touch(second, first):
        return
    order = [one[axis] for axis in two]
    if order == sorted(order) and bypass(second, source):
        bench.count("Transpose removed")
        return
    if order == sorted(order):
        return
    second.attributes.add(ir.AttrInt64s("perm", order))
    second.replace_input_with(0, source)
    mark(second)
    bench.count("Transpose merged")


def _order(bench: Workbench, node: ir.Node) -> tuple[int, ...] | None:
    order = node.attributes.get_ints("perm", None)
    if order is not None:
        return tuple(order)
    rank = bench.rank(node.inputs[0])
    return None if rank is None else tuple(reversed(range(rank)))


def _merge_reshape(bench: Workbench, first: ir.Node, second: ir.Node) -> None:
    """A target without 0 does not depend on the shape before, only on the number of elements."""
    target = integers(second, 1, "shape")
    if target is None or 0 in target or not bench.may_touch(second, first):
        return
    second.replace_input_with(0, first.inputs[0])
    mark(second)
    bench.count("Reshape merged")
