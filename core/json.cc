// SPDX-License-Identifier: Apache-2.0
#include "core/json.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <set>
#include <vector>

#include "core/check.h"
#include "core/text.h"

namespace smp::core {
namespace {

using nlohmann::json;

// Functions that recur over a value could not bear any depth.
constexpr int kMaxDepth = 256;

// Follows the objects that are open while the parser runs, to see keys that occur twice; the
// parser itself silently keeps the last.
class DuplicateKeys {
 public:
  void operator()(json::parse_event_t event, const json& parsed) {
    if (event == json::parse_event_t::object_start) {
      open_.emplace_back();
    } else if (event == json::parse_event_t::object_end) {
      open_.pop_back();
    } else if (event == json::parse_event_t::key) {
      Object& object = open_.back();
      object.current = parsed.get<std::string>();
      if (!object.seen.insert(object.current).second && first_.empty()) first_ = path();
    }
  }

  /// The path of the first key that occurred twice, or empty.
  const std::string& first() const { return first_; }

 private:
  struct Object {
    std::set<std::string> seen;
    std::string current;
  };

  std::string path() const {
    std::string text;
    for (const Object& object : open_) text += (text.empty() ? "" : ".") + object.current;
    return text;
  }

  std::vector<Object> open_;
  std::string first_;
};

// "line 3, column 5" of the byte (1-based) at which the parser stopped.
std::string position(const std::string& text, size_t byte) {
  const std::string before = text.substr(0, byte > 0 ? byte - 1 : 0);
  const auto line = 1 + std::count(before.begin(), before.end(), '\n');
  const size_t line_start = before.rfind('\n') + 1;  // npos + 1 is 0: the first line
  return c10::str("line ", line, ", column ", before.size() - line_start + 1);
}

// nlohmann's messages start with a tag and its own position; the reason is after that.
std::string reason(const json::exception& error) {
  const std::string what = error.what();
  const size_t at = what.find(": ");
  return at == std::string::npos ? what : what.substr(at + 2);
}

}  // namespace

json parse_json(const std::string& text, const std::string& source_name) {
  DuplicateKeys duplicates;
  int deepest = 0;
  const auto watch = [&](int depth, json::parse_event_t event, json& parsed) {
    deepest = std::max(deepest, depth);
    duplicates(event, parsed);
    return true;
  };
  json parsed;
  try {
    parsed = json::parse(text, watch);
  } catch (const json::parse_error& error) {
    SMP_CHECK_WITH(ConfigError, false, source_name, ": malformed JSON at ",
                   position(text, error.byte), ": ", shortened(reason(error), 200),
                   ". Correct the text at that position.");
  } catch (const json::out_of_range& error) {
    core::fail<ConfigError>(source_name,
                            ": a number is too large for JSON: ", shortened(reason(error)),
                            ". Write a smaller one.");
  }
  SMP_CHECK_WITH(ConfigError, deepest <= kMaxDepth, source_name, ": expected JSON of at most ",
                 kMaxDepth, " levels, got ", deepest, ". Write values without so many brackets.");
  SMP_CHECK_WITH(ConfigError, duplicates.first().empty(), source_name, ": \"", shortened(duplicates.first()),
                 "\": expected each key once, got it twice in one object. Remove one of the two.");
  return parsed;
}

std::string read_file(const std::string& path, const std::string& what) {
  std::ifstream in(path, std::ios::binary);
  const bool is_folder = std::filesystem::is_directory(path);  // which opens, but does not read
  SMP_CHECK_WITH(ConfigError, in && !is_folder, path, ": cannot read ", what, ": ",
                 is_folder ? "it is a folder" : std::strerror(errno),
                 ". Give the path of a JSON file.");
  return std::string(std::istreambuf_iterator<char>(in), {});
}

}  // namespace smp::core
