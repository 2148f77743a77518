"""The part of Triton's ``model_config.proto`` that exports write, with its field numbers.

From triton-inference-server/common, protobuf/model_config.proto.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format

_FIELD = descriptor_pb2.FieldDescriptorProto
_KINDS = {
    "int32": _FIELD.TYPE_INT32,
    "int64": _FIELD.TYPE_INT64,
    "uint64": _FIELD.TYPE_UINT64,
    "string": _FIELD.TYPE_STRING,
    "bool": _FIELD.TYPE_BOOL,
}
_DATA_TYPES = (
    "INVALID BOOL UINT8 UINT16 UINT32 UINT64 INT8 INT16 INT32 INT64 FP16 FP32 FP64 STRING BF16"
)
_ENUMS = {
    "DataType": [f"TYPE_{name}" for name in _DATA_TYPES.split()],
    "Kind": ["KIND_AUTO", "KIND_GPU", "KIND_CPU", "KIND_MODEL"],
}
# "*" is a repeated field, "map" one of texts.
_MESSAGES: dict[str, dict[str, tuple[int, str]]] = {
    "Reshape": {"shape": (1, "*int64")},
    "Input": {
        "name": (1, "string"),
        "data_type": (2, "DataType"),
        "dims": (4, "*int64"),
        "reshape": (5, "Reshape"),
    },
    "Output": {
        "name": (1, "string"),
        "data_type": (2, "DataType"),
        "dims": (3, "*int64"),
        "reshape": (5, "Reshape"),
    },
    "InstanceGroup": {"count": (2, "int32"), "kind": (4, "Kind")},
    "DynamicBatching": {
        "preferred_batch_size": (1, "*int32"),
        "max_queue_delay_microseconds": (2, "uint64"),
    },
    "TextEntry": {"key": (1, "string"), "value": (2, "string")},
    "Accelerator": {"name": (1, "string"), "parameters": (2, "*TextEntry")},
    "Accelerators": {
        "gpu_execution_accelerator": (1, "*Accelerator"),
        "cpu_execution_accelerator": (2, "*Accelerator"),
    },
    "Optimization": {"execution_accelerators": (4, "Accelerators")},
    "Parameter": {"string_value": (1, "string")},
    "ParameterEntry": {"key": (1, "string"), "value": (2, "Parameter")},
    "ModelConfig": {
        "name": (1, "string"),
        "platform": (2, "string"),
        "max_batch_size": (4, "int32"),
        "input": (5, "*Input"),
        "output": (6, "*Output"),
        "instance_group": (7, "*InstanceGroup"),
        "dynamic_batching": (11, "DynamicBatching"),
        "optimization": (12, "Optimization"),
        "parameters": (14, "*ParameterEntry"),
    },
}


@cache
def _config_class() -> Any:
    file = descriptor_pb2.FileDescriptorProto(
        name="model_config.proto", package="inference", syntax="proto3"
    )
    for name, values in _ENUMS.items():
        enum = file.enum_type.add(name=name)
        for number, value in enumerate(values):
            enum.value.add(name=value, number=number)
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field, (number, kind) in fields.items():
            _add_field(message, field, number, kind)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("inference.ModelConfig"))


def _add_field(message: Any, name: str, number: int, kind: str) -> None:
    plain = kind.removeprefix("*")
    label = _FIELD.LABEL_OPTIONAL if plain == kind else _FIELD.LABEL_REPEATED
    field = message.field.add(name=name, number=number, label=label)
    if plain in _KINDS:
        field.type = _KINDS[plain]
    else:
        field.type = _FIELD.TYPE_ENUM if plain in _ENUMS else _FIELD.TYPE_MESSAGE
        field.type_name = f".inference.{plain}"


def parse(text: str) -> Any:
    """A configuration; an unknown field or a wrong type is an error."""
    return text_format.Parse(text, _config_class()())
