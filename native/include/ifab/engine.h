/* SPDX-License-Identifier: Apache-2.0
 *
 * The door: one C interface to every engine.
 *
 * A caller creates an engine from a directory, submits requests, polls events, and destroys the engine. Which backend
 * runs is found from the directory and never shown here: what differs between engines is what their contracts say.
 *
 * Conventions that hold for every function
 * ----------------------------------------
 * Status.     Functions that can fail return ifab_status_t: 0 is success, other values are the numbers of gRPC codes.
 *             Values never travel in the status; out-parameters come last, are named out_*, and are written on success
 *             only, unless the comment says otherwise.
 * Messages.   `err` is a buffer of the caller's, `err_cap` its size in bytes; on failure it receives UTF-8 text,
 *             truncated to fit between characters and NUL-terminated. NULL or 0 is allowed: no text.
 * Ownership.  Handles are owned by the caller and end with their destroy function. Everything passed in is copied
 *             before the function returns; nothing passed in is kept. Static strings are never freed.
 * Structs.    Input structs begin with struct_size, set by the caller to sizeof; the library reads no further. A
 *             struct_size that is smaller than the first revision's, or larger than this library's, is
 *             IFAB_INVALID_ARGUMENT. Structs that come in arrays (ifab_request_t, ifab_event_t) are frozen for one ABI
 *             major: ifab_struct_size() lets a binding compare.
 * Exceptions. None crosses this line, and no input makes the library abort the process.
 * Threads.    [any] may be called from any thread at any time between create and destroy. [one] one thread at a time.
 *             ifab_engine_destroy() may run only when no other call on the same engine is running.
 * Fork.       A process that has created an engine must not fork without exec.
 */
#ifndef IFAB_ENGINE_H
#define IFAB_ENGINE_H

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define IFAB_API __attribute__((visibility("default")))
#define IFAB_MUST_CHECK __attribute__((warn_unused_result))
#else
#define IFAB_API
#define IFAB_MUST_CHECK
#endif

#ifdef __cplusplus
#define IFAB_NOEXCEPT noexcept
extern "C" {
#else
#define IFAB_NOEXCEPT
#endif

/* Version of this interface. A caller built against MAJOR.MINOR works with a library of the same major and the same or
 * a larger minor. A minor adds functions, enum values, and fields at the end of input structs; it changes nothing else.
 */
#define IFAB_ABI_MAJOR 1
#define IFAB_ABI_MINOR 1

/* 0, or the number of a gRPC status code. */
typedef int32_t ifab_status_t;
#define IFAB_OK 0
#define IFAB_CANCELLED 1
#define IFAB_INVALID_ARGUMENT 3
#define IFAB_DEADLINE_EXCEEDED 4
#define IFAB_NOT_FOUND 5
#define IFAB_ALREADY_EXISTS 6
#define IFAB_RESOURCE_EXHAUSTED 8
#define IFAB_FAILED_PRECONDITION 9
#define IFAB_ABORTED 10
#define IFAB_OUT_OF_RANGE 11
#define IFAB_UNIMPLEMENTED 12
#define IFAB_INTERNAL 13
#define IFAB_UNAVAILABLE 14
#define IFAB_DATA_LOSS 15

/* A loaded engine. */
typedef struct ifab_engine ifab_engine_t;

/* Kinds of constraint on generated text, for ifab_request_t.guide_kind. */
#define IFAB_GUIDE_NONE 0
#define IFAB_GUIDE_JSON_SCHEMA 1 /* a JSON document that is a JSON schema */
#define IFAB_GUIDE_REGEX 2       /* a regular expression that the whole output matches */
#define IFAB_GUIDE_GRAMMAR 3     /* a context-free grammar in GBNF */

/* Bits of ifab_request_t.flags. */
#define IFAB_REQUEST_IGNORE_END 0x1u      /* the engine's own end tokens do not end a sample */
#define IFAB_REQUEST_LOGPROBS 0x2u        /* log-probabilities of generated tokens */
#define IFAB_REQUEST_PROMPT_LOGPROBS 0x4u /* log-probabilities of prompt tokens, with IFAB_EVENT_CONTEXT_DONE */
#define IFAB_REQUEST_NO_PAYLOAD 0x8u      /* the payload is not wanted and is not extracted */

/* How tokens are chosen. Ranges and meanings are those of ifabric.engine.v1.SamplingParameters; every field is set by
 * the caller, none has a default here. */
typedef struct ifab_sampling {
  float temperature;        /* 0 is greedy, at most 100 */
  float top_p;              /* above 0, at most 1; 1 keeps all */
  float min_p;              /* 0 to 1; 0 keeps all */
  float repetition_penalty; /* above 0, at most 10; 1 is none */
  float presence_penalty;   /* -2 to 2; 0 is none */
  float frequency_penalty;  /* -2 to 2; 0 is none */
  int32_t top_k;            /* 0 keeps all */
  uint32_t reserved;        /* 0 */
  uint64_t seed;
} ifab_sampling_t;

/* One request. An element of an array: frozen for ABI 1. */
typedef struct ifab_request {
  uint64_t id;              /* chosen by the caller; unique among requests that have not ended */
  const int32_t *token_ids; /* the prompt, token_count ids */
  const int32_t *stop_ids;  /* tokens that end a sample beside the engine's own; NULL when stop_count is 0. Such a token
                               ends the sample instead of being generated, guide or not: a guide's text is written with
                               other tokens, or the request fails where there are none. */
  const uint32_t *head_ends; /* a hint: lengths, ascending, of leading parts of the prompt that other requests are
                                expected to share, so that they are kept; NULL when head_count is 0. The library also
                                sees what requests that it holds share. Never changes an answer. */
  const char *guide;         /* UTF-8, guide_size bytes, not NUL-terminated; NULL when guide_kind is NONE */
  uint64_t guide_size;       /* at most 1 MiB */
  uint64_t salt;             /* cached heads are shared within one salt only */
  ifab_sampling_t sampling;
  uint32_t token_count; /* at least 1 */
  uint32_t stop_count;  /* at most 64 */
  uint32_t max_tokens;  /* for each sample; 0 exactly where the engine generates nothing */
  uint32_t samples;     /* at least 1; samples share the prompt's prefill */
  uint32_t flags;       /* IFAB_REQUEST_* */
  int32_t guide_kind;   /* IFAB_GUIDE_* */
  int32_t priority;     /* -100 to 100; higher enters the batcher first, equal ones keep submit order. One that
                           others pass for long gets its turn all the same. */
  uint32_t head_count;  /* at most 16 */
} ifab_request_t;

/* What became of one request of a submit. */
typedef struct ifab_submit_result {
  ifab_status_t status; /* IFAB_OK: accepted, and will end with exactly one FINISHED per sample, or one FAILED */
  uint32_t text_offset; /* where the message lies in the submit's text buffer, when status is not IFAB_OK */
  uint32_t text_size;   /* its size in bytes, without terminator */
} ifab_submit_result_t;

/* Kinds of event. */
#define IFAB_EVENT_TOKENS 1       /* new tokens of one sample */
#define IFAB_EVENT_CONTEXT_DONE 2 /* the prompt is computed and can be shared; once a request, before its tokens */
#define IFAB_EVENT_FINISHED 3     /* one sample ended well; with the last sample the request has ended */
#define IFAB_EVENT_FAILED 4       /* the request ended with an error: every sample of it has */

/* Why a sample ended, for FINISHED. Numbers of ifabric.engine.v1.FinishReason. */
#define IFAB_FINISH_STOP 1      /* stop_id, an end token of the engine's too; -1: the guide allows nothing more */
#define IFAB_FINISH_LENGTH 2    /* max_tokens, or the longest sequence */
#define IFAB_FINISH_CANCELLED 3 /* ifab_engine_cancel() */
#define IFAB_FINISH_COMPLETE 4  /* the engine generates nothing: the prompt is computed */

/* Number format of a payload. Numbers of ifabric.engine.v1.PayloadDtype. */
#define IFAB_DTYPE_FLOAT32 1
#define IFAB_DTYPE_FLOAT16 2
#define IFAB_DTYPE_BFLOAT16 3

/* One event. An element of an array: frozen for ABI 1. Offsets are counted in elements of the arena they point into and
 * hold until the caller's next poll into the same buffers. Fields that the kind does not name are 0. */
typedef struct ifab_event {
  uint64_t request_id;
  int32_t kind;          /* IFAB_EVENT_* */
  uint32_t sample;       /* TOKENS, FINISHED: which sample */
  uint32_t token_offset; /* TOKENS: into tokens; the same offset into logprobs when has_logprobs */
  uint32_t token_count;  /* TOKENS; for CONTEXT_DONE with prompt log-probabilities, how many lie at
                            token_offset of logprobs (tokens there are the prompt's) */
  uint32_t has_logprobs; /* TOKENS, CONTEXT_DONE: 1 where logprobs holds values */
  int32_t reason;        /* FINISHED: IFAB_FINISH_* */
  int32_t stop_id;       /* FINISHED with STOP: the token that ended the sample, which is not among its tokens;
                            -1 otherwise */
  ifab_status_t status;  /* FAILED: what went wrong */
  uint32_t text_offset;  /* FAILED, or FINISHED without its payload: into text, the reason */
  uint32_t text_size;
  uint32_t prompt_tokens;    /* CONTEXT_DONE, FINISHED, FAILED: size of the prompt */
  uint32_t cached_tokens;    /* of these, taken from a resident head */
  uint32_t computed_tokens;  /* of these, computed for this request, counted step by step */
  uint32_t generated_tokens; /* FINISHED: tokens of this sample, the stop token included */
  uint32_t payload_offset;   /* FINISHED of sample 0: into payload, in bytes, a multiple of 64 */
  uint32_t payload_size;     /* in bytes; 0 where there is no payload */
  int32_t payload_dtype;     /* IFAB_DTYPE_* */
  uint32_t payload_crc32;    /* CRC-32 (ISO-HDLC) of the payload */
  uint32_t payload_missing;  /* FINISHED: 1 where a payload was due and its extraction failed; text says why */
  uint32_t reserved;
} ifab_event_t;

/* Buffers of the caller for one poll. The library fills them front to back and stops before an event that does not
 * fit; that event comes first in the next poll. Sizes that can never hold one event of this engine are
 * IFAB_INVALID_ARGUMENT and the message says what is needed: ifab_engine_describe() gives the minimum in `poll`. */
typedef struct ifab_poll_buffers {
  size_t struct_size;
  ifab_event_t *events;
  int32_t *tokens;
  float *logprobs;
  uint8_t *payload; /* 64-byte aligned; may be NULL with payload_cap 0 for engines without payload */
  char *text;
  uint32_t events_cap;  /* elements */
  uint32_t tokens_cap;  /* elements, of tokens and of logprobs */
  uint32_t payload_cap; /* bytes */
  uint32_t text_cap;    /* bytes */
} ifab_poll_buffers_t;

/* Number of buckets of the histograms in ifab_stats_t. */
#define IFAB_HISTOGRAM_BUCKETS 24

/* A reading of the engine's counters, consistent in itself. Counters only grow between create and destroy. */
typedef struct ifab_stats {
  size_t struct_size;           /* set by the caller; the library fills no further */
  uint64_t progress_tick;       /* advances whenever the batcher did something; queued work with a still tick is a
                                   stall */
  uint64_t steps;               /* steps executed, progress-only ones included */
  uint64_t progress_only_steps; /* steps before which nothing was admitted because there had been no room */
  uint64_t admission_retries;   /* admissions put off for lack of room */
  uint64_t leader_waits;        /* admissions put off because a leader computes the head they share: not a stall */
  uint64_t requests_submitted;  /* accepted by submit */
  uint64_t requests_refused;    /* refused by submit */
  uint64_t requests_finished;
  uint64_t requests_failed;
  uint64_t requests_cancelled;
  uint64_t prompt_tokens_computed; /* counted step by step */
  uint64_t prompt_tokens_cached;
  uint64_t generated_tokens;
  uint64_t payload_bytes;
  uint64_t payload_failures;
  uint64_t queued; /* accepted, not yet in the batcher */
  uint64_t active; /* sequences in the batcher */
  uint64_t kv_blocks_used;
  uint64_t kv_blocks_total; /* 0 without a cache */
  uint64_t payload_slots_used;
  uint64_t payload_slots_total;
  uint64_t events_pending; /* published, not yet polled */
  uint64_t held_back;      /* 1 while no step is taken because events are not polled */
  uint64_t engine_failed;  /* 1 once the engine cannot go on: everything in flight has FAILED */
  uint64_t busy_us;        /* time in steps */
  uint64_t idle_us;        /* time with nothing to do */
  uint64_t uptime_us;
  uint64_t step_us[IFAB_HISTOGRAM_BUCKETS];   /* steps by duration: bucket i counts steps of [2^i, 2^(i+1)) us; the
                                                 first also shorter, the last also longer ones */
  uint64_t step_fill[IFAB_HISTOGRAM_BUCKETS]; /* steps by share of the token budget used: bucket i counts shares of
                                                 [i/24, (i+1)/24); a full step is in the last */
} ifab_stats_t;

/* Log levels for the log callback. */
#define IFAB_LOG_DEBUG 10
#define IFAB_LOG_INFO 20
#define IFAB_LOG_WARNING 30
#define IFAB_LOG_ERROR 40

/* Receives log lines: component and message are NUL-terminated UTF-8, valid during the call only. Called from any
 * thread of the library, never while a lock of the library is held. Must not call back into the library. */
typedef void (*ifab_log_fn)(void *context, int32_t level, const char *component, const char *message);

/* Writes the version of the library. Call it first: see IFAB_ABI_MAJOR for the rule.
 * Threads: [any], also without an engine. Since: ABI 1.0. */
IFAB_API void ifab_abi_version(uint32_t *out_major, uint32_t *out_minor) IFAB_NOEXCEPT;

/* Returns a static string such as "INVALID_ARGUMENT"; "UNKNOWN" for a number that is no status.
 * Threads: [any], also without an engine. Since: ABI 1.0. */
IFAB_API const char *ifab_status_name(ifab_status_t status) IFAB_NOEXCEPT;

/* Names for ifab_struct_size(). */
#define IFAB_STRUCT_REQUEST 1
#define IFAB_STRUCT_EVENT 2
#define IFAB_STRUCT_SUBMIT_RESULT 3
#define IFAB_STRUCT_POLL_BUFFERS 4
#define IFAB_STRUCT_STATS 5

/* Returns sizeof of a struct as the library was built, 0 for an unknown name. A binding compares at load.
 * Threads: [any], also without an engine. Since: ABI 1.0. */
IFAB_API size_t ifab_struct_size(int32_t which) IFAB_NOEXCEPT;

/* Sets where log lines go; NULL is nowhere, which is also the start. Lines below min_level are not made.
 * After it returns, the callback before is not called any more.
 * Threads: [any], also without an engine. Since: ABI 1.0. */
IFAB_API void ifab_log_set(ifab_log_fn fn, void *context, int32_t min_level) IFAB_NOEXCEPT;

/* Reads an engine directory without loading it: finds the backend, checks contract.json and the engine's own
 * configuration. Writes at most cap bytes of UTF-8 JSON and, always, the size of the whole document to *out_size; with
 * a smaller cap nothing is written and the status is IFAB_OUT_OF_RANGE, so that a call with cap 0 asks for the size.
 *
 * The document: {"contract_sha256", "configuration_file", "findings": [{"path", "found", "expected"}...]}. Findings
 * are everything that ifab_engine_create() would refuse without loading; an empty list means it would go on to load.
 *
 * IFAB_NOT_FOUND: no such directory, or no contract.json in it. Wrong content is not an error here: it is findings.
 * Threads: [any], also without an engine. Since: ABI 1.0. */
IFAB_API IFAB_MUST_CHECK ifab_status_t ifab_engine_inspect(const char *engine_dir, char *buffer, size_t cap,
                                                           size_t *out_size, char *err, size_t err_cap) IFAB_NOEXCEPT;

/* Says whether this machine has what the engine of a directory needs beside its files: a card, its driver, its
 * runtime's library. What is wrong with the directory itself is inspect's to say: one that fits no backend is IFAB_OK
 * here.
 *
 * IFAB_UNAVAILABLE: the message is one sentence that names the first thing that is not there. IFAB_NOT_FOUND: no such
 * directory, or no contract.json in it.
 * Threads: [any], also without an engine. Since: ABI 1.1. */
IFAB_API IFAB_MUST_CHECK ifab_status_t ifab_engine_runs_here(const char *engine_dir, char *err,
                                                             size_t err_cap) IFAB_NOEXCEPT;

/* Checks a contract document, given as text, against the rules alone; the directory rules of inspect do not apply.
 * Writes {"findings": [...]} as ifab_engine_inspect() does.
 * Threads: [any], also without an engine. Since: ABI 1.0. */
IFAB_API IFAB_MUST_CHECK ifab_status_t ifab_contract_check(const char *json, size_t json_size, char *buffer, size_t cap,
                                                           size_t *out_size, char *err, size_t err_cap) IFAB_NOEXCEPT;

/* Loads the engine of a directory and proves it with one step. Blocks until it can serve.
 *
 * On success *out_engine is owned by the caller, who ends it with ifab_engine_destroy(). On failure nothing is left
 * behind. IFAB_NOT_FOUND: no such directory. IFAB_FAILED_PRECONDITION: the directory fits no backend or several, or
 * contract and engine disagree, or a field is missing, unknown or mistyped: the message lists every finding, one a
 * line. IFAB_RESOURCE_EXHAUSTED: memory. IFAB_UNAVAILABLE: the device that the engine needs is not there.
 * IFAB_INTERNAL: the proving step failed.
 * Threads: [any], also without an engine. Since: ABI 1.0. */
IFAB_API IFAB_MUST_CHECK ifab_status_t ifab_engine_create(const char *engine_dir, ifab_engine_t **out_engine, char *err,
                                                          size_t err_cap) IFAB_NOEXCEPT;

/* Ends an engine: takes nothing more in, ends the step in progress, drops everything in flight without events, frees
 * all memory. Sets *engine to NULL; NULL, and a pointer to NULL, are allowed. Blocks for at most one step.
 * Threads: no other call on this engine may be running. Since: ABI 1.0. */
IFAB_API void ifab_engine_destroy(ifab_engine_t **engine) IFAB_NOEXCEPT;

/* Says what the loaded engine is, as UTF-8 JSON; buffer rules as for ifab_engine_inspect().
 *
 * The document: {"contract_sha256", "vocab_size", "hidden_size", "layers", "kv_pool_blocks", "load_ms", "limits":
 * {...}, "capabilities": {...}, "poll": {"events", "tokens", "payload_bytes", "text_bytes"}}; limits and capabilities
 * have the fields of the contract, with the values in force; poll gives the smallest buffers that a poll may use.
 * Threads: [any]. Since: ABI 1.0. */
IFAB_API IFAB_MUST_CHECK ifab_status_t ifab_engine_describe(const ifab_engine_t *engine, char *buffer, size_t cap,
                                                            size_t *out_size, char *err, size_t err_cap) IFAB_NOEXCEPT;

/* Hands in count requests. Copies what it needs and never waits for a step. Every request is accepted or refused by
 * itself; results[i] is always written for i < count when the function returns IFAB_OK. Messages of refused ones are
 * packed into text (text_cap bytes; a message that does not fit is cut, possibly to nothing).
 *
 * Per request: IFAB_INVALID_ARGUMENT names the field, the value and the limit. IFAB_ALREADY_EXISTS: the id has not
 * ended. IFAB_UNIMPLEMENTED: the engine does not do what a field asks for, as its description says.
 * IFAB_RESOURCE_EXHAUSTED: the table of waiting requests is full. IFAB_UNAVAILABLE: the engine has failed.
 * The call itself fails, with no request accepted, only for arguments that cannot be read (NULL with a count).
 * Threads: [any]. Since: ABI 1.0. */
IFAB_API IFAB_MUST_CHECK ifab_status_t ifab_engine_submit(ifab_engine_t *engine, const ifab_request_t *requests,
                                                          uint32_t count, ifab_submit_result_t *results, char *text,
                                                          uint32_t text_cap) IFAB_NOEXCEPT;

/* Waits up to timeout_ms for events and writes them, oldest first, with their tokens, payloads and texts. Returns
 * IFAB_OK with *out_count 0 when the time is up; timeout_ms 0 does not wait, a negative one is IFAB_INVALID_ARGUMENT.
 * Events of one sample keep their order. An event is delivered exactly once.
 *
 * A caller that stops polling stops the engine: when the event store is full no further step is taken, and
 * ifab_stats_t.held_back says so. Nothing is lost.
 * IFAB_INVALID_ARGUMENT: buffers too small for this engine, or misaligned. IFAB_FAILED_PRECONDITION: another thread is
 * polling. A refused poll takes no event and writes nothing but the message.
 * Threads: [one]. Since: ABI 1.0. */
IFAB_API IFAB_MUST_CHECK ifab_status_t ifab_engine_poll(ifab_engine_t *engine, ifab_poll_buffers_t *buffers,
                                                        uint32_t *out_count, int32_t timeout_ms, char *err,
                                                        size_t err_cap) IFAB_NOEXCEPT;

/* Makes a poll that waits, or the next one that would, return at once. For shutting down.
 * Threads: [any]. Since: ABI 1.0. */
IFAB_API void ifab_engine_wake(ifab_engine_t *engine) IFAB_NOEXCEPT;

/* Ends requests. Each still delivers its end: FINISHED with IFAB_FINISH_CANCELLED for every sample that had not ended,
 * exactly once; one that ended before is untouched. Safe before the first token, between tokens and after the end.
 * Writes how many of the ids named a request in flight, an id given twice counted twice, to *out_count, which may be
 * NULL. Never waits for a step. IFAB_INVALID_ARGUMENT: ids is NULL with a count; nothing was cancelled then.
 * Threads: [any]. Since: ABI 1.0. */
IFAB_API IFAB_MUST_CHECK ifab_status_t ifab_engine_cancel(ifab_engine_t *engine, const uint64_t *ids, uint32_t count,
                                                          uint32_t *out_count) IFAB_NOEXCEPT;

/* Fills *stats up to its struct_size. Never waits for a step.
 * IFAB_INVALID_ARGUMENT: struct_size too small or too large.
 * Threads: [any]. Since: ABI 1.0. */
IFAB_API IFAB_MUST_CHECK ifab_status_t ifab_engine_stats(const ifab_engine_t *engine,
                                                         ifab_stats_t *stats) IFAB_NOEXCEPT;

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* IFAB_ENGINE_H */
