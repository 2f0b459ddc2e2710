// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "comm/communicator.h"

namespace smp::runtime {

/// While ranks work on something that may take hours, they meet every so often, each on a thread of
/// its own: one that is stopped or gone is noticed within the group's time-out, and one that is
/// merely slow keeps the others waiting as long as it takes. From construction to `finish` this
/// rank calls no collective of the group. Internal.
class Attendance {
 public:
  /// Collective, as is `finish`; `group` has all ranks of the world.
  explicit Attendance(comm::Communicator& group);
  /// Without `finish` the ranks cannot talk any more.
  ~Attendance();
  Attendance(const Attendance&) = delete;
  Attendance& operator=(const Attendance&) = delete;

  /// This rank is done. Returns when all are; throws the errors of the waits for them.
  void finish();

 private:
  enum class State { kWorks, kIsDone, kGivesUp };

  void set(State state);
  void attend();
  std::vector<int> meet(bool is_done);

  comm::Communicator& group_;
  const std::chrono::milliseconds period_;
  const void* const served_;  // the server whose waits this thread's are
  std::mutex mutex_;
  std::condition_variable changed_;
  State state_ = State::kWorks;  // guarded by mutex_
  std::exception_ptr error_;     // error of the thread, read when it has ended
  std::thread thread_;
};

}  // namespace smp::runtime
