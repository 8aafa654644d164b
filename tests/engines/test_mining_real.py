# SPDX-License-Identifier: Apache-2.0
"""Our own network on a real model's weights, against the embedded runtime that knows nothing of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest

from engines.graph.numpy_interpreter import run
from engines.mining.network import build_network
from engines.mining.packing import pack
from engines.model_config import ModelShape
from services.worker.native import Engine, EventKind, Options, PollBuffers, Request
from tests.engines.test_mining_network import cosine

if TYPE_CHECKING:
    from pathlib import Path

    from engines.build import Built

SHAPE = ModelShape(30, 576, 1536, 9, 3, 64, 49152, 1e-5, 100_000.0)
NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
PROMPTS = [np.arange(500, 500 + length, dtype=np.int32) * 7 % 40_000 for length in (5, 23, 61)]


def checkpoint_weights(path: Path) -> dict[str, npt.NDArray[Any]]:
    """The weights of a GGUF file under the names of a checkpoint, query and key rows in a checkpoint's order."""
    found: dict[str, npt.NDArray[Any]] = {}
    for tensor in gguf.GGUFReader(path).tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        parts = tensor.name.split(".")
        if parts[0] == "blk":
            if parts[2] in ("attn_q", "attn_k"):
                halves = values.reshape(-1, SHAPE.head_size // 2, 2, SHAPE.hidden_size)
                values = halves.swapaxes(1, 2).reshape(values.shape)
            found[f"model.layers.{parts[1]}.{NAMES[parts[2]]}.weight"] = values
        elif tensor.name == "token_embd.weight":
            found["model.embed_tokens.weight"] = values
        elif tensor.name == "output_norm.weight":
            found["model.norm.weight"] = values
    return found


def states_of_the_engine(directory: Path) -> list[npt.NDArray[np.float32]]:
    states: dict[int, npt.NDArray[np.float32]] = {}
    with Engine.create(directory) as engine:
        requests = [
            Request(number, ids.astype("<i4").tobytes(), Options(max_tokens=0)) for number, ids in enumerate(PROMPTS)
        ]
        assert engine.submit(requests) == [None] * len(PROMPTS)
        buffers = PollBuffers(events=64, tokens=4096, payload_bytes=1 << 20, text_bytes=4096)
        while len(states) < len(PROMPTS):
            for event in engine.poll(buffers, 1000):
                assert event["kind"] != EventKind.FAILED
                if event["kind"] == EventKind.FINISHED:
                    begin = int(event["payload_offset"])
                    raw = bytes(buffers.payload[begin : begin + int(event["payload_size"])])
                    states[int(event["request_id"])] = np.frombuffer(raw, np.float32)
    return [states[number] for number in range(len(PROMPTS))]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_hidden_states_of_a_real_model_agree_with_another_runtime(hidden_engine: Built) -> None:
    weights = checkpoint_weights(hidden_engine.directory / "model.gguf")
    ours = run(build_network(SHAPE, weights, dtype="float32"), pack(PROMPTS, 128))["hidden"]
    for found, expected in zip(ours, states_of_the_engine(hidden_engine.directory), strict=True):
        assert cosine(found, expected) >= 0.999
