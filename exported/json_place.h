// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

namespace smp::exported {

/// A value in untrusted JSON, and where it is. Asked for another type than it has, it throws a
/// `CheckpointError` that names file and place. The JSON outlives it.
class JsonPlace {
 public:
  /// `file` is its name in errors.
  JsonPlace(const nlohmann::json& json, std::string file) : json_(&json), file_(std::move(file)) {}

  const std::string& file() const { return file_; }

  /// Whether it is an object that has `key`, with a value other than null.
  bool has(const std::string& key) const;
  JsonPlace at(const std::string& key) const;
  /// Those of a list.
  std::vector<JsonPlace> elements() const;
  /// Those of an object, in the order of their keys.
  std::vector<std::pair<std::string, JsonPlace>> items() const;
  /// The only member of a tagged union, `{"as_int": 3}`.
  std::pair<std::string, JsonPlace> tagged() const;

  bool is_null() const { return json_->is_null(); }
  bool is_string() const { return json_->is_string(); }
  bool is_integer() const { return json_->is_number_integer(); }
  std::string text() const;
  int64_t integer() const;
  bool boolean() const;
  /// A number, or "Infinity", "-Infinity" or "NaN".
  double real() const;

  /// Throws the error: `expected` tells the expectation.
  [[noreturn]] void expect(const std::string& expected) const;

 private:
  JsonPlace(const nlohmann::json& json, std::string file, std::string path)
      : json_(&json), file_(std::move(file)), path_(std::move(path)) {}

  const nlohmann::json* json_;
  std::string file_;
  std::string path_;
};

}  // namespace smp::exported
