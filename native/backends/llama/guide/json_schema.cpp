// SPDX-License-Identifier: Apache-2.0
#include "json_schema.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "decimal.h"
#include "document.h"
#include "json_apart.h"
#include "json_keywords.h"
#include "json_text.h"

namespace ifab::guide {
namespace {

constexpr int kDeepestSchema = 200;

class SchemaReader {
 public:
  explicit SchemaReader(const Value& root) : root_(root), apart_(root) {}

  std::shared_ptr<const Grammar> read() { return builder_.finish(value(root_, "")); }

 private:
  [[noreturn]] static void fail(const std::string& path, const std::string& what) {
    throw GuideError((path.empty() ? "schema" : path) + ": " + what);
  }

  // The rule of values that are valid under a schema. One for each place of the document, so that schemas may refer to
  // themselves.
  Element value(const Value& schema, const std::string& path) {
    if (schema.is(Value::Kind::kBoolean)) {
      if (!schema.boolean()) fail(path, "false allows no value");
      return text_.any_value();
    }
    if (!schema.is(Value::Kind::kObject)) fail(path, "expected a schema, found " + render(schema));
    const auto [known, added] = rules_.try_emplace(&schema);
    if (!added) return known->second;
    const Element rule = known->second = builder_.rule();
    check_keywords(schema, path);
    if (++depth_ > kDeepestSchema) fail(path, "schemas refer to schemas too deeply");
    for (Sequence& alternative : alternatives(schema, path)) builder_.add(rule, std::move(alternative));
    --depth_;
    return rule;
  }

  std::vector<Sequence> alternatives(const Value& schema, const std::string& path) {
    if (schema.find("$ref") != nullptr) {
      refuse_beside(schema, path, "$ref", {});
      return {{value(resolve(root_, schema, path), path)}};
    }
    if (schema.find("enum") != nullptr || schema.find("const") != nullptr) return constants(schema, path);
    for (const std::string_view keyword : {"anyOf", "oneOf", "allOf"}) {
      if (const Value* branches = schema.find(keyword)) {
        refuse_beside(schema, path, keyword, {});
        return combined(*branches, keyword, member_path(path, keyword));
      }
    }
    const unsigned types = types_of(schema, path);
    if (types == kEveryType && schema.find("type") == nullptr) return {{text_.any_value()}};
    std::vector<Sequence> out;
    if ((types & kObjectType) != 0) out.push_back({object(schema, path)});
    if ((types & kArrayType) != 0) out.push_back({array(schema, path)});
    if ((types & kStringType) != 0) out.push_back({string(schema, path)});
    if ((types & kNumberType) != 0) {
      out.push_back({number(schema, path)});
    } else if ((types & kIntegerType) != 0) {
      out.push_back({integer(schema, path)});
    }
    if ((types & kBooleanType) != 0) out.push_back({text_.boolean()});
    if ((types & kNullType) != 0) out.push_back({text_.null()});
    return out;
  }

  std::vector<Sequence> constants(const Value& schema, const std::string& path) {
    const Value* one = schema.find("const");
    const std::string_view keyword = one != nullptr ? "const" : "enum";
    refuse_beside(schema, path, keyword, {"type"});
    const Value& given = schema.at(keyword);
    std::vector<Value> values;
    if (one != nullptr) {
      values.push_back(given);
    } else {
      values = given.items();
    }
    const unsigned types = schema.find("type") != nullptr ? types_of(schema, path) : static_cast<unsigned>(kEveryType);
    std::vector<std::string> texts;
    for (const Value& constant : values) {
      if ((type_of_value(constant) & types) != 0) texts.push_back(json_of(constant));
    }
    if (texts.empty()) fail(member_path(path, keyword), "allows no value of the type");
    return {builder_.any_of(std::move(texts))};
  }

  std::vector<Sequence> combined(const Value& branches, std::string_view keyword, const std::string& path) {
    const std::vector<Value>& items = branches.items();
    if (items.empty()) fail(path, "expected a list of schemas");
    if (keyword == "allOf" && items.size() > 1) {
      throw GuideError(path + ": more than one schema is not supported", IFAB_UNIMPLEMENTED);
    }
    std::vector<Sequence> out;
    for (size_t i = 0; i < items.size(); ++i) out.push_back({value(items[i], item_path(path, i))});
    if (keyword == "oneOf") apart_.check(items, path);
    return out;
  }

  // ---- Keywords

  std::optional<uint32_t> count(const Value& schema, std::string_view keyword, const std::string& path) {
    const Value* found = schema.find(keyword);
    if (found == nullptr) return std::nullopt;
    const double real = found->real();
    const bool number = found->is(Value::Kind::kInteger) || found->is(Value::Kind::kReal);
    if (!number || real < 0 || real != std::floor(real)) {
      fail(member_path(path, keyword), "expected a whole number, found " + render(*found));
    }
    if (real > GrammarBuilder::kMostRepetitions) {
      fail(member_path(path, keyword),
           render(*found) + ", at most " + std::to_string(GrammarBuilder::kMostRepetitions));
    }
    return static_cast<uint32_t>(real);
  }

  // The stricter of a bound and its exclusive twin.
  struct Bound {
    std::string keyword;
    const Value* given = nullptr;  // null where there is no bound
    std::optional<Decimal> exact;
    bool open = false;

    bool excludes(int64_t whole) const {
      // A validator that reads the bound as a double excludes what the double excludes.
      return open && (*exact == Decimal(std::to_string(whole)) ||
                      (given->is(Value::Kind::kReal) && given->real() == static_cast<double>(whole)));
    }
  };

  // `sign` is 1 for lower bounds, -1 for upper ones.
  static Bound bound(const Value& schema, std::string_view keyword, std::string_view exclusive, int sign) {
    Bound out;
    for (const std::string_view name : {keyword, exclusive}) {
      const Value* found = schema.find(name);
      if (found == nullptr) continue;
      const Decimal exact(json_of(*found));
      const bool open = name == exclusive;
      if (out.exact && (sign > 0 ? exact < *out.exact : exact > *out.exact)) continue;
      out = {std::string(name), found, exact, open};
    }
    return out;
  }

  // The least or the largest whole number within a bound. Throws GuideError where a reader of doubles would take the
  // bound for another: of `number`, every value is such a double; of `integer`, only bounds that are written as one.
  static std::optional<int64_t> whole_bound(const Bound& bound, int sign, bool of_number, const std::string& path) {
    if (!bound.exact) return std::nullopt;
    constexpr int64_t kMostExact = int64_t{1} << 53;
    const int64_t nearest = sign > 0 ? bound.exact->ceil() : bound.exact->floor();
    // Beyond all that is written, where it does not matter how it is read.
    if (*bound.exact >= Decimal("1e19") || *bound.exact <= Decimal("-1e19")) return nearest;
    bool exact = -kMostExact <= nearest && nearest <= kMostExact;
    if (!exact && !of_number) {
      exact = !bound.given->is(Value::Kind::kReal) || Decimal(std::to_string(bound.given->real())) == *bound.exact;
    }
    if (!exact) {
      throw GuideError(member_path(path, bound.keyword) + ": " + render(*bound.given) +
                           " is not exact as a double, at most " + std::to_string(kMostExact) + " is supported",
                       IFAB_UNIMPLEMENTED);
    }
    return bound.excludes(nearest) ? nearest + sign : nearest;
  }

  Element integer(const Value& schema, const std::string& path) {
    const auto least = whole_bound(bound(schema, "minimum", "exclusiveMinimum", 1), 1, false, path);
    const auto most = whole_bound(bound(schema, "maximum", "exclusiveMaximum", -1), -1, false, path);
    return at(path, [&] { return text_.integer(least, most); });
  }

  Element number(const Value& schema, const std::string& path) {
    const Bound low = bound(schema, "minimum", "exclusiveMinimum", 1);
    const Bound high = bound(schema, "maximum", "exclusiveMaximum", -1);
    const auto least = whole_bound(low, 1, true, path);
    const auto most = whole_bound(high, -1, true, path);
    if (!least && !most) return text_.any_number();
    return at(path, [&] {
      return text_.number({.first = least.value_or(-Decimal::kFar),
                           .last = most.value_or(Decimal::kFar),
                           .lower = low.exact ? low.exact->ceil() : -Decimal::kFar,
                           .upper = high.exact ? high.exact->floor() : Decimal::kFar});
    });
  }

  Element string(const Value& schema, const std::string& path) {
    const std::optional<uint32_t> least = count(schema, "minLength", path);
    const std::optional<uint32_t> most = count(schema, "maxLength", path);
    const Value* pattern = schema.find("pattern");
    const Value* format = schema.find("format");
    if ((pattern != nullptr ? 1 : 0) + (format != nullptr ? 1 : 0) + (least || most ? 1 : 0) > 1) {
      throw GuideError(path + ": more than one of pattern, format and minLength or maxLength is not supported",
                       IFAB_UNIMPLEMENTED);
    }
    if (pattern != nullptr) {
      return at(member_path(path, "pattern"), [&] { return text_.string_like(pattern->text()); });
    }
    if (format != nullptr) {
      if (std::optional<Element> known = text_.string_in_format(format->text())) return *known;
      throw GuideError(member_path(path, "format") + ": " + render(*format) + " is not supported", IFAB_UNIMPLEMENTED);
    }
    return at(path, [&] { return text_.string(least.value_or(0), most.value_or(GrammarBuilder::kUnbounded)); });
  }

  // Puts the place in front of what a piece complains about.
  template <class Make>
  static auto at(const std::string& path, Make make) -> decltype(make()) {
    try {
      return make();
    } catch (const GuideError& error) {
      throw GuideError((path.empty() ? "schema" : path) + ": " + error.what(), error.code());
    }
  }

  // What a keyword allows for the values that no other names; nothing where it is false. It is read even where no such
  // value is written, so that nothing in it is read over.
  std::optional<Element> value_or_none(const Value& schema, std::string_view keyword, const std::string& path) {
    const Value* given = schema.find(keyword);
    if (given == nullptr) return text_.any_value();
    if (given->is(Value::Kind::kBoolean) && !given->boolean()) return std::nullopt;
    return value(*given, member_path(path, keyword));
  }

  // ---- Arrays

  Element array(const Value& schema, const std::string& path) {
    const uint32_t least = count(schema, "minItems", path).value_or(0);
    const std::optional<uint32_t> given_most = count(schema, "maxItems", path);
    std::vector<Element> first;
    if (const Value* prefix = schema.find("prefixItems")) {
      const std::string at_prefix = member_path(path, "prefixItems");
      for (size_t i = 0; i < prefix->items().size(); ++i) {
        first.push_back(value(prefix->items()[i], item_path(at_prefix, i)));
      }
    }
    const std::optional<Element> rest = value_or_none(schema, "items", path);
    uint32_t most = given_most.value_or(GrammarBuilder::kUnbounded);
    if (!rest) most = std::min(most, static_cast<uint32_t>(first.size()));
    if (most < least) fail(path, "minItems leaves no array");
    if (first.size() > most) first.resize(most);
    const auto fixed = static_cast<uint32_t>(first.size());

    // behind_[i]: what follows i items.
    Element behind = builder_.rule();
    if (fixed < most) {
      const Element item = *rest;
      const uint32_t still = least > fixed ? least - fixed : 0;
      const uint32_t open = most == GrammarBuilder::kUnbounded ? most : most - fixed;
      if (still == 0) builder_.add(behind, closing("]", fixed > 0));
      Sequence more = next(item, fixed > 0);
      const uint32_t others = open == GrammarBuilder::kUnbounded ? open : open - 1;
      GrammarBuilder::append(more, builder_.repeat(next(item, true), still > 0 ? still - 1 : 0, others));
      GrammarBuilder::append(more, closing("]", true));
      builder_.add(behind, more);
    } else {
      builder_.add(behind, closing("]", fixed > 0));
    }
    for (uint32_t i = fixed; i-- > 0;) {
      const Element here = builder_.rule();
      if (i >= least) builder_.add(here, closing("]", i > 0));
      Sequence more = next(first[i], i > 0);
      more.push_back(behind);
      builder_.add(here, more);
      behind = here;
    }
    return builder_.choice({{builder_.byte('['), text_.space(), behind}});
  }

  // One more item or member, behind a comma where others stand before it.
  Sequence next(Element item, bool behind_others) {
    if (!behind_others) return {item};
    return {builder_.byte(','), text_.space(), item};
  }

  Sequence closing(std::string_view bracket, bool behind_others) {
    Sequence out;
    if (behind_others) out.push_back(text_.space());
    GrammarBuilder::append(out, builder_.text(bracket));
    return out;
  }

  // ---- Objects

  struct Property {
    Element member;
    bool required = false;
  };

  Element member(Element key, Element of) { return builder_.choice({{key, builder_.byte(':'), text_.space(), of}}); }

  Element object(const Value& schema, const std::string& path) {
    std::vector<Property> properties;
    std::map<std::string_view, size_t> places;
    const std::optional<Element> other = value_or_none(schema, "additionalProperties", path);
    if (const Value* given = schema.find("properties")) {
      for (const Value::Member& property : given->members()) {
        places.emplace(property.key, properties.size());
        const Element key = builder_.choice({builder_.text(JsonText::quoted(property.key))});
        properties.push_back(
            {member(key, value(property.value, member_path(member_path(path, "properties"), property.key)))});
      }
    }
    if (const Value* required = schema.find("required")) {
      for (size_t i = 0; i < required->items().size(); ++i) {
        const std::string& name = required->items()[i].text();
        const auto [known, added] = places.emplace(name, properties.size());
        if (!added) {
          properties[known->second].required = true;
          continue;
        }
        if (!other)
          fail(item_path(member_path(path, "required"), i),
               render_text(name) + " is not in properties, and additionalProperties is false");
        const Element key = builder_.choice({builder_.text(JsonText::quoted(name))});
        properties.push_back({member(key, *other), true});
      }
    }
    return properties.empty() ? free_object(other) : fixed_object(properties);
  }

  // Members in order. rest[0] is what may follow where no member stands yet, rest[1] where one does.
  Element fixed_object(const std::vector<Property>& properties) {
    Element rest[2] = {builder_.choice({closing("}", false)}), builder_.choice({closing("}", true)})};
    for (size_t i = properties.size(); i-- > 0;) {
      const Property& property = properties[i];
      Element here[2];
      for (const bool behind_others : {false, true}) {
        Sequence with = next(property.member, behind_others);
        with.push_back(rest[1]);
        std::vector<Sequence> alternatives{with};
        if (!property.required) alternatives.push_back({rest[behind_others ? 1 : 0]});
        here[behind_others ? 1 : 0] = builder_.choice(std::move(alternatives));
      }
      rest[0] = here[0];
      rest[1] = here[1];
    }
    return builder_.choice({{builder_.byte('{'), text_.space(), rest[0]}});
  }

  // No member is named: members of any name, with the values that additionalProperties allows.
  Element free_object(const std::optional<Element>& of) {
    Sequence empty{builder_.byte('{'), text_.space(), builder_.byte('}')};
    if (!of) return builder_.choice({empty});
    const Element one = member(text_.string(0, GrammarBuilder::kUnbounded), *of);
    Sequence filled{builder_.byte('{'), text_.space(), one};
    GrammarBuilder::append(filled, builder_.repeat(next(one, true), 0, GrammarBuilder::kUnbounded));
    GrammarBuilder::append(filled, closing("}", true));
    return builder_.choice({empty, filled});
  }

  const Value& root_;
  Apart apart_;
  GrammarBuilder builder_;
  JsonText text_{builder_};
  std::map<const Value*, Element> rules_;
  int depth_ = 0;
};

}  // namespace

std::shared_ptr<const Grammar> read_json_schema(std::string_view text) {
  std::vector<Finding> findings;
  const std::optional<Value> document = read_document(text, findings);
  if (!findings.empty()) {
    const Finding& first = findings.front();
    throw GuideError((first.path.empty() ? "schema" : first.path) + ": " + first.found + ", expected " +
                     first.expected);
  }
  return SchemaReader(*document).read();
}

}  // namespace ifab::guide
