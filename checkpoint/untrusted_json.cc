// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/untrusted_json.h"

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
  return nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
}

}  // namespace smp::checkpoint
