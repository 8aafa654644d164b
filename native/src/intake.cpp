// SPDX-License-Identifier: Apache-2.0
#include "intake.h"

#include <string>
#include <utility>

namespace ifab {

Intake::Intake(Doorbell& owner) : owner_(owner) {}

void Intake::submit(std::span<std::unique_ptr<Entry>> entries, std::span<Status> statuses) {
  bool any = false;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& entry : entries) {
      if (entry != nullptr) ids_.prefetch(entry->request.id);
    }
    for (size_t i = 0; i < entries.size(); ++i) {
      if (entries[i] != nullptr) statuses[i] = accept(entries[i]);
      ++(statuses[i].ok() ? counts_.submitted : counts_.refused);
      any = any || statuses[i].ok();
    }
  }
  if (any) owner_.ring();
}

Status Intake::accept(std::unique_ptr<Entry>& entry) {
  if (!closed_.ok()) return closed_;
  const Request& request = entry->request;
  if (ids_.find(request.id) != nullptr) {
    return {IFAB_ALREADY_EXISTS, "id: a request with id " + std::to_string(request.id) + " has not ended"};
  }
  if (ids_.size() == ids_.capacity()) {
    return {IFAB_RESOURCE_EXHAUSTED,
            "the engine holds " + std::to_string(kMaxRequests) + " requests that have not ended, its limit"};
  }
  if (held_tokens_ + request.prompt.size() > kMaxHeldTokens) {
    return {IFAB_RESOURCE_EXHAUSTED, "the engine holds " + std::to_string(held_tokens_) +
                                         " prompt tokens of requests that have not ended; with " +
                                         std::to_string(request.prompt.size()) + " more they would exceed its limit, " +
                                         std::to_string(kMaxHeldTokens)};
  }
  entry->serial = next_serial_++;
  ids_.insert(request.id, {entry->serial, false});
  held_tokens_ += request.prompt.size();
  entries_.push_back(std::move(entry));
  return {};
}

uint32_t Intake::cancel(std::span<const uint64_t> ids) {
  uint32_t in_flight = 0;
  bool any = false;
  {
    const std::lock_guard lock(mutex_);
    for (const uint64_t id : ids) ids_.prefetch(id);
    for (const uint64_t id : ids) {
      Held* held = ids_.find(id);
      if (held == nullptr) continue;
      ++in_flight;
      if (held->cancelled) continue;
      held->cancelled = true;
      cancels_.push_back({id, held->serial});
      any = true;
    }
  }
  if (any) owner_.ring();
  return in_flight;
}

Intake::Counts Intake::counts() {
  const std::lock_guard lock(mutex_);
  return counts_;
}

void Intake::take(std::vector<std::unique_ptr<Entry>>& entries, std::vector<Cancel>& cancels) {
  const std::lock_guard lock(mutex_);
  entries.swap(entries_);
  cancels.swap(cancels_);
}

void Intake::ended(const EntryList& entries) {
  if (entries.empty()) return;
  const std::lock_guard lock(mutex_);
  for (const Entry* entry = entries.front(); entry != nullptr; entry = entry->next) {
    ids_.erase(entry->request.id);
    held_tokens_ -= entry->request.prompt.size();
  }
}

void Intake::close(Status why) {
  const std::lock_guard lock(mutex_);
  closed_ = std::move(why);
}

}  // namespace ifab
