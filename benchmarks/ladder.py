# SPDX-License-Identifier: Apache-2.0
"""Our ladder beside that of llama.cpp's own server, same weights, same machine: `make bench-ladder`.

`ifab engine ladder` climbs both, turn by turn: the bundled engine through client, broker and worker, and llama.cpp's
server over OpenAI-compatible HTTP (`benchmarks/llama_server.py`), with as many slots, tokens a sequence and a step, and
threads. Prompts are about 145 tokens of random words, two thirds of them one of four heads; 32 tokens come out of each.

    ours_N, theirs_N   tokens/s at N clients
    ours_over_theirs_N
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from typing import Any

from benchmarks.frame import ROOT, Report
from benchmarks.llama_server import LlamaServerError, running

ENGINE = ROOT / "build" / "engines" / "smollm2-135m"
LIMIT_S = 600.0


def climb(target: list[str], rungs: list[int], seconds: float) -> dict[int, dict[str, Any]]:
    """One ladder; the rungs by their clients.

    Raises:
        RuntimeError: It failed, or ended early.
    """
    command = [sys.executable, "-c", "from services.cli.main import main; main()", "engine", "ladder", *target]
    command += ["--rungs", ",".join(map(str, rungs)), "--rung-s", f"{seconds:g}", "--warmup-s", "3", "-n", "32"]
    command += ["--no-evidence", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False, cwd=ROOT)
    if done.returncode:
        raise RuntimeError(f"the ladder of {target[-1]} failed: {done.stderr.strip()}")
    ladder = json.loads(done.stdout)["alone"]
    if ladder["ended"]:
        raise RuntimeError(f"the ladder of {target[-1]} ended early: {ladder['ended']}")
    return {int(rung["level"]): rung for rung in ladder["rungs"]}


def show(name: str, ladder: dict[int, dict[str, Any]]) -> None:
    """Prints the rungs of one ladder."""
    for clients, rung in ladder.items():
        wait, step = rung["first_token"]["p50"], rung["per_token"]["p50"] * 1e3
        print(f"{name:<8}{clients:>8}{rung['tokens_per_s']:>10.1f}{wait:>20.2f}{step:>17.1f}", flush=True)


def main() -> None:
    """Climbs both, turn by turn, and reports."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rungs", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--rung-s", type=float, default=10.0)
    parser.add_argument("--runs", type=int, default=3)
    said = parser.parse_args()
    contract = json.loads((ENGINE / "contract.json").read_text())
    limits = contract["limits"]
    found: dict[str, list[dict[int, dict[str, Any]]]] = {"ours": [], "theirs": []}
    print(f"{'server':<8}{'clients':>8}{'tokens/s':>10}{'first token p50, s':>20}{'between p50, ms':>17}")
    for _ in range(said.runs):
        try:
            with running(
                ENGINE / "model.gguf",
                slots=limits["slots"],
                sequence_tokens=limits["max_sequence_tokens"],
                step_tokens=limits["step_token_budget"],
            ) as url:
                found["theirs"].append(climb(["--openai", url], said.rungs, said.rung_s))
                show("theirs", found["theirs"][-1])
        except LlamaServerError as error:
            sys.exit(str(error))
        found["ours"].append(climb([str(ENGINE)], said.rungs, said.rung_s))
        show("ours", found["ours"][-1])
    report = Report("ladder")
    for clients in said.rungs:
        for name, ladders in found.items():
            report.figure(f"{name}_{clients}", [each[clients]["tokens_per_s"] for each in ladders], unit="tokens/s")
        report.ratio(f"ours_over_theirs_{clients}", of=f"ours_{clients}", over=f"theirs_{clients}")
    report.fact("rung_s", said.rung_s)
    report.fact("rungs", found)
    report.print()


if __name__ == "__main__":
    main()
