// SPDX-License-Identifier: Apache-2.0
#include "core/json_reader.h"

#include <utility>

#include "core/check.h"
#include "core/text.h"

namespace smp::core {
namespace {

using nlohmann::json;

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

JsonReader::JsonReader(const json& document, std::string source_name)
    : value_(&document), source_(std::move(source_name)) {}

JsonReader::JsonReader(const json& value, const std::string& source, std::string path)
    : value_(&value), source_(source), path_(std::move(path)) {}

JsonReader JsonReader::at(const std::string& key) const {
  const auto member = find(key);
  if (!member) fail_expected("an object with \"" + key + "\"");
  return *member;
}

std::optional<JsonReader> JsonReader::find(const std::string& key) const {
  if (!value_->is_object()) fail_expected("an object");
  const auto member = value_->find(key);
  if (member == value_->end()) return std::nullopt;
  return JsonReader(*member, source_, path_.empty() ? key : path_ + "." + key);
}

size_t JsonReader::size() const {
  if (!value_->is_array()) fail_expected("an array");
  return value_->size();
}

JsonReader JsonReader::at(size_t index) const {
  if (index >= size()) fail_expected(c10::str("an array with an element ", index));
  return JsonReader((*value_)[index], source_, c10::str(path_, "[", index, "]"));
}

bool JsonReader::boolean() const {
  if (!value_->is_boolean()) fail_expected("true or false");
  return value_->get<bool>();
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
  if (!value_->is_number()) fail_expected("a number");
  return value_->get<double>();
}

std::string JsonReader::text() const {
  if (!value_->is_string()) fail_expected("a string");
  return value_->get<std::string>();
}

void JsonReader::fail_expected(const std::string& expected) const {
  fail(c10::str("expected ", expected, ", got ", preview(*value_)), "");
}

void JsonReader::fail(const std::string& problem, const std::string& remedy) const {
  core::fail<ConfigError>(source_, ": ",
                          path_.empty() ? "" : "\"" + printable(path_) + "\": ", problem, ".",
                          remedy.empty() ? "" : " " + remedy);
}

}  // namespace smp::core
