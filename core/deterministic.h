// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/util/Exception.h>

namespace smp::core {

/// Names a workspace with which cuBLAS repeats its sums, in an environment variable that is read
/// when a GPU computes its first product, unless it is set: call this before, and before there are
/// threads that read the environment.
void set_deterministic_workspace();

/// Has libtorch take kernels that give the same bits in each run, in this process and from now on:
/// its deterministic algorithms, with which an operator that has none is an error; and cuDNN's,
/// which are not chosen by trial. Throws `ConfigError` unless the environment names a workspace
/// with which cuBLAS repeats its sums (`set_deterministic_workspace`).
void use_deterministic_kernels();

/// Has libtorch take such kernels as long as one of these lives, on whatever thread of the process,
/// and afterwards those that it took before.
class DeterministicKernels {
 public:
  /// Throws as `use_deterministic_kernels` does.
  DeterministicKernels();
  ~DeterministicKernels();
  DeterministicKernels(const DeterministicKernels&) = delete;
  DeterministicKernels& operator=(const DeterministicKernels&) = delete;
};

/// Whether libtorch takes such kernels now.
bool uses_deterministic_kernels();

/// Adds the remedy to libtorch's error about an operator that has no such kernel. Leaves other
/// errors as they are.
void explain_if_not_deterministic(c10::Error& error);

/// Returns the result of `call()`, and explains its errors.
template <class Call>
auto explaining_what_is_not_deterministic(const Call& call) {
  try {
    return call();
  } catch (c10::Error& error) {
    explain_if_not_deterministic(error);
    throw;
  }
}

}  // namespace smp::core
