// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "comm/collectives.h"
#include "comm/group.h"
#include "comm/messages.h"
#include "comm/world_end.h"

namespace smp::comm {

/// How tensors of devices go from rank to rank (comm/device/device_communicator.h).
struct DeviceTransport {
  /// Over NCCL or not at all; otherwise where it can be used.
  bool only_nccl = false;
  /// NCCL reduces in the order that suits it; otherwise reductions add in rank order there, too.
  bool fast_reductions = false;
};

/// A group of ranks and all that they can do: messages between two of them, collectives of all. A
/// group of one works and moves nothing. All tensors are dense, contiguous CPU tensors of any dtype
/// (checked). Wrong arguments are a `UsageError`.
///
/// Operations go on while their rank computes. An operation whose wait has thrown may still be
/// under way, so the tensors' contents are undefined and the group is of no further use: abort.
class Communicator : public Group,
                     public Messages,
                     public Collectives,
                     public std::enable_shared_from_this<Communicator> {
 public:
  /// Makes a communicator of those ranks of this one whose list is the one given. Collective
  /// over *this* communicator: every rank calls it with its own group, whose members all pass the
  /// same list (ascending ranks of this communicator, the caller's among them).
  virtual std::shared_ptr<Communicator> split(const std::vector<int>& members,
                                              const std::string& name) = 0;

  /// Sets the transport of communicators for devices that are made over this one; a split inherits
  /// it. All ranks set the same.
  virtual void set_device_transport(const DeviceTransport& transport) = 0;
  virtual DeviceTransport device_transport() const = 0;

  /// Lets go of devices when the world ends.
  virtual const std::shared_ptr<WorldEnd>& world_end() const = 0;
};

using CommunicatorPtr = std::shared_ptr<Communicator>;

/// Gathers byte strings of any lengths; element r is rank r's. Collective and blocking.
std::vector<std::string> all_gather_bytes(Communicator& group, const std::string& bytes);

/// Returns `root`'s byte string on every rank. Collective and blocking.
std::string broadcast_bytes(Communicator& group, const std::string& bytes, int root);

}  // namespace smp::comm
