# SPDX-License-Identifier: Apache-2.0
"""What docs/security.md says about setting it up, run as it stands there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

from services.common.security import access_file, certificates
from tests.support.processes import ROOT, ServiceProcess
from tests.support.waiting import PATIENCE_S

PROGRAMS = Path(sys.executable).parent


def run(folder: Path, text: str) -> str:
    done = subprocess.run(
        ["bash", "-euc", text], cwd=folder, env={**os.environ, "PATH": f"{PROGRAMS}:{os.environ['PATH']}"},
        capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_pages_certificates_and_key_are_what_services_take(tmp_path: Path) -> None:
    section = (ROOT / "docs" / "security.md").read_text().partition("\n## Setting it up\n")[2]
    of_certificates, of_keys = re.findall(r"```sh\n(.*?)```", section, flags=re.DOTALL)
    [services] = re.findall(r"```\n(python .*?)```", section, flags=re.DOTALL)
    run(tmp_path, of_certificates + of_keys)
    assert (tmp_path / "key").stat().st_mode & 0o077 == 0
    assert len(access_file.read(tmp_path / "access.toml").keys) == 1

    def settings(role: str) -> dict[str, str]:
        """As the page's line for that service has them."""
        [line] = re.findall(rf"^python -m services\.{role} (.*)$", services, flags=re.MULTILINE)
        named = dict(re.findall(r"--(tls-\w+) (\S+)", line))
        return {setting.replace("-", "_"): str(tmp_path / name) for setting, name in named.items()}

    for role in ("broker", "worker"):
        own = {setting: Path(path) for setting, path in settings(role).items()}
        bundle = certificates.read(certificates.Files(own["tls_cert"], own["tls_key"], own["tls_ca"]), time.time())
        assert bundle.names == (f"{role}.ifabric",)
    [operator] = [line for line in services.splitlines() if " nodes --provisioner " in line]
    with ServiceProcess("services.provisioner", {"listen": "127.0.0.1:0", **settings("provisioner")}) as provisioner:
        run(tmp_path, operator.replace("provisioner:7601", provisioner.address))
