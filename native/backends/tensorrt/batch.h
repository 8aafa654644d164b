// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "bindings.h"
#include "request.h"

namespace ifab::tensorrt {

// The prompts of one launch, laid out as the engine's layout wants them. Allocates at construction only.
//
// Rows are filled first fit, and callers offer long prompts first, so that little of a launch is padding.
class Batch {
 public:
  // What is left of a request once it is launched: the request itself may be gone before the launch ends.
  struct Item {
    uint64_t id = 0;
    uint32_t tokens = 0;
    bool dropped = false;  // its end has been told already
  };

  Batch(const BindingPlan& plan, uint32_t token_budget);

  void clear();
  // Lays a prompt out. False where the launch has no room for it; nothing changed then.
  bool add(const Request& request);

  size_t size() const { return items_.size(); }
  std::span<Item> items() { return items_; }
  uint32_t rows() const { return static_cast<uint32_t>(row_used_.size()); }
  uint32_t prompt_tokens() const { return prompt_tokens_; }
  // Tokens that the launch computes, padding included.
  uint32_t launch_tokens() const { return packed_ ? prompt_tokens_ : rows() * row_tokens_; }

  // Writes the values of an input as the launch needs them; the requests must still be there. `out` has room for the
  // binding's bytes. Returns how many elements were written; `extents` receives the extents of this launch.
  uint64_t fill(const Binding& binding, void* out, std::vector<int64_t>& extents) const;

 private:
  struct Place {
    uint32_t row, begin, segment;
  };
  template <class Write>
  uint64_t each_token(int32_t* out, int32_t padding, Write write) const;

  bool packed_, shares_rows_;
  uint32_t row_tokens_, rows_max_, tokens_max_, prompts_max_, longest_;
  std::vector<const Request*> requests_;
  std::vector<Item> items_;
  std::vector<Place> places_;
  std::vector<uint32_t> row_used_;  // tokens of each row
  std::vector<uint32_t> row_prompts_;
  uint32_t prompt_tokens_ = 0;
};

}  // namespace ifab::tensorrt
