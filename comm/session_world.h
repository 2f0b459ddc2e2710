// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "comm/store/store_communicator.h"

namespace smp::comm {

/// The world of a session: one that ends before its process does, and after which there may be
/// another. It has nothing of the launcher's: neither its variables nor its MPI.
class SessionWorld {
 public:
  /// This process alone.
  static SessionWorld alone();

  /// The processes of a communicator of the program, with their ranks there; collective over it.
  /// They meet by one collective of MPI on this thread, at a store that rank 0 opens, and from then
  /// on talk by shared memory and sockets only: MPI may have any thread level. `problem` is why
  /// this process cannot begin, empty if it can: it comes all the same, so that the others know.
  ///
  /// Throws `UsageError` for a handle that is none; `CommError` and `TimeoutError`, on all ranks,
  /// when one cannot begin or they do not meet within `timeout`.
  static SessionWorld meet(int64_t communicator, std::chrono::milliseconds timeout,
                           const std::string& problem);

  const CommunicatorPtr& world() const { return world_.world; }
  /// The host name of each rank.
  const std::vector<std::string>& hosts() const { return world_.hosts; }

  /// Ends it, and what has objects of devices there. Collective: waits until all ranks have called
  /// it; throws the `CommError` of which final_barrier tells. Returns at once when a rank has
  /// aborted.
  void finish();

 private:
  explicit SessionWorld(StoreWorld world) : world_(std::move(world)) {}

  StoreWorld world_;
};

}  // namespace smp::comm
