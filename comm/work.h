#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <memory>

namespace smp::comm {

/// A communication under way. Copies share the operation. Tensors given to the operation are
/// kept alive until it is complete, and must not be touched before `wait()` has returned.
class Work {
 public:
  virtual ~Work() = default;

  /// True once the operation is complete or has failed. Never blocks; makes progress.
  virtual bool test() = 0;

  /// Blocks until complete. Gives the core away while it waits. Throws `TimeoutError` after the
  /// communicator's time-out and `CommError` when a peer has failed or the communicator was
  /// aborted; the message names the operation and the peer.
  virtual void wait() = 0;
};

using WorkPtr = std::shared_ptr<Work>;

}  // namespace smp::comm
