# SPDX-License-Identifier: Apache-2.0
"""What admission is for: a llama engine whose pool holds two requests and a half, with admission and without.

32 requests come at once. Without admission every one enters as soon as it has a slot; the prompts then fill the pool
together, and none of them can be finished. `finished_*` says how many ended, `still_steps_*` how many steps moved
nothing, `stood_still_*` whether the engine stopped for good. The program is `native/tests/llama_admission.cpp`.
"""

from __future__ import annotations

import json
import subprocess

from benchmarks.frame import ROOT, Report, take_no_options

LONGEST_S = 300


def main() -> None:
    """Runs both sides and prints them beside each other."""
    take_no_options(__doc__)
    program = ROOT / "build" / "native" / "tests" / "llama_admission"
    output = subprocess.run([str(program)], capture_output=True, text=True, check=True, timeout=LONGEST_S).stdout
    sides = {side.pop("admission"): side for side in map(json.loads, output.splitlines())}
    print("  ".join(["admission", *sides["on"]]))
    for name, side in sides.items():
        print("  ".join(f"{value!s:>{len(key)}}" for key, value in {"admission": name, **side}.items()))
    report = Report("admission")
    for name, side in sides.items():
        for key, value in side.items():
            report.fact(f"{key}_{name}", value)
    report.print()


if __name__ == "__main__":
    main()
