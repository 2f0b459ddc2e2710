// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "smp/detail/step_call.h"
#include "smp/export.h"
#include "smp/step_options.h"

namespace smp::runtime {
class StepFunction;
}  // namespace smp::runtime

namespace smp::detail {

/// The part of `Step` that does not depend on its function's type.
class SMP_API StepCore {
 public:
  /// Throws `UsageError` before `smp::init` and for options without meaning.
  explicit StepCore(const StepOptions& options);
  ~StepCore();

  /// Runs a call: collective over the ranks (each replica its own pipeline).
  StepResults run(const StepCall& call);

  /// Throws `UsageError` where the options name an argument that a call with `count` does not have.
  void check_positions(int count) const;

  /// The most microbatches of a call, and into how many the tensors of one are cut.
  int64_t microbatches() const;
  int64_t count_microbatches(const StepCall& call) const;
  /// See `Step::program`.
  std::string program() const;
  /// False if the configuration's `guard` lets some calls pass without running the function.
  bool guards_every_step() const;

 private:
  std::unique_ptr<runtime::StepFunction> function_;
};

}  // namespace smp::detail
