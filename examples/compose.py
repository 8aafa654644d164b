# SPDX-License-Identifier: Apache-2.0
"""Composes the bundled bulk job from `tasks/*.toml`: `python examples/compose.py > examples/prompts.jsonl`.

Every task is a head that all its prompts share (an instruction with examples) and a list of items. Rows are shuffled
with a fixed seed, so that nothing but a reader of the prompts can find the shared heads again.
"""

from __future__ import annotations

import json
import random
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

TASKS = Path(__file__).resolve().parent / "tasks"


def rows() -> list[dict[str, Any]]:
    """All rows of the job, shuffled, each with `id`, `prompt`, `max_tokens` and `stop`."""
    ordered = [row for path in sorted(TASKS.glob("*.toml")) for row in _rows_of(path)]
    random.Random(2026).shuffle(ordered)  # noqa: S311 -- a fixed order, nothing secret
    return ordered


def _rows_of(path: Path) -> Iterator[dict[str, Any]]:
    task = tomllib.loads(path.read_text(encoding="utf-8"))
    for number, item in enumerate(task["items"], start=1):
        yield {
            "id": f"{path.stem}-{number:03}",
            "prompt": task["head"] + task["tail"].format(item=item),
            "max_tokens": task["max_tokens"],
            "stop": ["\n"],
        }


if __name__ == "__main__":
    sys.stdout.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows())
