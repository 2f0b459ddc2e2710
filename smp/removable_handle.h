// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <utility>

namespace smp {

/// Takes a hook away again.
class RemovableHandle {
 public:
  explicit RemovableHandle(std::function<void()> remove) : remove_(std::move(remove)) {}
  /// Removes the hook; later calls do nothing.
  void remove() {
    if (remove_) std::exchange(remove_, nullptr)();
  }

 private:
  std::function<void()> remove_;
};

}  // namespace smp
