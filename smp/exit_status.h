// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace smp {

/// The exit status of a program, and then of `smprun`, that has stopped because it was asked to,
/// and can go on later (EX_TEMPFAIL of <sysexits.h>). See `smp::stop_requested`.
constexpr int kPreemptedStatus = 75;

}  // namespace smp
