// SPDX-License-Identifier: Apache-2.0
#include "stats.h"

#include <algorithm>
#include <bit>

namespace ifab {

uint32_t duration_bucket(uint64_t microseconds) {
  if (microseconds == 0) return 0;
  return std::min<uint32_t>(static_cast<uint32_t>(std::bit_width(microseconds)) - 1, IFAB_HISTOGRAM_BUCKETS - 1);
}

uint32_t fill_bucket(uint64_t used, uint64_t budget) {
  return static_cast<uint32_t>(std::min<uint64_t>(used * IFAB_HISTOGRAM_BUCKETS / budget, IFAB_HISTOGRAM_BUCKETS - 1));
}

}  // namespace ifab
