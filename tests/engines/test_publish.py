# SPDX-License-Identifier: Apache-2.0
"""Engine directories come whole or not at all, whatever happens to the build."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from engines import publish
from services.common.errors import FailedPreconditionError, ResourceExhaustedError, UnavailableError

ROOT = Path(__file__).resolve().parents[2]


def build(target: Path, inputs: str, made: list[str], *, needed_bytes: int = 1, stop_at: str = "") -> None:
    """A build of two files and a contract that notes what it makes; `stop_at` is where it is killed."""
    with publish.workplace(target, turn_s=5) as place:
        place.begin(inputs, needed_bytes)
        for name in ("a", "b", "contract.json"):

            def make(part: Path, name: str = name) -> None:
                part.write_text(f"{name} of {inputs}")
                made.append(name)
                if name == stop_at:
                    raise KeyboardInterrupt

            place.step(name, make)
        place.path("scrap").write_text("not of the engine")
        place.publish(["a", "b", "contract.json"])


def content(target: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in target.iterdir()}


WHOLE = {"a": "a of one", "b": "b of one", "contract.json": "contract.json of one"}


def test_a_directory_holds_what_was_named_and_nothing_lies_beside_it(tmp_path: Path) -> None:
    build(tmp_path / "deep" / "engine", "one", [])
    assert content(tmp_path / "deep" / "engine") == WHOLE
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["engine"]


def test_an_interrupted_build_leaves_no_directory_and_is_taken_up(tmp_path: Path) -> None:
    made: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        build(tmp_path / "engine", "one", made, stop_at="b")
    assert not (tmp_path / "engine").exists()
    build(tmp_path / "engine", "one", made)
    assert made == ["a", "b", "b", "contract.json"]
    assert content(tmp_path / "engine") == WHOLE


def test_a_build_that_finished_nothing_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        build(tmp_path / "engine", "one", [], stop_at="a")
    assert list(tmp_path.iterdir()) == []


def test_other_inputs_begin_anew(tmp_path: Path) -> None:
    made: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        build(tmp_path / "engine", "zero", made, stop_at="b")
    build(tmp_path / "engine", "one", made)
    assert made == ["a", "b", "a", "b", "contract.json"]
    assert content(tmp_path / "engine") == WHOLE


def test_an_engine_is_replaced_in_one_step(tmp_path: Path) -> None:
    build(tmp_path / "engine", "zero", [])
    with pytest.raises(KeyboardInterrupt):
        build(tmp_path / "engine", "one", [], stop_at="contract.json")
    assert content(tmp_path / "engine")["a"] == "a of zero"
    build(tmp_path / "engine", "one", [])
    assert content(tmp_path / "engine") == WHOLE
    assert [path.name for path in tmp_path.iterdir()] == ["engine"]


def test_a_build_that_died_between_two_renames_is_mended(tmp_path: Path) -> None:
    build(tmp_path / "engine", "one", [])
    (tmp_path / "engine").rename(tmp_path / ".engine.old")
    with publish.workplace(tmp_path / "engine"):
        assert content(tmp_path / "engine") == WHOLE
    assert [path.name for path in tmp_path.iterdir()] == ["engine"]


def test_what_is_no_engine_directory_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "thesis.txt").write_text("precious")
    with pytest.raises(FailedPreconditionError, match="exists and is no engine directory"):
        build(tmp_path / "engine", "one", [])
    assert content(tmp_path / "engine") == {"thesis.txt": "precious"}
    (tmp_path / "file").write_text("precious")
    with pytest.raises(FailedPreconditionError, match="file"):
        build(tmp_path / "file", "one", [])
    assert (tmp_path / "file").read_text() == "precious"


def test_a_disk_without_room_is_refused_before_the_work(tmp_path: Path) -> None:
    made: list[str] = []
    with pytest.raises(ResourceExhaustedError, match=r"MiB of disk are free .* the build needs \d+: make room"):
        build(tmp_path / "engine", "one", made, needed_bytes=1 << 60)
    assert made == []


def test_a_disk_that_fills_up_is_said_in_one_sentence(tmp_path: Path) -> None:
    def fill(_part: Path) -> None:
        with Path("/dev/full").open("w") as full:
            full.write("x")

    def build_on_a_full_disk() -> None:
        with publish.workplace(tmp_path / "e") as place:
            place.begin("one", 1)
            place.step("a", fill)

    with pytest.raises(ResourceExhaustedError, match="the disk is full under"):
        build_on_a_full_disk()
    assert not (tmp_path / "e").exists()


def test_builds_take_turns_and_wait_no_longer_than_they_may(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "engine")], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        place = publish.workplace(tmp_path / "other", turn_s=0.2)
        with pytest.raises(UnavailableError, match=r"another build has been running in .* for 0\.2 s"):
            place.__enter__()
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.communicate()
    build(tmp_path / "engine", "one", [])  # a build that was killed holds nobody up
    assert content(tmp_path / "engine") == WHOLE


HOLD = """
import sys, pathlib, signal
from engines import publish
with publish.workplace(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    signal.pause()
"""
