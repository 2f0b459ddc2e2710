// SPDX-License-Identifier: Apache-2.0
#include "tools/train/order.h"

#include <algorithm>
#include <utility>

namespace smp::tools::train {
namespace {

constexpr uint64_t kStride = 0x9e3779b97f4a7c15;

/// SplitMix64's function of its state, a bijection.
uint64_t mix(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
  z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
  return z ^ (z >> 31);
}

}  // namespace

std::vector<int64_t> order_of(int64_t count, uint64_t seed, uint64_t epoch) {
  const uint64_t start = mix(mix(seed) + epoch);
  std::vector<std::pair<uint64_t, int64_t>> keys;
  keys.reserve(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) {
    keys.emplace_back(mix(start + (static_cast<uint64_t>(i) + 1) * kStride), i);
  }
  std::sort(keys.begin(), keys.end());
  std::vector<int64_t> order;
  order.reserve(keys.size());
  for (const auto& key : keys) order.push_back(key.second);
  return order;
}

}  // namespace smp::tools::train
