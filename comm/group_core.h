// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <vector>

#include "comm/communicator.h"
#include "smp/group.h"

namespace c10d {
class ProcessGroup;
}  // namespace c10d

namespace smp::comm {

/// The core of a public `smp::Group`.
class GroupCore {
 public:
  virtual ~GroupCore() = default;

  /// That of the ranks, at this moment.
  virtual CommunicatorPtr communicator() const = 0;
  /// Numbers of the ranks in the world, ascending.
  virtual std::vector<int> ranks() const = 0;
  /// See `smp::Group`.
  virtual c10::intrusive_ptr<c10d::ProcessGroup> process_group() const = 0;
  /// Throws `UsageError` where `call`, which communicates, must not be made now.
  virtual void check_may_communicate(const char* call) const = 0;
};

/// The ranks of a communicator as a public group, which may communicate at any time. `ranks`: their
/// numbers in the world.
smp::Group make_public_group(CommunicatorPtr communicator, std::vector<int> ranks);

}  // namespace smp::comm
