# SPDX-License-Identifier: Apache-2.0
"""Simulated engine directories, as the tests want them."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

from services.common import contract
from services.common.contract import values


def simulated(directory: Path, *, payload: int = 0, longest_step_ms: int = 1000, **configuration: Any) -> str:
    directory.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = {
        "simulated_version": 1,
        "seed": 7,
        "vocab_size": 1000,
        "hidden_size": 64,
        "layers": 2,
        "slots": 8,
        "sequence_tokens": 256,
        "step_token_budget": 256,
        "splits_prompts": True,
        "kv_block_tokens": 16,
        "kv_pool_blocks": 128,
        "samples_max": 4,
        "scoring": True,
        "payload": "not_applicable",
        "end_one_in": 0,
        "time": {
            "mode": "real",
            "scale": 1,
            "load_ms": 0,
            "step_us": 500,
            "prompt_token_ns": 0,
            "generated_token_ns": 0,
            "context_token_ns": 0,
        },
        "step_faults": [],
        "request_faults": [],
    }
    if payload:
        config |= {
            "payload": {"values": payload, "dtype": "float32"},
            "kv_block_tokens": "not_applicable",
            "kv_pool_blocks": "not_applicable",
            "samples_max": 1,
            "scoring": False,
        }
    config["time"] |= configuration.pop("time", {})
    config |= configuration
    (directory / "simulated.json").write_text(json.dumps(config))
    (directory / "tokenizer.json").write_text("{}")
    files = tuple(
        values.File(n, (directory / n).stat().st_size, hashlib.sha256((directory / n).read_bytes()).hexdigest())
        for n in ("simulated.json", "tokenizer.json")
    )
    blocks = config["kv_block_tokens"]
    made = values.Contract(
        contract_version=1,
        engine_id="simulated",
        files=files,
        model=values.Model(
            "simulated",
            config["layers"],
            config["hidden_size"],
            config["vocab_size"],
            "none",
            "none",
            None if payload else "none",
        ),
        tokenizer=values.Tokenizer("tokenizer.json", () if payload else (2,)),
        card=values.Card("cpu", None, 1, 1, 1, 1),
        limits=values.Limits(
            128 if payload else 192,
            128 if payload else 256,
            0 if payload else 64,
            config["slots"],
            config["step_token_budget"],
            config["step_token_budget"],
            None if blocks == "not_applicable" else blocks,
            None,
            0,
            1,
            longest_step_ms,
        ),
        capabilities=values.Capabilities(
            (),
            config["samples_max"],
            config["scoring"],
            True,
            values.Payload((payload,), "float32", (-1,)) if payload else None,
        ),
        runtime=values.Runtime("simulated", "1"),
        build=values.Build("tests", "1", (), None, "2026-11-29"),
    )
    (directory / "contract.json").write_bytes(contract.to_json(made.to_proto()))
    return contract.engine_digest(directory)
