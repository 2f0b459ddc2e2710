// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "graph/intercept.h"
#include "graph/random.h"

namespace smp::graph {

/// While it lives, random operators that this thread calls in plain eager code draw from `key`'s
/// streams, as they would inside a step: the oracle that a single process is compared with.
class KeyedRandomScope : public OperatorInterceptor {
 public:
  explicit KeyedRandomScope(const RandomKey& key) : key_(key), scope_(*this) {}

  void call(const c10::OperatorHandle& op, torch::jit::Stack& stack) override {
    if (is_random(op)) {
      call_seeded(op, stack, stream_seed(key_, ordinal_++));
    } else {
      op.callBoxed(stack);
    }
  }

 private:
  const RandomKey key_;
  uint64_t ordinal_ = 0;
  InterceptScope scope_;
};

}  // namespace smp::graph
