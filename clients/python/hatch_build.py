# SPDX-License-Identifier: Apache-2.0
"""Puts the generated messages into what is built: a checkout has them in its build folder, a source archive beside."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class MessagesHook(BuildHookInterface[Any]):
    """Finds the package `ifabric` and has it included."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """See hatchling.

        Raises:
            RuntimeError: there are no messages yet.
        """
        root = Path(self.root)
        for folder in (root / "ifabric", root.parents[1] / "build" / "proto" / "ifabric"):
            if folder.is_dir():
                build_data["force_include"][str(folder)] = "ifabric"
                return
        raise RuntimeError("the messages have not been generated: run `make proto` in the checkout first")
