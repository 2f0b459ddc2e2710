#include "smp/pretrained.h"

#include <memory>

#include "core/check.h"
#include "runtime/runtime.h"
#include "runtime/save/checkpointing.h"
#include "runtime/save/loading.h"
#include "runtime/save/saving.h"
#include "runtime/save/together.h"

namespace smp {
namespace {

/// The model's tensors by the names that the module itself gives them.
std::vector<checkpoint::ExpectedTensor> expected_by(const Runtime& runtime, const ModelCore& model,
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

PretrainedReport load_pretrained(ModelCore& model, const std::string& path,
                                 const PretrainedOptions& options) {
  Runtime& runtime = Runtime::get();
  SMP_CHECK_WITH(UsageError, !runtime.in_step,
                 "smp::load_pretrained was called inside a step function; call it before or after "
                 "the step");
  const auto tensors = tensors_of(runtime, {&model});
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

}  // namespace smp
