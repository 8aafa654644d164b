# SPDX-License-Identifier: Apache-2.0
"""Nodes that agree with themselves in everything, to be broken one field at a time."""

from __future__ import annotations

import math

from ifabric.engine.v1 import contract_pb2, generation_pb2, node_pb2
from ifabric.worker.v1 import worker_service_pb2
from services.common.contract import from_document
from services.common.protocol import PROTOCOL_REVISION
from tests.contract import documents

DIGEST = "0123456789abcdef" * 4


def contract(*, payload: bool = False) -> contract_pb2.EngineContract:
    """A contract without findings; with `payload`, of an engine that returns hidden states and generates nothing."""
    return from_document(documents.hidden_states() if payload else documents.generation())


def description(
    node_id: str = "node-1",
    incarnation: str = "i-1",
    address: str = "127.0.0.1:50051",
    *,
    payload: bool = False,
) -> node_pb2.NodeDescription:
    """A node that may load its engine."""
    agreed = contract(payload=payload)
    return node_pb2.NodeDescription(
        node_id=node_id,
        incarnation=incarnation,
        address=address,
        engine_digest=DIGEST,
        contract=agreed,
        suite_version="0.1.0",
        protocol_revision=PROTOCOL_REVISION,
        card=node_pb2.CardFacts(
            family=agreed.card.family,
            compute_capability=agreed.card.compute_capability,
            memory_bytes=agreed.card.memory_bytes * 2,
            count=agreed.card.count,
        ),
    )


def report(node: node_pb2.NodeDescription) -> node_pb2.EngineReport:
    """What the engine of a node says of itself once it is loaded."""
    agreed = node.contract
    blocks = agreed.limits.kv_block_tokens
    return node_pb2.EngineReport(
        engine_digest=node.engine_digest,
        vocab_size=agreed.model.vocab_size,
        hidden_size=agreed.model.hidden_size,
        layers=agreed.model.layers,
        limits=agreed.limits,
        capabilities=agreed.capabilities,
        kv_pool_blocks=16 * agreed.limits.max_sequence_tokens // blocks.value if blocks.HasField("value") else 0,
        load_ms=812,
    )


def answer(node: node_pb2.NodeDescription) -> worker_service_pb2.ProbeResponse:
    """What a probe of the loaded engine brings back."""
    generates = node.contract.limits.max_output_tokens > 0
    payload = node.contract.capabilities.payload
    width = 2 if payload.value.dtype == contract_pb2.PAYLOAD_DTYPE_FLOAT16 else 4
    return worker_service_pb2.ProbeResponse(
        report=report(node),
        payload=payload,
        elapsed_ms=40,
        usage=generation_pb2.Usage(
            prompt_tokens=4, cached_tokens=0, computed_tokens=4, generated_tokens=1 if generates else 0
        ),
        payload_bytes=math.prod(payload.value.shape) * width if payload.HasField("value") else 0,
    )
