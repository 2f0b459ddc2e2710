// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "core/refusal.h"
#include "tools/hosts.h"
#include "tools/job_run.h"
#include "tools/launch.h"
#include "tools/process.h"
#include "tools/restarts.h"

namespace smp::tools {

/// Where a job that is started again finds its places. Uses the given places as long as they are
/// there.
class Places {
 public:
  Places(const LaunchOptions& options, LaunchContext& context, CommandRunner& runner);

  /// Leaves out hosts that do not answer, and takes fewer ranks if the job wants that: on one host
  /// each time, on several where too few answer.
  Restarts::Decision decide(const JobRun& run, Restarts::Decision decision);

  /// The signal to this process that came meanwhile; 0 for none.
  int signal() const { return signal_; }

 private:
  int count() const;
  bool answer(const std::vector<Host>& hosts);
  void look_for_hosts(int places);
  void leave_out_those_that_do_not_answer();
  void wait_for_hosts(int places);
  core::Refusal too_few(int places) const;
  core::Refusal shrink(const JobRun& run);

  const LaunchOptions& options_;
  LaunchContext& context_;
  CommandRunner& runner_;
  const int at_first_;
  int signal_ = 0;
};

}  // namespace smp::tools
