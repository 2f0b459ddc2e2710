// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

namespace smp::core {

/// A place in a JSON document, from which values are read. A missing value, or one of the wrong
/// kind, is a `ConfigError` with the document's name, the path and the expectation:
///
///     graph.json: "operators[3].results[0]": expected an integer from 0 to 35, got 99.
///
/// Points into the document, which must outlive it.
class JsonReader {
 public:
  /// The whole of `document`; errors call it `source_name`.
  JsonReader(const nlohmann::json& document, std::string source_name);

  /// A member of an object that must have it.
  JsonReader at(const std::string& key) const;
  /// A member of an object, nothing if it has none of this name.
  std::optional<JsonReader> find(const std::string& key) const;
  /// The number of elements of an array.
  size_t size() const;
  /// An element of an array.
  JsonReader at(size_t index) const;

  /// The value itself.
  const nlohmann::json& value() const { return *value_; }

  bool boolean() const;
  int64_t integer(int64_t minimum = std::numeric_limits<int64_t>::min(),
                  int64_t maximum = std::numeric_limits<int64_t>::max()) const;
  /// Finite, of whole numbers too.
  double number() const;
  std::string text() const;

  /// Throws: `expected` in words, and the value found.
  [[noreturn]] void fail_expected(const std::string& expected) const;
  /// Throws: `problem` as a sentence without a full stop, then the remedy.
  [[noreturn]] void fail(const std::string& problem, const std::string& remedy) const;

 private:
  JsonReader(const nlohmann::json& value, const std::string& source, std::string path);

  const nlohmann::json* value_;
  std::string source_;
  std::string path_;
};

}  // namespace smp::core
