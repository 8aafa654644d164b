# SPDX-License-Identifier: Apache-2.0
"""The native program through which engine builders reach libllama; no Python process links it."""

from __future__ import annotations

import json
import os
import struct
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engines.sources import ROOT
from services.common.errors import FailedPreconditionError, NotFoundError, ResourceExhaustedError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import numpy.typing as npt

NAME = "ifab_llama_tool"
_BUILT = ROOT / "build" / "native" / "tools" / NAME
_LIMIT_S = 600.0
_SIZE = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class ModelReport:
    """What libllama says of a GGUF model."""

    architecture: str
    layers: int
    hidden_size: int
    vocab_size: int
    weights_dtype: str
    weights_bytes: int
    trained_context_tokens: int
    runtime_name: str
    runtime_version: str


class LlamaTool:
    """Runs the program. Every call is one process that ends within a limit."""

    def __init__(self, path: Path | None = None, *, limit_s: float = _LIMIT_S) -> None:
        """Finds the program: `path`, or what the build made.

        Raises:
            NotFoundError: It was not built.
        """
        self.path = path or _BUILT
        self._limit_s = limit_s
        if not (self.path.is_file() and os.access(self.path, os.X_OK)):
            raise NotFoundError(f"{NAME} is not built at {self.path}: run scripts/libllama, then scripts/native build")

    def describe(self, model: Path) -> ModelReport:
        """What libllama says of a model.

        Raises:
            FailedPreconditionError: It is no model that libllama can load.
        """
        said = json.loads(self._run(b"", "describe", model))
        return ModelReport(
            architecture=said["architecture"],
            layers=said["layers"],
            hidden_size=said["hidden_size"],
            vocab_size=said["vocab_size"],
            weights_dtype=said["weights_dtype"],
            weights_bytes=said["weights_bytes"],
            trained_context_tokens=said["trained_context_tokens"],
            runtime_name=said["runtime"]["name"],
            runtime_version=said["runtime"]["version"],
        )

    def quantize(self, source: Path, target: Path, dtype: str, *, threads: int) -> None:
        """Writes a model again with other weights.

        Raises:
            FailedPreconditionError: It is no model that libllama can load, or it cannot have such weights.
            ResourceExhaustedError: The disk is full.
        """
        self._run(b"", "quantize", source, target, dtype, str(threads))

    def tokenize(self, model: Path, texts: Sequence[str]) -> list[npt.NDArray[np.int32]]:
        """The engine's own token ids of each text; texts of special tokens become these tokens.

        Raises:
            FailedPreconditionError: It is no model that libllama can load.
        """
        sent = b"".join(_SIZE.pack(len(data)) + data for data in (text.encode() for text in texts))
        answer = self._run(sent, "tokenize", model)
        out: list[npt.NDArray[np.int32]] = []
        at = 0
        for _ in texts:
            (count,) = _SIZE.unpack_from(answer, at)
            out.append(np.frombuffer(answer, "<i4", count, at + _SIZE.size))
            at += _SIZE.size + 4 * count
        return out

    def _run(self, sent: bytes, verb: str, *arguments: Path | str) -> bytes:
        try:
            done = subprocess.run(
                [self.path, verb, *arguments], input=sent, capture_output=True, timeout=self._limit_s, check=False
            )
        except subprocess.TimeoutExpired:
            raise FailedPreconditionError(f"{NAME} {verb} took longer than {self._limit_s:g} s") from None
        if done.returncode == 0:
            return done.stdout
        why = done.stderr.decode(errors="replace").strip().removeprefix(f"{NAME}: ")
        if "No space left" in why:
            raise ResourceExhaustedError(f"{NAME} {verb}: the disk is full: {why}")
        if done.returncode < 0:
            why = f"ended by signal {-done.returncode}; was it built on another kind of processor? {why}".strip()
        raise FailedPreconditionError(f"{NAME} {verb}: {why or f'exit status {done.returncode}'}")
