# SPDX-License-Identifier: Apache-2.0
"""The `ifab` program from outside: help, failures in one sentence, JSON."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import grpc
import pytest
import typer

from services.cli.app import app
from tests.support.ports import held_port
from tests.support.processes import ServiceProcess
from tests.support.waiting import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def ifab(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    program = "import sys; from services.cli.main import main; main()"
    return subprocess.run(
        [sys.executable, "-c", program, *words],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE_S,
        check=False,
    )


def commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))
        else:
            yield " ".join((*path, name)), command


COMMANDS = dict(commands(typer.main.get_command(app)))
GROUPS = ("", "bulk", "engine", "jobs", "nodes")


@pytest.mark.parametrize("path", COMMANDS)
def test_every_command_has_help_with_an_example_and_speaks_json(path: str) -> None:
    command = COMMANDS[path]
    assert f"Example: ifab {path} " in command.help
    options = [parameter for parameter in command.params if parameter.name != "help"]
    assert "--json" in {name for option in options for name in option.opts}
    assert all(option.help for option in options)


def test_every_group_has_help_with_an_example() -> None:
    whole: Any = typer.main.get_command(app)
    assert {"", *(name for name, command in whole.commands.items() if hasattr(command, "commands"))} == set(GROUPS)
    for name in GROUPS:
        group = whole.commands[name] if name else whole
        assert f"Example: ifab {name}" in group.help


def test_control_c_while_all_is_imported_ends_silently(tmp_path: Path) -> None:
    program = "from services.cli.main import main; main()"
    with subprocess.Popen(
        # Whoever runs the tests in the background ignores SIGINT, and children inherit that.
        ["env", "--default-signal=INT", sys.executable, "-X", "importtime", "-c", program, "--help"],
        # A page of its lines fills the pipe: it waits for its reader, who so interrupts it before it has imported all.
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, pipesize=4096,
    ) as process:  # fmt: skip
        assert process.stderr is not None
        assert process.stdout is not None
        said = next(line for line in process.stderr if line.rstrip().endswith("typer"))  # one of the first of many
        process.send_signal(signal.SIGINT)
        said += process.stderr.read()
        assert (process.wait(PATIENCE_S), process.stdout.read()) == (130, "")
    assert [line for line in said.splitlines() if not line.startswith("import time:")] == []


@pytest.fixture
def nobody() -> Iterator[str]:
    """An address where nothing listens."""
    with held_port() as address:
        yield address


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


def test_the_address_of_another_service_is_one_sentence(tmp_path: Path) -> None:
    server = grpc.server(ThreadPoolExecutor(1))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        nodes = ifab("nodes", "--provisioner", address, "--json", cwd=tmp_path)
        job = ifab("bulk", "status", "job", "--broker", address, cwd=tmp_path)
    finally:
        server.stop(None).wait()
    assert (nodes.returncode, job.returncode) == (1, 1)
    said = f"what answers at {address} is no provisioner; name the address of one with --provisioner"
    assert nodes.stderr == f"ifab: {said}\n"
    assert json.loads(nodes.stdout)["error"]["message"] == said
    assert job.stderr.startswith(f"ifab: what answers at {address} is no broker, or one that keeps no jobs")


@pytest.mark.parametrize("words", [("engine", "schema"), ("key", "name")])
def test_output_that_nobody_reads_ends_the_command_without_a_word(words: tuple[str, ...], tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    program = "from services.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program, *words],
        cwd=tmp_path, stdout=writer, stderr=subprocess.PIPE, timeout=2 * PATIENCE_S, check=False,
    )  # fmt: skip
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.e2e
def test_nodes_say_when_the_broker_leaves_its_part_out(nobody: str, tmp_path: Path) -> None:
    server = grpc.server(ThreadPoolExecutor(1))
    stranger = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        with ServiceProcess("services.provisioner") as provisioner:
            words = ("nodes", "--provisioner", provisioner.address, "--broker")
            refused = ifab(*words, stranger, "--json", cwd=tmp_path)
            absent = ifab(*words, nobody, cwd=tmp_path)
    finally:
        server.stop(None).wait()
    assert (refused.returncode, absent.returncode) == (1, 1)
    without = "ifab: what runs at the nodes is left out: "
    assert refused.stderr.startswith(f"{without}what answers at {stranger} is no broker")
    assert json.loads(refused.stdout)["broker_error"]["code"] == "UNIMPLEMENTED"
    assert absent.stderr.startswith(f"{without}nothing answers at {nobody}")
    assert absent.stdout == "no node has registered\n"
    assert refused.stderr.count("\n") == absent.stderr.count("\n") == 1


def test_a_name_that_leads_nowhere_is_in_the_sentence(tmp_path: Path) -> None:
    done = ifab("nodes", "--provisioner", "nobody.invalid:7601", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("ifab: nothing answers at nobody.invalid:7601; start a suite with `ifab up`")


@pytest.mark.parametrize("words", [("engine", "describe"), ("engine", "verify"), ("up", "--free-ports", "--engine")])
def test_a_contract_that_is_no_json_is_named_once(words: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "contract.json").write_text("no json")
    done = ifab(*words, "bad", cwd=tmp_path)
    says = "bad/contract.json is no JSON at character 1, expected one JSON document in UTF-8"
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"ifab: {says}; make the engine anew with `ifab engine build`\n"


def test_an_engine_is_not_built_into_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    done = ifab("engine", "build", "file", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (1, "ifab: file is no directory; name one that is to be made\n")
    assert (tmp_path / "file").read_text() == "mine"


def test_a_job_that_cannot_start_leaves_older_results_alone(nobody: str, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "x", "max_tokens": 1}\n')
    (tmp_path / "out.jsonl").write_text("older results\n")
    done = ifab("bulk", "run", "in.jsonl", "-o", "out.jsonl", "--silence", "1", "--broker", nobody, cwd=tmp_path)
    assert done.returncode == 1
    assert (tmp_path / "out.jsonl").read_text() == "older results\n"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("bulk", "run", "absent.jsonl", "-o", "out.jsonl"), "absent.jsonl: No such file or directory"),
        (("bulk", "run", "in.jsonl", "-o", "in.jsonl"), "in.jsonl is the input"),
        (("bulk", "run", "in.jsonl", "-o", "absent/out.jsonl", "--silence", "1", "--broker"), "nothing answers"),
    ],
)
def test_files_at_fault_are_named(words: tuple[str, ...], says: str, nobody: str, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "x"}\n')
    done = ifab(*words, *([nobody] if words[-1] == "--broker" else []), cwd=tmp_path)
    assert done.returncode == 1
    *waits, failure = done.stderr.splitlines()
    assert says in failure
    assert all(line.startswith("ifab: waiting for the broker: ") for line in waits)
    assert len(waits) <= 1


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (("bulk", "run", "in.jsonl", "-o", "/dev/full"), "/dev/full"),
        (("bulk", "run", "in.jsonl", "-o", "."), "."),
        (("bulk", "run", "in.jsonl", "-o", "out.jsonl", "--errors", "pipe"), "pipe"),
        (("bulk", "results", "job", "-o", "pipe"), "pipe"),
        (("bulk", "results", "job", "-o", "out.jsonl", "--errors", "/dev/null"), "/dev/null"),
    ],
)
def test_results_go_into_regular_files(words: tuple[str, ...], name: str, nobody: str, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "x"}\n')
    os.mkfifo(tmp_path / "pipe")
    done = ifab(*words, "--broker", nobody, cwd=tmp_path)
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
        (("generate", "x", "--broker", "127.0.0.1:99999"), "--broker"),
        (("nodes", "--provisioner", "127.0.0.1:0"), "--provisioner"),
        (("nodes", "--provisioner", "nonsense"), "--provisioner"),
    ],
)
def test_a_value_that_cannot_be_meant_names_its_option(words: tuple[str, ...], option: str, tmp_path: Path) -> None:
    done = ifab(*words, cwd=tmp_path)
    assert done.returncode == 2
    assert f"Invalid value for '{option}'" in done.stderr
    assert "Traceback" not in done.stderr
