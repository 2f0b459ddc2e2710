// SPDX-License-Identifier: Apache-2.0
#include "core/text.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>

namespace smp::core {
namespace {

struct Character {
  uint32_t code = 0;
  size_t bytes = 1;
  bool is_valid = false;  // else one byte that is no UTF-8
};

bool continues(char byte) { return (byte & 0xC0) == 0x80; }

// The first character of a text that is not empty.
Character first_of(std::string_view text) {
  const auto first = static_cast<unsigned char>(text[0]);
  if (first < 0x80) return {first, 1, true};
  const size_t bytes = first >= 0xF0 ? 4 : first >= 0xE0 ? 3 : 2;
  if (first < 0xC2 || first > 0xF4 || text.size() < bytes) return {first};
  uint32_t code = first & (0x7F >> bytes);
  for (size_t i = 1; i < bytes; ++i) {
    if (!continues(text[i])) return {first};
    code = code << 6 | (text[i] & 0x3F);
  }
  constexpr std::array<uint32_t, 5> kLeast = {0, 0, 0x80, 0x800, 0x10000};
  const bool is_surrogate = code >= 0xD800 && code <= 0xDFFF;
  if (code < kLeast[bytes] || is_surrogate || code > 0x10FFFF) return {first};
  return {code, bytes, true};
}

// Whether a terminal or a viewer may do something else with it than show it.
bool is_control(uint32_t code) {
  const auto is_in = [&](uint32_t first, uint32_t last) { return first <= code && code <= last; };
  return code < 0x20 || is_in(0x7F, 0x9F) || is_in(0x2028, 0x202E) || is_in(0x2066, 0x2069) ||
         is_in(0xFFFE, 0xFFFF);
}

std::string escape(const Character& character) {
  switch (character.is_valid ? character.code : 0xFF) {
    case '\n':
      return "\\n";
    case '\r':
      return "\\r";
    case '\t':
      return "\\t";
    default: {
      std::array<char, 16> text{};
      const char* const format = character.code > 0xFF ? "\\u%04x" : "\\x%02x";
      std::snprintf(text.data(), text.size(), format, character.code);
      return text.data();
    }
  }
}

std::string escaped(std::string_view text, std::string_view kept) {
  std::string result;
  while (!text.empty()) {
    const Character character = first_of(text);
    const bool is_shown = character.is_valid && (!is_control(character.code) ||
                                                 kept.find(text[0]) != std::string_view::npos);
    result += is_shown ? std::string(text.substr(0, character.bytes)) : escape(character);
    text.remove_prefix(character.bytes);
  }
  return result;
}

}  // namespace

std::string printable(std::string_view text, size_t most) {
  // Escapes as much of a long text as may be shown, and one character more.
  std::string shown = escaped(text.substr(0, most + 4), "");
  if (text.size() <= most + 4 && shown.size() <= most) return shown;
  most = std::min(most, shown.size());
  while (most > 0 && most < shown.size() && continues(shown[most])) --most;
  return shown.substr(0, most) + "... (" + std::to_string(text.size()) + " bytes)";
}

std::string printable_lines(std::string_view text) { return escaped(text, "\n"); }

}  // namespace smp::core
