"""Reading models safely, in the one form that passes work on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from logging import ERROR, getLogger
from pathlib import Path

import onnx_ir as ir

from slimctl.core.errors import ModelLoadError, UnsupportedModelError
from slimctl.graph._external import ExternalReader
from slimctl.graph._normalize import normalize
from slimctl.graph._parse import read_proto
from slimctl.graph.edit import all_graphs, all_nodes


def load_model(path: Path) -> ir.Model:
    """Reads an ONNX model, with or without external data, and normalizes it.

    The model computes what the file computes, and has the same inputs and outputs, except that
    initializers are no longer listed among the inputs. Weights in external data are mapped, not
    read, so models of any size load.

    Args:
        path: An ``.onnx`` file.

    Raises:
        ModelLoadError: Not a readable, complete, consistent and safe model.
        UnsupportedModelError: A valid model that needs something we do not have.
    """
    with quiet_onnx_ir():
        try:
            model = ir.serde.deserialize_model(read_proto(path))
        except (ir.serde.SerdeError, ValueError, TypeError, NotImplementedError) as error:
            raise ModelLoadError(
                path,
                f"The model cannot be understood: {_root(error)}",
                fix="check it with onnx.checker.check_model, and export it again",
            ) from error
        try:
            normalize(model)
        except UnsupportedModelError as error:
            raise ModelLoadError(path, error.what, fix=error.fix) from error
    detach(model, path)
    return model


def _root(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


@contextmanager
def quiet_onnx_ir() -> Iterator[None]:
    """onnx-ir logs warnings about what we report as errors."""
    logger = getLogger("onnx_ir")
    level = logger.level
    logger.setLevel(ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def detach(model: ir.Model, path: Path) -> None:
    """Lets go of the parsed file: a single tensor that refers to it keeps all of it in memory.

    Afterwards reading a weight is a view and no copy, and external data are mapped: the model no
    longer needs its files.
    """
    external = ExternalReader(path)
    for graph in all_graphs(model):
        for value in graph.initializers.values():
            if value.const_value is not None:
                value.const_value = _detached(value.const_value, external)
    for node in all_nodes(model):
        for name, attribute in list(node.attributes.items()):
            if attribute.type == ir.AttributeType.TENSOR and not attribute.is_ref():
                tensor = _detached(attribute.value, external)
                node.attributes[name] = ir.AttrTensor(name, tensor)
            elif attribute.type == ir.AttributeType.TENSORS and not attribute.is_ref():
                tensors = [_detached(tensor, external) for tensor in attribute.value]
                node.attributes[name] = ir.AttrTensors(name, tensors)


def _detached(tensor: ir.TensorProtocol, external: ExternalReader) -> ir.TensorProtocol:
    if isinstance(tensor, ir.ExternalTensor):
        return external.tensor(tensor)
    if isinstance(tensor, ir.StringTensor):
        return ir.StringTensor(list(tensor.string_data()), shape=tensor.shape, name=tensor.name)
    if isinstance(tensor, ir.TensorProtoTensor) and tensor.dtype.bitwidth >= 8:
        return ir.Tensor(tensor.numpy(), dtype=tensor.dtype, name=tensor.name)
    return tensor
