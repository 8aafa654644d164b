# SPDX-License-Identifier: Apache-2.0
"""One loaded engine."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import orjson

from services.common.errors import FabricError, FailedPreconditionError
from services.worker.native._errors import native_error
from services.worker.native._layout import (
    EVENT,
    REQUEST,
    STATS_COUNTERS,
    SUBMIT_RESULT,
    PollBuffersStruct,
    StatsStruct,
)
from services.worker.native._library import library
from services.worker.native.values import (
    EngineDescription,
    EngineFinding,
    Inspection,
    PollMinimum,
    Request,
    Stats,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path
    from types import TracebackType

_OUT_OF_RANGE = 11
_MESSAGE_CAP = 64 * 1024
"""Room for one message, in bytes: a refused directory lists every finding."""
_POLL_MESSAGE_CAP = 1024
"""Room for the message of one poll that fails, in bytes."""
_POLL_MESSAGE_SIZE = ctypes.c_size_t(_POLL_MESSAGE_CAP)
"""The same, as the library takes it."""
_REFUSAL_CAP = 512
"""Room for the message of one refused request, in bytes."""
_DOCUMENT_CAP = 4 * 1024
"""First try at the size of a document, in bytes."""
_PAYLOAD_ALIGNMENT = 64


def _data_offset() -> int:
    """Where CPython keeps the data of a bytes object, counted from its identity: the same for all of them."""
    sample = b"sample"
    return int(ctypes.cast(ctypes.c_char_p(sample), ctypes.c_void_p).value or 0) - id(sample)


_DATA_OFFSET = _data_offset()


class PollBuffers:
    """Memory of one poll, reused by the next. The views hold until the next poll into the same buffers.

    Attributes:
        events: structured array of `ifab_event_t`, shape [events].
        tokens: int32, shape [tokens]; events point into it.
        logprobs: float32, shape [tokens]; offsets are those of `tokens`.
        payload: uint8, shape [payload_bytes], 64-byte aligned.
        text: uint8, shape [text_bytes]; UTF-8 of messages.
    """

    __slots__ = (
        "_count",
        "_message",
        "_out_count",
        "_struct",
        "_struct_at",
        "events",
        "logprobs",
        "payload",
        "text",
        "tokens",
    )

    def __init__(self, *, events: int, tokens: int, payload_bytes: int, text_bytes: int) -> None:
        self.events = np.zeros(events, dtype=EVENT)
        self.tokens = np.zeros(tokens, dtype=np.int32)
        self.logprobs = np.zeros(tokens, dtype=np.float32)
        room = np.zeros(payload_bytes + _PAYLOAD_ALIGNMENT, dtype=np.uint8)
        start = -room.ctypes.data % _PAYLOAD_ALIGNMENT
        self.payload = room[start : start + payload_bytes]
        self.text = np.zeros(text_bytes, dtype=np.uint8)
        self._struct = PollBuffersStruct(
            struct_size=ctypes.sizeof(PollBuffersStruct),
            events=self.events.ctypes.data,
            tokens=self.tokens.ctypes.data,
            logprobs=self.logprobs.ctypes.data,
            payload=self.payload.ctypes.data if payload_bytes else None,
            text=self.text.ctypes.data,
            events_cap=events,
            tokens_cap=tokens,
            payload_cap=payload_bytes,
            text_cap=text_bytes,
        )
        self._struct_at = ctypes.byref(self._struct)
        self._count = ctypes.c_uint32()
        self._out_count = ctypes.byref(self._count)
        self._message = ctypes.create_string_buffer(_POLL_MESSAGE_CAP)

    def message(self, offset: int, size: int) -> str:
        """Returns the text at an event's text_offset and text_size."""
        return self.text[offset : offset + size].tobytes().decode("utf-8", "replace")


class Engine:
    """A loaded engine. Close it, or use it as a context manager.

    Threads: submit, cancel, stats, describe and wake from any; poll from one at a time; close when no other call runs.
    Every method raises FailedPreconditionError after close.
    """

    __slots__ = ("_handle", "_library", "_poll")

    def __init__(self, loaded: ctypes.CDLL, handle: ctypes.c_void_p) -> None:
        self._library = loaded
        self._handle: ctypes.c_void_p | None = handle
        # Without declared types: ctypes makes pointers of its arguments anew in each call that has them, which takes a
        # third of the time of a poll. These are made once, with the buffers.
        self._poll = loaded["ifab_engine_poll"]
        self._poll.restype = ctypes.c_int32

    @classmethod
    def create(cls, directory: Path) -> Engine:
        """Loads the engine of a directory and proves it with one step. Blocks until it can serve, which may be minutes.

        Raises:
            NotFoundError: no such directory.
            FailedPreconditionError: it fits no backend or several, or its documents are refused: one finding a line.
            ResourceExhaustedError: memory.
            UnavailableError: the device that it needs is not there.
            InternalError: the proving step failed.
        """
        loaded = library()
        handle = ctypes.c_void_p()
        message = ctypes.create_string_buffer(_MESSAGE_CAP)
        status = loaded.ifab_engine_create(_path(directory), ctypes.byref(handle), message, _MESSAGE_CAP)
        if status:
            raise native_error(status, _text(message))
        return cls(loaded, handle)

    def describe(self) -> EngineDescription:
        """Says what is loaded."""
        document = _document(self._library.ifab_engine_describe, self._live())
        return EngineDescription(**{**document, "poll": PollMinimum(**document["poll"])})

    def submit(self, requests: Sequence[Request]) -> list[FabricError | None]:
        """Hands requests in; never waits for a step.

        Returns:
            One entry a request, in order: None where it was accepted, else why it was refused: InvalidArgumentError
            with the field, AlreadyExistsError, UnimplementedError, ResourceExhaustedError or UnavailableError.
        """
        handle, count = self._live(), len(requests)
        if not count:
            return []
        rows, _pointed_at = _rows(requests)
        results = np.empty(count, dtype=SUBMIT_RESULT)
        text = np.empty(min(count * _REFUSAL_CAP, _MESSAGE_CAP), dtype=np.uint8)
        status = self._library.ifab_engine_submit(handle, _at(rows), count, _at(results), _at(text), text.size)
        if status:
            raise native_error(status, "")
        if not results["status"].any():
            return [None] * count
        return [
            native_error(code, text[offset : offset + size].tobytes().decode("utf-8", "replace")) if code else None
            for code, offset, size in results.tolist()
        ]

    def poll(self, buffers: PollBuffers, timeout_ms: int) -> npt.NDArray[np.void]:
        """Waits up to `timeout_ms` for events, without the GIL, and writes them into the buffers.

        Returns:
            A view of the events written, oldest first, shape [n], n 0 when the time is up.

        Raises:
            InvalidArgumentError: buffers smaller than `describe().poll`.
            FailedPreconditionError: another thread is polling.
        """
        status = self._poll(
            self._live(), buffers._struct_at, buffers._out_count, timeout_ms, buffers._message, _POLL_MESSAGE_SIZE
        )
        if status:
            raise native_error(status, _text(buffers._message))
        return buffers.events[: buffers._count.value]

    def wake(self) -> None:
        """Makes a poll that waits, or the next one that would, return at once."""
        self._library.ifab_engine_wake(self._live())

    def cancel(self, ids: Sequence[int]) -> int:
        """Ends requests; each still delivers its end. Safe at any moment; unknown ids are ignored.

        Returns:
            How many were in flight.
        """
        packed = np.array(ids, dtype=np.uint64)
        count = ctypes.c_uint32()
        status = self._library.ifab_engine_cancel(self._live(), packed.ctypes.data, packed.size, count)
        if status:
            raise native_error(status, "")
        return count.value

    def stats(self) -> Stats:
        """Reads the counters; never waits for a step."""
        struct = StatsStruct(struct_size=ctypes.sizeof(StatsStruct))
        status = self._library.ifab_engine_stats(self._live(), struct)
        if status:
            raise native_error(status, "")
        counters: dict[str, Any] = dict(zip(STATS_COUNTERS, struct.counters, strict=True))
        counters |= {"held_back": bool(counters["held_back"]), "engine_failed": bool(counters["engine_failed"])}
        return Stats(**counters, step_us=tuple(struct.step_us), step_fill=tuple(struct.step_fill))

    def close(self) -> None:
        """Ends the engine and drops what is in flight. Blocks for at most one step; again is no error."""
        handle, self._handle = self._handle, None
        if handle is not None:
            self._library.ifab_engine_destroy(ctypes.byref(handle))

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _live(self) -> ctypes.c_void_p:
        handle = self._handle
        if handle is None:
            raise FailedPreconditionError("the engine is closed")
        return handle


def inspect(directory: Path) -> Inspection:
    """Reads an engine directory without loading it.

    Raises:
        NotFoundError: no such directory, or no contract.json in it.
    """
    document = _document(library().ifab_engine_inspect, _path(directory))
    findings = tuple(EngineFinding(**entry) for entry in document.pop("findings"))
    return Inspection(findings=findings, **document)


def check_machine(directory: Path) -> None:
    """Checks that this machine has what an engine needs beside its directory: card, driver, the runtime's library.

    Raises:
        UnavailableError: it has not; one sentence says what is not there.
        NotFoundError: no such directory, or no contract.json in it.
    """
    message = ctypes.create_string_buffer(_MESSAGE_CAP)
    if status := library().ifab_engine_runs_here(_path(directory), message, _MESSAGE_CAP):
        raise native_error(status, _text(message))


def check_contract(text: bytes) -> tuple[EngineFinding, ...]:
    """Checks a contract document against the rules alone.

    Raises:
        InvalidArgumentError: it cannot be read at all.
    """
    document = _document(library().ifab_contract_check, text, len(text))
    return tuple(EngineFinding(**entry) for entry in document["findings"])


def _rows(requests: Sequence[Request]) -> tuple[npt.NDArray[np.void], tuple[object, ...]]:
    """Lays requests out as an array of `ifab_request_t`; the second value keeps alive what the first points at."""
    prompts = [request.token_ids for request in requests]
    rows = np.frombuffer(bytearray().join([request.options.record for request in requests]), dtype=REQUEST)
    rows["id"] = [request.id for request in requests]
    rows["token_count"] = np.fromiter(map(len, prompts), np.uint32, len(prompts)) >> 2
    # Straight into the prompts: to copy them together, or to ask ctypes for each, would cost more than all the rest.
    rows["token_ids"] = np.array([id(prompt) for prompt in prompts], dtype=np.uintp) + _DATA_OFFSET
    counts = [len(request.head_ends) for request in requests]
    if not any(counts):
        return rows, (prompts,)
    head_ends = np.array([end for request in requests for end in request.head_ends], dtype=np.uint32)
    rows["head_count"] = counts
    rows["head_ends"] = head_ends.ctypes.data + 4 * (np.cumsum(counts) - counts)
    return rows, (prompts, head_ends)


def _at(memory: npt.NDArray[Any]) -> Any:
    """Where the first byte of an array lies, as an argument of a call; less than half the time of `memory.ctypes`."""
    return ctypes.byref(ctypes.c_char.from_buffer(memory.data))


def _document(function: Callable[..., int], *arguments: object) -> dict[str, Any]:
    """Calls a function that writes a JSON document, with as much room as the document turns out to need."""
    size = ctypes.c_size_t()
    message = ctypes.create_string_buffer(_MESSAGE_CAP)
    cap = _DOCUMENT_CAP
    while True:
        buffer = ctypes.create_string_buffer(cap)
        status = function(*arguments, buffer, cap, ctypes.byref(size), message, _MESSAGE_CAP)
        if status == _OUT_OF_RANGE and size.value > cap:
            cap = size.value
            continue
        if status:
            raise native_error(status, _text(message))
        document: dict[str, Any] = orjson.loads(buffer.raw[: size.value])
        return document


def _path(directory: Path) -> bytes:
    return str(directory).encode("utf-8", "surrogateescape")


def _text(message: ctypes.Array[ctypes.c_char]) -> str:
    return message.value.decode("utf-8", "replace")
