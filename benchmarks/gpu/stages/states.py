# SPDX-License-Identifier: Apache-2.0
"""Hidden states of the last token from the embedded runtime on a card: right, and what returning them costs.

Right is told by PyTorch on the same weights, in float32. The cost is told by the same rows on the same engine, once
with their payloads and once with `omit_payload`, turn by turn.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np

from benchmarks.gpu.driving import random_prompts, run, suite, worker_mib
from benchmarks.gpu.llama_engine import HEADS, HIDDEN, CardEngine
from ifabric.broker.v1 import broker_service_pb2 as pb
from ifabric.broker.v1 import broker_service_pb2_grpc as pb_grpc

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.gpu.stages.context import Context

PROMPT = 128
CHECKED = 12
ROWS = 2048


def measure(context: Context) -> dict[str, Any]:
    """Returns cosines, and prompt tokens a second with payloads and without."""
    engine = CardEngine(256, 0, PROMPT, 0, context.budget, layout=context.layout, payload_layers=(-1,))
    if context.layout == "unified":
        raise ValueError("rows share nothing, so a pool would only be read in vain: take streams")
    directory = context.prepare(engine)
    lengths = np.linspace(1, PROMPT, CHECKED).astype(int)
    asked = [random_prompts(1, int(length), 50 + int(length))[0] for length in lengths]
    rates: dict[str, list[float]] = {"returned": [], "omitted": []}
    with suite(directory, context.logs) as served:
        found = _states(served.broker, asked)
        run(served, random_prompts(512, PROMPT, 1), 0, payloads=True)
        loaded = worker_mib(served)
        for turn in range(context.repeats):
            for name in rates:
                ran = run(served, random_prompts(ROWS, PROMPT, 10 + turn), 0, payloads=name == "returned")
                rates[name].append(ROWS * PROMPT / ran.seconds)
            print({name: round(values[-1]) for name, values in rates.items()}, flush=True)
    cosines = [_cosine(ours, theirs) for ours, theirs in zip(found, _reference(context, asked), strict=True)]
    return {
        "layout": context.layout,
        "worker_mib": loaded,
        "cosine_min": min(cosines),
        "cosine_median": statistics.median(cosines),
        "prompt_tokens_per_s": rates,
        "returned_over_omitted": statistics.median(rates["returned"]) / statistics.median(rates["omitted"]),
    }


def _states(address: str, prompts: Sequence[Any]) -> list[Any]:
    """Each prompt's state, float32 [hidden]."""
    with grpc.insecure_channel(address) as channel:
        broker = pb_grpc.BrokerServiceStub(channel)
        states = []
        for ids in prompts:
            request = pb.GenerationRequest(prompt=pb.Prompt(packed_token_ids=ids.tobytes()))
            result = broker.Generate(pb.GenerateRequest(request=request), timeout=30).result
            states.append(np.frombuffer(result.payload.data, "<f4"))
    return states


def _cosine(a: Any, b: Any) -> float:
    return float(np.dot(a, b) / np.linalg.norm(a) / np.linalg.norm(b))


def _reference(context: Context, prompts: Sequence[Any]) -> list[Any]:
    """The model in PyTorch, all sums in float32, straight from the file's weights.

    The file's rows of queries and keys are laid out for positions that turn neighbouring values, as the runtime does.
    """
    import gguf
    import torch
    from torch.nn import functional

    tensors = {tensor.name: tensor.data for tensor in gguf.GGUFReader(context.model).tensors}

    def weight(name: str) -> Any:
        return torch.from_numpy(np.array(tensors[name])).cuda().float()

    def norm(x: Any, name: str) -> Any:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * weight(name)

    size = HIDDEN // HEADS
    frequency = 10000.0 ** (-torch.arange(0, size, 2, device="cuda", dtype=torch.float64) / size)

    def turn(x: Any) -> Any:
        angle = (torch.arange(x.shape[1], device="cuda", dtype=torch.float64)[:, None] * frequency).float()
        even, odd = x[..., 0::2], x[..., 1::2]
        cosine, sine = angle.cos(), angle.sin()
        return torch.stack((even * cosine - odd * sine, even * sine + odd * cosine), -1).flatten(-2)

    # A layer's weights are brought to the card once for all prompts.
    states = [weight("token_embd.weight")[torch.from_numpy(ids).long().cuda()] for ids in prompts]
    layers = sum(name.endswith("attn_q.weight") for name in tensors)
    for index in range(layers):
        prefix = f"blk.{index}"
        names = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
        held = {name: weight(f"{prefix}.{name}.weight") for name in names}
        for number, x in enumerate(states):
            normed = norm(x, f"{prefix}.attn_norm.weight")
            q, k, v = (
                functional.linear(normed, held[f"attn_{word}"]).view(-1, HEADS, size).transpose(0, 1) for word in "qkv"
            )
            attended = functional.scaled_dot_product_attention(turn(q), turn(k), v, is_causal=True)
            x = x + functional.linear(attended.transpose(0, 1).reshape(-1, HIDDEN), held["attn_output"])
            normed = norm(x, f"{prefix}.ffn_norm.weight")
            gate = functional.silu(functional.linear(normed, held["ffn_gate"]))
            states[number] = x + functional.linear(gate * functional.linear(normed, held["ffn_up"]), held["ffn_down"])
    return [norm(x[-1], "output_norm.weight").cpu().numpy() for x in states]
