/* SPDX-License-Identifier: Apache-2.0
 *
 * Read before every C source of libllama, by scripts/libllama.
 *
 * Between two operations of a graph the runtime's threads wait for each other in a loop of pause instructions. On cores
 * that the services share, the one waited for may not be running, and the loop then keeps its core from it for a whole
 * time slice: steps took ten times as long. So every 128th pause lets others run; alone on a core that costs nothing
 * that can be measured.
 */
#ifndef IFAB_LIBLLAMA_WAIT_H
#define IFAB_LIBLLAMA_WAIT_H

#include <immintrin.h>
#include <sched.h>

static inline void ifab_pause(void) {
  static __thread unsigned pauses;
  _mm_pause();
  if ((++pauses & 127u) == 0) sched_yield();
}
#define _mm_pause ifab_pause

#endif
