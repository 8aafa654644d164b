# SPDX-License-Identifier: Apache-2.0
"""`ifab engine ladder` on a card: 1, 16, 256 and 2,000 clients, alone and with another engine resident on the card.

The other engine is idle, or serves a closed loop of `--resident-clients` of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from benchmarks.gpu.driving import LIMIT_S
from benchmarks.gpu.llama_engine import CardEngine

if TYPE_CHECKING:
    from benchmarks.gpu.stages.context import Context

TOKENS = 128
RUNG_S, WARMUP_S = 12, 6


def measure(context: Context) -> dict[str, Any]:
    """Returns the command's own document, and its summary as text."""
    engine = context.prepare(CardEngine(256, 0, 256, 128, context.budget))
    resident = context.prepare(CardEngine(64, 0, 256, 128, 2048), "resident")
    prompts = context.work / "prompts.jsonl"
    words = ("alpha ", "beta ", "gamma ", "delta ")
    texts = ("".join(words[(number >> 2 * place) % 4] for place in range(24)) for number in range(2000))
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    command = [sys.executable, "-c", "from services.cli.main import main; main()", "engine", "ladder", str(engine)]
    command += ["--resident", str(resident), "--resident-clients", str(context.resident_clients)]
    command += ["--rungs", context.rungs, "--max-tokens", str(TOKENS), "--prompts", str(prompts)]
    command += ["--rung-s", str(RUNG_S), "--warmup-s", str(WARMUP_S), "--drain-s", "120", "--start-limit", "300"]
    command += ["--html", str(context.work / "ladder.html"), "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=LIMIT_S, check=False)
    if done.returncode:
        raise RuntimeError(f"the ladder ended with status {done.returncode}: {done.stdout[-2000:]}")
    return {"layout": "streams", "prompts": "about 128 tokens", "ladder": json.loads(done.stdout)}
