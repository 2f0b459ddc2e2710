// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

/// The version of the format of exported programs that is read and written.
namespace smp::exported {

constexpr int64_t kSchemaMajor = 8;
constexpr int64_t kSchemaMinor = 17;  // that is written; any is read
constexpr int64_t kOpset = 10;

}  // namespace smp::exported
