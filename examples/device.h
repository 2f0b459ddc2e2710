// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/util/Exception.h>
#include <torch/cuda.h>

#include <string>

/// The device that `--device` of an example names, "cpu" or "cuda", for one of the ranks of a host:
/// they share GPUs where there are too few. Throws where there is none.
inline c10::Device device_of(const std::string& name, int local_rank = 0) {
  if (name == "cpu") return c10::kCPU;
  const auto count = static_cast<int>(torch::cuda::device_count());
  TORCH_CHECK_VALUE(count > 0, "--device ", name, ": expected a GPU, got a machine without one, ",
                    "or a program that is not built for CUDA. Leave --device out, or build for ",
                    "CUDA (docs/cuda.md).");
  return {c10::kCUDA, static_cast<c10::DeviceIndex>(local_rank % count)};
}
