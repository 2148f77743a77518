"""All operators. One that is not here is refused, by name."""

from __future__ import annotations

from slimctl.training import (
    operators_elementwise,
    operators_index,
    operators_linear,
    operators_movement,
    operators_normalize,
    operators_pool,
    operators_quantize,
    operators_recurrent,
    operators_reduce,
    operators_resize,
    operators_shape,
)
from slimctl.training.operator import Operator

OPERATORS: dict[str, Operator] = {
    **operators_elementwise.OPERATORS,
    **operators_index.OPERATORS,
    **operators_linear.OPERATORS,
    **operators_movement.OPERATORS,
    **operators_normalize.OPERATORS,
    **operators_pool.OPERATORS,
    **operators_quantize.OPERATORS,
    **operators_recurrent.OPERATORS,
    **operators_reduce.OPERATORS,
    **operators_resize.OPERATORS,
    **operators_shape.OPERATORS,
}
"""By operator of ONNX's own domain, as operator set 18 has them; later sets add to that."""

OPSET = 18
"""Graphs of older operator sets are raised to this one first, so that an operator has one form."""
