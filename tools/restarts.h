// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <optional>
#include <string>

#include "core/restart.h"

namespace smp::tools {

/// What `smprun` does after each failure of its job.
class Restarts {
 public:
  /// Starts the job again `most` times at most; nothing: as often as its `"recovery"` wants.
  /// `one_host`: rank 0 leaves its notes on this host; else it may not see the launcher's folder.
  Restarts(std::optional<int> most, bool one_host) : most_(most), one_host_(one_host) {}

  struct Decision {
    bool again = false;
    std::string text;              ///< a line that says what happens and why; empty: nothing to say
    std::chrono::seconds wait{0};  ///< before the next start
  };

  /// After a failure: `cause` is the launcher's line that names it, `noted` how far the job came
  /// this time, `recovers` whether its `"recovery"` is on. A job that fails twice with one cause at
  /// one step would do so for ever, and ends.
  Decision after(const std::string& cause, const std::optional<core::JobProgress>& noted,
                 bool recovers = false);

  /// What the next start of the job is told.
  core::Restart next() const { return {restarts_, so_far_}; }

 private:
  struct Failed {
    std::string cause;
    std::optional<int64_t> steps;
  };

  std::string why_not(const Failed& now) const;
  bool take(const core::JobProgress& noted);
  std::chrono::seconds waiting_time(bool recovers) const;
  std::string from() const;

  const std::optional<int> most_;
  const bool one_host_;
  int restarts_ = 0;
  int without_progress_ = 0;  // restarts in a row that followed no new checkpoint or copy
  core::JobProgress so_far_;
  std::optional<Failed> last_;
};

}  // namespace smp::tools
