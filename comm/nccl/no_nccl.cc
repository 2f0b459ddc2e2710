// SPDX-License-Identifier: Apache-2.0
// What a build without --config=cuda has in place of nccl_communicator.cc.

#include "comm/nccl/nccl_communicator.h"
#include "core/check.h"

namespace smp::comm {

bool has_nccl() { return false; }

std::string nccl_gpu(at::Device /*device*/) { return ""; }

CommunicatorPtr make_nccl_communicator(const CommunicatorPtr& /*host*/, at::Device device) {
  SMP_INTERNAL_ASSERT(false, "NCCL for ", device, " in a build without it");
}

}  // namespace smp::comm
