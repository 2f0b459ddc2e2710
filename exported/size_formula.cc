// SPDX-License-Identifier: Apache-2.0
#include "exported/size_formula.h"

#include <c10/util/StringUtil.h>

#include <algorithm>

namespace smp::exported {
namespace {

constexpr size_t kPoints = 3;  // for a formula of degree 2

bool contains(const std::vector<int64_t>& values, int64_t value) {
  return std::find(values.begin(), values.end(), value) != values.end();
}

/// Sizes to capture at, the given one first. Multiples of it go through the divisions that it goes
/// through. Sizes of one are left out: they broadcast.
std::vector<int64_t> points_in(const SizeGrid::Range& range) {
  std::vector<int64_t> points = {range.given};
  for (int64_t factor = 2; points.size() <= kPoints; ++factor) {
    const int64_t size = range.given * factor;
    if (size > range.most) break;
    points.push_back(size);
  }
  const int64_t least = std::max<int64_t>(range.least, 2);
  for (int64_t size = range.most; points.size() <= kPoints && size >= least; --size) {
    if (!contains(points, size)) points.push_back(size);
  }
  return points;
}

/// Replaces the values of a polynomial at points by its coefficients, beginning with the constant;
/// false where these are no integers.
bool interpolate(const std::vector<int64_t>& points, std::vector<int64_t>& values) {
  const size_t count = points.size();
  for (size_t order = 1; order < count; ++order) {  // Newton's divided differences
    for (size_t i = count; i-- > order;) {
      const int64_t rise = values[i] - values[i - 1];
      const int64_t run = points[i] - points[i - order];
      if (rise % run != 0) return false;
      values[i] = rise / run;
    }
  }
  std::vector<int64_t> coefficients(count, 0);
  for (size_t i = count; i-- > 0;) {  // Horner's scheme: times (x - points[i]), plus values[i]
    for (size_t k = count; k-- > 0;) {
      coefficients[k] = (k > 0 ? coefficients[k - 1] : 0) - points[i] * coefficients[k];
    }
    coefficients[0] += values[i];
  }
  values = std::move(coefficients);
  return true;
}

std::string integer(int64_t value) { return "Integer(" + std::to_string(value) + ")"; }

std::string joined(const std::string& name, const std::vector<std::string>& parts) {
  return parts.size() == 1 ? parts.front() : c10::str(name, "(", c10::Join(", ", parts), ")");
}

}  // namespace

std::string symbol_name(size_t index) { return "s" + std::to_string(index); }

std::optional<int64_t> SizeFormula::constant() const {
  if (terms.empty()) return 0;
  const auto& [exponents, factor] = *terms.begin();
  const bool is_constant = terms.size() == 1 && std::all_of(exponents.begin(), exponents.end(),
                                                            [](int power) { return power == 0; });
  return is_constant ? std::optional(factor) : std::nullopt;
}

int64_t SizeFormula::evaluate(const std::vector<int64_t>& sizes) const {
  int64_t sum = 0;
  for (const auto& [exponents, factor] : terms) {
    int64_t product = factor;
    for (size_t i = 0; i < exponents.size(); ++i) {
      for (int power = 0; power < exponents[i]; ++power) product *= sizes[i];
    }
    sum += product;
  }
  return sum;
}

std::string SizeFormula::to_srepr() const {
  std::vector<std::string> sum;
  for (const auto& [exponents, factor] : terms) {
    std::vector<std::string> product;
    for (size_t i = 0; i < exponents.size(); ++i) {
      for (int power = 0; power < exponents[i]; ++power) {
        product.push_back("Symbol('" + symbol_name(i) + "', positive=True, integer=True)");
      }
    }
    if (factor != 1 || product.empty()) product.insert(product.begin(), integer(factor));
    sum.push_back(joined("Mul", product));
  }
  return sum.empty() ? integer(0) : joined("Add", sum);
}

SizeGrid::SizeGrid(const std::vector<Range>& ranges) {
  std::vector<int64_t> last;
  bool has_more = false;
  for (const Range& range : ranges) {
    points_.push_back(points_in(range));
    last.push_back(points_.back().back());
    if (points_.back().size() <= kPoints) continue;
    points_.back().pop_back();
    has_more = true;
  }
  if (has_more) check_ = std::move(last);
}

size_t SizeGrid::combinations() const {
  size_t count = 1;
  for (const auto& points : points_) count *= points.size();
  return count;
}

size_t SizeGrid::captures() const { return combinations() + (check_ ? 1 : 0); }

std::vector<size_t> SizeGrid::digits(size_t combination) const {
  std::vector<size_t> digits;
  for (const auto& points : points_) {
    digits.push_back(combination % points.size());
    combination /= points.size();
  }
  return digits;
}

std::vector<int64_t> SizeGrid::sizes(size_t capture) const {
  if (capture >= combinations()) return *check_;
  std::vector<int64_t> sizes;
  const auto digits = this->digits(capture);
  for (size_t i = 0; i < points_.size(); ++i) sizes.push_back(points_[i][digits[i]]);
  return sizes;
}

std::string SizeGrid::shown(size_t capture) const {
  return c10::str("(", c10::Join(", ", sizes(capture)), ")");
}

SizeFormula SizeGrid::formula(const std::vector<int64_t>& coefficients) const {
  SizeFormula formula;
  for (size_t i = 0; i < coefficients.size(); ++i) {
    if (coefficients[i] == 0) continue;
    const auto digits = this->digits(i);
    formula.terms[std::vector<int>(digits.begin(), digits.end())] = coefficients[i];
  }
  return formula;
}

/// Interpolates along one dynamic size after the other.
std::optional<SizeFormula> SizeGrid::fit(const std::vector<int64_t>& seen) const {
  std::vector<int64_t> values(seen.begin(), seen.begin() + static_cast<int64_t>(combinations()));
  size_t stride = 1;
  for (const auto& points : points_) {
    for (size_t begin = 0; begin < values.size(); ++begin) {
      if (begin / stride % points.size() != 0) continue;  // no first one along this size
      std::vector<int64_t> line;
      for (size_t k = 0; k < points.size(); ++k) line.push_back(values[begin + k * stride]);
      if (!interpolate(points, line)) return std::nullopt;
      for (size_t k = 0; k < points.size(); ++k) values[begin + k * stride] = line[k];
    }
    stride *= points.size();
  }
  SizeFormula found = formula(values);
  if (check_ && found.evaluate(*check_) != seen.back()) return std::nullopt;
  return found;
}

}  // namespace smp::exported
