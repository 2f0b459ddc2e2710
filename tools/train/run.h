// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "tools/train/options.h"

namespace smp::tools::train {

/// Trains, on all ranks, and writes the trained model. Returns the exit status: 0, or
/// `kPreemptedStatus` when it was asked to stop and has saved a checkpoint. Throws `smp::Error`.
int run(const Options& options);

}  // namespace smp::tools::train
