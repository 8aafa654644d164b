// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace ifab {

// A map from ids to small values with room for a fixed number of them: after construction it never allocates and never
// fails but by being full. Open addressing, linear probing, at most half full.
template <class Value>
class IdMap {
 public:
  explicit IdMap(size_t capacity) : capacity_(capacity), places_(std::bit_ceil(std::max<size_t>(capacity, 1) * 2)) {}

  size_t size() const { return size_; }
  size_t capacity() const { return capacity_; }

  // Asks for the memory of an id that is about to be looked up: it lies anywhere in some megabytes, and who has several
  // to look up waits for all of them at once.
  void prefetch(uint64_t id) const { __builtin_prefetch(&places_[home(id)], 1); }

  // Null where the id is not there. Valid until the next insert or erase.
  Value* find(uint64_t id) {
    Place& place = places_[probe(id)];
    return place.used ? &place.value : nullptr;
  }

  // False where the id is there already, or the map is full.
  bool insert(uint64_t id, Value value) {
    if (size_ == capacity_) return false;
    Place& place = places_[probe(id)];
    if (place.used) return false;
    place = {id, value, true};
    ++size_;
    return true;
  }

  bool erase(uint64_t id) {
    size_t hole = probe(id);
    if (!places_[hole].used) return false;
    // Entries behind the hole move up as far as their own home allows, so that probing needs no tombstones.
    for (size_t next = (hole + 1) & mask(); places_[next].used; next = (next + 1) & mask()) {
      if (((next - home(places_[next].id)) & mask()) >= ((next - hole) & mask())) {
        places_[hole] = places_[next];
        hole = next;
      }
    }
    places_[hole].used = false;
    --size_;
    return true;
  }

  template <class Visit>
  void for_each(Visit visit) {
    // Few are held as a rule, and an empty map is asked once more when an engine ends.
    size_t left = size_;
    for (auto place = places_.begin(); left > 0; ++place) {
      if (!place->used) continue;
      --left;
      visit(place->id, place->value);
    }
  }

 private:
  struct Place {
    uint64_t id = 0;
    Value value{};
    bool used = false;
  };

  size_t mask() const { return places_.size() - 1; }
  size_t home(uint64_t id) const {
    id = (id ^ (id >> 30)) * 0xBF58476D1CE4E5B9u;
    id = (id ^ (id >> 27)) * 0x94D049BB133111EBu;
    return (id ^ (id >> 31)) & mask();
  }
  // Where the id is, or the free place where it would go.
  size_t probe(uint64_t id) const {
    size_t at = home(id);
    while (places_[at].used && places_[at].id != id) at = (at + 1) & mask();
    return at;
  }

  size_t capacity_;
  size_t size_ = 0;
  std::vector<Place> places_;
};

}  // namespace ifab
