// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace smp::runtime {

/// The first line in which two texts differ, of each; "(nothing)" where a text has ended. Equal
/// texts give twice "(nothing)".
std::pair<std::string, std::string> first_difference(const std::string& a, const std::string& b);

/// XXH64 of a text, which ranks may compare in its place.
uint64_t hash_of(std::string_view text);

/// The first rank whose text is not rank 0's, of texts by rank; 0 if they are all alike.
size_t first_other(const std::vector<std::string>& texts);

}  // namespace smp::runtime
