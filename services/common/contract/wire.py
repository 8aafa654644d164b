# SPDX-License-Identifier: Apache-2.0
"""The mapping between a contract document and its wire form.

Both have the same names, so the mapping follows the message's descriptor: `Maybe...` messages are a value or the text
`not_applicable`, enum values are their lower-case words, and everything else is itself. A test walks schema and
descriptor together and finds any name that only one of them has.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from google.protobuf.descriptor import FieldDescriptor

from ifabric.engine.v1 import contract_pb2
from services.common.schema import ABSENT, Document, Real
from services.common.schema.nodes import NOT_APPLICABLE

if TYPE_CHECKING:
    from google.protobuf.message import Message

_Descriptor = Any
"""A descriptor of protobuf's, whose stubs have two unrelated classes for each kind."""

_INTEGERS: Final = {
    FieldDescriptor.TYPE_INT32: range(-(1 << 31), 1 << 31),
    FieldDescriptor.TYPE_INT64: range(-(1 << 63), 1 << 63),
}


def to_document(contract: contract_pb2.EngineContract) -> dict[str, Document]:
    """The document that a contract in wire form stands for; what is absent there is absent here.

    Repeated fields have no presence: an empty one is an empty list.
    """
    return _document_of(contract)


def from_document(document: Document) -> contract_pb2.EngineContract:
    """The wire form of a document, as far as it can carry it: what is missing, unknown or mistyped is left out."""
    contract = contract_pb2.EngineContract()
    _fill(contract, document)
    return contract


def to_json(contract: contract_pb2.EngineContract) -> bytes:
    """The text of a `contract.json`, in the one form in which the engine builders write it."""
    plain = json.dumps(to_document(contract), indent=2, ensure_ascii=True, allow_nan=False, default=_plain)
    return f"{plain}\n".encode()


def is_maybe(message: _Descriptor) -> bool:
    """Whether a message says a value or that it does not apply."""
    return str(message.name).startswith("Maybe")


def word_of(enum: _Descriptor, number: int) -> str:
    """The word of an enum value; the number itself where the enum has no such value."""
    value = enum.values_by_number.get(number)
    return str(number) if value is None else str(value.name).removeprefix(_prefix(enum)).lower()


def _prefix(enum: _Descriptor) -> str:
    return str(enum.values_by_number[0].name).removesuffix("UNSPECIFIED")


def _plain(value: Any) -> float:
    if isinstance(value, Real):
        return value.value
    raise TypeError(f"{type(value).__name__} in a contract")


def _document_of(message: Message) -> dict[str, Document]:
    document: dict[str, Document] = {}
    for field in message.DESCRIPTOR.fields:
        if field.is_repeated:
            document[field.name] = [_value_of(field, item) for item in getattr(message, field.name)]
        elif field.has_presence and not message.HasField(field.name):
            continue
        elif (value := _value_of(field, getattr(message, field.name))) is not ABSENT:
            document[field.name] = value
    return document


def _value_of(field: _Descriptor, value: Any) -> Document:
    if field.message_type is not None:
        return _maybe_of(value) if is_maybe(field.message_type) else _document_of(value)
    if field.enum_type is not None:
        # Zero is "unspecified" in every enum: nobody said it.
        return word_of(field.enum_type, value) if value else ABSENT
    return Real.of(value) if field.type == FieldDescriptor.TYPE_DOUBLE else value


def _maybe_of(message: Any) -> Document:
    match message.WhichOneof("kind"):
        case "not_applicable":
            # `false` is never sent; shown as it is, it becomes a finding.
            return NOT_APPLICABLE if message.not_applicable else False
        case "value":
            return _value_of(message.DESCRIPTOR.fields_by_name["value"], message.value)
        case _:
            return ABSENT


def _fill(message: Message, document: Document) -> None:
    if not isinstance(document, dict):
        return
    for field in message.DESCRIPTOR.fields:
        value = document.get(field.name, ABSENT)
        if field.is_repeated:
            _fill_list(getattr(message, field.name), field, value)
        elif field.message_type is not None and is_maybe(field.message_type):
            _fill_maybe(message, field, value)
        elif field.message_type is not None:
            if isinstance(value, dict):
                getattr(message, field.name).SetInParent()
                _fill(getattr(message, field.name), value)
        elif (scalar := _scalar(field, value)) is not ABSENT:
            setattr(message, field.name, scalar)


def _fill_list(target: Any, field: _Descriptor, value: Document) -> None:
    for item in value if isinstance(value, list) else []:
        if field.message_type is not None:
            _fill(target.add(), item)
        elif (scalar := _scalar(field, item)) is not ABSENT:
            target.append(scalar)


def _fill_maybe(message: Message, field: _Descriptor, value: Document) -> None:
    if value == NOT_APPLICABLE:
        getattr(message, field.name).not_applicable = True
        return
    inner = field.message_type.fields_by_name["value"]
    if inner.message_type is not None:
        if isinstance(value, dict):
            getattr(message, field.name).value.SetInParent()
            _fill(getattr(message, field.name).value, value)
    elif (scalar := _scalar(inner, value)) is not ABSENT:
        getattr(message, field.name).value = scalar


def _scalar(field: _Descriptor, value: Document) -> Any:
    """The value as the field carries it; ABSENT where it cannot."""
    if field.type in _INTEGERS:
        return value if type(value) is int and value in _INTEGERS[field.type] else ABSENT
    if field.type == FieldDescriptor.TYPE_DOUBLE:
        if isinstance(value, Real):
            return value.value
        return float(value) if type(value) is int else ABSENT
    if field.type == FieldDescriptor.TYPE_BOOL:
        return value if isinstance(value, bool) else ABSENT
    if not isinstance(value, str):
        return ABSENT
    if field.enum_type is not None:
        number = field.enum_type.values_by_name.get(_prefix(field.enum_type) + value.upper())
        return number.number if number is not None and number.number and value.islower() else ABSENT
    return value
