# SPDX-License-Identifier: Apache-2.0
"""What one request has produced so far, and what of it the client has not been sent.

Tokens come in; deltas, and at the end the result, go out. What deltas have carried is not repeated in the result, so
a client's text is its deltas and then the result's, whether it read fast or slowly.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from ifabric.broker.v1 import broker_service_pb2
from ifabric.engine.v1 import generation_pb2
from services.broker.frontdoor.detokenization import SampleText

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from google.protobuf.internal.containers import RepeatedCompositeFieldContainer as RepeatedCompositeContainer

    from services.broker.frontdoor.intake import Plan
    from services.broker.frontdoor.tokenization import TextCodec
    from services.broker.work import Core, SampleEnd, TokenArray, Work, WorkEnd

    LogProbs = npt.NDArray[np.float32] | None


ROW_BYTES = 512
"""Kept for a result beside its output: its id, usage, digest, and the objects that hold them."""
_DELTA_BYTES = 64
"""A delta beside what it carries: its request's id."""
TOKEN_BYTES = 12
"""Kept for a token: its id, its log-probability and a few characters."""


class _Unsent:
    """One sample's text, and the output that no delta has carried yet."""

    __slots__ = ("ids", "logprobs", "pieces", "text")

    def __init__(self, text: SampleText) -> None:
        self.text = text
        self.pieces: list[str] = []
        self.ids: list[int] = []
        self.logprobs: list[float] = []


class Transcript:
    """The output of one request.

    Args:
        plan: The request.
    """

    __slots__ = ("_codec", "_logprobs", "_return_ids", "_samples", "_stops", "_told", "request_id")

    def __init__(self, plan: Plan) -> None:
        self.request_id = plan.request_id
        self._codec = plan.codec
        self._stops = plan.stops
        self._return_ids = plan.return_token_ids
        self._logprobs = plan.logprobs
        self._samples: dict[int, _Unsent] = {}
        self._told = False

    def push(self, sample: int, tokens: TokenArray, logprobs: LogProbs) -> bool:
        """Takes new tokens of one sample; returns whether there is something new to send."""
        unsent = self._sample(sample)
        if unsent.text.stop:
            return False  # what the engine made before it heard that the sample is over
        piece, count = unsent.text.push(tokens.tolist())
        if piece:
            unsent.pieces.append(piece)
        if self._return_ids:
            unsent.ids += tokens[:count].tolist()
        if self._logprobs and logprobs is not None:
            unsent.logprobs += logprobs[:count].tolist()
        return bool(piece or (count and (self._return_ids or self._logprobs)))

    def stopped(self, samples: int) -> bool:
        """Whether a stop string has ended each of so many samples, so that the engine need not go on."""
        return len(self._samples) == samples and all(sample.text.stop for sample in self._samples.values())

    def take_deltas(self) -> list[broker_service_pb2.Delta]:
        """Returns what has not been sent, by sample, and counts it as sent."""
        deltas = []
        for index, unsent in self._with_output():
            delta = broker_service_pb2.Delta()
            self._move(index, unsent, delta)
            deltas.append(delta)
        return deltas

    def write_deltas(self, deltas: RepeatedCompositeContainer[broker_service_pb2.RequestDelta]) -> int:
        """Writes what has not been sent behind others, by sample, and counts it as sent; returns about its bytes."""
        return sum(
            self._move(index, unsent, deltas.add(request_id=self.request_id).delta)
            for index, unsent in self._with_output()
        )

    def forget(self) -> bool:
        """Takes everything back where no delta has carried any of it; returns whether that was so."""
        if not self._told:
            self._samples.clear()
        return not self._told

    def weight(self, end: WorkEnd) -> int:
        """About how many bytes the result keeps in memory until it is sent."""
        weight = ROW_BYTES + TOKEN_BYTES * sum(len(sample.tokens) for sample in end.samples)
        if end.payload is not None:
            weight += len(end.payload.data)
        if end.prompt_logprobs is not None:
            weight += end.prompt_logprobs.nbytes
        for unsent in self._samples.values():
            weight += sum(map(len, unsent.pieces)) + TOKEN_BYTES * (len(unsent.ids) + len(unsent.logprobs))
        return weight

    def write_result(self, end: WorkEnd, result: broker_service_pb2.GenerationResult) -> None:
        """Writes the result into an empty message, with everything that has not been sent. Called once, last."""
        result.request_id = self.request_id
        result.engine_digest = end.engine_digest
        result.usage.CopyFrom(end.usage)
        if end.payload is not None:
            result.payload.CopyFrom(end.payload)
        if end.prompt_logprobs is not None:
            result.prompt_logprobs.extend(end.prompt_logprobs.tolist())
        if self._codec is not None:
            for index, sample in enumerate(end.samples):
                self._write_sample(index, sample, self._codec, result.samples.add())

    def _write_sample(self, index: int, end: SampleEnd, codec: TextCodec, sample: broker_service_pb2.Sample) -> None:
        sample.finish_reason = generation_pb2.FinishReason.ValueType(end.finish_reason)
        if index not in self._samples and not self._stops:
            # It comes in one piece and has nothing to be cut at, like most bulk rows.
            sample.text = codec.decode(end.tokens)
            if self._return_ids:
                sample.token_ids.extend(end.tokens.tolist())
            if self._logprobs and end.logprobs is not None:
                sample.logprobs.extend(end.logprobs.tolist())
            return
        self.push(index, end.tokens, end.logprobs)
        unsent = self._sample(index)
        if not unsent.text.stop:
            unsent.pieces.append(unsent.text.finish())
        sample.text = "".join(unsent.pieces)
        sample.token_ids.extend(unsent.ids)
        sample.logprobs.extend(unsent.logprobs)
        if unsent.text.stop:
            sample.finish_reason = generation_pb2.FINISH_REASON_STOP
            sample.stop = unsent.text.stop

    def _with_output(self) -> list[tuple[int, _Unsent]]:
        """The samples that have something to send, in order."""
        samples = self._samples.items()
        return [(index, it) for index, it in sorted(samples) if it.pieces or it.ids or it.logprobs]

    def _move(self, index: int, unsent: _Unsent, delta: broker_service_pb2.Delta) -> int:
        """Moves what a sample has to send into an empty message; returns about how many bytes that takes."""
        delta.sample = index
        delta.text = text = "".join(unsent.pieces)
        size = _DELTA_BYTES + (len(text) if text.isascii() else 4 * len(text))
        unsent.pieces.clear()
        if unsent.ids:
            delta.token_ids.extend(unsent.ids)
            size += TOKEN_BYTES * len(unsent.ids)
            unsent.ids.clear()
        if unsent.logprobs:
            delta.logprobs.extend(unsent.logprobs)
            size += TOKEN_BYTES * len(unsent.logprobs)
            unsent.logprobs.clear()
        self._told = True
        return size

    def _sample(self, index: int) -> _Unsent:
        unsent = self._samples.get(index)
        if unsent is None:
            assert self._codec is not None  # noqa: S101 -- engines without a codec make no tokens
            unsent = self._samples[index] = _Unsent(SampleText(self._codec.decoder(), self._stops))
        return unsent


class OutputSink(ABC):
    """The part of a `Sink` that single calls and rows of a stream share: tokens into the transcript, early ends."""

    __slots__ = ("_core", "_stops", "ended_early", "transcript")

    def __init__(self, plan: Plan, core: Core) -> None:
        self.transcript = Transcript(plan)
        self._core = core
        self._stops = bool(plan.stops)
        self.ended_early = False
        """Whether stop strings have ended every sample, and the core was told so."""

    def tokens(self, work: Work, sample: int, tokens: TokenArray, logprobs: LogProbs) -> None:
        """See `Sink`."""
        if self.transcript.push(sample, tokens, logprobs):
            self.on_output()
        if self._stops and not self.ended_early and self.transcript.stopped(work.samples):
            self.ended_early = True
            self._core.finish_early(work)

    def restarted(self, work: Work) -> bool:
        """See `Sink`."""
        self.ended_early = False
        return self.transcript.forget()

    @abstractmethod
    def on_output(self) -> None:
        """There is something new to send."""
