// SPDX-License-Identifier: Apache-2.0
#include "smp/model_core.h"

#include <torch/nn/module.h>

#include <algorithm>
#include <mutex>
#include <utility>

#include "core/check.h"
#include "core/log.h"
#include "core/status.h"
#include "runtime/model.h"
#include "runtime/runtime.h"
#include "runtime/session/model_calls.h"
#include "runtime/update/complete_gradients.h"
#include "smp/keyed_random.h"

namespace smp {

using runtime::unique_values;

ModelCore::ModelCore(std::shared_ptr<torch::nn::Module> module, const ModelOptions& options)
    : model_(std::make_shared<runtime::Model>(std::move(module), options,
                                              runtime::Runtime::get_shared())) {
  runtime::Runtime::get().add_model(model_);
}

void ModelCore::backward(const at::Tensor& loss) const { runtime::backward(*model_, {loss}, {}); }
void ModelCore::backward(const std::vector<at::Tensor>& tensors,
                         const std::vector<at::Tensor>& gradients) const {
  runtime::backward(*model_, tensors, gradients);
}

std::vector<at::Tensor> ModelCore::parameters() const { return model_->parameters(); }
std::vector<at::Tensor> ModelCore::buffers() const { return model_->buffers(); }
ModelCore::TensorDict ModelCore::named_parameters() const { return model_->named_parameters(); }
ModelCore::TensorDict ModelCore::named_buffers() const { return model_->named_buffers(); }

std::vector<at::Tensor> ModelCore::local_parameters() const {
  return unique_values(local_named_parameters());
}
ModelCore::TensorDict ModelCore::local_named_parameters() const {
  return model_->local_named_parameters();
}
std::vector<at::Tensor> ModelCore::local_buffers() const {
  return unique_values(local_named_buffers());
}
ModelCore::TensorDict ModelCore::local_named_buffers() const {
  return model_->local_named_buffers();
}
std::vector<at::Tensor> ModelCore::local_virtual_parameters() const {
  return virtual_named_parameters().values();
}
ModelCore::TensorDict ModelCore::virtual_named_parameters() const {
  return runtime::virtual_named_parameters(*model_);
}

std::vector<std::shared_ptr<torch::nn::Module>> ModelCore::local_modules() const {
  return local_named_modules().values();
}
torch::OrderedDict<std::string, std::shared_ptr<torch::nn::Module>> ModelCore::local_named_modules()
    const {
  return modules_that([this](const at::Tensor& tensor) { return model_->is_local(tensor); });
}

ModelCore::TensorDict ModelCore::state_dict(bool gather_to_rank0) const {
  const core::CallScope here("model->state_dict", "smp::state_dict");
  return runtime::state_dict(*model_, gather_to_rank0);
}
ModelCore::TensorDict ModelCore::local_state_dict() const {
  return runtime::local_state_dict(*model_);
}
void ModelCore::load_state_dict(const TensorDict& state, bool strict,
                                bool same_partition_load) const {
  const core::CallScope here("model->load_state_dict", "smp::load_state_dict");
  if (same_partition_load) {
    runtime::load_local_state_dict(*model_, state, strict);
  } else {
    runtime::load_state_dict(*model_, state, strict);
  }
}

void ModelCore::train(bool on) const { module_ptr()->train(on); }
void ModelCore::eval() const { module_ptr()->eval(); }
bool ModelCore::is_training() const { return module_ptr()->is_training(); }
void ModelCore::zero_grad() const { runtime::zero_grad(*model_); }

void ModelCore::to(at::Device device) const {
  SMP_CHECK_WITH(UsageError, !partitioned(), "model->to(", device,
                 ") was called after partitioning. Move the module before it is wrapped, or gather "
                 "it with model->cpu()");
  static std::once_flag warned;
  std::call_once(warned, [&] {
    core::log_warning(
        c10::str("model->to(", device, ") is ignored; move the module before it is wrapped"));
  });
}

void ModelCore::cpu() const {
  const core::CallScope here("model->cpu", "smp::model->cpu");
  runtime::gather_on_cpu(*model_);
}

bool ModelCore::is_distributed_parameter(const at::Tensor& parameter) const {
  return model_->is_distributed_parameter(parameter);
}

torch::OrderedDict<std::string, std::shared_ptr<torch::nn::Module>> ModelCore::distributed_modules()
    const {
  return modules_that(
      [this](const at::Tensor& tensor) { return is_distributed_parameter(tensor); });
}

torch::OrderedDict<std::string, std::shared_ptr<torch::nn::Module>> ModelCore::modules_that(
    const std::function<bool(const at::Tensor&)>& holds) const {
  torch::OrderedDict<std::string, std::shared_ptr<torch::nn::Module>> result;
  for (const auto& item : module_ptr()->named_modules()) {
    auto own = item.value()->parameters(/*recurse=*/false);
    const auto buffers = item.value()->buffers(/*recurse=*/false);
    own.insert(own.end(), buffers.begin(), buffers.end());
    if (std::any_of(own.begin(), own.end(), holds)) result.insert(item.key(), item.value());
  }
  return result;
}

ModelCore::TensorDict ModelCore::default_reducer_named_parameters() const {
  return model_->parameters_that_are(/*distributed=*/false);
}
ModelCore::TensorDict ModelCore::scaled_batch_reducer_named_parameters() const {
  return model_->parameters_that_are(/*distributed=*/true);
}
const std::string& ModelCore::tensor_parallelism_report() const {
  return model_->tensor_parallelism_report();
}

bool ModelCore::partitioned() const { return model_->partitioned(); }
const std::string& ModelCore::partition_report() const { return model_->partition_report(); }

RemovableHandle ModelCore::register_post_partition_hook(std::function<void()> hook) const {
  return model_->register_post_partition_hook(std::move(hook));
}
RemovableHandle ModelCore::register_post_step_hook(std::function<void()> hook) const {
  return model_->register_post_step_hook(std::move(hook));
}

void ModelCore::register_comm_hook(CommHook hook) const {
  model_->register_comm_hook(std::move(hook));
}

Join ModelCore::join(const JoinOptions& options) const {
  return runtime::join_replicas(*model_, options);
}

const std::shared_ptr<torch::nn::Module>& ModelCore::module_ptr() const {
  return model_->module_ptr();
}
std::optional<at::ScalarType> ModelCore::half() const { return model_->half(); }
const ModelOptions& ModelCore::options() const { return model_->options(); }

detail::ModelCall::ModelCall(const ModelCore& model, const std::vector<at::Tensor>& inputs) {
  const auto& runtime = runtime::Runtime::get();
  if (runtime.current_step.is_running) return;
  const std::optional<uint64_t> call = runtime::begin_shared_call(model.impl(), inputs);
  if (!call) return;
  random_ = std::make_unique<KeyedRandom>(*runtime.progress.seed, "model(x)", *call,
                                          runtime.replicas()->rank());
}

detail::ModelCall::~ModelCall() = default;

}  // namespace smp
