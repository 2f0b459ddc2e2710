// SPDX-License-Identifier: Apache-2.0
#include "smp/pretrained.h"

#include <memory>

#include "checkpoint/pretrained.h"
#include "core/check.h"
#include "core/status.h"
#include "runtime/runtime.h"
#include "runtime/save/loading.h"
#include "runtime/save/saving.h"
#include "runtime/together.h"
#include "runtime/update/average.h"
#include "smp/model_core.h"

namespace smp {
namespace {

using runtime::assign;
using runtime::expected_by;
using runtime::load_values;
using runtime::Runtime;
using runtime::together;

}  // namespace

PretrainedReport load_pretrained(const std::string& path, const ModelCore& core,
                                 const PretrainedOptions& options) {
  const core::CallScope here("smp::load_pretrained");
  runtime::Model& model = core.impl();
  Runtime& runtime = Runtime::get();
  SMP_CHECK_WITH(UsageError, !runtime.current_step.is_running,
                 "smp::load_pretrained was called inside a step function; call it before or after "
                 "the step");
  check_no_average_in_use(model, "smp::load_pretrained");
  const auto tensors = runtime::tensors_of(runtime.table(), {&model});
  std::shared_ptr<const checkpoint::PretrainedPlan> plan;
  together(*runtime.world(), [&] {
    plan = std::make_shared<checkpoint::PretrainedPlan>(
        std::make_shared<checkpoint::PretrainedFiles>(path),
        expected_by(runtime.table(), model, tensors), options);
    return "";
  });
  load_values(runtime, [&] {
    for (size_t i = 0; i < tensors.size(); ++i) {
      if (!plan->has(i)) continue;
      const auto& entry = runtime.table().at(tensors[i].tensor);
      assign(entry, runtime.rank(), [plan, i] { return plan->read(i); });
    }
  });
  return plan->report();
}

PretrainedReport load_pretrained(const std::string& path, torch::nn::Module& module,
                                 const PretrainedOptions& options) {
  return checkpoint::load_pretrained(module, path, options);
}

void save_pretrained(const std::string& folder, const ModelCore& core, const NameMap& names) {
  const core::CallScope here("smp::save_pretrained");
  runtime::save_pretrained(folder, core.impl(), names);
}

void save_pretrained(const std::string& folder, const torch::nn::Module& module,
                     const NameMap& names) {
  checkpoint::save_pretrained(module, folder, names);
}

}  // namespace smp
