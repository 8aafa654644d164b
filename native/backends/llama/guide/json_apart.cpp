// SPDX-License-Identifier: Apache-2.0
#include "json_apart.h"

#include <algorithm>
#include <set>
#include <utility>

#include "decimal.h"
#include "grammar.h"
#include "json_keywords.h"
#include "json_text.h"

namespace ifab::guide {
namespace {

[[noreturn]] void refuse(const std::string& path, size_t one, size_t other) {
  throw GuideError(item_path(path, std::max(one, other)) + ": a schema that cannot be told apart from " +
                       item_path(path, std::min(one, other)) +
                       " by type, constants or a required constant member is not supported",
                   IFAB_UNIMPLEMENTED);
}

// A text that two values have in common exactly where they are equal.
std::string one_text(const Value& value) {
  std::string out;
  switch (value.kind()) {
    case Value::Kind::kInteger:
    case Value::Kind::kHugeInteger:
    case Value::Kind::kReal:
      return Decimal(json_of(value)).text();
    case Value::Kind::kList:
      for (const Value& item : value.items()) out += one_text(item) + ",";
      return "[" + out + "]";
    case Value::Kind::kObject: {
      std::vector<std::string> members;
      for (const Value::Member& member : value.members()) {
        members.push_back(JsonText::quoted(member.key) + ":" + one_text(member.value) + ",");
      }
      std::sort(members.begin(), members.end());
      for (const std::string& member : members) out += member;
      return "{" + out + "}";
    }
    default:
      return json_of(value);
  }
}

bool disjoint(const std::vector<uint32_t>& a, const std::vector<uint32_t>& b) {
  for (size_t i = 0, k = 0; i < a.size() && k < b.size();) {
    if (a[i] == b[k]) return false;
    a[i] < b[k] ? ++i : ++k;
  }
  return true;
}

}  // namespace

void Apart::check(const std::vector<Value>& branches, const std::string& path) {
  std::vector<const Summary*> summaries;
  summaries.reserve(branches.size());
  for (const Value& branch : branches) summaries.push_back(&summary(resolve(root_, branch, path)));
  size_t steps = branches.size();
  for (const Summary* summary : summaries) steps += summary->constants != nullptr ? summary->constants->size() : 0;
  count(steps, path);
  check_constants(summaries, path);
  check_types(summaries, path);
  check_objects(summaries, path);
}

void Apart::count(size_t steps, const std::string& path) {
  steps_ += steps;
  if (steps_ <= kMostSteps) return;
  throw GuideError(path + ": " + std::to_string(steps_) + " steps to tell the schemas of a oneOf apart, at most " +
                   std::to_string(kMostSteps) + " in a schema");
}

const Apart::Ids* Apart::constants(const Value& schema) {
  const auto [known, added] = constants_.try_emplace(&schema);
  std::optional<Ids>& out = known->second;
  if (!added) return out ? &*out : nullptr;
  const unsigned types = schema.find("type") != nullptr ? types_of(schema, "") : static_cast<unsigned>(kEveryType);
  const auto take = [&](const Value& value) {
    if ((type_of_value(value) & types) == 0) return;
    out->push_back(ids_.try_emplace(one_text(value), static_cast<uint32_t>(ids_.size())).first->second);
  };
  if (const Value* one = schema.find("const")) {
    out.emplace();
    take(*one);
  } else if (const Value* several = schema.find("enum")) {
    out.emplace();
    for (const Value& value : several->items()) take(value);
  } else {
    return nullptr;
  }
  std::sort(out->begin(), out->end());
  out->erase(std::unique(out->begin(), out->end()), out->end());
  return &*out;
}

const Apart::Summary& Apart::summary(const Value& schema) {
  const auto [known, added] = summaries_.try_emplace(&schema);
  Summary& out = known->second;
  if (!added) return out;
  out.constants = constants(schema);
  if (out.constants != nullptr) {
    const auto add = [&](const Value& value) { out.types |= type_of_value(value); };
    if (const Value* one = schema.find("const")) add(*one);
    if (const Value* several = schema.find("enum"))
      std::for_each(several->items().begin(), several->items().end(), add);
    if (schema.find("type") != nullptr) out.types &= types_of(schema, "");
    return out;
  }
  // Types are only sure where they are named: without `type` a schema is valid for values that it does not speak of.
  out.types = schema.find("type") != nullptr ? types_of(schema, "") : static_cast<unsigned>(kEveryType);
  const Value* properties = schema.find("properties");
  const Value* required = schema.find("required");
  if (properties == nullptr || required == nullptr) return out;
  std::set<std::string_view> names;
  for (const Value& name : required->items()) names.insert(name.text());
  for (const Value::Member& property : properties->members()) {
    if (!names.contains(property.key)) continue;
    const Ids* listed = constants(resolve(root_, property.value, ""));
    if (listed == nullptr) continue;
    out.members.emplace(property.key, listed);
    out.steps += listed->size();
  }
  return out;
}

void Apart::check_constants(const std::vector<const Summary*>& summaries, const std::string& path) const {
  std::vector<std::pair<uint32_t, size_t>> all;
  for (size_t i = 0; i < summaries.size(); ++i) {
    if (summaries[i]->constants == nullptr) continue;
    for (const uint32_t id : *summaries[i]->constants) all.emplace_back(id, i);
  }
  std::sort(all.begin(), all.end());
  const auto same = std::adjacent_find(all.begin(), all.end(),
                                       [](const auto& one, const auto& other) { return one.first == other.first; });
  if (same != all.end()) refuse(path, same->second, std::next(same)->second);
}

// Of each type but objects: one schema, or constants that check_constants has found to differ.
void Apart::check_types(const std::vector<const Summary*>& summaries, const std::string& path) const {
  for (unsigned type = 1; type < kEveryType; type <<= 1) {
    std::optional<size_t> listed;
    std::optional<size_t> open;
    for (size_t i = 0; i < summaries.size(); ++i) {
      if ((summaries[i]->types & type) == 0) continue;
      if (summaries[i]->constants != nullptr) {
        if (open) refuse(path, i, *open);
        listed = i;
        continue;
      }
      if (listed) refuse(path, i, *listed);
      if (open && type != kObjectType) refuse(path, i, *open);
      open = i;
    }
  }
}

void Apart::check_objects(const std::vector<const Summary*>& summaries, const std::string& path) {
  std::vector<size_t> open;
  size_t steps = 0;
  for (size_t i = 0; i < summaries.size(); ++i) {
    if ((summaries[i]->types & kObjectType) == 0 || summaries[i]->constants != nullptr) continue;
    open.push_back(i);
    steps += summaries[i]->steps;
  }
  if (open.size() < 2) return;
  count(open.size() * steps, path);
  for (size_t i = 0; i < open.size(); ++i) {
    for (size_t k = 0; k < i; ++k) {
      const auto& others = summaries[open[k]]->members;
      const auto& members = summaries[open[i]]->members;
      const bool apart = std::any_of(members.begin(), members.end(), [&](const auto& member) {
        const auto other = others.find(member.first);
        return other != others.end() && disjoint(*member.second, *other->second);
      });
      if (!apart) refuse(path, open[i], open[k]);
    }
  }
}

}  // namespace ifab::guide
