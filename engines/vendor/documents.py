# SPDX-License-Identifier: Apache-2.0
"""`executor.json` and `contract.json` of an engine that TensorRT-LLM's tools made, from its plan."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from engines.contract_text import NOT_APPLICABLE, BuiltFrom, card_document, contract_text
from services.common import schema
from services.common.errors import FailedPreconditionError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from engines.cpu import FileFacts
    from engines.planner import EnginePlan

SETTINGS_FILE: Final = "executor.json"
TOKENIZER_FILE: Final = "tokenizer.json"
GUIDES: Final = ("json_schema", "regex")
_IDLE_US: Final = 180_000_000


def executor_settings(plan: EnginePlan) -> bytes:
    """The text of `executor.json`: how the Executor runs this engine, nothing left to a default.

    The pool is held to what the slots and the resident heads need, in tokens; the contract's fraction bounds it in
    memory, and the smaller of both counts.

    Raises:
        FailedPreconditionError: The rules of the document refuse it: all findings are named.
    """
    document: dict[str, Any] = {
        "executor_version": 1,
        "batching": "inflight",
        "communication": "leader",
        "devices": list(range(plan.cards.count)),
        "scheduler": {
            "capacity_policy": "guaranteed_no_evict",
            "chunking_policy": "first_come_first_served",
            "dynamic_batch": NOT_APPLICABLE,
        },
        "chunked_context": True,
        "max_queue_size": 2 * plan.slots,
        "max_idle_us": _IDLE_US,
        "receive_poll_ms": 0,
        "iteration_stats": 1000,
        "request_stats": 0,
        "kv_cache": {
            "block_reuse": True,
            "partial_reuse": False,
            "copy_on_partial_reuse": False,
            "max_tokens": plan.memory.cache // plan.cache_token_bytes,
            "max_attention_window": [plan.max_sequence_tokens],
            "sink_tokens": 0,
            "onboard_blocks": True,
            "offload_priority": 35,
            "event_buffer": 0,
            "event_gather_ms": 5,
            "use_uvm": False,
            "max_gpu_bytes": 0,
        },
        "weights": {"gpu_direct_storage": False, "gpu_percent": 1.0},
        "performance": {
            "multi_block_mode": True,
            "context_fmha_fp32_accumulation": False,
            "cuda_graph_mode": False,
            "cuda_graph_cache": 0,
        },
        "decoding_mode": "top_k_top_p",
        "normalize_log_probs": False,
        "gather_generation_logits": False,
        "prompt_table_offloading": False,
        "trt_overlap": False,
        "fail_fast_on_attention_window": True,
        "guided_decoding": "xgrammar",
        "payload_outputs": NOT_APPLICABLE,
        "peft_cache": NOT_APPLICABLE,
        "logits_post_processor": NOT_APPLICABLE,
        "speculative_decoding": NOT_APPLICABLE,
        "cache_transceiver": NOT_APPLICABLE,
        "debug": NOT_APPLICABLE,
    }
    text = json.dumps(document, indent=2).encode() + b"\n"
    if findings := schema.check_text("executor", text)[1]:
        raise FailedPreconditionError(
            f"{SETTINGS_FILE} of tier {plan.tier.name} would be refused: " + "; ".join(map(str, findings))
        )
    return text


def contract(
    plan: EnginePlan, files: Mapping[str, FileFacts], *, engine_id: str, runtime_version: str, built: BuiltFrom
) -> bytes:
    """The text of `contract.json`.

    Raises:
        FailedPreconditionError: The contract would be refused: all findings are named.
    """
    limits, shape = plan.tier.generation, plan.model.shape
    return contract_text(
        engine_id=engine_id,
        files=files,
        model={
            "architecture": "llama",
            "layers": shape.layers,
            "hidden_size": shape.hidden_size,
            "vocab_size": shape.vocab_size,
            "weights_dtype": limits.weights,
            "activations_dtype": "bfloat16",
            "kv_cache_dtype": limits.cache,
        },
        tokenizer={"file": TOKENIZER_FILE, "end_token_ids": list(plan.model.end_token_ids)},
        card=card_document(plan.cards, plan.memory.total),
        limits={
            "max_input_tokens": limits.max_input_tokens,
            "max_sequence_tokens": plan.max_sequence_tokens,
            "max_output_tokens": plan.max_output_tokens,
            "slots": plan.slots,
            "step_token_budget": limits.step_token_budget,
            "built_step_token_budget": limits.step_token_budget,
            "kv_block_tokens": limits.kv_block_tokens,
            "kv_cache_memory_fraction": plan.cache_fraction,
            "host_cache_bytes": 0,
            "beams": 1,
            "longest_step_ms": limits.longest_step_ms,
        },
        capabilities={
            "guided_decoding": list(GUIDES),
            "samples_max": min(8, plan.slots),
            "scoring": False,
            "reproducible": False,
            "payload": NOT_APPLICABLE,
        },
        runtime={"name": "tensorrt-llm", "version": runtime_version},
        built=built,
    )
