/* SPDX-License-Identifier: Apache-2.0
 *
 * generate ENGINE_DIR MAX_TOKENS ID...   loads an engine, generates greedily from a prompt of token ids, and prints the
 * ids that come, one a line. Shows that the C interface needs nothing but a C compiler. */
#include <ifab/engine.h>
#include <stdio.h>
#include <stdlib.h>

enum { MAX_PROMPT = 4096, EVENTS = 64, TOKENS = 65536, PAYLOAD = 1 << 20, TEXT = 4096 };

static ifab_event_t events[EVENTS];
static int32_t tokens[TOKENS];
static float logprobs[TOKENS];
static _Alignas(64) uint8_t payload[PAYLOAD];
static char text[TEXT];

/* Prints what a poll brought. Returns 1 once the request has ended, -1 where it failed. */
static int print(const ifab_event_t *event) {
  if (event->kind == IFAB_EVENT_TOKENS) {
    for (uint32_t i = 0; i < event->token_count; ++i) printf("%d\n", (int)tokens[event->token_offset + i]);
  } else if (event->kind == IFAB_EVENT_FINISHED) {
    fprintf(stderr, "finished: reason %d, %u prompt tokens (%u cached), %u generated, %u bytes of payload\n",
            (int)event->reason, (unsigned)event->prompt_tokens, (unsigned)event->cached_tokens,
            (unsigned)event->generated_tokens, (unsigned)event->payload_size);
    return 1;
  } else if (event->kind == IFAB_EVENT_FAILED) {
    fprintf(stderr, "%s: %.*s\n", ifab_status_name(event->status), (int)event->text_size, text + event->text_offset);
    return -1;
  }
  return 0;
}

int main(int argc, char **argv) {
  int32_t prompt[MAX_PROMPT];
  uint32_t count = 0;
  int ended = 0;
  ifab_engine_t *engine = NULL;
  ifab_submit_result_t result = {0};
  ifab_request_t request = {.id = 1, .token_ids = prompt, .samples = 1};
  ifab_poll_buffers_t buffers = {sizeof buffers, events, tokens, logprobs, payload,
                                 text,           EVENTS, TOKENS, PAYLOAD,  TEXT};
  if (argc < 4 || argc - 3 > MAX_PROMPT) {
    fprintf(stderr, "usage: %s ENGINE_DIR MAX_TOKENS ID...\n", argv[0]);
    return 2;
  }
  for (int i = 3; i < argc; ++i) prompt[request.token_count++] = (int32_t)strtol(argv[i], NULL, 10);
  request.max_tokens = (uint32_t)strtoul(argv[2], NULL, 10);
  request.sampling.top_p = 1;
  request.sampling.repetition_penalty = 1;

  ifab_status_t status = ifab_engine_create(argv[1], &engine, text, TEXT);
  if (status == IFAB_OK) {
    status = ifab_engine_submit(engine, &request, 1, &result, text, TEXT - 1);
    if (status == IFAB_OK) status = result.status;
    text[result.text_size] = '\0';
  }
  while (status == IFAB_OK && ended == 0) {
    status = ifab_engine_poll(engine, &buffers, &count, 1000, text, TEXT);
    for (uint32_t i = 0; status == IFAB_OK && i < count; ++i) ended = print(&events[i]);
  }
  if (status != IFAB_OK) fprintf(stderr, "%s: %s\n", ifab_status_name(status), text);
  ifab_engine_destroy(&engine);
  return status == IFAB_OK && ended > 0 ? 0 : 1;
}
