// SPDX-License-Identifier: Apache-2.0
#include "partitioner/format.h"

#include <fmt/format.h>

#include <vector>

namespace smp::partitioner {
namespace {

/// Four characters of a number below 1000, and its unit.
std::string format_scaled(double number, double step, const std::vector<const char*>& units) {
  size_t unit = 0;
  while (number >= 999.5 && unit + 1 < units.size()) {
    number /= step;
    ++unit;
  }
  const int digits = unit == 0 || number >= 99.95 ? 0 : 1;
  return fmt::format("{:.{}f}{}", number, digits, units[unit]);
}

}  // namespace

std::string format_bytes(int64_t bytes) {
  if (bytes == 0) return "-";
  return format_scaled(static_cast<double>(bytes), 1024, {" B", " KiB", " MiB", " GiB", " TiB"});
}

std::string format_count(int64_t count) {
  if (count == 0) return "-";
  return format_scaled(static_cast<double>(count), 1000, {"", " k", " M", " B"});
}

std::string format_time(double us) {
  if (us < 1e3) return fmt::format("{:.3g} us", us);
  if (us < 1e6) return fmt::format("{:.3g} ms", us / 1e3);
  return fmt::format("{:.3g} s", us / 1e6);
}

}  // namespace smp::partitioner
