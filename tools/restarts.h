// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <optional>
#include <string>

#include "core/refusal.h"
#include "core/restart.h"

namespace smp::tools {

/// The acts of `smprun` after each failure of its job.
class Restarts {
 public:
  /// Starts the job again `most` times at most; nothing: as often as its `"recovery"` wants.
  /// `one_host`: rank 0 leaves its notes on this host; else it may not see the launcher's folder.
  Restarts(std::optional<int> most, bool one_host) : most_(most), one_host_(one_host) {}

  struct Decision {
    bool again = false;
    std::string text;              ///< a line that tells the event and the reason; empty: nothing
                                   ///< to say
    std::chrono::seconds wait{0};  ///< before the next start
  };

  /// After a failure: `noted` is how far the job came this time, `recovers` whether its
  /// `"recovery"` is on. A job of which three starts in a row have won no step would go on so for
  /// ever, and ends. A step is won by the start that comes further than all before, or from which
  /// the next one can begin further on.
  Decision after(const std::optional<core::JobProgress>& noted, bool recovers = false);

  /// The news for the next start of the job.
  core::Restart next() const { return {restarts_, so_far_}; }

 private:
  bool take(const core::JobProgress& noted);
  void count(const std::optional<core::JobProgress>& noted);
  core::Refusal why_not(bool is_noted) const;
  std::chrono::seconds waiting_time(bool recovers) const;
  std::string from() const;

  const std::optional<int> most_;
  const bool one_host_;
  int restarts_ = 0;
  int without_checkpoint_ = 0;  // starts in a row that left no new checkpoint or copy
  int without_step_ = 0;        // starts in a row that have won no step
  core::JobProgress so_far_;
};

}  // namespace smp::tools
