// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <vector>

/// The order of samples, written apart from that of tools/train.
namespace smp::testing {

/// The order by the generator itself, as Steele, Lea and Flood wrote it down.
class SplitMix64 {
 public:
  explicit SplitMix64(uint64_t state) : state_(state) {}
  uint64_t next() { return finish(state_ += 0x9e3779b97f4a7c15); }
  static uint64_t finish(uint64_t z) {
    z ^= z >> 30;
    z *= 0xbf58476d1ce4e5b9;
    z ^= z >> 27;
    z *= 0x94d049bb133111eb;
    return z ^ z >> 31;
  }

 private:
  uint64_t state_;
};

inline std::vector<int64_t> plain_order(int64_t count, uint64_t seed, uint64_t epoch) {
  SplitMix64 generator(SplitMix64::finish(SplitMix64::finish(seed) + epoch));
  std::map<uint64_t, int64_t> by_key;
  for (int64_t i = 0; i < count; ++i) by_key[generator.next()] = i;
  std::vector<int64_t> order;
  for (const auto& entry : by_key) order.push_back(entry.second);
  return order;
}

}  // namespace smp::testing
