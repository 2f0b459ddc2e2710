// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>

#include "runtime/runtime.h"
#include "smp/comm_group.h"

namespace smp::testing {

/// From now on this rank waits for others for `limit` only. A test says so where the awaited event
/// has happened already, so that a short limit is as good as a long one on any machine.
inline void wait_at_most(std::chrono::seconds limit) {
  for (const CommGroup group : {CommGroup::kWorld, CommGroup::kPp, CommGroup::kTp, CommGroup::kRdp,
                                CommGroup::kMp, CommGroup::kDp}) {
    runtime::Runtime::get().group(group)->set_timeout(limit);
  }
}

}  // namespace smp::testing
