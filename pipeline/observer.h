// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>

#include "pipeline/action.h"

namespace smp::pipeline {

/// Looks at a step as a rank runs it, on the thread that runs it. Observers are named before the
/// step, and see all of its actions in the order of the rank's list.
class Observer {
 public:
  virtual ~Observer() = default;
  virtual void on_step_begin() {}
  /// The `index`-th action of the list begins, or has been done.
  virtual void on_begin(size_t /*index*/, const Action& /*action*/) {}
  virtual void on_end(size_t /*index*/, const Action& /*action*/) {}
  /// Between both, where the action reads divided parameters: they are there.
  virtual void on_gathered() {}
  virtual void on_step_end() {}
};

}  // namespace smp::pipeline
