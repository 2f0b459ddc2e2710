// SPDX-License-Identifier: Apache-2.0
#include "runtime/first_difference.h"

#include <xxhash.h>

#include <algorithm>
#include <sstream>

namespace smp::runtime {

std::pair<std::string, std::string> first_difference(const std::string& a, const std::string& b) {
  std::istringstream first(a), other(b);
  std::string x, y;
  while (true) {
    const bool more_x = static_cast<bool>(std::getline(first, x));
    const bool more_y = static_cast<bool>(std::getline(other, y));
    if (!more_x) x = "(nothing)";
    if (!more_y) y = "(nothing)";
    if (x != y || (!more_x && !more_y)) return {x, y};
  }
}

uint64_t hash_of(std::string_view text) { return XXH64(text.data(), text.size(), /*seed=*/0); }

size_t first_other(const std::vector<std::string>& texts) {
  const auto other = std::find_if(texts.begin(), texts.end(),
                                  [&](const std::string& text) { return text != texts[0]; });
  return other == texts.end() ? 0 : static_cast<size_t>(other - texts.begin());
}

}  // namespace smp::runtime
