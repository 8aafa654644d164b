# SPDX-License-Identifier: Apache-2.0
"""Values and paths of messages as short text, as findings show them."""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING, Any

from google.protobuf.message import Message

from ifabric.engine.v1 import node_pb2
from ifabric.worker.v1 import worker_service_pb2

if TYPE_CHECKING:
    from collections.abc import Iterator

    from google.protobuf.descriptor import Descriptor

ABSENT = "absent"
_CHARACTERS_MAX = 200
_INDEX = re.compile(r"\[[^]]*]")


def text_of(value: Any, field: Any = None) -> str:
    """Returns a value as short text; the value of a message's field if its descriptor is given, `absent` where not set.

    Enum values are lower-case words without their prefix, lists are in brackets, what does not apply says so.
    """
    if field is None:
        return _cut(_plain(value))
    if field.has_presence and not value.HasField(field.name):
        return ABSENT
    inner = getattr(value, field.name)
    if field.is_repeated:
        items = [_element(item, field) for item in inner]
        if field.enum_type is not None:
            items.sort()  # a list of words is a set: its order says nothing
        return _cut(f"[{', '.join(items)}]")
    return _cut(_element(inner, field))


def field_label(path: str) -> str:
    """Returns a finding's path without indices, or `other` where documents of this suite have no such field.

    Metrics carry it as a label, and what a node writes into its contract must not make new labels.
    """
    plain = _INDEX.sub("", path)
    return plain if plain in _known_paths() else "other"


def _element(value: Any, field: Any) -> str:
    if field.enum_type is None:
        return _plain(value)
    number = field.enum_type.values_by_number.get(value)
    prefix = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", field.enum_type.name).upper() + "_"
    return str(value) if number is None else number.name.removeprefix(prefix).lower()


def _plain(value: Any) -> str:
    if isinstance(value, Message):
        if "kind" in value.DESCRIPTOR.oneofs_by_name:
            kind = value.WhichOneof("kind")
            return _plain(getattr(value, "value", None)) if kind == "value" else kind or ABSENT
        return ", ".join(f"{field.name} {text_of(value, field)}" for field in value.DESCRIPTOR.fields)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return value or ABSENT
    return str(value)


def _cut(text: str) -> str:
    return text if len(text) <= _CHARACTERS_MAX else text[:_CHARACTERS_MAX] + "…"


@cache
def _known_paths() -> frozenset[str]:
    loaded = frozenset(_paths("loaded", node_pb2.EngineReport.DESCRIPTOR))
    return frozenset(
        {
            *_paths("", node_pb2.NodeDescription.DESCRIPTOR),
            *loaded,
            "engine",
            "probe",
            *_paths("probe", worker_service_pb2.ProbeResponse.DESCRIPTOR),
        }
    )


def _paths(prefix: str, kind: Descriptor) -> Iterator[str]:
    """Yields the path of every field below `prefix`; what may not apply counts as what it is when it does."""
    for field in kind.fields:
        path = f"{prefix}.{field.name}" if prefix else field.name
        yield path
        inner = field.message_type
        if inner is not None and "kind" in inner.oneofs_by_name:
            inner = inner.fields_by_name["value"].message_type
        if inner is not None:
            yield from _paths(path, inner)
