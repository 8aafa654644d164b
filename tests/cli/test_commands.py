# SPDX-License-Identifier: Apache-2.0
"""The `ifab` program from outside: help, failures in one sentence, JSON."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import typer

from services.cli.main import app

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def ifab(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    program = "import sys; from services.cli.main import main; main()"
    return subprocess.run(
        [sys.executable, "-c", program, *words], cwd=cwd, capture_output=True, text=True, timeout=30, check=False
    )


def commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))
        else:
            yield " ".join((*path, name)), command


COMMANDS = dict(commands(typer.main.get_command(app)))


@pytest.mark.parametrize("path", COMMANDS)
def test_every_command_has_help_with_an_example_and_speaks_json(path: str) -> None:
    command = COMMANDS[path]
    assert f"Example: ifab {path} " in command.help
    options = [parameter for parameter in command.params if parameter.name != "help"]
    assert "--json" in {name for option in options for name in option.opts}
    assert all(option.help for option in options)


@pytest.fixture
def nobody() -> str:
    """An address where nothing listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{taken.getsockname()[1]}"


@pytest.mark.parametrize("words", [("nodes", "--provisioner"), ("generate", "Hello", "--broker")])
def test_nobody_there_is_one_sentence(words: tuple[str, ...], nobody: str, tmp_path: Path) -> None:
    done = ifab(*words, nobody, "--json", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert nobody in done.stderr
    assert "ifab up" in done.stderr
    assert json.loads(done.stdout)["error"]["code"] == "UNAVAILABLE"


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_an_answer_that_does_not_come_is_one_sentence(form: tuple[str, ...], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        done = ifab("generate", "x", "--timeout", "0.5", "--broker", address, *form, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr == "ifab: the answer did not end within 0.5 s; allow it more with --timeout\n"


def test_a_job_that_cannot_start_leaves_older_results_alone(nobody: str, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "x", "max_tokens": 1}\n')
    (tmp_path / "out.jsonl").write_text("older results\n")
    done = ifab("bulk", "run", "in.jsonl", "-o", "out.jsonl", "--broker", nobody, cwd=tmp_path)
    assert done.returncode == 1
    assert (tmp_path / "out.jsonl").read_text() == "older results\n"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("bulk", "run", "absent.jsonl", "-o", "out.jsonl"), "absent.jsonl: No such file or directory"),
        (("bulk", "run", "in.jsonl", "-o", "in.jsonl"), "in.jsonl is the input"),
        (("bulk", "run", "in.jsonl", "-o", "absent/out.jsonl", "--broker"), "nothing answers"),
    ],
)
def test_files_at_fault_are_named(words: tuple[str, ...], says: str, nobody: str, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "x"}\n')
    done = ifab(*words, *([nobody] if words[-1] == "--broker" else []), cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert says in done.stderr


@pytest.mark.parametrize("place", ["a device", "a pipe", "a folder"])
@pytest.mark.parametrize(
    "words",
    [
        ("bulk", "run", "in.jsonl", "-o", "PLACE"),
        ("bulk", "run", "in.jsonl", "-o", "out.jsonl", "--errors", "PLACE"),
        ("bulk", "results", "job", "-o", "PLACE"),
        ("bulk", "results", "job", "-o", "out.jsonl", "--errors", "PLACE"),
    ],
)
def test_results_go_into_regular_files(words: tuple[str, ...], place: str, nobody: str, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "x"}\n')
    os.mkfifo(tmp_path / "pipe")
    name = {"a device": "/dev/full", "a pipe": "pipe", "a folder": "."}[place]
    done = ifab(*[name if word == "PLACE" else word for word in words], "--broker", nobody, cwd=tmp_path)
    assert done.returncode == 1
    says = f"{name} is not a regular file; results are read back to go on, so name one on a disk"
    assert done.stderr == f"ifab: {says}\n"
    assert not (tmp_path / "out.jsonl").exists()


def test_hidden_states_go_into_a_folder_of_regular_files(nobody: str, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "x"}\n')
    (tmp_path / "states").mkdir()
    os.mkfifo(tmp_path / "states" / "errors.jsonl")
    for place, says in (
        ("/dev/null", "ifab: /dev/null is not a folder"),
        ("states", "ifab: states/errors.jsonl is not a regular file"),
    ):
        done = ifab("mine", "in.jsonl", "-o", place, "--broker", nobody, cwd=tmp_path)
        assert (done.returncode, done.stderr.count("\n")) == (1, 1)
        assert done.stderr.startswith(says)


def test_wrong_usage_is_status_2(tmp_path: Path) -> None:
    assert ifab("bulk", "run", cwd=tmp_path).returncode == 2
    assert ifab("no-such-command", cwd=tmp_path).returncode == 2


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (("generate", "x", "-n", "99999999999"), "--max-tokens"),
        (("generate", "x", "--top-k", "99999999999"), "--top-k"),
        (("generate", "x", "--seed", "99999999999999999999"), "--seed"),
        (("generate", "\udcff"), "PROMPT"),
        (("generate", "x", "--stop", "\udcff"), "--stop"),
        (("up", "--worker", "nonsense"), "--worker"),
        (("up", "--broker", "127.0.0.1:99999"), "--broker"),
    ],
)
def test_a_value_that_cannot_be_meant_names_its_option(words: tuple[str, ...], option: str, tmp_path: Path) -> None:
    done = ifab(*words, cwd=tmp_path)
    assert done.returncode == 2
    assert f"Invalid value for '{option}'" in done.stderr
    assert "Traceback" not in done.stderr
