# SPDX-License-Identifier: Apache-2.0
"""A pool far too small for what is sent, on the card, with admission and without: what stops, what moves.

The program is `native/tests/llama_admission.cpp`; it steps the backend directly, because a served engine has no switch
that would take admission out.
"""

from __future__ import annotations

import json
import subprocess
from typing import TYPE_CHECKING, Any

from benchmarks.gpu.driving import LIMIT_S
from benchmarks.gpu.llama_engine import CardEngine

if TYPE_CHECKING:
    from benchmarks.gpu.stages.context import Context

REQUESTS = 32
POOL_TOKENS = 8192
SLOTS = 16


def measure(context: Context) -> dict[str, Any]:
    """Returns what became of the same requests on both sides."""
    longest_prompt, longest_output = POOL_TOKENS * 3 // 10, POOL_TOKENS // 10
    engine = CardEngine(
        SLOTS, 0, longest_prompt, longest_output, context.budget, layout="unified", pool_tokens=POOL_TOKENS
    )
    directory = context.prepare(engine)
    program = context.native / "tests" / "llama_admission"
    done = subprocess.run(
        [str(program), str(REQUESTS), str(directory)], capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    if done.returncode:
        raise RuntimeError(f"llama_admission ended with status {done.returncode}: {done.stderr[-2000:]}")
    sides = [json.loads(line) for line in done.stdout.splitlines()]
    return {"layout": "unified", "pool_tokens": POOL_TOKENS, "sides": sides}
