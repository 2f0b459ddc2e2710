// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

/// Training of models that users run, on a device other than the CPU, compared with plain libtorch
/// on that device. A program links the suite (models_suite.cc) with a device (parity_suite.h) and
/// with this.
namespace smp::testing {

/// How large the models are, and which of them the device can compute.
struct ModelSizes {
  int64_t layers, width, heads, length;  ///< sizes of the GPT; a multiple of `heads` wide
  int64_t channels, side;                ///< sizes of the images; an even side
  bool casts;                            ///< the device has autocast
  bool convolves;                        ///< the device has convolutions
};

ModelSizes sizes();

}  // namespace smp::testing
