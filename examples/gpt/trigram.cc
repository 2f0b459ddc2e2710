// SPDX-License-Identifier: Apache-2.0
#include "examples/gpt/trigram.h"

#include <cmath>

namespace gpt {
namespace {

/// The `length` bytes before `position`, as one number.
uint32_t context_before(const std::string& text, size_t position, size_t length) {
  uint32_t context = 0;
  for (size_t i = position - length; i < position; ++i) {
    context = context << 8 | static_cast<unsigned char>(text[i]);
  }
  return context;
}

}  // namespace

TrigramModel::TrigramModel(const std::string& training_text) {
  for (size_t i = 0; i < training_text.size(); ++i) {
    const auto byte = static_cast<unsigned char>(training_text[i]);
    for (size_t length = 0; length < orders_.size() && length <= i; ++length) {
      const uint32_t context = context_before(training_text, i, length);
      Followers& followers = orders_[length].contexts[context];
      followers.total += 1;
      followers.distinct += orders_[length].counts[context << 8 | byte]++ == 0;
    }
  }
}

double TrigramModel::probability(const std::string& text, size_t position) const {
  const auto byte = static_cast<unsigned char>(text[position]);
  double p = 1.0 / 256;
  for (size_t length = 0; length < orders_.size() && length <= position; ++length) {
    const uint32_t context = context_before(text, position, length);
    const auto seen = orders_[length].contexts.find(context);
    if (seen == orders_[length].contexts.end()) break;
    const auto count = orders_[length].counts.find(context << 8 | byte);
    const double matches = count == orders_[length].counts.end() ? 0 : count->second;
    const auto [total, distinct] = seen->second;
    p = (matches + distinct * p) / (static_cast<double>(total) + distinct);
  }
  return p;
}

double TrigramModel::bits_per_byte(const std::string& text) const {
  double bits = 0;
  for (size_t i = 0; i < text.size(); ++i) bits -= std::log2(probability(text, i));
  return bits / static_cast<double>(text.size());
}

}  // namespace gpt
