// SPDX-License-Identifier: Apache-2.0
#include "document.h"

#include <cstdio>
#include <nlohmann/json.hpp>
#include <set>
#include <stdexcept>
#include <utility>

namespace ifab {
namespace {

constexpr size_t kShownCharacters = 40;
constexpr size_t kPlainKeyCharacters = 64;

// Makes a Value of the events of a JSON parser, bottom up: a container is finished before its parent takes it in.
class Builder : public nlohmann::json_sax<nlohmann::json> {
 public:
  explicit Builder(std::vector<Finding>& findings) : findings_(findings) {}

  bool null() override { return take(Value::null()); }
  bool boolean(bool value) override { return take(Value::of_boolean(value)); }
  bool number_integer(number_integer_t value) override { return take(Value::of_integer(value)); }
  bool number_unsigned(number_unsigned_t value) override {
    if (std::in_range<int64_t>(value)) return take(Value::of_integer(static_cast<int64_t>(value)));
    return take(Value::of_huge_integer(std::to_string(value)));
  }
  bool number_float(number_float_t value, const string_t& literal) override {
    // The parser falls back to a double for whole numbers that no 64-bit integer holds.
    if (literal.find_first_of(".eE") == string_t::npos) return take(Value::of_huge_integer(literal));
    return take(Value::of_real(value, literal));
  }
  bool string(string_t& value) override { return take(Value::of_text(std::move(value))); }
  bool binary(binary_t&) override { return fail("binary", "JSON text"); }

  bool start_object(size_t) override { return open(Value::object()); }
  bool start_array(size_t) override { return open(Value::list()); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }

  bool key(string_t& key) override {
    Frame& frame = frames_.back();
    frame.key = std::move(key);
    frame.repeated = !frame.keys.insert(frame.key).second;
    if (frame.repeated) add_finding(findings_, {path_of_current(), "given twice", "given once"});
    return true;
  }

  bool parse_error(size_t position, const std::string&, const nlohmann::detail::exception& error) override {
    // 406 is the parser's own number for a literal that no double holds.
    return error.id == 406 ? fail("a number too large", "numbers within a double")
                           : fail("no JSON at byte " + std::to_string(position), "one JSON document in UTF-8");
  }

  // The finished document, or what is wrong with it as a whole.
  std::optional<Value> result;
  std::optional<Finding> unreadable;

 private:
  struct Frame {
    Value container;
    std::set<std::string> keys;
    std::string key;        // of the member that comes next
    bool repeated = false;  // that member is a repetition and is dropped
    size_t index = 0;       // of the item that comes next
  };

  bool fail(std::string found, std::string expected) {
    if (!unreadable) unreadable = Finding{"", std::move(found), std::move(expected)};
    return false;
  }

  bool open(Value container) {
    if (frames_.size() == kMaxDocumentDepth) {
      return fail("nesting deeper than " + std::to_string(kMaxDocumentDepth),
                  "nesting of at most " + std::to_string(kMaxDocumentDepth));
    }
    frames_.push_back(Frame{std::move(container), {}, {}, false, 0});
    return true;
  }

  bool close() {
    Value done = std::move(frames_.back().container);
    frames_.pop_back();
    return take(std::move(done));
  }

  bool take(Value value) {
    if (frames_.empty()) {
      result = std::move(value);
      return true;
    }
    Frame& frame = frames_.back();
    if (frame.container.is(Value::Kind::kList)) {
      frame.container.append(std::move(value));
      ++frame.index;
    } else if (!frame.repeated) {
      frame.container.insert(std::move(frame.key), std::move(value));
    }
    return true;
  }

  std::string path_of_current() const {
    std::string path;
    for (const Frame& frame : frames_) {
      path = frame.container.is(Value::Kind::kList) ? item_path(path, frame.index) : member_path(path, frame.key);
    }
    return path;
  }

  std::vector<Frame> frames_;
  std::vector<Finding>& findings_;
};

// The code point that starts at `at`, moving `at` behind it. The text is valid UTF-8: the parser has checked it.
uint32_t next_code_point(std::string_view text, size_t& at) {
  const auto byte = [&](size_t i) { return static_cast<uint32_t>(static_cast<unsigned char>(text[i])); };
  const uint32_t first = byte(at);
  const size_t more = first < 0x80 ? 0 : first < 0xE0 ? 1 : first < 0xF0 ? 2 : 3;
  uint32_t point = more == 0 ? first : first & (0x3Fu >> more);
  for (size_t i = 1; i <= more && at + i < text.size(); ++i) point = (point << 6) | (byte(at + i) & 0x3Fu);
  at += more + 1;
  return point;
}

void append_escape(std::string& out, uint32_t unit) {
  char buffer[8];
  std::snprintf(buffer, sizeof buffer, "\\u%04x", unit & 0xFFFFu);
  out += buffer;
}

void append_escaped(std::string& out, uint32_t point) {
  switch (point) {
    case '"':
      out += "\\\"";
      return;
    case '\\':
      out += "\\\\";
      return;
    case '\b':
      out += "\\b";
      return;
    case '\f':
      out += "\\f";
      return;
    case '\n':
      out += "\\n";
      return;
    case '\r':
      out += "\\r";
      return;
    case '\t':
      out += "\\t";
      return;
    default:
      break;
  }
  if (point >= 0x20 && point < 0x7F) {
    out += static_cast<char>(point);
  } else if (point < 0x10000) {
    append_escape(out, point);
  } else {
    append_escape(out, 0xD800 + ((point - 0x10000) >> 10));
    append_escape(out, 0xDC00 + ((point - 0x10000) & 0x3FF));
  }
}

bool plain_key(std::string_view key) {
  if (key.empty() || key.size() > kPlainKeyCharacters || (key[0] >= '0' && key[0] <= '9')) return false;
  for (const char c : key) {
    const bool plain = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_';
    if (!plain) return false;
  }
  return true;
}

std::string cut(const std::string& literal) {
  return literal.size() <= kShownCharacters ? literal : literal.substr(0, kShownCharacters) + "...";
}

}  // namespace

void add_finding(std::vector<Finding>& findings, Finding finding) {
  if (findings.size() < kMaxFindings) {
    findings.push_back(std::move(finding));
  } else if (findings.size() == kMaxFindings) {
    findings.push_back({"", "more findings than " + std::to_string(kMaxFindings), "none"});
  }
}

Value::Value(Kind kind) : kind_(kind) {}

Value Value::null() {
  return Value(Kind::kNull);
}

Value Value::list() {
  return Value(Kind::kList);
}

Value Value::object() {
  return Value(Kind::kObject);
}

Value Value::of_boolean(bool value) {
  Value out(Kind::kBoolean);
  out.integer_ = value ? 1 : 0;
  return out;
}

Value Value::of_integer(int64_t value) {
  Value out(Kind::kInteger);
  out.integer_ = value;
  return out;
}

Value Value::of_huge_integer(std::string literal) {
  Value out(Kind::kHugeInteger);
  out.text_ = std::move(literal);
  return out;
}

Value Value::of_real(double value, std::string literal) {
  Value out(Kind::kReal);
  out.real_ = value;
  out.text_ = std::move(literal);
  return out;
}

Value Value::of_text(std::string text) {
  Value out(Kind::kText);
  out.text_ = std::move(text);
  return out;
}

double Value::real() const {
  return kind_ == Kind::kInteger ? static_cast<double>(integer_) : real_;
}

const Value* Value::find(std::string_view key) const {
  for (const Member& member : members_) {
    if (member.key == key) return &member.value;
  }
  return nullptr;
}

const Value& Value::at(std::string_view key) const {
  if (const Value* value = find(key)) return *value;
  throw std::logic_error("document without member " + std::string(key));
}

void Value::append(Value item) {
  items_.push_back(std::move(item));
}

void Value::insert(std::string key, Value value) {
  members_.push_back({std::move(key), std::move(value)});
}

std::optional<Value> read_document(std::string_view text, std::vector<Finding>& findings) {
  if (text.size() > kMaxDocumentBytes) {
    add_finding(findings, {"", std::to_string(text.size()) + " bytes",
                           "at most " + std::to_string(kMaxDocumentBytes) + " bytes"});
    return std::nullopt;
  }
  if (text.starts_with("\xEF\xBB\xBF")) {
    // The parser would skip it; RFC 8259 forbids writing it.
    add_finding(findings, {"", "a byte order mark", "one JSON document in UTF-8"});
    return std::nullopt;
  }
  if (const size_t nul = text.find('\0'); nul != std::string_view::npos) {
    // The parser would take it for the end of the text and not see what follows.
    add_finding(findings, {"", "no JSON at byte " + std::to_string(nul + 1), "one JSON document in UTF-8"});
    return std::nullopt;
  }
  std::vector<Finding> repeated;
  Builder builder(repeated);
  const bool whole = nlohmann::json::sax_parse(text.begin(), text.end(), &builder);
  if (!whole || !builder.result) {
    add_finding(findings, builder.unreadable.value_or(Finding{"", "no JSON", "one JSON document in UTF-8"}));
    return std::nullopt;
  }
  for (Finding& finding : repeated) add_finding(findings, std::move(finding));
  return std::move(builder.result);
}

std::string render_text(std::string_view text) {
  std::string out = "\"";
  size_t shown = 0;
  for (size_t at = 0; at < text.size(); ++shown) {
    if (shown == kShownCharacters) {
      out += "...";
      break;
    }
    append_escaped(out, next_code_point(text, at));
  }
  return out + '"';
}

std::string render(const Value& value) {
  switch (value.kind()) {
    case Value::Kind::kNull:
      return "null";
    case Value::Kind::kBoolean:
      return value.boolean() ? "true" : "false";
    case Value::Kind::kInteger:
      return std::to_string(value.integer());
    case Value::Kind::kHugeInteger:
    case Value::Kind::kReal:
      return cut(value.text());
    case Value::Kind::kText:
      return render_text(value.text());
    case Value::Kind::kList:
      return "list of " + std::to_string(value.items().size()) + (value.items().size() == 1 ? " item" : " items");
    case Value::Kind::kObject:
      return "object";
  }
  return "";
}

std::string member_path(const std::string& path, std::string_view key) {
  if (!plain_key(key)) return path + '[' + render_text(key) + ']';
  return path.empty() ? std::string(key) : path + '.' + std::string(key);
}

std::string item_path(const std::string& path, size_t index) {
  return path + '[' + std::to_string(index) + ']';
}

}  // namespace ifab
