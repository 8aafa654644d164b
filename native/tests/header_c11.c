/* SPDX-License-Identifier: Apache-2.0
 * The header is C11, and the library is what the header says. */
#include <ifab/engine.h>

_Static_assert(sizeof(ifab_status_t) == 4, "statuses are 32 bits");

int main(void) {
  uint32_t major = 0;
  uint32_t minor = 0;
  ifab_engine_t* engine = NULL;
  ifab_abi_version(&major, &minor);
  if (major != IFAB_ABI_MAJOR || minor != IFAB_ABI_MINOR) return 1;
  if (ifab_struct_size(IFAB_STRUCT_REQUEST) != sizeof(ifab_request_t)) return 2;
  if (ifab_struct_size(IFAB_STRUCT_EVENT) != sizeof(ifab_event_t)) return 3;
  if (ifab_struct_size(IFAB_STRUCT_SUBMIT_RESULT) != sizeof(ifab_submit_result_t)) return 4;
  if (ifab_struct_size(IFAB_STRUCT_POLL_BUFFERS) != sizeof(ifab_poll_buffers_t)) return 5;
  if (ifab_struct_size(IFAB_STRUCT_STATS) != sizeof(ifab_stats_t)) return 6;
  if (ifab_struct_size(0) != 0) return 7;
  ifab_engine_destroy(NULL);
  ifab_engine_destroy(&engine);
  ifab_engine_wake(NULL);
  return 0;
}
