// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <string>

namespace smp::core {

/// `text` if it has at most `most` bytes, else its beginning and how long it is: what a user gave,
/// for an error message.
std::string shortened(const std::string& text, size_t most = 100);

}  // namespace smp::core
