// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>

namespace smp::partitioner {

/// "1.5 KiB": at most four characters and the unit; "-" for nothing.
std::string format_bytes(int64_t bytes);

/// "12.3 M": at most four characters and the unit; "-" for nothing.
std::string format_count(int64_t count);

/// "1.2 ms": three digits and the unit.
std::string format_time(double us);

}  // namespace smp::partitioner
