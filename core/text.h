// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace smp::core {

/// Makes names from files, the environment and users printable in messages: on one line, and so
/// that a terminal does nothing but show it. Control characters, marks that change the direction of
/// text, and bytes that are no UTF-8 stand as escapes: "\n", "\x1b", "\u202e". A text that then has
/// more than `most` bytes is cut, and its length is given.
std::string printable(std::string_view text, size_t most = 400);

/// The same of a message, which may have several lines and any length.
std::string printable_lines(std::string_view text);

/// The lines of a list in a message, each after "\n ", and of a long one how many more there are.
/// Foreign text in them is printable already.
template <class Lines>
std::string indented(const Lines& lines, size_t most = 100) {
  std::string text;
  size_t shown = 0;
  for (const std::string& line : lines) {
    if (shown++ == most) return text + "\n  and " + std::to_string(lines.size() - most) + " more";
    text += "\n  " + line;
  }
  return text;
}

}  // namespace smp::core
