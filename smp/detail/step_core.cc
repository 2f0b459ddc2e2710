// SPDX-License-Identifier: Apache-2.0
#include "smp/detail/step_core.h"

#include "runtime/step/step_function.h"

namespace smp::detail {

StepCore::StepCore(const StepOptions& options)
    : function_(std::make_unique<runtime::StepFunction>(options)) {}
StepCore::~StepCore() = default;

StepResults StepCore::run(const StepCall& call) { return function_->run(call); }
void StepCore::check_positions(int count) const { function_->check_positions(count); }
std::string StepCore::program() const { return function_->describe_program(); }
int64_t StepCore::microbatches() const { return function_->microbatches(); }
int64_t StepCore::count_microbatches(const StepCall& call) const {
  return function_->count_microbatches(call);
}
bool StepCore::guards_every_step() const { return function_->guards_every_step(); }

}  // namespace smp::detail
