// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace ifab {

// A fixed ring of plain values, addressed by positions that only grow. Who may write or read where, and when, is the
// owner's business: two threads that keep to disjoint positions need no lock for the values themselves.
template <class T>
class Ring {
 public:
  explicit Ring(size_t capacity) : values_(std::bit_ceil(std::max<size_t>(capacity, 1))) {}

  size_t capacity() const { return values_.size(); }
  T& at(uint64_t position) { return values_[position & (values_.size() - 1)]; }

  void write(uint64_t position, std::span<const T> source) {
    const size_t start = position & (values_.size() - 1);
    const size_t first = std::min(source.size(), values_.size() - start);
    std::copy_n(source.begin(), first, values_.begin() + static_cast<ptrdiff_t>(start));
    std::copy(source.begin() + static_cast<ptrdiff_t>(first), source.end(), values_.begin());
  }

  void read(uint64_t position, size_t count, T* out) const {
    const size_t start = position & (values_.size() - 1);
    const size_t first = std::min(count, values_.size() - start);
    std::copy_n(values_.begin() + static_cast<ptrdiff_t>(start), first, out);
    if (first < count) std::copy_n(values_.begin(), count - first, out + first);  // seldom, and a call of its own
  }

 private:
  std::vector<T> values_;
};

}  // namespace ifab
