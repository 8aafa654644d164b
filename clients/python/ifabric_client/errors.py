# SPDX-License-Identifier: Apache-2.0
"""What a broker answers where a call or a row fails, as one typed error."""

from __future__ import annotations

from dataclasses import dataclass

import grpc
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status


@dataclass(frozen=True, slots=True)
class Violation:
    """A field at fault."""

    field: str
    description: str
    """The value that was found and the limit."""


class CallError(Exception):
    """A call failed, or a row did.

    Attributes:
        code: Name of the gRPC status, such as `INVALID_ARGUMENT`.
        reason: Stable word for programs; `docs/errors.md` lists them. Empty where gRPC itself failed.
        message: A sentence for people.
        violations: Fields at fault, all of them.
        retry_after_s: When the broker wants to be asked again, in seconds; None where it did not say.
    """

    def __init__(
        self,
        code: str,
        message: str,
        *,
        reason: str = "",
        violations: tuple[Violation, ...] = (),
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(f"{code} {reason}: {message}" if reason else f"{code}: {message}")
        self.code = code
        self.message = message
        self.reason = reason
        self.violations = violations
        self.retry_after_s = retry_after_s

    @property
    def passing(self) -> bool:
        """Whether the same call may succeed later: nothing serves now, or a bound was reached that comes free again."""
        return self.code == "UNAVAILABLE" or (self.code == "RESOURCE_EXHAUSTED" and self.retry_after_s is not None)


class ClosedError(RuntimeError):
    """A call was made after the client was closed; what was open then ends with CANCELLED instead."""

    def __init__(self) -> None:
        super().__init__("the client is closed")


def closed_meanwhile() -> CallError:
    """Returns what ends a call that was open when its client was closed."""
    return CallError("CANCELLED", "the client was closed while the call ran")


def of_call(error: grpc.aio.AioRpcError) -> CallError:
    """Turns a failed call into its error."""
    try:
        status = rpc_status.from_call(error)  # type: ignore[arg-type]
    except ValueError:
        status = None  # details that contradict the code: only the code can be trusted
    if status is not None and status.details:
        return of_status(status)
    if error.code() is grpc.StatusCode.CANCELLED:
        # Not by us: closing raises its own error. What the broker cancels has a status that says so; this is gRPC's
        # word for a call that reached a broker as it ended.
        return CallError("UNAVAILABLE", "the broker ended as the call came in")
    return CallError(error.code().name, error.details() or error.code().name.lower())


def of_status(status: status_pb2.Status) -> CallError:
    """Turns a status, such as a failed row's, into its error; details of other kinds are left out."""
    reason, retry_after_s = "", None
    violations: tuple[Violation, ...] = ()
    for detail in status.details:
        info, bad, retry = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
        if detail.Unpack(info):
            reason = info.reason
        elif detail.Unpack(bad):
            violations = tuple(Violation(each.field, each.description) for each in bad.field_violations)
        elif detail.Unpack(retry):
            retry_after_s = retry.retry_delay.ToTimedelta().total_seconds()
    return CallError(
        code_pb2.Code.Name(code_pb2.Code.ValueType(status.code)),
        status.message,
        reason=reason,
        violations=violations,
        retry_after_s=retry_after_s,
    )
