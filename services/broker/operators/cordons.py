# SPDX-License-Identifier: Apache-2.0
"""Which nodes get no new work because an operator said so, kept in a file over restarts of the broker.

An operator who takes a node out of service does not want the next restart of a broker to bring it back. The file is
small and written whole: beside its place, through to the disk, then renamed.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

from services.common.errors import InternalError, ResourceExhaustedError, StartError

if TYPE_CHECKING:
    from pathlib import Path

NODES_MAX = 10_000
"""Nodes that may be cordoned at the same time."""


class Cordons:
    """The names of cordoned nodes.

    Args:
        path: Where they are kept; None keeps them as long as the process lives.

    Raises:
        StartError: the file cannot be read, or holds something else.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._nodes = frozenset[str]() if path is None else _read(path)

    @property
    def nodes(self) -> frozenset[str]:
        """The nodes that are cordoned."""
        return self._nodes

    def put(self, node_id: str, cordoned: bool) -> None:
        """Adds a node or takes it out, durably; blocks for as long as the disk takes.

        Raises:
            ResourceExhaustedError: NODES_MAX are cordoned.
            InternalError: the file cannot be written; nothing has changed.
        """
        nodes = self._nodes | {node_id} if cordoned else self._nodes - {node_id}
        if nodes == self._nodes:
            return
        if len(nodes) > NODES_MAX:
            raise ResourceExhaustedError(f"{NODES_MAX} nodes are cordoned, the most that a broker keeps; uncordon some")
        if self._path is not None:
            _write(self._path, nodes)
        self._nodes = nodes


def _read(path: Path) -> frozenset[str]:
    try:
        text = path.read_text("utf-8")
    except FileNotFoundError:
        return frozenset()
    except (OSError, UnicodeDecodeError) as error:
        raise StartError(f"the cordoned nodes cannot be read from {path}: {error}") from error
    try:
        nodes = json.loads(text)["cordoned"]
    except (ValueError, KeyError, TypeError) as error:
        raise StartError(f"{path} does not hold cordoned nodes; remove it, and cordon the nodes again") from error
    if not isinstance(nodes, list) or not all(isinstance(node, str) for node in nodes):
        raise StartError(f"{path} does not hold names of nodes; remove it, and cordon the nodes again")
    return frozenset(nodes)


def _write(path: Path, nodes: frozenset[str]) -> None:
    part = path.with_name(f".{path.name}.part")
    try:
        with part.open("w", encoding="utf-8") as file:
            json.dump({"cordoned": sorted(nodes)}, file)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise InternalError(f"the cordoned nodes cannot be kept: {error.strerror}") from error
