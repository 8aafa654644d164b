// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "doorbell.h"
#include "entry.h"
#include "id_map.h"
#include "status.h"

namespace ifab {

// Where callers' threads hand requests and cancellations to the owner thread, and where ids are kept unique.
//
// Bounded by kMaxRequests and kMaxHeldTokens over everything that has not ended. The lock is held for moving pointers,
// never while a request is checked, copied or computed.
class Intake {
 public:
  // Requests that have not ended.
  static constexpr size_t kMaxRequests = size_t{1} << 16;
  // Prompt tokens of requests that have not ended: 128 MiB of ids.
  static constexpr uint64_t kMaxHeldTokens = uint64_t{1} << 25;

  struct Cancel {
    uint64_t id;
    uint64_t serial;
  };
  struct Counts {
    uint64_t submitted = 0;
    uint64_t refused = 0;
  };

  // `owner` is rung when there is something to take; it outlives the intake.
  explicit Intake(Doorbell& owner);

  // ---- any thread ----

  // Accepts or refuses each entry by itself: statuses[i] is left alone where entries[i] is null (refused already), and
  // written otherwise. Accepted entries are taken out of `entries`.
  void submit(std::span<std::unique_ptr<Entry>> entries, std::span<Status> statuses);
  // Returns how many of the ids have not ended. An id is handed on once.
  uint32_t cancel(std::span<const uint64_t> ids);
  Counts counts();

  // ---- owner thread ----

  // Everything handed in since the last call, in order. The vectors come empty and are swapped, so that neither side
  // allocates once they have grown.
  void take(std::vector<std::unique_ptr<Entry>>& entries, std::vector<Cancel>& cancels);
  // These entries have ended: their ids are free. Called before the reader can see their last event.
  void ended(const EntryList& entries);
  // From now on everything is refused with that status.
  void close(Status why);

 private:
  struct Held {
    uint64_t serial = 0;
    bool cancelled = false;
  };

  Status accept(std::unique_ptr<Entry>& entry);

  Doorbell& owner_;
  std::mutex mutex_;
  IdMap<Held> ids_{kMaxRequests};
  uint64_t held_tokens_ = 0;
  uint64_t next_serial_ = 1;
  std::vector<std::unique_ptr<Entry>> entries_;
  std::vector<Cancel> cancels_;
  Counts counts_;
  Status closed_;
};

}  // namespace ifab
