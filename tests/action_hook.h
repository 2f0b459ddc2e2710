// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <functional>
#include <utility>

#include "pipeline/observer.h"

namespace smp::testing {

/// Calls a function, if it has one, when an action begins in the steps that it looks at
/// (`runtime::Execution::observers`).
struct ActionHook final : pipeline::Observer {
  using Function = std::function<void(const pipeline::Action& action)>;

  explicit ActionHook(Function called = nullptr) : function(std::move(called)) {}

  void on_begin(size_t /*index*/, const pipeline::Action& action) override {
    if (function) function(action);
  }

  Function function;
};

}  // namespace smp::testing
