// SPDX-License-Identifier: Apache-2.0
#include "core/text.h"

namespace smp::core {

std::string shortened(const std::string& text, size_t most) {
  if (text.size() <= most) return text;
  const auto continues = [&](size_t at) { return (text[at] & 0xC0) == 0x80; };
  while (most > 0 && continues(most)) --most;  // a character of UTF-8 stays whole
  return text.substr(0, most) + "... (" + std::to_string(text.size()) + " bytes)";
}

}  // namespace smp::core
