// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>
#include <type_traits>

#include "smp/export.h"

namespace smp {

/// While it lives, random operators (dropout, randn ...) that this thread calls in plain eager code
/// draw the numbers that they would draw inside a step function: the one of that name (the first
/// one without a name is "step 0"), in its call number `call`, on global microbatch `microbatch`
/// (dp_rank * microbatches + m), under `seed`. For comparing a distributed run with a plain one.
/// Each of them counts, also one with a generator of its own: draw the batch before. On the CPU the
/// default generator is neither read nor written, so other threads may draw from it.
class [[nodiscard]] SMP_API KeyedRandom {
 public:
  KeyedRandom(uint64_t seed, std::string_view step_function, uint64_t call, uint64_t microbatch);
  /// Step functions have names, no numbers: a literal 0 would be a null pointer.
  template <class T, class = std::enable_if_t<std::is_arithmetic_v<T> || std::is_null_pointer_v<T>>>
  KeyedRandom(uint64_t seed, T step_function, uint64_t call, uint64_t microbatch) = delete;
  ~KeyedRandom();
  KeyedRandom(const KeyedRandom&) = delete;
  KeyedRandom& operator=(const KeyedRandom&) = delete;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace smp
