// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace smp::exported {

/// A size as a function of a program's dynamic sizes: a sum of products of them, `2*s0*s0*s1 + 1`.
struct SizeFormula {
  /// Factors by the exponents of the dynamic sizes, in their order; no zeros.
  std::map<std::vector<int>, int64_t> terms;

  /// The number itself, where it depends on no dynamic size.
  std::optional<int64_t> constant() const;
  int64_t evaluate(const std::vector<int64_t>& sizes) const;
  /// Writes in the form of sympy's `srepr`.
  std::string to_srepr() const;

  bool operator<(const SizeFormula& other) const { return terms < other.terms; }
  bool operator==(const SizeFormula& other) const { return terms == other.terms; }
};

/// The name of a dynamic size in a program.
std::string symbol_name(size_t index);

/// The sizes at which a program is captured, to find out how its numbers depend on them: every
/// combination of a few for each dynamic size, and one more to check the findings.
class SizeGrid {
 public:
  /// Both ends are allowed; `given` is that of the inputs.
  struct Range {
    int64_t given;
    int64_t least;
    int64_t most;
  };

  SizeGrid() = default;
  explicit SizeGrid(const std::vector<Range>& ranges);

  /// How many captures there are. The first has the sizes given.
  size_t captures() const;
  /// The dynamic sizes of a capture.
  std::vector<int64_t> sizes(size_t capture) const;
  /// The same as text: "(2, 16)".
  std::string shown(size_t capture) const;

  /// The formula of a number, of degree 2 at most in each dynamic size; `seen` is by capture.
  /// Nothing where there is none.
  std::optional<SizeFormula> fit(const std::vector<int64_t>& seen) const;

 private:
  size_t combinations() const;
  std::vector<size_t> digits(size_t combination) const;
  SizeFormula formula(const std::vector<int64_t>& coefficients) const;

  std::vector<std::vector<int64_t>> points_;  // points by dynamic size
  std::optional<std::vector<int64_t>> check_;
};

}  // namespace smp::exported
