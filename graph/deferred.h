// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/arg.h>

#include <cstdint>
#include <memory>

namespace smp::graph {

/// Options of deferred construction.
struct DeferredOptions {
  /// Tensors of at most so many bytes are made at once: computations of constructors on the host (a
  /// schedule of rates, a table of indices, `torch::tensor(list)`) just work.
  TORCH_ARG(int64_t, eager_bytes) = 16 << 10;
  /// Random operators on larger tensors are not run to learn where they leave the generator; they
  /// will be keyed by name (`Recording::assign_seeds`).
  TORCH_ARG(bool, fast) = false;
};

/// While it lives, tensors that this thread makes on the CPU get their sizes, strides and type but
/// no data: the operators called are recorded (`Recording`) and run when the data is needed.
///
/// Constructors need no care. Views, in-place operators, copies (`clone`, `set_data`) and custom
/// initialisation are recorded. Code that reads data (`item`) gets the right values: they are
/// computed for the occasion. Random operators are run once on temporary memory, one at a time, so
/// that the default generator is always where plain construction would have it. Only data that is
/// accessed behind the dispatcher's back (accessors, data_ptr) must be small: above `eager_bytes`
/// it throws.
///
/// A scope that begins while tensors of an earlier one are still without data goes on recording
/// where that one ended. Scopes nest; the innermost one's options count.
class DeferredScope {
 public:
  explicit DeferredScope(DeferredOptions options = {});
  ~DeferredScope();
  DeferredScope(const DeferredScope&) = delete;
  DeferredScope& operator=(const DeferredScope&) = delete;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace smp::graph
