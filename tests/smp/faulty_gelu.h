// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/torch.h>

/// A processor that computes something else: in a program that links faulty_gelu.cc, `aten::gelu`
/// and its backward are libtorch's own kernels, of whose results a rank thread can have one bit
/// flipped.
namespace smp::testing {

class GeluFault {
 public:
  enum class Pass { kForward, kBackward };

  /// From now on, of this thread's calls of a pass the `first`-th (counted from 0) gives a result
  /// with another bit; or all from that on. Until the thread ends.
  static void plant(Pass pass, int first, bool stays = false);
  /// Counts this thread's calls anew, and plants nothing.
  static void clear();
  /// How often this thread has called the kernel since.
  static int calls(Pass pass);
};

}  // namespace smp::testing
