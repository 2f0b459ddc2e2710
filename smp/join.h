// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "smp/ddp_options.h"
#include "smp/export.h"

namespace smp {

namespace dp {
class Joinable;
}  // namespace dp

/// While it lives, replicas may run out of data; see `ModelCore::join` and
/// `DistributedDataParallel::join`.
class [[nodiscard]] SMP_API Join {
 public:
  /// For the library itself.
  Join(std::shared_ptr<dp::Joinable> replica, const JoinOptions& options);
  /// Takes part in the others' communication until their data have ended, too; throws its errors.
  /// Does nothing where an exception is on its way.
  ~Join() noexcept(false);
  Join(const Join&) = delete;
  Join& operator=(const Join&) = delete;

 private:
  const std::shared_ptr<dp::Joinable> replica_;
  const bool enabled_;
  const int exceptions_;
};

}  // namespace smp
