# SPDX-License-Identifier: Apache-2.0
"""Peers of the recorded protocol revision.

A client and a worker that know nothing newer work with this broker, and those of this revision with such a broker. The
client's messages are the recorded ones. Worker and broker are this revision's, which need their own; what they send and
read goes through the recorded ones on its way, and loses whatever they do not know; nor do they serve what the recorded
revision has no name for.

`tests/data/protoset-v1` is the descriptor set of the revision, without source info:

    python -m grpc_tools.protoc -Iprotos -I<googleapis> --include_imports --descriptor_set_out=... <every proto>

It is never written anew; the next revision gets a file of its own.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from google.protobuf import descriptor_pb2

from tests.jobs.running import Fabric
from tests.support.processes import ROOT, environment
from tests.support.suite import run

if TYPE_CHECKING:
    from collections.abc import Iterator

RECORDED = ROOT / "tests" / "data" / "protoset-v1"
NOW = ROOT / "build" / "proto" / "ifabric.protoset"
OURS = "ifabric/"


def descriptors(path: Path) -> dict[str, descriptor_pb2.FileDescriptorProto]:
    files = descriptor_pb2.FileDescriptorSet.FromString(path.read_bytes()).file
    return {file.name: file for file in files if file.name.startswith(OURS)}


@pytest.fixture(scope="module")
def old_messages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python modules of the recorded revision."""
    out = tmp_path_factory.mktemp("old")
    command = [
        sys.executable, "-m", "grpc_tools.protoc", f"--descriptor_set_in={RECORDED}", f"--python_out={out}",
        f"--grpc_python_out={out}", *descriptors(RECORDED),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    for folder in {out / OURS, *(path.parent for path in out.rglob("*_pb2.py"))}:
        (folder / "__init__.py").touch()
        (folder.parent / "__init__.py").touch()
    (out / "__init__.py").unlink()
    return out


VEIL = """
from pathlib import Path
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_pool = descriptor_pool.DescriptorPool()


def knows(service):
    try:
        return bool(_pool.FindServiceByName(service))
    except KeyError:
        return False


for _file in descriptor_pb2.FileDescriptorSet.FromString(Path({recorded!r}).read_bytes()).file:
    _pool.Add(_file)


def _through(kind, raw):
    try:
        known = message_factory.GetMessageClass(_pool.FindMessageTypeByName(kind.DESCRIPTOR.full_name))
    except KeyError:
        return raw
    message = known.FromString(raw)
    message.DiscardUnknownFields()
    return message.SerializeToString()


def out(kind):
    return lambda message: _through(kind, message.SerializeToString())


def into(kind):
    return lambda raw: kind.FromString(_through(kind, raw))
"""


SERVING = r"(def add_\w+\(servicer, server\):\n)(((?!def ).)*?method_handlers_generic_handler\(\s*'([\w.]+)')"
"""A generated function that lets a server serve, up to the service's name."""


@pytest.fixture(scope="module")
def veiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python modules of this revision whose calls say and hear no more than the recorded one knows."""
    out = tmp_path_factory.mktemp("veiled")
    shutil.copytree(NOW.parent / OURS, out / OURS)
    (out / "veil.py").write_text(VEIL.format(recorded=str(RECORDED)))
    for stubs in (out / OURS).rglob("*_pb2_grpc.py"):
        text = re.sub(r"(\w+_pb2\.\w+)\.SerializeToString", r"veil.out(\1)", stubs.read_text())
        text = re.sub(r"(\w+_pb2\.\w+)\.FromString", r"veil.into(\1)", text)
        text = re.sub(SERVING, r"\1    if not veil.knows('\4'):\n        return\n\2", text, flags=re.DOTALL)
        assert text.count("veil.knows") == text.count("def add_")
        stubs.write_text(f"import veil\n{text}")
        assert "SerializeToString" not in text
    return out


@pytest.fixture(scope="module")
def fabric(tmp_path_factory: pytest.TempPathFactory, veiled: Path) -> Iterator[Fabric]:
    """This broker and provisioner, and a worker that speaks the recorded revision."""
    with Fabric(tmp_path_factory.mktemp("skew"), worker_env={"PYTHONPATH": str(veiled)}) as made:
        yield made.start()


@pytest.fixture(scope="module")
def old_broker(tmp_path_factory: pytest.TempPathFactory, veiled: Path) -> Iterator[Fabric]:
    """A broker that speaks the recorded revision, between a provisioner and a worker of this one."""
    with Fabric(tmp_path_factory.mktemp("skew"), broker_env={"PYTHONPATH": str(veiled)}) as made:
        yield made.start()


def test_an_old_client_and_an_old_worker_work_with_this_broker(fabric: Fabric, old_messages: Path) -> None:
    env = environment({"PYTHONPATH": str(old_messages)})
    where = "import ifabric.worker.v1.worker_service_pb2 as m; print(m.__file__)"
    found = subprocess.run(
        [sys.executable, "-c", where], env=env, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert Path(found.stdout.strip()).is_relative_to(old_messages)
    told = client(fabric, env)
    assert Path(told["messages"]).is_relative_to(old_messages)


def client(fabric: Fabric, env: dict[str, str]) -> dict[str, Any]:
    """Runs `old_client` with the messages of an environment, and returns what it says when it got what it wanted."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "jobs" / "old_client.py"), fabric.brokers[0].address],
        env=env, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    assert told["acknowledged"] == [20]
    assert told["state"] == "JOB_STATE_COMPLETED"
    assert len(told["results"]) == 20
    assert told["results"] == told["exchanged"]
    return told


def test_a_client_and_a_worker_of_this_revision_work_with_an_old_broker(old_broker: Fabric, tmp_path: Path) -> None:
    told = client(old_broker, environment())
    assert Path(told["messages"]).is_relative_to(NOW.parent)

    to = ("--broker", old_broker.brokers[0].address)
    rows, out = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    newest = {"omit_payload": True, "max_tokens": 3}
    rows.write_text("".join(json.dumps({"prompt": f"A new prompt {n}", **newest}) + "\n" for n in range(20)))
    done = run("bulk", "run", str(rows), "-o", str(out), *to, "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["requests"], report["failed"]) == (20, 0)
    assert report["prompt_tokens_computed"] > 0
    assert report["waiting_s"] is None, "an old broker does not tell"
    assert len(out.read_text().splitlines()) == 20
    unknown = run("explain", "r1", *to)
    assert unknown.returncode == 1
    assert "or of an earlier version" in unknown.stderr


def test_this_revision_keeps_every_word_of_the_recorded_one() -> None:
    old, new = vocabulary(descriptors(RECORDED).values()), vocabulary(descriptors(NOW).values())
    assert len(old) > 300
    assert {name: (meaning, new.get(name)) for name, meaning in old.items() if new.get(name) != meaning} == {}


def test_a_changed_meaning_would_be_found() -> None:
    files = descriptors(RECORDED)
    old = vocabulary(files.values())
    message = files["ifabric/broker/v1/job_service.proto"].message_type[0]
    message.field[0].number += 100
    assert vocabulary(files.values()) != old


def vocabulary(files: Any) -> dict[str, tuple[Any, ...]]:
    """Everything that peers must agree on, by full name: fields, enum values, methods."""
    words: dict[str, tuple[Any, ...]] = {}

    def message(prefix: str, made: descriptor_pb2.DescriptorProto) -> None:
        name = f"{prefix}.{made.name}"
        for field in made.field:
            oneof = made.oneof_decl[field.oneof_index].name if field.HasField("oneof_index") else ""
            words[f"{name}.{field.name}"] = (field.number, field.type, field.label, field.type_name, oneof)
        for nested in made.nested_type:
            message(name, nested)
        for enum in made.enum_type:
            words.update({f"{name}.{enum.name}.{value.name}": (value.number,) for value in enum.value})

    for file in files:
        for each in file.message_type:
            message(file.package, each)
        for enum in file.enum_type:
            words.update({f"{file.package}.{enum.name}.{value.name}": (value.number,) for value in enum.value})
        for service in file.service:
            for method in service.method:
                words[f"{file.package}.{service.name}.{method.name}"] = (
                    method.input_type, method.output_type, method.client_streaming, method.server_streaming,
                )  # fmt: skip
    return words
