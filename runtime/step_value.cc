// SPDX-License-Identifier: Apache-2.0
#include "runtime/step_value.h"

#include <ATen/ops/full.h>

#include <utility>
#include <vector>

#include "core/check.h"
#include "runtime/runtime.h"

namespace smp::runtime {

StepValue::StepValue(double value) : value_(at::full({}, value, at::kFloat)) {}

std::shared_ptr<StepValue> StepValue::make(double value) {
  const std::shared_ptr<StepValue> made(new StepValue(value));
  if (Runtime::exists()) Runtime::get().step_inputs.values.add(made);
  return made;
}

double StepValue::get() const { return static_cast<double>(value_.item<float>()); }

void StepValue::set(double value) { value_.fill_(value); }

at::Tensor StepValue::tensor() const {
  if (placeholder_.defined()) return placeholder_;
  SMP_CHECK_WITH(UsageError, !Runtime::exists() || !Runtime::get().current_step.is_running,
                 "a loss scale was used in a step function that began without it. Make the "
                 "GradScaler after smp::init and outside of step functions");
  return value_;
}

detail::StepCall with_step_values(const StepInputs& inputs, at::Device device,
                                  const detail::StepCall& call) {
  const auto values = inputs.values.all();
  detail::StepCall result = call;
  if (values.empty()) return result;
  for (const auto& value : values) {
    // A copy: the value may change while something still holds the input.
    const auto options = at::TensorOptions(at::kFloat).device(device);
    result.tensors.push_back(at::full({}, value->get(), options));
    result.cuts.emplace_back();
    result.places.push_back(-1);
  }
  result.function = [function = call.function, values](int microbatch,
                                                       const std::vector<at::Tensor>& tensors) {
    struct Bound {
      const std::vector<std::shared_ptr<StepValue>>& values;
      ~Bound() {
        for (const auto& value : values) value->placeholder_.reset();
      }
    };
    const size_t first = tensors.size() - values.size();
    const Bound bound{values};
    for (size_t i = 0; i < values.size(); ++i) values[i]->placeholder_ = tensors[first + i];
    return function(microbatch, tensors);
  };
  return result;
}

}  // namespace smp::runtime
