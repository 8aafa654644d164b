# SPDX-License-Identifier: Apache-2.0
"""`python -m services.broker`."""

from __future__ import annotations

from services.broker.main import serve
from services.broker.settings import BrokerSettings
from services.common.process import run

if __name__ == "__main__":
    raise SystemExit(run(BrokerSettings, serve))
