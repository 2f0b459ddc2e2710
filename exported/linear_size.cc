// SPDX-License-Identifier: Apache-2.0
#include "exported/linear_size.h"

#include <cctype>
#include <cerrno>
#include <cstdlib>
#include <utility>
#include <vector>

namespace smp::exported {
namespace {

constexpr int kMaxDepth = 64;

bool add_to(int64_t& sum, int64_t value) { return !__builtin_add_overflow(sum, value, &sum); }

std::optional<LinearSize> sum_of(const std::vector<LinearSize>& parts) {
  LinearSize sum;
  for (const LinearSize& part : parts) {
    if (!add_to(sum.constant, part.constant)) return std::nullopt;
    for (const auto& [symbol, factor] : part.terms) {
      if (!add_to(sum.terms[symbol], factor)) return std::nullopt;
    }
  }
  for (auto term = sum.terms.begin(); term != sum.terms.end();) {
    term = term->second == 0 ? sum.terms.erase(term) : std::next(term);
  }
  return sum;
}

std::optional<LinearSize> scaled(LinearSize size, int64_t factor) {
  if (__builtin_mul_overflow(size.constant, factor, &size.constant)) return std::nullopt;
  if (factor == 0) size.terms.clear();
  for (auto& term : size.terms) {
    if (__builtin_mul_overflow(term.second, factor, &term.second)) return std::nullopt;
  }
  return size;
}

/// One part at most may have symbols.
std::optional<LinearSize> product_of(const std::vector<LinearSize>& parts) {
  LinearSize product;
  product.constant = 1;
  for (const LinearSize& part : parts) {
    const bool is_number = part.terms.empty();
    if (!is_number && !product.terms.empty()) return std::nullopt;
    const auto next = is_number ? scaled(product, part.constant) : scaled(part, product.constant);
    if (!next) return std::nullopt;
    product = *next;
  }
  return product;
}

class Parser {
 public:
  explicit Parser(const std::string& text) : text_(text) {}

  std::optional<LinearSize> parse() {
    auto size = expression(0);
    skip_blanks();
    return at_ == text_.size() ? size : std::nullopt;
  }

 private:
  std::optional<LinearSize> expression(int depth) {
    if (depth > kMaxDepth) return std::nullopt;
    const std::string name = word();
    if (!take('(')) return std::nullopt;
    if (name == "Symbol") return symbol();
    if (name == "Integer") return integer();
    if (name != "Add" && name != "Mul") return std::nullopt;
    std::vector<LinearSize> parts;
    do {
      const auto part = expression(depth + 1);
      if (!part) return std::nullopt;
      parts.push_back(*part);
    } while (take(','));
    if (!take(')')) return std::nullopt;
    return name == "Add" ? sum_of(parts) : product_of(parts);
  }

  /// The part behind the name, `positive=True`, says nothing of its value.
  std::optional<LinearSize> symbol() {
    if (!take('\'')) return std::nullopt;
    const std::string name = word();
    if (name.empty() || !take('\'')) return std::nullopt;
    while (take(',')) {
      if (word().empty() || !take('=') || word().empty()) return std::nullopt;
    }
    if (!take(')')) return std::nullopt;
    return LinearSize{0, {{name, 1}}};
  }

  std::optional<LinearSize> integer() {
    skip_blanks();
    const char* begin = text_.c_str() + at_;
    char* end = nullptr;
    errno = 0;
    const long long value = std::strtoll(begin, &end, 10);
    if (end == begin || errno != 0) return std::nullopt;
    at_ += static_cast<size_t>(end - begin);
    if (!take(')')) return std::nullopt;
    return LinearSize{value, {}};
  }

  std::string word() {
    skip_blanks();
    const size_t begin = at_;
    while (at_ < text_.size() &&
           (std::isalnum(static_cast<unsigned char>(text_[at_])) != 0 || text_[at_] == '_')) {
      ++at_;
    }
    return text_.substr(begin, at_ - begin);
  }

  bool take(char c) {
    skip_blanks();
    if (at_ >= text_.size() || text_[at_] != c) return false;
    ++at_;
    return true;
  }

  void skip_blanks() {
    while (at_ < text_.size() && text_[at_] == ' ') ++at_;
  }

  const std::string& text_;
  size_t at_ = 0;
};

}  // namespace

std::optional<int64_t> LinearSize::evaluate(const Symbols& symbols) const {
  int64_t sum = constant;
  for (const auto& [symbol, factor] : terms) {
    const auto value = symbols.find(symbol);
    int64_t product = 0;
    if (value == symbols.end() || __builtin_mul_overflow(value->second, factor, &product) ||
        !add_to(sum, product)) {
      return std::nullopt;
    }
  }
  return sum;
}

std::optional<std::pair<std::string, int64_t>> LinearSize::solve(const Symbols& symbols,
                                                                 int64_t size) const {
  LinearSize known = *this;
  std::optional<std::pair<std::string, int64_t>> unknown;
  for (const auto& term : terms) {
    if (symbols.count(term.first) > 0) continue;
    if (unknown) return std::nullopt;
    unknown = term;
    known.terms.erase(term.first);
  }
  const auto rest = known.evaluate(symbols);
  if (!unknown || !rest || unknown->second == 0) return std::nullopt;
  int64_t distance = 0;
  if (__builtin_sub_overflow(size, *rest, &distance) || distance == INT64_MIN ||
      distance % unknown->second != 0) {
    return std::nullopt;
  }
  return std::make_pair(unknown->first, distance / unknown->second);
}

std::string LinearSize::to_string() const {
  std::string text;
  for (const auto& [symbol, factor] : terms) {
    if (!text.empty()) text += " + ";
    text += factor == 1 ? symbol : std::to_string(factor) + "*" + symbol;
  }
  if (text.empty()) return std::to_string(constant);
  return constant == 0 ? text : text + " + " + std::to_string(constant);
}

std::optional<LinearSize> parse_linear_size(const std::string& text) {
  return Parser(text).parse();
}

}  // namespace smp::exported
