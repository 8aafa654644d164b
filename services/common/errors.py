# SPDX-License-Identifier: Apache-2.0
"""Typed errors of the suite and their form on the wire.

    FabricError
    ├── InvalidArgumentError      INVALID_ARGUMENT     a field is wrong; every violation at once
    ├── NotFoundError             NOT_FOUND            no such engine, node, job
    ├── AlreadyExistsError        ALREADY_EXISTS       the id is in flight
    ├── FailedPreconditionError   FAILED_PRECONDITION  things disagree, or it is too early
    ├── ResourceExhaustedError    RESOURCE_EXHAUSTED   a bound is reached; says when to try again
    ├── UnavailableError          UNAVAILABLE          gone or going away; may be tried again
    ├── UnimplementedError        UNIMPLEMENTED        a field or engine capability that is not served
    ├── DeadlineExceededError     DEADLINE_EXCEEDED    time is up
    ├── CancelledError_           CANCELLED            the caller ended it
    ├── UnauthenticatedError      UNAUTHENTICATED      nobody knows who calls
    ├── PermissionDeniedError     PERMISSION_DENIED    it is known who calls, and it is not theirs to do
    └── InternalError             INTERNAL             our fault; says nothing of the inside

    StartError                    never on the wire    the process cannot start; one sentence that says what to do

Domain code raises these; one server interceptor (`services.common.rpc`) turns them into `google.rpc.Status`. A status
always carries `ErrorInfo` (reason, domain, metadata), and `BadRequest` or `RetryInfo` where they apply.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from google.protobuf import any_pb2, duration_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2

from services.common import reasons

DOMAIN = "ifabric"
"""`ErrorInfo.domain` of every error of the suite."""


VIOLATION_BYTES_MAX = 16 * 1024
"""Most bytes of violations in one status: it travels in base64 in trailers, and our peers take 64 KiB of those at most
(`services.common.rpc.options`)."""


MESSAGE_CHARACTERS_MAX = 2_000
"""Longest message of a status; what is beyond is cut."""


@dataclass(frozen=True, slots=True)
class Violation:
    """One field at fault."""

    field: str
    """Path in proto form: `sampling.temperature`, `prompt.tokens.ids[3]`."""
    description: str
    """One sentence with the value found and the limit."""


class StartError(Exception):
    """A process cannot start: its message is one sentence that says what is wrong and what to do.

    The entry points print it and exit with status 2; it never crosses the wire.
    """


class FabricError(Exception):
    """Base of all errors of the suite.

    Attributes:
        message: One sentence for people.
        reason: Stable UPPER_SNAKE word for machines; the catalogue is `docs/errors.md`.
        metadata: Figures and names that belong to the error; never prompt text, never secrets.
        violations: Fields at fault, all of them.
        retry_after_s: When to try again, in seconds; None where trying again does not help.
    """

    code: ClassVar[int] = code_pb2.UNKNOWN
    default_reason: ClassVar[str] = "UNKNOWN"

    def __init__(
        self,
        message: str,
        *,
        reason: str = "",
        metadata: dict[str, str] | None = None,
        violations: tuple[Violation, ...] = (),
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason or self.default_reason
        self.metadata = dict(metadata or {})
        self.violations = violations
        self.retry_after_s = retry_after_s


class InvalidArgumentError(FabricError):
    """Fields of a request are wrong, whatever the state of the suite."""

    code = code_pb2.INVALID_ARGUMENT
    default_reason = reasons.INVALID_FIELDS

    @classmethod
    def of(cls, violations: list[Violation]) -> InvalidArgumentError:
        """Makes one error of all violations; `violations` is not empty."""
        first = violations[0]
        more = f" (and {len(violations) - 1} more)" if len(violations) > 1 else ""
        return cls(f"{first.field}: {first.description}{more}", violations=tuple(violations))


class NotFoundError(FabricError):
    """What the request names does not exist."""

    code = code_pb2.NOT_FOUND
    default_reason = reasons.NOT_FOUND


class AlreadyExistsError(FabricError):
    """The id that the request brings is in use."""

    code = code_pb2.ALREADY_EXISTS
    default_reason = reasons.ID_IN_FLIGHT


class FailedPreconditionError(FabricError):
    """The request is well formed but does not fit the state of things."""

    code = code_pb2.FAILED_PRECONDITION
    default_reason = reasons.PRECONDITION


class ResourceExhaustedError(FabricError):
    """A bound is reached."""

    code = code_pb2.RESOURCE_EXHAUSTED
    default_reason = reasons.BOUND_REACHED


class UnavailableError(FabricError):
    """What should serve the request is not there now."""

    code = code_pb2.UNAVAILABLE
    default_reason = reasons.UNAVAILABLE


class UnimplementedError(FabricError):
    """A field or capability that is not served, by name."""

    code = code_pb2.UNIMPLEMENTED
    default_reason = reasons.NOT_SERVED


class DeadlineExceededError(FabricError):
    """Time is up."""

    code = code_pb2.DEADLINE_EXCEEDED
    default_reason = reasons.DEADLINE


class CancelledError_(FabricError):
    """The caller ended the request; the plain name is asyncio's."""

    code = code_pb2.CANCELLED
    default_reason = reasons.CANCELLED


class UnauthenticatedError(FabricError):
    """The call carries no credential that this server can verify."""

    code = code_pb2.UNAUTHENTICATED
    default_reason = reasons.TOKEN_MISSING


class PermissionDeniedError(FabricError):
    """The caller is known and may not do this."""

    code = code_pb2.PERMISSION_DENIED
    default_reason = reasons.SCOPE_MISSING


class InternalError(FabricError):
    """A fault of the suite itself."""

    code = code_pb2.INTERNAL
    default_reason = reasons.INTERNAL


_BY_CODE: dict[int, type[FabricError]] = {kind.code: kind for kind in FabricError.__subclasses__()}


def to_status(error: BaseException) -> status_pb2.Status:
    """Turns an error into its wire form; anything that is not a FabricError becomes INTERNAL and says nothing."""
    if not isinstance(error, FabricError):
        error = InternalError("internal error")
    details: list[any_pb2.Any] = [
        _packed(error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=error.metadata))
    ]
    if error.violations:
        details.append(_packed(_bad_request(error.violations)))
    if error.retry_after_s is not None:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(int(error.retry_after_s * 1e9))
        details.append(_packed(error_details_pb2.RetryInfo(retry_delay=delay)))
    message = (
        error.message
        if len(error.message) <= MESSAGE_CHARACTERS_MAX
        else (error.message[:MESSAGE_CHARACTERS_MAX] + "…")
    )
    return status_pb2.Status(code=error.code, message=message, details=details)


def _bad_request(violations: tuple[Violation, ...]) -> error_details_pb2.BadRequest:
    """Packs violations, as many as trailers can carry; a last one says how many are left out."""
    bad, size = error_details_pb2.BadRequest(), 0
    for index, violation in enumerate(violations):
        size += len(violation.field.encode()) + len(violation.description.encode()) + 8
        if size > VIOLATION_BYTES_MAX:
            bad.field_violations.add(
                field=violation.field, description=f"and {len(violations) - index} more violations"
            )
            break
        bad.field_violations.add(field=violation.field, description=violation.description)
    return bad


def from_status(status: status_pb2.Status) -> FabricError:
    """Turns a wire status back into the typed error; unknown details are left out."""
    kind = _BY_CODE.get(status.code, InternalError)
    error = kind(status.message)
    for detail in status.details:
        info, bad, retry = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
        if detail.Unpack(info):
            error.reason, error.metadata = info.reason, dict(info.metadata)
        elif detail.Unpack(bad):
            error.violations = tuple(Violation(v.field, v.description) for v in bad.field_violations)
        elif detail.Unpack(retry):
            error.retry_after_s = retry.retry_delay.ToTimedelta().total_seconds()
    return error


def _packed(message: object) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)  # type: ignore[arg-type]
    return packed
