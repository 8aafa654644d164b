# SPDX-License-Identifier: Apache-2.0
"""Conventions of the protos, checked on their descriptors: names, zero values, requests and responses, comments."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from google.protobuf import descriptor_pb2

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
PROTOSET = ROOT / "build" / "proto" / "ifabric.protoset"

# Field numbers in descriptor.proto, of which paths in SourceCodeInfo are made.
_MESSAGES, _ENUMS, _SERVICES = 4, 5, 6
_FIELDS, _NESTED, _NESTED_ENUMS, _ONEOFS, _VALUES, _METHODS = 2, 3, 4, 8, 2, 2


FOREIGN = "inference"
"""Package of a protocol that others made: its names, numbers and shapes are theirs; only its comments are ours."""


def files() -> list[descriptor_pb2.FileDescriptorProto]:
    return [file for file in all_files() if file.package != FOREIGN]


def all_files() -> list[descriptor_pb2.FileDescriptorProto]:
    everything = descriptor_pb2.FileDescriptorSet.FromString(PROTOSET.read_bytes())
    return [file for file in everything.file if file.name.startswith("ifabric/")]


def messages() -> Iterator[tuple[str, descriptor_pb2.DescriptorProto]]:
    for file in files():
        for message in file.message_type:
            yield f"{file.package}.{message.name}", message


def enums() -> Iterator[tuple[str, descriptor_pb2.EnumDescriptorProto]]:
    for file in files():
        for enum in file.enum_type:
            yield f"{file.package}.{enum.name}", enum
    for name, message in messages():
        for enum in message.enum_type:
            yield f"{name}.{enum.name}", enum


def methods() -> Iterator[tuple[str, descriptor_pb2.MethodDescriptorProto]]:
    for file in files():
        for service in file.service:
            for method in service.method:
                yield f"{file.package}.{service.name}.{method.name}", method


def test_the_protoset_holds_what_it_should() -> None:
    packages = {file.package for file in files()}
    assert packages == {f"ifabric.{area}.v1" for area in ("broker", "engine", "provisioner", "worker")}
    everything = descriptor_pb2.FileDescriptorSet.FromString(PROTOSET.read_bytes())
    assert any(file.name == "google/rpc/status.proto" for file in everything.file), "grpcurl needs the imports too"


def test_the_wheel_carries_the_protoset_beside_its_package(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, capture_output=True, check=True)
    [wheel] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as carried:
        assert {"ifabric.protoset", "ifabric/broker/v1/broker_service_pb2.py"} <= set(carried.namelist())
        assert carried.read("ifabric.protoset") == PROTOSET.read_bytes()


def test_they_are_generated_without_a_word(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    script = shutil.copy(ROOT / "scripts" / "proto", tmp_path / "scripts")
    shutil.copytree(ROOT / "protos", tmp_path / "protos")
    done = subprocess.run([script, sys.executable], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")
    assert (tmp_path / "build" / "proto" / "ifabric" / "broker" / "v1" / "broker_service_pb2.pyi").exists()


@pytest.mark.parametrize("file", files(), ids=lambda file: file.name)
def test_a_file_lies_where_its_package_says(file: descriptor_pb2.FileDescriptorProto) -> None:
    assert file.syntax == "proto3"
    assert file.name.rpartition("/")[0] == file.package.replace(".", "/")
    assert re.fullmatch(r"[a-z_]+\.proto", file.name.rpartition("/")[2])
    assert all(service.name.endswith("Service") for service in file.service)


def test_every_rpc_has_a_request_and_a_response_of_its_own() -> None:
    used: Counter[str] = Counter()
    for name, method in methods():
        package, rpc = name.rpartition(".")[0].rpartition(".")[0], method.name
        assert method.input_type == f".{package}.{rpc}Request", name
        assert method.output_type == f".{package}.{rpc}Response", name
        used.update((method.input_type, method.output_type))
    assert [name for name, count in used.items() if count > 1] == []


def test_enum_values_carry_their_enum_and_zero_is_unspecified() -> None:
    found = list(enums())
    assert found
    for name, enum in found:
        prefix = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", enum.name).upper() + "_"
        assert all(value.name.startswith(prefix) for value in enum.value), name
        assert (enum.value[0].name, enum.value[0].number) == (f"{prefix}UNSPECIFIED", 0), name


def test_names_of_messages_and_fields() -> None:
    for name, message in messages():
        assert re.fullmatch(r"([A-Z][a-z0-9]+)+", message.name), name
        for field in message.field:
            assert re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", field.name), f"{name}.{field.name}"


def test_numbers_of_contracts_have_presence() -> None:
    # An absent token budget must be absent, never 0: no number of a contract may lose its presence.
    kinds = descriptor_pb2.FieldDescriptorProto
    plain = {kinds.TYPE_STRING, kinds.TYPE_MESSAGE, kinds.TYPE_ENUM, kinds.TYPE_BYTES}
    contract = next(file for file in files() if file.name.endswith("/contract.proto"))
    numbers = [
        (f"{message.name}.{field.name}", field)
        for message in contract.message_type
        for field in message.field
        if field.type not in plain and field.label != kinds.LABEL_REPEATED
    ]
    assert len(numbers) > 20
    # Members of a oneof have presence by being one of them.
    assert [name for name, field in numbers if not field.proto3_optional and not field.HasField("oneof_index")] == []


def test_everything_is_commented() -> None:
    missing = [name for file in all_files() for name in _uncommented(file)]
    assert missing == []


def _uncommented(file: descriptor_pb2.FileDescriptorProto) -> Iterator[str]:
    commented = {tuple(place.path) for place in file.source_code_info.location if place.leading_comments.strip()}

    def check(path: tuple[int, ...], name: str) -> Iterator[str]:
        if path not in commented:
            yield f"{file.name}: {name}"

    def of_enum(path: tuple[int, ...], enum: descriptor_pb2.EnumDescriptorProto) -> Iterator[str]:
        yield from check(path, enum.name)
        for number, value in enumerate(enum.value):
            yield from check((*path, _VALUES, number), value.name)

    def of_message(path: tuple[int, ...], message: descriptor_pb2.DescriptorProto) -> Iterator[str]:
        yield from check(path, message.name)
        for number, field in enumerate(message.field):
            yield from check((*path, _FIELDS, number), f"{message.name}.{field.name}")
        for number, nested in enumerate(message.nested_type):
            if not nested.options.map_entry:
                yield from of_message((*path, _NESTED, number), nested)
        for number, enum in enumerate(message.enum_type):
            yield from of_enum((*path, _NESTED_ENUMS, number), enum)
        for number, oneof in enumerate(message.oneof_decl):
            if not oneof.name.startswith("_"):  # one that `optional` made
                yield from check((*path, _ONEOFS, number), f"{message.name}.{oneof.name}")

    for number, message in enumerate(file.message_type):
        yield from of_message((_MESSAGES, number), message)
    for number, enum in enumerate(file.enum_type):
        yield from of_enum((_ENUMS, number), enum)
    for number, service in enumerate(file.service):
        yield from check((_SERVICES, number), service.name)
        for index, method in enumerate(service.method):
            yield from check((_SERVICES, number, _METHODS, index), f"{service.name}.{method.name}")
