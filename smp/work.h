// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>

#include "smp/export.h"

namespace smp {

/// A communication under way. Copies of its pointer share the operation. Tensors given to the
/// operation are kept alive until it is complete, and must not be touched before `wait()` has
/// returned.
class SMP_API Work {
 public:
  virtual ~Work() = default;

  /// True once the operation is complete or has failed. Never blocks; makes progress.
  virtual bool test() = 0;

  /// Blocks until complete. Gives the core away while it waits. Throws `TimeoutError` after the
  /// group's time-out and `CommError` when a peer has failed or the job was aborted; the message
  /// names the operation and the peer.
  virtual void wait() = 0;
};

using WorkPtr = std::shared_ptr<Work>;

/// Work that calls `next` once, in `wait()`, when `work` is complete.
SMP_API WorkPtr then(WorkPtr work, std::function<void()> next);

}  // namespace smp
