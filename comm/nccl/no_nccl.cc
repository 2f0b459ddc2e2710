// SPDX-License-Identifier: Apache-2.0
// Replaces nccl_groups.cc in a build without --config=cuda.

#include "comm/nccl/nccl_groups.h"
#include "core/check.h"

namespace smp::comm {

bool has_nccl() { return false; }

std::string nccl_gpu(at::Device /*device*/) { return ""; }

MakeDeviceGroup nccl_groups(const CommunicatorPtr& host) {
  SMP_INTERNAL_ASSERT(false, "NCCL for group '", host->name(), "' in a build without it");
}

}  // namespace smp::comm
