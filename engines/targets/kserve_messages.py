# SPDX-License-Identifier: Apache-2.0
"""The few messages of KServe's v2 inference protocol that a text request needs, described here field by field.

The protocol names its package `inference` and its service `GRPCInferenceService`; the numbers of fields are its own.
They are described in a pool of their own, so that a process that also loads another description of the protocol keeps
both.
"""

from __future__ import annotations

from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

SERVICE: Final = "inference.GRPCInferenceService"
_KIND: Final = descriptor_pb2.FieldDescriptorProto
_TYPES: Final = {
    "string": _KIND.TYPE_STRING,
    "int64": _KIND.TYPE_INT64,
    "bool": _KIND.TYPE_BOOL,
    "bytes": _KIND.TYPE_BYTES,
}
_MESSAGES: Final[dict[str, dict[str, tuple[int, str, bool]]]] = {
    "Tensor": {"name": (1, "string", False), "datatype": (2, "string", False), "shape": (3, "int64", True)},
    "RequestedOutput": {"name": (1, "string", False)},
    "ModelInferRequest": {
        "model_name": (1, "string", False),
        "model_version": (2, "string", False),
        "id": (3, "string", False),
        "inputs": (5, "Tensor", True),
        "outputs": (6, "RequestedOutput", True),
        "raw_input_contents": (7, "bytes", True),
    },
    "ModelInferResponse": {
        "model_name": (1, "string", False),
        "model_version": (2, "string", False),
        "id": (3, "string", False),
        "outputs": (5, "Tensor", True),
        "raw_output_contents": (6, "bytes", True),
    },
    "ModelStreamInferResponse": {
        "error_message": (1, "string", False),
        "infer_response": (2, "ModelInferResponse", False),
    },
}
"""Messages by name: field -> number, type, repeated."""


def _classes() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="inference.proto", package="inference", syntax="proto3")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field, (number, kind, repeated) in fields.items():
            label = _KIND.LABEL_REPEATED if repeated else _KIND.LABEL_OPTIONAL
            described = message.field.add(name=field, number=number, label=label)
            if kind in _TYPES:
                described.type = _TYPES[kind]
            else:
                described.type = _KIND.TYPE_MESSAGE
                described.type_name = f".inference.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"inference.{name}")) for name in _MESSAGES
    }


_MADE: Final = _classes()
ModelInferRequest: Final = _MADE["ModelInferRequest"]
ModelInferResponse: Final = _MADE["ModelInferResponse"]
ModelStreamInferResponse: Final = _MADE["ModelStreamInferResponse"]
