# SPDX-License-Identifier: Apache-2.0
"""One attempt at one request: from its wire form to the engine's, and what the engine has said of it since."""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from ifabric.engine.v1 import generation_pb2
from services.common.errors import FabricError, InvalidArgumentError, Violation
from services.worker.credit import Amount
from services.worker.native import Options, Request

if TYPE_CHECKING:
    from ifabric.worker.v1 import worker_service_pb2

_CACHED_GUIDE_BYTES = 4096


class Outlet(Protocol):
    """Hears what becomes of items. Called on the event loop; must neither block nor raise.

    Of each item that the engine accepted exactly one of `finished` and `failed` is heard, last.
    """

    def context_done(self, item: Item) -> None:
        """The prompt is computed; only for items that want to report it."""

    def tokens(self, item: Item, sample: int, ids: memoryview, logprobs: memoryview | None) -> None:
        """New tokens, packed; only for items that stream. The views hold during the call only."""

    def finished(self, item: Item) -> None:
        """All samples ended well; the item has the rest."""

    def failed(self, item: Item, error: FabricError) -> None:
        """The item ended with an error."""


@dataclass(slots=True)
class Sample:
    """One sample of an item, so far."""

    token_ids: bytearray = field(default_factory=bytearray)
    """Packed little-endian int32; stays empty where the item streams."""
    logprobs: bytearray = field(default_factory=bytearray)
    """Packed little-endian binary32, one a token where asked for; stays empty where the item streams."""
    finish_reason: int = 0
    stop_token_id: int = -1
    generated_tokens: int = 0


@dataclass(frozen=True, slots=True)
class PayloadPart:
    """The payload that came with an end."""

    data: bytes
    dtype: int
    crc32: int
    failure: str
    """Why there is no data; empty where there is."""


@dataclass(slots=True, eq=False)
class Item:
    """One attempt. Lives from its dispatch until its end is on its way."""

    handle: int
    """The broker's name for it on its stream."""
    request: Request
    """The engine's form; its id is the engine's name for this attempt, never used twice."""
    outlet: Outlet
    cost: Amount
    stream_tokens: bool
    report_context_done: bool
    traceparent: str = ""
    begun_ns: int = 0
    """When it was made, by the wall clock; only where it is traced."""
    context_done_ns: int = 0
    """When its prompt was computed, by the wall clock; only where it is traced, 0 before."""
    cancelled: bool = False
    """Whether the engine was told to end it."""
    samples: list[Sample] = field(default_factory=list)
    samples_left: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    payload: PayloadPart | None = None
    prompt_logprobs: bytes = b""

    def __post_init__(self) -> None:
        """Makes room for the samples."""
        self.samples_left = self.request.options.samples
        self.samples = [Sample() for _ in range(self.samples_left)]

    def add_tokens(self, sample: int, ids: memoryview, logprobs: memoryview | None) -> None:
        """Takes new tokens in, or passes them on where the item streams."""
        if self.stream_tokens:
            self.outlet.tokens(self, sample, ids, logprobs)
            return
        part = self.samples[sample]
        part.token_ids += ids
        if logprobs is not None:
            part.logprobs += logprobs

    def count_prompt(self, prompt_tokens: int, cached_tokens: int, computed_tokens: int) -> None:
        """Takes in what the engine last said of the prompt."""
        self.prompt_tokens, self.cached_tokens, self.computed_tokens = prompt_tokens, cached_tokens, computed_tokens

    def usage(self) -> generation_pb2.Usage:
        """What the item has cost so far."""
        return generation_pb2.Usage(
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            computed_tokens=self.computed_tokens,
            generated_tokens=sum(sample.generated_tokens for sample in self.samples),
        )


def item_from_wire(work: worker_service_pb2.WorkItem, native_id: int, outlet: Outlet, payload_bytes: int) -> Item:
    """Makes the item that a broker dispatched.

    Only what the engine's number types cannot carry is refused here; everything else the library checks.

    Args:
        work: Its wire form.
        native_id: The engine's name for it.
        outlet: Who hears what becomes of it.
        payload_bytes: Bytes of payload that a finished request of the engine carries.

    Raises:
        InvalidArgumentError: with every field at fault.
    """
    violations = [
        Violation(name, f"{value}, and the least is {least}")
        for name, value, least in (("max_tokens", work.max_tokens, 0), ("samples", work.samples, 1))
        if value < least
    ]
    head_ends = tuple(work.head_ends)
    violations += [
        Violation(f"head_ends[{index}]", f"{end}, and the least is 1") for index, end in enumerate(head_ends) if end < 1
    ]
    if violations:
        raise InvalidArgumentError.of(violations)
    options = _options_of(work)
    request = Request(native_id, work.token_ids, options, head_ends)
    cost = Amount(
        len(request.token_ids) // 4 + options.samples * options.max_tokens,
        options.samples,
        payload_bytes if options.payload else 0,
    )
    return Item(
        handle=work.handle,
        request=request,
        outlet=outlet,
        cost=cost,
        stream_tokens=work.stream_tokens,
        report_context_done=work.report_context_done,
        traceparent=work.traceparent,
        begun_ns=time.time_ns() if work.traceparent else 0,
    )


def _options_of(work: worker_service_pb2.WorkItem) -> Options:
    """Returns the options of an item; items of one job mostly share one."""
    guide = work.guide.text.encode() if work.HasField("guide") else b""
    make = _options if len(guide) <= _CACHED_GUIDE_BYTES else _options.__wrapped__
    return make(
        work.sampling.SerializeToString(),
        work.max_tokens,
        work.samples,
        tuple(work.stop_token_ids),
        work.ignore_end,
        work.logprobs,
        work.prompt_logprobs,
        work.return_payload,
        work.guide.kind,
        guide,
        work.salt,
        work.priority,
    )


@functools.lru_cache(maxsize=1024)
def _options(
    sampling_bytes: bytes,
    max_tokens: int,
    samples: int,
    stop_ids: tuple[int, ...],
    ignore_end: bool,
    logprobs: bool,
    prompt_logprobs: bool,
    payload: bool,
    guide_kind: int,
    guide: bytes,
    salt: int,
    priority: int,
) -> Options:
    sampling = generation_pb2.SamplingParameters.FromString(sampling_bytes)
    return Options(
        max_tokens=max_tokens,
        samples=samples,
        **{name.name: value for name, value in sampling.ListFields()},
        stop_ids=stop_ids,
        ignore_end=ignore_end,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        payload=payload,
        guide_kind=guide_kind,
        guide=guide,
        salt=salt,
        priority=priority,
    )
