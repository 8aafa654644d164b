# SPDX-License-Identifier: Apache-2.0
"""`ifab key`: a static key for a client of the broker."""

from __future__ import annotations

import hashlib
import secrets
import sys
from typing import Annotated

import typer

from services.cli import options
from services.cli.running import CommandError, run_plain, write_json
from services.common.security.access_file import TENANT_CHARACTERS
from services.common.security.needs import SCOPES

_KEY_BYTES = 32


def key(
    name: Annotated[str, typer.Argument(metavar="ID", help="Name of the key, in the access file and in logs.")],
    tenant: Annotated[str, typer.Option("--tenant", help="Whom its bearer speaks for.")] = "",
    scope: Annotated[
        list[str], typer.Option("--scope", help=f"What it opens, one or more of {', '.join(sorted(SCOPES))}.")
    ] = ["generate", "jobs"],  # noqa: B006 -- typer reads it, nobody writes to it
    as_json: options.AsJson = False,
) -> None:
    """Make a key of 256 random bits, and the entry of the broker's access_file that lets it in.

    The key itself is on the first line and nowhere else; the entry holds its digest only.

    Example: ifab key search-nightly --tenant search --scope generate
    """

    def work() -> None:
        unknown = sorted(set(scope) - SCOPES)
        if unknown:
            raise CommandError(f"--scope {unknown[0]} is not known; known are {', '.join(sorted(SCOPES))}")
        if len(tenant) > TENANT_CHARACTERS:
            raise CommandError(f"--tenant has {len(tenant)} characters; allowed are {TENANT_CHARACTERS}")
        made = "ifab_" + secrets.token_urlsafe(_KEY_BYTES)
        digest = hashlib.sha256(made.encode()).hexdigest()
        if as_json:
            write_json({"key": made, "id": name, "sha256": digest, "tenant": tenant, "scopes": scope})
            return
        listed = ", ".join(f'"{each}"' for each in scope)
        sys.stdout.write(
            f'{made}\n\n[[keys]]\nid = "{name}"\nsha256 = "{digest}"\ntenant = "{tenant}"\nscopes = [{listed}]\n'
        )

    run_plain(work, as_json=as_json)
