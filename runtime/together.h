// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <exception>
#include <functional>
#include <string>
#include <vector>

#include "comm/communicator.h"

namespace smp::runtime {

/// Calls `action` on each rank of a group and returns the results of all, in their order. If it
/// threw on some, throws one error on every rank, with the same text: a `UsageError` if one of them
/// was, else a `CheckpointError`. For work outside of communication, such as on files: no rank goes
/// on alone, and none waits for a rank that has given up. Collective. Internal.
std::vector<std::string> together(comm::Communicator& group,
                                  const std::function<std::string()>& action);

/// Works like `together`, for work that may take hours: a rank that is stopped meanwhile is noticed
/// within the time-out of the group, which has all ranks of the world. `action` calls none of its
/// collectives. Internal.
std::vector<std::string> together_for_long(comm::Communicator& group,
                                           const std::function<std::string()>& action);

/// Works like `together`, except that an error which all ranks have alike keeps its kind: each
/// throws its own. Internal.
void together_as_thrown(comm::Communicator& group, const std::function<void()>& action);

/// Calls `action`, which communicates. An error in it is this rank's alone, and others wait for it,
/// so the group is aborted. Internal.
void alone(comm::Communicator& group, const std::function<void()>& action);

/// Work on files between messages to and from other ranks, which go on after an error: then nothing
/// more is read or written. Internal.
class FileWork {
 public:
  /// `is_mine`: false on a rank that takes part in the messages only.
  explicit FileWork(bool is_mine = true) : is_mine_(is_mine) {}

  void attempt(const std::function<void()>& action);
  /// Throws the error.
  void finish() const;

 private:
  const bool is_mine_;
  std::exception_ptr failure_;
};

}  // namespace smp::runtime
