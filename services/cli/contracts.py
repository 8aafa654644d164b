# SPDX-License-Identifier: Apache-2.0
"""Contracts of engine directories that are no documents at all, said before anything is made of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.cli.running import CommandError
from services.common import schema
from services.common.contract import CONTRACT_FILE
from services.common.schema.document import MAX_BYTES

if TYPE_CHECKING:
    from pathlib import Path


def check_readable(directory: Path) -> None:
    """Makes sure that the contract of an engine directory is one JSON document, whatever it says.

    A directory or contract that is absent passes: who reads it next has its own sentence for that.

    Raises:
        CommandError: It is none.
        OSError: It cannot be read.
    """
    path = directory / CONTRACT_FILE
    if not path.is_file():
        return
    findings = schema.Findings()
    with path.open("rb") as file:
        document = schema.read_document(file.read(MAX_BYTES + 1), findings)
    if document is schema.ABSENT:
        [finding] = findings.all
        raise CommandError(
            f"{path} is {finding.found}, expected {finding.expected}; make the engine anew with `ifab engine build`"
        )
