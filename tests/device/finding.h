// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdio>
#include <string>

namespace smp::testing {

/// Prints a line "name<TAB>value<TAB>unit", as benches do: a fact about the machine that no test
/// can expect.
inline void print_finding(const std::string& name, const std::string& value, const char* unit) {
  std::printf("%s\t%s\t%s\n", name.c_str(), value.c_str(), unit);
  std::fflush(stdout);
}

}  // namespace smp::testing
