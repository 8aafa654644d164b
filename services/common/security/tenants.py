# SPDX-License-Identifier: Apache-2.0
"""The tenant of a request is the caller's, whatever the request says."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from google.protobuf.message import Message

from services.common import reasons
from services.common.errors import PermissionDeniedError

if TYPE_CHECKING:
    from google.protobuf.descriptor import Descriptor

    from services.common.security.caller import Caller

_FIELD = "tenant"


def impose(message: object, caller: Caller, *, first: bool = True) -> None:
    """Fills the caller's tenant in wherever a message leaves it out.

    Looks at the message's own `tenant` and at those of the messages right inside it (a call's request, a stream's
    requests, a job's spec). Rows of a job carry none: the job's counts.

    Args:
        message: A request message; changed in place. What is no protobuf message carries no tenant.
        caller: Who sent it.
        first: Whether it is the first of its call. A stream names its tenant once.

    Raises:
        PermissionDeniedError: it names another tenant than the caller's, who may not.
    """
    if not isinstance(message, Message):
        return
    own, single, many = _places(message.DESCRIPTOR)
    if own and first:
        _settle(message, caller)
    for name in single:
        if message.HasField(name):
            _settle(getattr(message, name), caller)
    for name in many:
        for inner in getattr(message, name):
            _settle(inner, caller)


def request_count(message: object) -> int:
    """Returns how many requests a message brings: its `requests` or `rows`, or 1 where it holds a single one."""
    if not isinstance(message, Message):
        return 0
    descriptor = message.DESCRIPTOR
    for name in ("requests", "rows"):
        field = descriptor.fields_by_name.get(name)
        if field is not None and field.is_repeated:
            return len(getattr(message, name))
    return 1 if "request" in descriptor.fields_by_name or descriptor.name == "ModelInferRequest" else 0


def _settle(message: Any, caller: Caller) -> None:
    if message.tenant == caller.tenant or caller.any_tenant:
        return
    if message.tenant:
        raise PermissionDeniedError(
            "the request names another tenant than the caller's: leave it out", reason=reasons.TENANT_DIFFERS
        )
    message.tenant = caller.tenant


@functools.cache
def _places(descriptor: Descriptor) -> tuple[bool, tuple[str, ...], tuple[str, ...]]:
    """Where tenants stand in a kind of message: in itself, in single messages in it, in repeated ones."""
    inner = [
        field
        for field in descriptor.fields
        if field.message_type is not None and _FIELD in field.message_type.fields_by_name
    ]
    return (
        _FIELD in descriptor.fields_by_name,
        tuple(field.name for field in inner if not field.is_repeated),
        tuple(field.name for field in inner if field.is_repeated),
    )
