// SPDX-License-Identifier: Apache-2.0
#include "core/json_reader.h"

#include <utility>

#include "core/check.h"
#include "core/text.h"

namespace smp::core {
namespace {

using nlohmann::json;

/// Names are cut to so many bytes in paths, of which each reader has a copy.
constexpr size_t kShownName = 120;

/// A value in an error text: short.
std::string preview(const json& value) {
  if (value.is_object()) return "an object";
  if (value.is_array()) return c10::str("an array of ", value.size());
  return printable(value.dump(-1, ' ', false, json::error_handler_t::replace), 100);
}

std::string integer_range(int64_t minimum, int64_t maximum) {
  if (maximum < std::numeric_limits<int64_t>::max()) {
    return c10::str("an integer from ", minimum, " to ", maximum);
  }
  if (minimum > std::numeric_limits<int64_t>::min()) return c10::str("an integer >= ", minimum);
  return "an integer";
}

}  // namespace

JsonReader::JsonReader(const json& document, std::string source_name, Fail fail)
    : value_(&document), source_(std::move(source_name)), fail_(fail) {}

JsonReader::JsonReader(const json& value, const JsonReader& whole, std::string path)
    : value_(&value), source_(whole.source_), path_(std::move(path)), fail_(whole.fail_) {}

JsonReader JsonReader::at(const std::string& key) const {
  const auto member = find(key);
  if (!member) fail_expected("an object with \"" + printable(key, kShownName) + "\"");
  return *member;
}

std::optional<JsonReader> JsonReader::find(const std::string& key) const {
  if (!value_->is_object()) fail_expected("an object");
  const auto member = value_->find(key);
  if (member == value_->end()) return std::nullopt;
  const std::string name = key.size() > kShownName ? printable(key, kShownName) : key;
  return JsonReader(*member, *this, path_.empty() ? name : path_ + "." + name);
}

bool JsonReader::has(const std::string& key) const {
  if (!value_->is_object()) return false;
  const auto member = value_->find(key);
  return member != value_->end() && !member->is_null();
}

std::vector<std::pair<std::string, JsonReader>> JsonReader::members() const {
  expect(value_->is_object(), "an object");
  std::vector<std::pair<std::string, JsonReader>> result;
  for (const auto& item : value_->items()) result.emplace_back(item.key(), at(item.key()));
  return result;
}

size_t JsonReader::size() const {
  expect(value_->is_array(), "an array");
  return value_->size();
}

JsonReader JsonReader::at(size_t index) const {
  if (index >= size()) fail_expected(c10::str("an array with an element ", index));
  return JsonReader((*value_)[index], *this, path_ + "[" + std::to_string(index) + "]");
}

JsonReader::Elements JsonReader::elements() const {
  expect(value_->is_array(), "an array");
  return Elements(*this);
}

bool JsonReader::boolean() const {
  expect(value_->is_boolean(), "true or false");
  return value_->get<bool>();
}

uint64_t JsonReader::count() const {
  expect(value_->is_number_unsigned(), "a non-negative integer");
  return value_->get<uint64_t>();
}

int64_t JsonReader::integer(int64_t minimum, int64_t maximum) const {
  if (!value_->is_number_integer()) fail_expected(integer_range(minimum, maximum));
  const bool too_large =
      value_->is_number_unsigned() &&
      value_->get<uint64_t>() > static_cast<uint64_t>(std::numeric_limits<int64_t>::max());
  const auto value = value_->get<int64_t>();
  if (too_large || value < minimum || value > maximum) {
    fail_expected(integer_range(minimum, maximum));
  }
  return value;
}

double JsonReader::number() const {
  expect(value_->is_number(), "a number");
  return value_->get<double>();
}

std::string JsonReader::text() const {
  expect(value_->is_string(), "a string");
  return value_->get<std::string>();
}

void JsonReader::expect(bool ok, const std::string& expected) const {
  if (!ok) fail_expected(expected);
}

void JsonReader::fail_expected(const std::string& expected) const {
  fail(c10::str("expected ", expected, ", got ", preview(*value_)));
}

void JsonReader::fail(const std::string& problem, const std::string& remedy) const {
  const std::string quoted = "\"" + printable(path_) + "\"";
  if (fail_ != nullptr) fail_(source_, path_.empty() ? "its beginning" : quoted, problem);
  core::fail<ConfigError>(source_, ": ", path_.empty() ? "" : quoted + ": ", problem, ".",
                          remedy.empty() ? "" : " " + remedy);
}

}  // namespace smp::core
