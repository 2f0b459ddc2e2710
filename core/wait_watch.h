// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "core/status.h"

namespace smp::core {

/// A wait of this thread for other ranks, from its first `look` to its end: says so in the status
/// of the rank, and warns, once for all ranks of the job on this host, when it has lasted
/// `stall_seconds`. A wait that is over before a first look costs nothing. One that ends by an
/// error is in the status until the rank's next wait or call, for others that give up at the same
/// time.
class WaitWatch {
 public:
  WaitWatch() = default;
  ~WaitWatch();
  WaitWatch(const WaitWatch&) = delete;
  WaitWatch& operator=(const WaitWatch&) = delete;

  /// The wait in `call` goes on, for `ranks` of the world (one at least). Called some ten times a
  /// second.
  void look(const char* call, const std::vector<int>& ranks);

 private:
  void warn_of_stall();

  Status* const status_ = this_status();
  bool is_told_ = false;
  int exceptions_ = 0;  // under way when it was told
  bool is_warned_of_ = false;
  Status::Clock::time_point since_;
  Status::Clock::time_point next_check_;
};

}  // namespace smp::core
