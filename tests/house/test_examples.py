# SPDX-License-Identifier: Apache-2.0
"""The bundled bulk job: composed from its tasks, large enough, and worth grouping."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROMPTS = ROOT / "examples" / "prompts.jsonl"


def test_the_file_is_what_its_tasks_compose() -> None:
    composed = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "compose.py")], capture_output=True, text=True, check=True
    )
    assert composed.stdout == PROMPTS.read_text(encoding="utf-8"), (
        "run: python examples/compose.py > examples/prompts.jsonl"
    )


def test_it_has_enough_rows_and_shared_heads_in_no_order() -> None:
    rows = [json.loads(line) for line in PROMPTS.read_text(encoding="utf-8").splitlines()]
    assert len(rows) >= 240
    assert len({row["id"] for row in rows}) == len(rows)
    groups: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        groups[row["id"].rpartition("-")[0]].append(row["prompt"])
    # 900 characters of English are more than 200 tokens of this tokenizer.
    assert sum(len({prompt[:900] for prompt in prompts}) == 1 for prompts in groups.values()) >= 6
    neighbours = sum(left["prompt"][:200] == right["prompt"][:200] for left, right in pairwise(rows))
    assert neighbours < len(rows) // 4, "rows of one task stand together: the file is not shuffled"
