# SPDX-License-Identifier: Apache-2.0
"""Every example of docs/clients.md, and the first ones of other pages, work as they stand, against a real suite."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from engines import tier
from tests.support.processes import ROOT
from tests.support.waiting import PATIENCE_S

if TYPE_CHECKING:
    from tests.support.door import Door

pytestmark = pytest.mark.e2e

PAGE = ROOT / "docs" / "clients.md"
ENGINE = "smollm2-135m-instruct-q8_0-cpu"
"""What the pages call the engine that `make up` serves."""
TOOLS = ROOT / ".tools" / "bin"
SHOWN = {
    "One answer, and one as it comes": ["length"],
    "A bulk job.": ["Italy", "France", "Egypt", "completed"],
    "Many requests that nobody": ["0 (", "1 (", "float16"],
    "**Errors**": ["INVALID_ARGUMENT INVALID_FIELDS ['max_tokens']"],
    "What is there": ["inference.GRPCInferenceService", "SERVING", '"engine_id": "texts"', "NODE_STATE_ACCEPTED"],
    "One answer; token ids": ['"finished"', '"generated_tokens"', '"token_ids"'],
    "Many requests over one stream": ['"request_id": "a"', '"request_id": "b"', '"report"'],
    "A job by hand": ['"durable_rows": "1"', '"row_id": "r0"', '"state": "JOB_STATE_COMPLETED"'],
    "Where is a row": ["REQUEST_PLACE_ENDED", '"connected": true'],
    "The KServe protocol": ['"platform": "simulated"', '"finish_reason"'],
}
"""What the page's examples print, by how the paragraph before them begins."""


def examples() -> list[tuple[str, str, str]]:
    """(paragraph before it, language, text) of each code block."""
    found = re.findall(r"([^\n]+(?:\n[^\n]+)*)\n\n```(python|sh)\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    return [(before, language, text) for before, language, text in found]


def test_no_example_is_left_out() -> None:
    begins = [next((words for words in SHOWN if before.startswith(words)), before) for before, _, _ in examples()]
    assert begins == list(SHOWN)


@pytest.fixture(scope="module")
def printed(door: Door) -> list[str]:
    """What each example prints, all run in the order of the page: later ones speak of what earlier ones made."""
    if not (TOOLS / "grpcurl").exists():
        pytest.fail("grpcurl is not there: run scripts/grpcurl first")
    return [_run(language, text, door) for _, language, text in examples()]


@pytest.mark.parametrize("words", list(SHOWN))
def test_an_example_prints_what_it_should(words: str, printed: list[str]) -> None:
    output = printed[list(SHOWN).index(words)]
    assert [shown for shown in SHOWN[words] if shown not in output] == [], output


@pytest.mark.parametrize("page", ["docs/index.md", "clients/python/README.md"])
def test_the_first_example_of_python_runs(page: str, door: Door) -> None:
    [example] = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), flags=re.DOTALL)
    assert _run("python", example, door).strip()


def test_the_pages_name_the_engines_that_their_commands_make() -> None:
    pages = "".join((ROOT / "docs" / page).read_text() for page in ("clients.md", "kserve.md"))
    named = set(re.findall(r"(?<!engines/)\bsmollm2[\w-]*", pages))
    made = {tier.load(name).engine_id for name in ("cpu-generate", "cpu-hidden")}
    assert named == made


def test_the_texts_to_mine_are_mined(door: Door, tmp_path: Path) -> None:
    done = subprocess.run(
        [Path(sys.executable).with_name("ifab"), "mine", "examples/texts.jsonl", "-o", tmp_path / "states", "--json"],
        cwd=ROOT, env={**os.environ, "IFAB_CLI_BROKER": door.suite.broker},
        capture_output=True, text=True, timeout=2 * PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_lines_of_grpcurl_in_the_readme_run(door: Door) -> None:
    [lines] = re.findall(r"```\n(grpcurl .*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    printed = _run("sh", lines, door)
    for shown in (
        "ifabric.broker.v1.BrokerService",
        "rpc Generate (",
        '"finished"',
        '"NODE_STATE_ACCEPTED"',
        '"SERVING"',
    ):
        assert shown in printed


def _run(language: str, text: str, door: Door) -> str:
    for theirs, ours in (
        ("127.0.0.1:7600", door.suite.broker),
        ("127.0.0.1:7601", door.suite.provisioner),
        ("127.0.0.1:7602", door.suite.workers[0]),
        (f"{ENGINE}-hidden", "states"),
        (ENGINE, "texts"),
    ):
        text = text.replace(theirs, ours)
    command = [sys.executable, "-W", "error", "-c", text] if language == "python" else ["bash", "-euc", text]
    python_path = os.pathsep.join(map(str, (ROOT / "clients" / "python", ROOT / "build" / "proto")))
    environment = {**os.environ, "PATH": f"{TOOLS}:{os.environ['PATH']}", "PYTHONPATH": python_path}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=2 * PATIENCE_S, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
