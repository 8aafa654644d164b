# SPDX-License-Identifier: Apache-2.0
"""The one place where a status of the C interface becomes an error of the suite."""

from __future__ import annotations

import re

from google.rpc import status_pb2

from services.common.errors import FabricError, InvalidArgumentError, Violation, from_status

_FIELD = re.compile(r"([a-z_][a-z0-9_]*(?:\[\d+\])?(?:\.[a-z_][a-z0-9_]*(?:\[\d+\])?)*): (.+)", re.DOTALL)
"""How the library words a wrong field: path, colon, what is wrong with it."""


def native_error(status: int, message: str) -> FabricError:
    """Makes the error that a status stands for.

    Args:
        status: Not 0; the number of a gRPC code. One that the suite has no error for becomes INTERNAL.
        message: The library's text; may be empty.
    """
    error = from_status(status_pb2.Status(code=status, message=message or f"the engine library answered {status}"))
    if isinstance(error, InvalidArgumentError) and (field := _FIELD.fullmatch(message)):
        error.violations = (Violation(field[1], field[2]),)
    return error
