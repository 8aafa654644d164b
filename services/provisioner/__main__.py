# SPDX-License-Identifier: Apache-2.0
"""`python -m services.provisioner`."""

from __future__ import annotations

from services.common.process import run
from services.provisioner.main import serve
from services.provisioner.settings import ProvisionerSettings

if __name__ == "__main__":
    raise SystemExit(run(ProvisionerSettings, serve))
