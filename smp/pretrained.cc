// SPDX-License-Identifier: Apache-2.0
#include "smp/pretrained.h"

#include <memory>

#include "checkpoint/pretrained.h"
#include "core/check.h"
#include "runtime/runtime.h"
#include "runtime/save/loading.h"
#include "runtime/save/saving.h"
#include "runtime/save/together.h"
#include "smp/model_core.h"

namespace smp {
namespace {

using runtime::assign;
using runtime::expect_whole;
using runtime::load_values;
using runtime::Runtime;
using runtime::together;

/// The model's tensors by the names that the module itself gives them.
std::vector<checkpoint::ExpectedTensor> expected_by(const Runtime& runtime,
                                                    const runtime::Model& model,
                                                    std::vector<checkpoint::NamedTensor> tensors) {
  const size_t prefix = model.full_name("").size();
  for (auto& tensor : tensors) {
    tensor.name.erase(0, prefix);
    for (std::string& alias : tensor.aliases) alias.erase(0, prefix);
  }
  auto expected = checkpoint::expectations(tensors);
  expect_whole(runtime, tensors, expected);
  return expected;
}

}  // namespace

PretrainedReport load_pretrained(const std::string& path, const ModelCore& core,
                                 const PretrainedOptions& options) {
  const runtime::Model& model = core.impl();
  Runtime& runtime = Runtime::get();
  SMP_CHECK_WITH(UsageError, !runtime.current_step.is_running,
                 "smp::load_pretrained was called inside a step function; call it before or after "
                 "the step");
  const auto tensors = runtime::tensors_of(runtime, model);
  std::shared_ptr<const checkpoint::PretrainedPlan> plan;
  together(*runtime.world(), [&] {
    plan = std::make_shared<checkpoint::PretrainedPlan>(
        std::make_shared<checkpoint::PretrainedFiles>(path), expected_by(runtime, model, tensors),
        options);
    return "";
  });
  load_values(runtime, [&] {
    for (size_t i = 0; i < tensors.size(); ++i) {
      if (plan->has(i)) assign(runtime, tensors[i].tensor, [plan, i] { return plan->read(i); });
    }
  });
  return plan->report();
}

PretrainedReport load_pretrained(const std::string& path, torch::nn::Module& module,
                                 const PretrainedOptions& options) {
  return checkpoint::load_pretrained(module, path, options);
}

}  // namespace smp
