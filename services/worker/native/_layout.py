# SPDX-License-Identifier: Apache-2.0
"""Structs of `ifab/engine.h`: arrays of them as numpy dtypes, single ones as ctypes structures.

Field names, order and types are the header's; `_library.load` compares every size with the library's own.
"""

from __future__ import annotations

import ctypes

import numpy as np

ABI_MAJOR = 1
ABI_MINOR = 1
HISTOGRAM_BUCKETS = 24

SAMPLING = np.dtype(
    [
        ("temperature", np.float32),
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("repetition_penalty", np.float32),
        ("presence_penalty", np.float32),
        ("frequency_penalty", np.float32),
        ("top_k", np.int32),
        ("reserved", np.uint32),
        ("seed", np.uint64),
    ],
    align=True,
)
"""`ifab_sampling_t`."""

REQUEST = np.dtype(
    [
        ("id", np.uint64),
        ("token_ids", np.uintp),
        ("stop_ids", np.uintp),
        ("head_ends", np.uintp),
        ("guide", np.uintp),
        ("guide_size", np.uint64),
        ("salt", np.uint64),
        ("sampling", SAMPLING),
        ("token_count", np.uint32),
        ("stop_count", np.uint32),
        ("max_tokens", np.uint32),
        ("samples", np.uint32),
        ("flags", np.uint32),
        ("guide_kind", np.int32),
        ("priority", np.int32),
        ("head_count", np.uint32),
    ],
    align=True,
)
"""`ifab_request_t`."""

SUBMIT_RESULT = np.dtype(
    [("status", np.int32), ("text_offset", np.uint32), ("text_size", np.uint32)],
    align=True,
)
"""`ifab_submit_result_t`."""

EVENT = np.dtype(
    [
        ("request_id", np.uint64),
        ("kind", np.int32),
        ("sample", np.uint32),
        ("token_offset", np.uint32),
        ("token_count", np.uint32),
        ("has_logprobs", np.uint32),
        ("reason", np.int32),
        ("stop_id", np.int32),
        ("status", np.int32),
        ("text_offset", np.uint32),
        ("text_size", np.uint32),
        ("prompt_tokens", np.uint32),
        ("cached_tokens", np.uint32),
        ("computed_tokens", np.uint32),
        ("generated_tokens", np.uint32),
        ("payload_offset", np.uint32),
        ("payload_size", np.uint32),
        ("payload_dtype", np.int32),
        ("payload_crc32", np.uint32),
        ("payload_missing", np.uint32),
        ("reserved", np.uint32),
    ],
    align=True,
)
"""`ifab_event_t`."""


class PollBuffersStruct(ctypes.Structure):
    """`ifab_poll_buffers_t`."""

    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("events", ctypes.c_void_p),
        ("tokens", ctypes.c_void_p),
        ("logprobs", ctypes.c_void_p),
        ("payload", ctypes.c_void_p),
        ("text", ctypes.c_void_p),
        ("events_cap", ctypes.c_uint32),
        ("tokens_cap", ctypes.c_uint32),
        ("payload_cap", ctypes.c_uint32),
        ("text_cap", ctypes.c_uint32),
    )


STATS_COUNTERS = (
    "progress_tick",
    "steps",
    "progress_only_steps",
    "admission_retries",
    "leader_waits",
    "requests_submitted",
    "requests_refused",
    "requests_finished",
    "requests_failed",
    "requests_cancelled",
    "prompt_tokens_computed",
    "prompt_tokens_cached",
    "generated_tokens",
    "payload_bytes",
    "payload_failures",
    "queued",
    "active",
    "kv_blocks_used",
    "kv_blocks_total",
    "payload_slots_used",
    "payload_slots_total",
    "events_pending",
    "held_back",
    "engine_failed",
    "busy_us",
    "idle_us",
    "uptime_us",
)
"""Plain fields of `ifab_stats_t` between struct_size and the histograms, all uint64_t."""


class StatsStruct(ctypes.Structure):
    """`ifab_stats_t`."""

    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("counters", ctypes.c_uint64 * len(STATS_COUNTERS)),
        ("step_us", ctypes.c_uint64 * HISTOGRAM_BUCKETS),
        ("step_fill", ctypes.c_uint64 * HISTOGRAM_BUCKETS),
    )


STRUCT_SIZES = {
    "ifab_request_t": (1, REQUEST.itemsize),
    "ifab_event_t": (2, EVENT.itemsize),
    "ifab_submit_result_t": (3, SUBMIT_RESULT.itemsize),
    "ifab_poll_buffers_t": (4, ctypes.sizeof(PollBuffersStruct)),
    "ifab_stats_t": (5, ctypes.sizeof(StatsStruct)),
}
"""Struct -> (its IFAB_STRUCT_* name, its size here in bytes)."""
