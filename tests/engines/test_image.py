# SPDX-License-Identifier: Apache-2.0
"""The image for Blackwell consumer cards cannot be built here: its form, and each pin against the table of sources."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from engines.vendor.tools import RELEASE

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy" / "images" / "tensorrt-llm"
DOCKERFILE = (FOLDER / "Dockerfile").read_text()
README = (FOLDER / "README.md").read_text()
COMMANDS = "\n".join(line for line in DOCKERFILE.splitlines() if not line.startswith("#"))


def table() -> dict[str, tuple[str, str]]:
    rows = re.findall(r"^\| `([^`]+)` \| `([^`]+)` \| (.+) \|$", README, re.MULTILINE)
    return {name: (value, source) for name, value, source in rows}


def test_every_pin_is_in_the_table_with_its_source_and_no_pin_is_only_there() -> None:
    pins = dict(re.findall(r"^ARG (\w+)=(\S+)$", COMMANDS, re.MULTILINE))
    constraints = re.search(r"printf '([^']+)' > /constraints.txt", COMMANDS)
    assert constraints is not None
    pins |= {
        name: operator + version
        for name, operator, version in re.findall(r"([a-z]+)(~=|==)([\d.]+)", constraints[1].replace("\\n", " "))
    }
    wheel = re.search(r"tensorrt_llm-([\d.]+)-", COMMANDS)
    assert wheel is not None
    pins["tensorrt_llm"] = wheel[1]
    found = table()
    assert {name: value for name, (value, _) in found.items()} == pins
    assert all(len(source) > 3 for _, source in found.values())
    assert pins["tensorrt_llm"] == RELEASE


def test_the_base_has_no_default_and_every_stage_stands_on_one_that_is_here() -> None:
    assert re.search(r"^ARG BASE_IMAGE$", COMMANDS, re.MULTILINE)
    stages = re.findall(r"^FROM (\S+) AS (\w+)$", COMMANDS, re.MULTILINE)
    assert len(stages) == COMMANDS.count("\nFROM ")
    known = {"${BASE_IMAGE}"}
    for base, name in stages:
        assert base in known
        known.add(name)
    copied = set(re.findall(r"COPY --from=([\w-]+)", COMMANDS))
    assert copied - known == {"tensorrt-llm"}, "the checkout comes as a build context"
    rows = re.findall(r"^\| `(\w+)` \| ", README.split("## Stages")[1], re.MULTILINE)
    assert rows == [name for _, name in stages]


def test_each_stage_says_why() -> None:
    for comment in re.split(r"^# --- ", DOCKERFILE, flags=re.MULTILINE)[1:]:
        lines = comment.splitlines()[1:]
        assert len([line for line in lines if line.startswith("# ")]) >= 1, comment[:40]


def test_nothing_is_fetched_by_address_and_nobody_takes_it_for_built() -> None:
    assert "://" not in DOCKERFILE + README
    assert "not built" in README.lower()
    assert "NOT BUILT" in DOCKERFILE


def test_the_worker_that_stands_on_it_finds_the_vendors_places() -> None:
    worker = (FOLDER.parent / "worker-cuda-executor" / "Containerfile").read_text()
    places = set(re.findall(r"/app/tensorrt_llm/(lib|include)/[\w./]+", worker))
    assert places == {"lib", "include"}
    assert all(f"/app/tensorrt_llm/{place}" in COMMANDS.rpartition(" AS vendor")[2] for place in places)


def test_the_linter_has_nothing_against_it() -> None:
    done = subprocess.run(
        [Path(sys.executable).with_name("hadolint"), FOLDER / "Dockerfile"], capture_output=True, text=True, check=False
    )
    assert done.stdout + done.stderr == ""
    assert done.returncode == 0
