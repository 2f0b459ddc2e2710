// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "comm/collective.h"
#include "core/public_call.h"

namespace smp::comm {

/// A rank's part where it meets others: the collective that it calls, and the call of the user's
/// that it is in. A value that ranks send each other.
struct Call {
  Signature collective;
  core::PublicCall caller;

  bool matches(const Call& other) const {
    return collective == other.collective && caller.is_of_kind_of(other.caller);
  }
};

/// `collective`, called by this thread.
Call call_of(const Signature& collective);

/// "rank 0 is in smp::save, rank 1 is in call 4 of step function "train". All ranks must ..." where
/// the calls of the user's differ, else "rank 0 called barrier, rank 1 called all_reduce (sum) of 8
/// x Float. All ranks must ..."; empty when all calls match. `calls` are those of `ranks`.
std::string mismatch_text(const std::vector<int>& ranks, const std::vector<Call>& calls);

}  // namespace smp::comm
