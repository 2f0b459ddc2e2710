// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <unordered_map>

namespace gpt {

/// The classical model that a neural one has to beat: the distribution of a byte given the two
/// before it, counted on a text. Witten-Bell smoothing interpolates it with shorter contexts:
///
///     p(byte | context) = (count(context byte) + T * p(byte | shorter context)) / (N + T)
///
/// where `context` was followed by N bytes of T different values. The shortest context, none at
/// all, falls back on the uniform distribution over 256 bytes; a context never seen is shortened.
class TrigramModel {
 public:
  /// Counts `training_text`.
  explicit TrigramModel(const std::string& training_text);

  /// Probability of `text[position]` given the up to two bytes before it in `text`.
  double probability(const std::string& text, size_t position) const;

  /// Mean of -log2 of the probability of each byte of `text`.
  double bits_per_byte(const std::string& text) const;

 private:
  struct Followers {
    uint32_t total = 0;
    uint32_t distinct = 0;
  };
  /// The followers counted behind contexts of one length; the bytes of a key are context, then
  /// follower.
  struct Order {
    std::unordered_map<uint32_t, Followers> contexts;
    std::unordered_map<uint32_t, uint32_t> counts;
  };

  std::array<Order, 3> orders_;
};

}  // namespace gpt
