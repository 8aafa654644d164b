# SPDX-License-Identifier: Apache-2.0
"""Chats as prompts, by the engine's own template.

The template is the one that comes with the model: `chat_template` in the engine's `tokenizer_config.json`, or its
`chat_template.jinja`. It is a program of whoever published the model, so it runs in a sandbox that reaches nothing and
changes nothing, and what it writes is bounded. Its text becomes token ids here, with the engine's `tokenizer.json` and
without further special tokens, since the template writes them itself.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import jinja2
import numpy as np
from jinja2.exceptions import SecurityError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from ifabric.provisioner.v1 import provisioner_service_pb2, provisioner_service_pb2_grpc
from ifabric.worker.v1 import worker_service_pb2, worker_service_pb2_grpc
from services.cli.connection import channel
from services.cli.files.openai import messages_of
from services.cli.running import CommandError
from services.common.rpc import translated
from services.common.security.needs import PROVISIONER, WORKER

if TYPE_CHECKING:
    from ifabric.engine.v1 import contract_pb2, node_pb2

TOKENIZER_CONFIG = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"
PROMPT_CHARACTERS_MAX = 4 * 1024 * 1024
"""Longest prompt that a template may write."""
_NUMBER_MAX, _EXPONENT_MAX = 1_000_000, 64
_FILE_BYTES_MAX = 64 * 1024 * 1024
_CALL_S = 5.0
_FETCH_S = 30.0


class _Sandbox(ImmutableSandboxedEnvironment):
    """A sandbox whose arithmetic makes nothing large, either."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        for one, other in ((left, right), (right, left)):
            repeats = isinstance(one, str | list | tuple) and isinstance(other, int)
            if repeats and len(one) * other > PROMPT_CHARACTERS_MAX:
                raise SecurityError("a value larger than any prompt")
        if operator == "**" and not (abs(left) <= _NUMBER_MAX and abs(right) <= _EXPONENT_MAX):
            raise SecurityError("a power of large numbers")
        return super().call_binop(context, operator, left, right)


class ChatTemplate:
    """A template, ready to be rendered.

    Args:
        source: Its text.
        tokens: Special tokens by the names that templates know: `bos_token`, `eos_token`, ….

    Raises:
        ValueError: The text is no template.
    """

    def __init__(self, source: str, tokens: dict[str, str]) -> None:
        environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        self._tokens = tokens
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ValueError(f"is no template: {error}") from error

    def render(self, messages: list[dict[str, Any]]) -> str:
        """Returns the prompt that asks for the next answer.

        Raises:
            ValueError: The template refuses the messages, fails on them, or writes more than PROMPT_CHARACTERS_MAX.
        """
        parts, size = [], 0
        try:
            for part in self._template.generate(messages=messages, add_generation_prompt=True, **self._tokens):
                size += len(part)
                if size > PROMPT_CHARACTERS_MAX:
                    raise ValueError(f"make the chat template write more than {PROMPT_CHARACTERS_MAX:,} characters")
                parts.append(part)
        except jinja2.TemplateError as error:
            raise ValueError(f"are refused by the engine's chat template: {error.message}") from error
        except (TypeError, ArithmeticError, LookupError, AttributeError, RecursionError) as error:
            raise ValueError(f"make the engine's chat template fail ({type(error).__name__})") from error
        return "".join(parts)


@dataclass(frozen=True, slots=True)
class ChatEngine:
    """What turns chats into prompts for one engine."""

    engine_id: str
    engine_digest: str
    max_output_tokens: int
    template: ChatTemplate
    tokenizer: Tokenizer

    def prompt(self, messages: Any) -> bytes:
        """Returns the ids of the prompt, packed as little-endian int32.

        Raises:
            TypeError, ValueError: `messages` is no list of messages, or the template refuses them.
        """
        rendered = self.template.render(messages_of(messages))
        return np.array(self.tokenizer.encode(rendered, add_special_tokens=False).ids, dtype="<i4").tobytes()


async def fetch_chat_engine(provisioner: str, engine_id: str) -> ChatEngine:
    """Gets template and tokenizer of an engine from a worker that serves it.

    Args:
        provisioner: Where the provisioner listens; it knows the workers.
        engine_id: The engine; empty where only one serves.

    Raises:
        CommandError: No accepted node, or several engines and none named; or the engine has no chat template.
        FabricError: A call failed.
    """
    node = await _node(provisioner, engine_id)
    contract = node.contract
    paths = {file.path: file for file in contract.files}
    found = [path for path in (TOKENIZER_CONFIG, TEMPLATE_FILE) if path in paths]
    if not found:
        raise _none(contract.engine_id, f"neither {TOKENIZER_CONFIG} nor {TEMPLATE_FILE} is among its files")
    async with channel(node.address, role=WORKER) as to_worker:
        stub = worker_service_pb2_grpc.WorkerServiceStub(to_worker)
        files = {path: await _fetch(stub, node, paths[path]) for path in (*found, contract.tokenizer.file)}
    config = json.loads(files.get(TOKENIZER_CONFIG, b"{}"))
    source = files[TEMPLATE_FILE].decode() if TEMPLATE_FILE in files else _template_of(config)
    if not source:
        raise _none(contract.engine_id, f"its {TOKENIZER_CONFIG} has no chat_template")
    try:
        template = ChatTemplate(source, _tokens_of(config))
    except ValueError as error:
        raise CommandError(f"the chat template of {contract.engine_id} {error}") from error
    tokenizer = Tokenizer.from_buffer(files[contract.tokenizer.file])
    tokenizer.no_truncation()
    tokenizer.no_padding()
    limit = contract.limits.max_output_tokens
    return ChatEngine(contract.engine_id, node.engine_digest, limit, template, tokenizer)


async def _node(provisioner: str, engine_id: str) -> node_pb2.NodeDescription:
    async with channel(provisioner, role=PROVISIONER) as to_provisioner:
        stub = provisioner_service_pb2_grpc.ProvisionerServiceStub(to_provisioner)
        with translated():
            reply = await stub.ListNodes(provisioner_service_pb2.ListNodesRequest(), timeout=_CALL_S)
    accepted = {
        node.description.contract.engine_id: node.description
        for node in reply.nodes
        if node.state == provisioner_service_pb2.NODE_STATE_ACCEPTED
    }
    if engine_id in accepted:
        return accepted[engine_id]
    names = ", ".join(sorted(accepted)) or "none"
    if engine_id or len(accepted) != 1:
        wanted = f"no engine called {engine_id!r} serves" if engine_id else "name the engine with --engine-id"
        raise CommandError(f"{wanted}; there are: {names}")
    return next(iter(accepted.values()))


async def _fetch(
    stub: worker_service_pb2_grpc.WorkerServiceAsyncStub, node: node_pb2.NodeDescription, file: contract_pb2.EngineFile
) -> bytes:
    if file.size_bytes > _FILE_BYTES_MAX:
        raise CommandError(f"{file.path} of {node.contract.engine_id} is larger than {_FILE_BYTES_MAX:,} bytes")
    request = worker_service_pb2.FetchFileRequest(engine_digest=node.engine_digest, path=file.path)
    call = stub.FetchFile(request, timeout=_FETCH_S)
    data = bytearray()
    try:
        with translated():
            async for chunk in call:
                data += chunk.data
    finally:
        call.cancel()
    if hashlib.sha256(data).hexdigest() != file.sha256:
        raise CommandError(f"{file.path} of {node.contract.engine_id} does not have the digest that the contract says")
    return bytes(data)


def _none(engine_id: str, why: str) -> CommandError:
    return CommandError(f"{engine_id} has no chat template ({why}); send it completions instead")


def _template_of(config: dict[str, Any]) -> str:
    """The template of a configuration, which may have several by name."""
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {each.get("name"): each.get("template") for each in template if isinstance(each, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else ""


def _tokens_of(config: dict[str, Any]) -> dict[str, str]:
    """Special tokens; each is text, or an object that has it as `content`."""
    tokens = {}
    for name, value in config.items():
        token = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(token, str):
            tokens[name] = token
    return tokens


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
