// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>

namespace smp::exported {

/// Values of symbols, the sizes that may differ from call to call.
using Symbols = std::map<std::string, int64_t>;

/// A size of an input: a constant plus multiples of symbols, `2*s0 + 1`.
struct LinearSize {
  int64_t constant = 0;
  std::map<std::string, int64_t> terms;  ///< terms by symbol; no zeros

  /// Nothing where a symbol has no value yet, or the result is no int64_t.
  std::optional<int64_t> evaluate(const Symbols& symbols) const;
  /// Where one symbol has no value yet: the value that makes the size `size`, if there is one.
  std::optional<std::pair<std::string, int64_t>> solve(const Symbols& symbols, int64_t size) const;
  /// "2*s0 + 1".
  std::string to_string() const;
};

/// Parses the output of sympy's `srepr`: `Add(Mul(Integer(2), Symbol('s0', integer=True)),
/// Integer(1))`. Nothing for a text that is no linear size.
std::optional<LinearSize> parse_linear_size(const std::string& text);

}  // namespace smp::exported
