// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace smp::core {

/// A place in a JSON document, from which values are read. A missing value, or one of the wrong
/// kind, is an error with the document's name, the path and the expectation; a `ConfigError`,
/// unless the document has errors of its own:
///
///     graph.json: "operators[3].results[0]": expected an integer from 0 to 35, got 99.
///
/// Points into the document, which must outlive it.
class JsonReader {
 public:
  /// Throws the error of a document: `place` is the quoted path, or "its beginning"; `problem` has
  /// no full stop.
  using Fail = void (*)(const std::string& source, const std::string& place,
                        const std::string& problem);

  /// The whole of `document`; errors call it `source_name`.
  JsonReader(const nlohmann::json& document, std::string source_name, Fail fail = nullptr);

  const std::string& source() const { return source_; }

  /// A member of an object that must have it.
  JsonReader at(const std::string& key) const;
  /// A member of an object, nothing if it has none of this name.
  std::optional<JsonReader> find(const std::string& key) const;
  /// Whether it is an object that has `key`, with a value other than null.
  bool has(const std::string& key) const;
  /// Those of an object, in the order of their keys.
  std::vector<std::pair<std::string, JsonReader>> members() const;
  /// The number of elements of an array.
  size_t size() const;
  /// An element of an array.
  JsonReader at(size_t index) const;
  /// All of them, each made when a loop comes to it.
  class Elements;
  Elements elements() const;

  /// The value itself.
  const nlohmann::json& value() const { return *value_; }

  bool boolean() const;
  uint64_t count() const;
  int64_t integer(int64_t minimum = std::numeric_limits<int64_t>::min(),
                  int64_t maximum = std::numeric_limits<int64_t>::max()) const;
  /// Finite, of whole numbers too.
  double number() const;
  std::string text() const;

  /// Throws unless `ok`; as `fail_expected`.
  void expect(bool ok, const std::string& expected) const;
  /// Throws: `expected` in words, and the value found.
  [[noreturn]] void fail_expected(const std::string& expected) const;
  /// Throws: `problem` as a sentence without a full stop, then the remedy, unless the document has
  /// errors of its own.
  [[noreturn]] void fail(const std::string& problem, const std::string& remedy = "") const;

 private:
  JsonReader(const nlohmann::json& value, const JsonReader& whole, std::string path);

  const nlohmann::json* value_;
  std::string source_;
  std::string path_;
  Fail fail_;
};

class JsonReader::Elements {
 public:
  class Iterator {
   public:
    JsonReader operator*() const { return array_->at(index_); }
    Iterator& operator++() { return ++index_, *this; }
    bool operator!=(const Iterator& other) const { return index_ != other.index_; }

   private:
    friend class Elements;
    Iterator(const JsonReader& array, size_t index) : array_(&array), index_(index) {}

    const JsonReader* array_;
    size_t index_;
  };

  Iterator begin() const { return {array_, 0}; }
  Iterator end() const { return {array_, array_.size()}; }

 private:
  friend class JsonReader;
  explicit Elements(JsonReader array) : array_(std::move(array)) {}

  const JsonReader array_;
};

}  // namespace smp::core
