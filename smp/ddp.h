#pragma once

/// Data parallelism without a pipeline: `smp::dp::DistributedDataParallel` over all ranks of the
/// program. See docs/data_parallel.md.

#include "dp/distributed_data_parallel.h"
#include "dp/power_sgd.h"
#include "smp/group.h"
#include "smp/init.h"

namespace smp::detail {

/// Makes the ranks of `smp::init` the default replicas. Returns true.
bool serve_data_parallelism();

inline const bool serves_data_parallelism = serve_data_parallelism();

}  // namespace smp::detail
