# SPDX-License-Identifier: Apache-2.0
"""The verdict on a node: a pure function of its description, its engine's report and the probe of its engine.

Every function returns all findings at once, so that whoever mends a node mends it once. Paths are those of
`RegisterNodeRequest` without the leading `description.`: `contract.limits.step_token_budget`, `card.memory_bytes`,
`loaded.vocab_size`, `probe.usage.prompt_tokens`, `evidence[audit]`. Two speak of something as a whole: `engine` of the
engine directory, `probe` of the probe.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

from ifabric.engine.v1 import contract_pb2, node_pb2
from services.common.contract import Finding, all_findings
from services.common.protocol import PROTOCOL_REVISION
from services.common.settings import split_address
from services.provisioner.wording import ABSENT, text_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from google.protobuf.message import Message

    from ifabric.worker.v1 import worker_service_pb2
    from services.common.errors import FabricError

_NODE_ID = re.compile(r"[a-z0-9]([a-z0-9.-]{0,126}[a-z0-9])?")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_DTYPE_BYTES = {
    contract_pb2.PAYLOAD_DTYPE_FLOAT32: 4,
    contract_pb2.PAYLOAD_DTYPE_FLOAT16: 2,
    contract_pb2.PAYLOAD_DTYPE_BFLOAT16: 2,
}


def identity(description: node_pb2.NodeDescription) -> list[Finding]:
    """Finds what is wrong with the fields by which a node is known and reached. Without them it cannot be listed."""
    found: list[Finding] = []
    if not _NODE_ID.fullmatch(description.node_id):
        found.append(
            Finding(
                "node_id",
                text_of(description.node_id),
                "1 to 128 lower-case letters, digits, dots and hyphens, a letter or digit at both ends",
            )
        )
    if not 1 <= len(description.incarnation) <= 64:
        found.append(Finding("incarnation", text_of(description.incarnation), "1 to 64 characters"))
    try:
        port = split_address(description.address)[1]
    except ValueError:
        port = 0
    if port == 0:
        found.append(
            Finding(
                "address", text_of(description.address), "host:port with a port from 1 to 65535 that brokers can reach"
            )
        )
    return found


def oversized(node: node_pb2.NodeDescription, most_bytes: int) -> list[Finding]:
    """Finds a description too long to be kept and sent on."""
    size = node.ByteSize()
    return [Finding("description", f"{size} bytes", f"at most {most_bytes} bytes")] if size > most_bytes else []


def description(node: node_pb2.NodeDescription) -> list[Finding]:
    """Finds what is absent, unknown or out of range in a description, its contract's own rules included."""
    found: list[Finding] = []
    if not _DIGEST.fullmatch(node.engine_digest):
        found.append(Finding("engine_digest", text_of(node.engine_digest), "64 lower-case hexadecimal digits"))
    if not node.suite_version:
        found.append(Finding("suite_version", ABSENT, "version of the suite that the worker runs"))
    if node.protocol_revision != PROTOCOL_REVISION:
        found.append(Finding("protocol_revision", str(node.protocol_revision), str(PROTOCOL_REVISION)))
    found += _contract(node)
    found += _card_presence(node.card)
    return found


def agreement(node: node_pb2.NodeDescription) -> list[Finding]:
    """Finds where a description's card falls short of what its contract asks for; skips what either leaves out."""
    wanted, card = node.contract.card, node.card
    found: list[Finding] = []
    if _both(wanted, card, "family") and card.family != wanted.family:
        found.append(_short("family", card.family, f"{wanted.family}, as contract.card.family says"))
    if _both(wanted, card, "compute_capability") and card.compute_capability != wanted.compute_capability:
        found.append(
            _short(
                "compute_capability",
                text_of(card.compute_capability),
                f"{text_of(wanted.compute_capability)}, as contract.card.compute_capability says",
            )
        )
    for field in ("memory_bytes", "count"):
        if _both(wanted, card, field) and getattr(card, field) < getattr(wanted, field):
            found.append(  # noqa: PERF401 -- reads as the checks above do
                _short(
                    field,
                    str(getattr(card, field)),
                    f"at least {getattr(wanted, field)}, as contract.card.{field} says",
                )
            )
    return found


def evidence(node: node_pb2.NodeDescription, required: Sequence[str]) -> list[Finding]:
    """Finds the required kinds of evidence that a node does not bring, or whose newest document fails."""
    found: list[Finding] = []
    for kind in required:
        good = [each for each in node.evidence if each.kind == kind and not each.flaw]
        if good and good[-1].outcome != node_pb2.EVIDENCE_OUTCOME_FAILS:
            continue
        flaws = [each.flaw for each in node.evidence if each.flaw and each.kind in (kind, "")]
        failing = [f"{each.digest[:16]} of {each.time}, which fails" for each in good[-1:]]
        said = [ABSENT, *flaws, *failing][-1]
        wanted = f"evidence of kind {kind} about engine {node.engine_digest[:16]} that does not fail"
        found.append(Finding(f"evidence[{kind}]", text_of(said), f"{wanted}, as the provisioner's policy says"))
    return found


def report(node: node_pb2.NodeDescription, loaded: node_pb2.EngineReport) -> list[Finding]:
    """Finds where the loaded engine says something else of itself than the contract does."""
    contract = node.contract
    expected = {
        "engine_digest": (node.engine_digest, "engine_digest"),
        "vocab_size": (contract.model.vocab_size, "contract.model.vocab_size"),
        "hidden_size": (contract.model.hidden_size, "contract.model.hidden_size"),
        "layers": (contract.model.layers, "contract.model.layers"),
    }
    found = [
        Finding(f"loaded.{field}", text_of(getattr(loaded, field)), f"{text_of(value)}, as {source} says")
        for field, (value, source) in expected.items()
        if getattr(loaded, field) != value
    ]
    found += _differences("loaded.limits", loaded.limits, contract.limits, "contract.limits")
    found += _differences("loaded.capabilities", loaded.capabilities, contract.capabilities, "contract.capabilities")
    found += _pool(contract, loaded)
    return found


def probe(
    node: node_pb2.NodeDescription,
    loaded: node_pb2.EngineReport,
    answer: worker_service_pb2.ProbeResponse,
) -> list[Finding]:
    """Finds where the running engine did something else than its description promises."""
    found = [
        Finding("probe.report" + finding.path.removeprefix("loaded"), finding.found, finding.expected)
        for finding in report(node, answer.report)
    ]
    if answer.report.load_ms != loaded.load_ms or answer.report.kv_pool_blocks != loaded.kv_pool_blocks:
        found.append(Finding("probe.report", "another load than the one registered", "the report that was registered"))
    found += _usage(node.contract.limits, answer)
    found += _payload(node.contract.capabilities.payload, answer)
    return found


def unanswered(address: str, error: FabricError) -> list[Finding]:
    """The finding of a probe that brought no answer."""
    return [Finding("probe", f"{error.reason}: {error.message}", f"an answer of WorkerService.Probe at {address}")]


def _contract(node: node_pb2.NodeDescription) -> Iterator[Finding]:
    """What the worker's reading of the document saw, then what the rules say of the rest."""
    reading = [Finding(f.path, f.found, f.expected) for f in node.findings]
    for finding in all_findings(node.contract, reading):
        path = f"contract.{finding.path}" if finding.path else "engine"
        yield Finding(path, finding.found, finding.expected)


def _card_presence(card: node_pb2.CardFacts) -> Iterator[Finding]:
    for field in card.DESCRIPTOR.fields:
        if text_of(card, field) == ABSENT:
            yield Finding(f"card.{field.name}", ABSENT, "what the node's card says of itself")
        elif field.name in ("memory_bytes", "count") and getattr(card, field.name) < 1:
            yield Finding(f"card.{field.name}", text_of(card, field), "at least 1")


def _both(wanted: contract_pb2.CardRequirement, card: node_pb2.CardFacts, field: Any) -> bool:
    return wanted.HasField(field) and card.HasField(field)


def _short(field: str, found: str, expected: str) -> Finding:
    return Finding(f"card.{field}", found, expected)


def _differences(path: str, said: Message, wanted: Message, source: str) -> Iterator[Finding]:
    """Compares two messages of one type field by field; presence counts."""
    for field in wanted.DESCRIPTOR.fields:
        found, expected = text_of(said, field), text_of(wanted, field)
        if found != expected:
            yield Finding(f"{path}.{field.name}", found, f"{expected}, as {source}.{field.name} says")


def _pool(contract: contract_pb2.EngineContract, loaded: node_pb2.EngineReport) -> Iterator[Finding]:
    block = contract.limits.kv_block_tokens
    if block.WhichOneof("kind") != "value":
        if loaded.kv_pool_blocks != 0:
            yield Finding("loaded.kv_pool_blocks", str(loaded.kv_pool_blocks), "0, since the engine has no cache")
        return
    least = math.ceil(contract.limits.max_sequence_tokens / max(block.value, 1))
    if loaded.kv_pool_blocks < least:
        yield Finding(
            "loaded.kv_pool_blocks",
            str(loaded.kv_pool_blocks),
            f"at least {least}: blocks of {block.value} tokens for one sequence of "
            f"{contract.limits.max_sequence_tokens}",
        )


def _usage(limits: contract_pb2.EngineLimits, answer: worker_service_pb2.ProbeResponse) -> Iterator[Finding]:
    usage = answer.usage
    if not 1 <= usage.prompt_tokens <= limits.max_input_tokens:
        yield Finding("probe.usage.prompt_tokens", str(usage.prompt_tokens), f"1 to {limits.max_input_tokens}")
    if not 0 <= usage.cached_tokens < max(usage.prompt_tokens, 1):
        yield Finding(
            "probe.usage.cached_tokens",
            str(usage.cached_tokens),
            "fewer than the prompt's tokens: the last one is always computed",
        )
    if usage.computed_tokens < 1:
        yield Finding("probe.usage.computed_tokens", str(usage.computed_tokens), "at least 1")
    if limits.max_output_tokens == 0 and usage.generated_tokens != 0:
        yield Finding(
            "probe.usage.generated_tokens", str(usage.generated_tokens), "0, as contract.limits.max_output_tokens says"
        )
    if limits.max_output_tokens > 0 and not 1 <= usage.generated_tokens <= limits.max_output_tokens:
        yield Finding("probe.usage.generated_tokens", str(usage.generated_tokens), f"1 to {limits.max_output_tokens}")


def _payload(wanted: contract_pb2.MaybePayload, answer: worker_service_pb2.ProbeResponse) -> Iterator[Finding]:
    came = answer.payload.WhichOneof("kind") == "value"
    if wanted.WhichOneof("kind") != "value":
        if came or answer.payload_bytes != 0:
            yield Finding(
                "probe.payload", f"{answer.payload_bytes} bytes", "none, as contract.capabilities.payload says"
            )
        return
    form = wanted.value
    if not came:
        yield Finding("probe.payload", "none", f"{text_of(form)}, as contract.capabilities.payload says")
        return
    yield from _differences("probe.payload", answer.payload.value, form, "contract.capabilities.payload")
    size = math.prod(form.shape) * _DTYPE_BYTES.get(form.dtype, 0)
    if answer.payload_bytes != size:
        yield Finding("probe.payload_bytes", str(answer.payload_bytes), f"{size}, as shape and dtype say")
