# SPDX-License-Identifier: Apache-2.0
"""From wire requests to plans, a batch at a time: rules, engine choice, tokens.

A plan is a request that is known to be servable: nothing behind it checks again. Every request of a batch is planned
or refused by itself.
"""

from __future__ import annotations

import functools
import hashlib
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ifabric.engine.v1 import generation_pb2
from services.broker.frontdoor.fit import Misfit, misfit, refusal
from services.broker.frontdoor.rules import check_request, read_tokens
from services.broker.frontdoor.selection import Candidates, ambiguous
from services.broker.work import Lane, Work
from services.common.errors import FabricError, InvalidArgumentError, Violation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ifabric.broker.v1 import broker_service_pb2
    from services.broker.frontdoor.selection import EngineDirectory, EngineProfile
    from services.broker.frontdoor.tokenization import CodecStore, TextCodec
    from services.broker.work import Sink, TokenArray

LANES: dict[int, Lane] = {lane.value: lane for lane in Lane}
"""Lanes by their number on the wire; 0, "not named", is none of them."""
_HANDED_ON: TokenArray = np.empty(0, dtype=np.int32)
_PLAIN_SAMPLING = generation_pb2.SamplingParameters()


@dataclass(slots=True, eq=False)
class Plan:
    """A request that can be served.

    Holds copies of what it needs, never the wire message: one row that waits would keep the whole message, with the
    prompts of its neighbours, in memory.
    """

    request_id: str
    tenant: str
    tokens: TokenArray
    """Handed on with the work: a prompt that waits lies in memory once."""
    prompt_tokens: int
    """How many there are."""
    max_tokens: int
    engine_digests: frozenset[str]
    codec: TextCodec | None
    """For the text of the output; None where the engines generate nothing."""
    lane: Lane | None
    """None where the request names none."""
    priority: int
    samples: int
    stops: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    ignore_end: bool
    sampling: generation_pb2.SamplingParameters
    logprobs: bool
    prompt_logprobs: bool
    guide: generation_pb2.Guide | None
    salt: int
    payload_bytes: int
    return_token_ids: bool
    traceparent: str

    def work(self, sink: Sink, *, lane: Lane, stream_tokens: bool, job: str = "", traceparent: str = "") -> Work:
        """Makes the work that this plan is for, and hands the tokens over to it. Called once.

        Args:
            sink: Who hears what becomes of it.
            lane: Where the request names none.
            stream_tokens: Whether the client wants output as it comes. Stop strings need it too: they are found here.
            job: The job that it belongs to.
            traceparent: Where the request names none.
        """
        tokens, self.tokens = self.tokens, _HANDED_ON
        return Work(
            (self.tenant, self.request_id),
            tokens,
            self.max_tokens,
            self.engine_digests,
            sink,
            self.lane or lane,
            self.priority,
            self.samples,
            self.stop_token_ids,
            self.ignore_end,
            self.sampling,
            self.logprobs,
            self.prompt_logprobs,
            self.guide,
            self.salt,
            stream_tokens or bool(self.stops),
            self.payload_bytes,
            job,
            self.traceparent or traceparent,
        )


class _Draft(NamedTuple):
    """A request that is servable as far as it is known: for a text, its tokens are not."""

    request: broker_service_pb2.GenerationRequest
    candidates: Candidates
    """Of one model, so that any of them stands for all where the tokenizer matters."""
    tokens: TokenArray | None
    """None for a text that is not tokenized."""
    violations: list[Violation]
    """What is wrong with a text's request, apart from its tokens: both are told together. Empty for ids."""

    @property
    def engine(self) -> EngineProfile:
        return self.candidates.engines[0]


class Intake:
    """Turns requests into plans.

    Args:
        directory: The engines.
        codecs: Their tokenizers.
    """

    def __init__(self, directory: EngineDirectory, codecs: CodecStore) -> None:
        self._directory = directory
        self._codecs = codecs

    async def plan(
        self,
        requests: Sequence[broker_service_pb2.GenerationRequest],
        *,
        id_required: bool = True,
    ) -> list[Plan | FabricError]:
        """Plans each request, or says why not; in order.

        Waits for a tokenizer that is not here yet, and for long texts to be tokenized.
        """
        drafts = [self._draft(request, id_required) for request in requests]
        codecs = await self._codecs_of(drafts)
        await self._tokenize(drafts, codecs)
        return [
            draft if isinstance(draft, FabricError) else _complete(draft, codecs.get(draft.engine.tokenizer_sha256))
            for draft in drafts
        ]

    def _draft(self, request: broker_service_pb2.GenerationRequest, id_required: bool) -> _Draft | FabricError:
        violations = check_request(request, id_required=id_required)
        form = request.prompt.WhichOneof("form")
        tokens = read_tokens(request.prompt, form, violations)
        try:
            candidates = self._directory.candidates(request.engine)
        except FabricError as error:
            return InvalidArgumentError.of(violations) if violations else error
        fits, misfits = _sorted_out(candidates, request, tokens)
        is_text = form == "text" and bool(request.prompt.text)
        if not is_text and (violations or not fits):
            return refusal(misfits, violations)
        narrowed = Candidates.of(fits) if fits and misfits else candidates
        if not narrowed.one_model:
            return refusal(misfits, violations) if violations or not fits else ambiguous(fits)
        return _Draft(request, narrowed, tokens, violations)

    async def _codecs_of(self, drafts: Sequence[_Draft | FabricError]) -> dict[str, TextCodec | FabricError]:
        """The tokenizer, by digest, of everything that needs one: texts, and whatever generates text."""
        codecs: dict[str, TextCodec | FabricError] = {}
        for draft in drafts:
            if isinstance(draft, FabricError):
                continue
            engine = draft.engine
            if engine.tokenizer_sha256 in codecs or not (engine.generates or draft.tokens is None):
                continue
            try:
                codecs[engine.tokenizer_sha256] = self._codecs.cached(engine) or await self._codecs.codec(engine)
            except FabricError as error:
                codecs[engine.tokenizer_sha256] = error
        return codecs

    async def _tokenize(
        self,
        drafts: list[_Draft | FabricError],
        codecs: dict[str, TextCodec | FabricError],
    ) -> None:
        """Tokenizes all texts in place, those of one tokenizer together."""
        batches: dict[str, list[int]] = {}
        for index, draft in enumerate(drafts):
            if isinstance(draft, FabricError) or draft.tokens is not None:
                continue
            codec = codecs[draft.engine.tokenizer_sha256]
            if isinstance(codec, FabricError):
                continue
            too_long = _too_long(draft, codec)
            if too_long is not None:
                draft.violations.append(too_long)
            else:
                batches.setdefault(draft.engine.tokenizer_sha256, []).append(index)
        for digest, indices in batches.items():
            codec = codecs[digest]
            rows = [(index, draft) for index in indices if isinstance(draft := drafts[index], _Draft)]
            if isinstance(codec, FabricError):
                continue
            encoded = await self._codecs.encode(codec, [draft.request.prompt.text for _, draft in rows])
            for (index, draft), tokens in zip(rows, encoded, strict=True):
                if tokens is None:
                    draft.violations.append(_lossy(draft))
                drafts[index] = draft._replace(tokens=tokens)


def _complete(draft: _Draft, codec: TextCodec | FabricError | None) -> Plan | FabricError:
    """Compares a text with the engines, now that its tokens are known, and makes the plan."""
    candidates, tokens = draft.candidates, draft.tokens
    if draft.request.prompt.HasField("text"):
        fits, misfits = _sorted_out(candidates, draft.request, tokens)
        if draft.violations or not fits:
            return refusal(misfits, draft.violations)
        if misfits:
            candidates = Candidates.of(fits)
    if isinstance(codec, FabricError):
        return codec
    assert tokens is not None  # noqa: S101 -- a text without tokens has a violation or a codec that failed
    return _plan(draft.request, tokens, candidates, codec if draft.engine.generates else None)


def _plan(
    request: broker_service_pb2.GenerationRequest,
    tokens: TokenArray,
    candidates: Candidates,
    codec: TextCodec | None,
) -> Plan:
    return Plan(
        request_id=request.request_id or uuid.uuid4().hex,
        tenant=request.tenant,
        tokens=tokens,
        prompt_tokens=len(tokens),
        max_tokens=request.max_tokens,
        engine_digests=candidates.digests,
        codec=codec,
        lane=LANES.get(request.lane),
        priority=request.priority,
        samples=request.samples or 1,
        stops=tuple(request.stop),
        stop_token_ids=tuple(request.stop_token_ids),
        ignore_end=request.ignore_end,
        sampling=_sampling(request.sampling.SerializeToString()) if request.HasField("sampling") else _PLAIN_SAMPLING,
        logprobs=request.logprobs,
        prompt_logprobs=request.prompt_logprobs,
        guide=_guide(request.guide.SerializeToString()) if request.HasField("guide") else None,
        salt=_salt(request.cache_salt) if request.cache_salt else 0,
        payload_bytes=0 if request.omit_payload else max(engine.payload_bytes for engine in candidates.engines),
        return_token_ids=request.return_token_ids,
        traceparent=request.traceparent,
    )


def _sorted_out(
    candidates: Candidates,
    request: broker_service_pb2.GenerationRequest,
    tokens: TokenArray | None,
) -> tuple[list[EngineProfile], list[Misfit]]:
    """The candidates that can serve a request as far as it is known, and what stands against the others."""
    fits: list[EngineProfile] = []
    misfits: list[Misfit] = []
    for engine in candidates.engines:
        found = misfit(engine, request, tokens)
        if found:
            misfits.append(found)
        else:
            fits.append(engine)
    return fits, misfits


def _too_long(draft: _Draft, codec: TextCodec) -> Violation | None:
    """Refuses a text that is too long for any engine however it is cut, before time goes into tokenizing it."""
    if codec.longest_token_bytes is None:
        return None
    engine = max(draft.candidates.engines, key=lambda candidate: candidate.max_input_tokens)
    size, limit = len(draft.request.prompt.text.encode()), engine.max_input_tokens * codec.longest_token_bytes
    if size <= limit:
        return None
    return Violation(
        "prompt.text",
        f"has {size} bytes; engine {engine.engine_id} takes at most {engine.max_input_tokens} tokens, of at most "
        f"{codec.longest_token_bytes} bytes each",
    )


def _lossy(draft: _Draft) -> Violation:
    return Violation(
        "prompt.text",
        f"holds characters that the vocabulary of engine {draft.engine.engine_id} has no token for: the engine would "
        "read another text",
    )


@functools.lru_cache(maxsize=1024)
def _sampling(serialized: bytes) -> generation_pb2.SamplingParameters:
    """One message for all requests that sample alike: a job's rows nearly always do."""
    return generation_pb2.SamplingParameters.FromString(serialized)


@functools.lru_cache(maxsize=64)
def _guide(serialized: bytes) -> generation_pb2.Guide:
    """One message for all requests under the same guide, which may be long."""
    return generation_pb2.Guide.FromString(serialized)


@functools.lru_cache(maxsize=1024)
def _salt(text: str) -> int:
    """The number that stands for a salt. Cryptographic, so that no tenant can look for another's."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") or 1
