# SPDX-License-Identifier: Apache-2.0
"""How well prompts with shared heads fill the calls into the embedded runtime: counts, the same on every machine.

    python -m benchmarks.calls [--groups 64] [--members 16] [--head 2048] [--tail 64] [--out 64] [--slots 64]
                               [--resident 24] [--budget 4096] [--late 1]

The workload of the stage `heads` of `benchmarks/gpu`, on a tiny model; admission, backend and runtime are what ships,
and prompts come as a broker sends them (`native/tests/llama_calls.cpp`). A read is one pass over all weights: the
fewer, the better. `model_s` is what a card would take for these calls by the rates that `docs/gpu-truth.md` measured,
with nothing else counted: for comparing two builds, not for promising a time.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import step_profile
from benchmarks.frame import ROOT, Report

if TYPE_CHECKING:
    from benchmarks.step_profile import StepProfile

LONGEST_S = 300
PREFILL_PER_S = 20_919
"""Prompt tokens a second in large calls: llama-batched-bench at 2,112 tokens."""
WEIGHTS_S = 13.5e9 / 4.0e12
"""One read of the weights."""
ROW_S = (64 / 2452 - WEIGHTS_S) / 64
"""What a generating row of 2,176 tokens adds to a step: llama-batched-bench at 64 sequences, less a read."""
CALL_S = 128 / 12_467 - 128 / PREFILL_PER_S
"""What a call for prompts costs beside its tokens: prompts of 128 tokens, each a call (stage `states`)."""
COPY_S = 2 * 1.2e9 / 4.0e12
"""One copy of a stream: read and written."""
PARAMETERS = {
    "groups": 64, "members": 16, "head": 2048, "tail": 64, "out": 64, "slots": 64, "resident": 24, "budget": 4096,
    "late": 1,
}  # fmt: skip


def modelled(profile: StepProfile) -> float:
    """Seconds of a card for a profile's calls."""
    seconds = 0.0
    for each in profile.classes:
        seconds += each.copies * COPY_S
        if each.kind == "generate":
            seconds += each.calls * WEIGHTS_S + each.tokens * ROW_S
        else:
            seconds += max(each.reads * WEIGHTS_S, each.tokens / PREFILL_PER_S) + each.calls * CALL_S
    return seconds


def main() -> None:
    """Runs the workload once, and prints what it called."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    for name, usual in PARAMETERS.items():
        parser.add_argument(f"--{name}", type=int, default=usual)
    words = vars(parser.parse_args())
    program = ROOT / "build" / "native" / "tests" / "llama_calls"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile.jsonl"
        subprocess.run(
            [str(program), *(str(words[name]) for name in PARAMETERS)],
            check=True,
            timeout=LONGEST_S,
            stdout=subprocess.DEVNULL,
            env={**os.environ, step_profile.VARIABLE: str(path)},
        )
        profile = step_profile.read(path)
    print(profile.table)
    report = Report("calls")
    for name, value in words.items():
        report.fact(name, value)
    report.fact("steps", profile.steps)
    for kind in ("prompt", "generate"):
        calls = profile.of(lambda each, kind=kind: each.kind == kind)  # type: ignore[misc]
        report.fact(f"{kind}_calls", calls.calls)
        report.fact(f"{kind}_reads", calls.reads)
        report.fact(f"{kind}_tokens", calls.tokens)
        report.fact(f"{kind}_tokens_a_read", round(calls.tokens / calls.reads, 1))
    report.fact("copies", sum(each.copies for each in profile.classes))
    report.fact("fillers", profile.fillers)
    report.fact("model_s", round(modelled(profile), 2))
    report.print()


if __name__ == "__main__":
    main()
