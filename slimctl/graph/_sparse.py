"""Sparse tensors of ONNX as ordinary ones. onnx-ir drops them, onnxruntime densifies them too."""

from __future__ import annotations

import math

import numpy as np
import onnx

_LARGEST = 1 << 31  # elements; a few bytes of a hostile file must not ask for all memory


def dense_tensor(sparse: onnx.SparseTensorProto) -> onnx.TensorProto:
    """The dense tensor with the name of ``sparse.values``.

    Raises:
        ValueError: Sizes and indices do not fit together, or the result would be too large.
        IndexError: An index is outside the shape.
    """
    dims = tuple(sparse.dims)
    if sparse.values.data_location or sparse.indices.data_location:
        raise ValueError("its parts lie in external data")
    if any(dim < 0 for dim in dims) or math.prod(dims) > _LARGEST:
        raise ValueError(f"its shape is {list(dims)}")
    values = onnx.numpy_helper.to_array(sparse.values)  # [n]
    indices = onnx.numpy_helper.to_array(sparse.indices)  # [n] or [n, rank]
    if indices.ndim > 1:
        indices = np.ravel_multi_index(tuple(indices.T), dims)  # [n, rank] -> [n]
    if indices.shape != values.shape or indices.min(initial=0) < 0:
        raise ValueError("every value needs one index that is not negative")
    dense = np.zeros(math.prod(dims), values.dtype)
    dense[indices] = values
    return onnx.numpy_helper.from_array(dense.reshape(dims), sparse.values.name)
