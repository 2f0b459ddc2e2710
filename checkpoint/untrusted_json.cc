// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/untrusted_json.h"

#include <set>
#include <string>
#include <vector>

namespace smp::checkpoint {
namespace {

constexpr int kMaxDepth = 256;

/// Counts brackets outside of strings; what is no JSON may come out as anything.
bool is_too_deep(const std::string& text) {
  int depth = 0;
  bool in_string = false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (in_string) {
      if (c == '\\') ++i;
      in_string = c != '"';
    } else if (c == '"') {
      in_string = true;
    } else if (c == '[' || c == '{') {
      if (++depth > kMaxDepth) return true;
    } else if (c == ']' || c == '}') {
      --depth;
    }
  }
  return false;
}

}  // namespace

nlohmann::json parse_untrusted(const std::string& text) {
  if (is_too_deep(text)) return nlohmann::json(nlohmann::json::value_t::discarded);
  std::vector<std::set<std::string>> open_objects;
  bool is_ambiguous = false;  // the parser would keep the last of two values
  const auto look = [&](int, nlohmann::json::parse_event_t event, nlohmann::json& value) {
    using Event = nlohmann::json::parse_event_t;
    if (event == Event::object_start) open_objects.emplace_back();
    if (event == Event::object_end) open_objects.pop_back();
    if (event == Event::key) {
      is_ambiguous |= !open_objects.back().insert(value.get<std::string>()).second;
    }
    return true;
  };
  nlohmann::json parsed = nlohmann::json::parse(text, look, /*allow_exceptions=*/false);
  return is_ambiguous ? nlohmann::json(nlohmann::json::value_t::discarded) : parsed;
}

}  // namespace smp::checkpoint
