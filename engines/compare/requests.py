# SPDX-License-Identifier: Apache-2.0
"""Requests of comparisons, and which prompts both engines can take."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ifabric.broker.v1 import broker_service_pb2
from services.common.errors import FailedPreconditionError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from services.common.contract import Contract


def generation(
    ids: Sequence[int],
    *,
    max_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    prompt_logprobs: bool = False,
) -> broker_service_pb2.GenerationRequest:
    """A request that returns token ids and goes on past end tokens."""
    request = hidden_state(ids)
    request.max_tokens = max_tokens
    request.return_token_ids = True
    request.ignore_end = True
    request.prompt_logprobs = prompt_logprobs
    request.sampling.temperature = temperature
    request.sampling.seed = seed
    return request


def hidden_state(ids: Sequence[int]) -> broker_service_pb2.GenerationRequest:
    """A request of an engine that generates nothing."""
    request = broker_service_pb2.GenerationRequest()
    request.prompt.packed_token_ids = np.array(ids, dtype="<i4").tobytes()
    return request


def fitting(prompts: Iterable[Sequence[int]], a: Contract, b: Contract, tokens: int) -> list[list[int]]:
    """The prompts that both engines take, with `tokens` more behind them.

    Raises:
        FailedPreconditionError: The vocabularies differ, or no prompt fits.
    """
    if a.model.vocab_size != b.model.vocab_size:
        raise FailedPreconditionError(
            f"{a.engine_id} has {a.model.vocab_size} tokens and {b.engine_id} has {b.model.vocab_size}: ids of one "
            "mean nothing to the other"
        )
    most = min(
        min(each.limits.max_input_tokens, each.limits.max_sequence_tokens - min(each.limits.max_output_tokens, 1))
        for each in (a, b)
    )
    fit = [list(ids) for ids in prompts if 1 <= len(ids) <= most - tokens]
    if not fit:
        raise FailedPreconditionError(
            f"no prompt has at most {most - tokens} tokens, which leaves room for {tokens} more"
        )
    return fit
