# SPDX-License-Identifier: Apache-2.0
"""Who may say what to whom: TLS between services, tokens of clients, and what listens where. See docs/security.md."""

from __future__ import annotations

from services.common.security.access import Access
from services.common.security.caller import Caller, current_caller
from services.common.security.certificates import Credentials, Files
from services.common.security.exposure import check_exposure
from services.common.security.tokens import TokenSources, TokenVerifier

__all__ = [
    "Access",
    "Caller",
    "Credentials",
    "Files",
    "TokenSources",
    "TokenVerifier",
    "check_exposure",
    "current_caller",
]
