# SPDX-License-Identifier: Apache-2.0
"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from services.common.settings import split_address


def _peer(text: str) -> str:
    if text.startswith(("dns:///", "unix:")):
        return text
    try:
        port = split_address(text)[1]
    except ValueError:
        port = 0
    if port == 0:
        raise typer.BadParameter(f"{text!r} is not host:port with a port from 1 to 65535, such as {BROKER_ADDRESS}")
    return text


BROKER_ADDRESS = "127.0.0.1:7600"
PROVISIONER_ADDRESS = "127.0.0.1:7601"
WORKER_ADDRESS = "127.0.0.1:7602"
"""Ports that `ifab up` takes unless told otherwise; further workers take the ones that follow."""
ENGINE_DIRECTORY = Path("build/engines/smollm2-135m")
LOG_DIRECTORY = Path("run")

EngineId = Annotated[str, typer.Option("--engine-id", help="Engine that is to answer.")]
EngineDigest = Annotated[str, typer.Option("--engine-digest", help="Engine that is to answer, by its exact digest.")]
AsJson = Annotated[bool, typer.Option("--json", help="Write JSON on stdout instead of text for people.")]
Broker = Annotated[
    str,
    typer.Option(
        "--broker", envvar="IFAB_CLI_BROKER", metavar="HOST:PORT", callback=_peer, help="Where the broker listens."
    ),
]
Provisioner = Annotated[
    str,
    typer.Option(
        "--provisioner",
        envvar="IFAB_CLI_PROVISIONER",
        metavar="HOST:PORT",
        callback=_peer,
        help="Where the provisioner listens.",
    ),
]
Engines = Annotated[
    list[Path],
    typer.Option(
        "--engine", envvar="IFAB_CLI_ENGINE", metavar="DIR", help="Engine directory of a worker; once a worker."
    ),
]
Logs = Annotated[Path, typer.Option("--logs", metavar="DIR", help="Where the services' logs go, a file each.")]
Grace = Annotated[
    float, typer.Option("--grace", min=0.1, max=600, help="Seconds that each service gets to finish what it has.")
]
StartLimit = Annotated[
    float, typer.Option("--start-limit", min=1, max=3600, help="Seconds within which all services must be ready.")
]
