// SPDX-License-Identifier: Apache-2.0
#include "smp/keyed_random.h"

#include "graph/keyed_random.h"
#include "runtime/step_functions.h"

namespace smp {

class KeyedRandom::Impl : public graph::KeyedRandomScope {
 public:
  using KeyedRandomScope::KeyedRandomScope;
};

KeyedRandom::KeyedRandom(uint64_t seed, std::string_view step_function, uint64_t call,
                         uint64_t microbatch)
    : impl_(std::make_unique<Impl>(
          graph::RandomKey{seed, runtime::stream_of(step_function), call, microbatch})) {}

KeyedRandom::~KeyedRandom() = default;

}  // namespace smp
