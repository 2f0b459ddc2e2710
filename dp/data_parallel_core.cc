// SPDX-License-Identifier: Apache-2.0
#include "dp/data_parallel_core.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <unordered_set>
#include <utility>

#include "comm/device/device_communicator.h"
#include "comm/group_core.h"
#include "core/check.h"
#include "dp/comm_errors.h"

namespace smp::dp {
namespace {

using TensorDict = torch::OrderedDict<std::string, at::Tensor>;

/// Each tensor under the first of its names.
std::vector<std::pair<std::string, at::Tensor>> unique(const TensorDict& dict) {
  std::vector<std::pair<std::string, at::Tensor>> result;
  std::unordered_set<const c10::TensorImpl*> seen;
  for (const auto& item : dict) {
    if (item.value().defined() && seen.insert(item.value().unsafeGetTensorImpl()).second) {
      result.emplace_back(item.key(), item.value());
    }
  }
  return result;
}

/// Themselves, not aliases: torch::load gives them other memory.
std::vector<at::Tensor> tensors_of(const TensorDict& dict) {
  std::vector<at::Tensor> result;
  for (const auto& [name, tensor] : unique(dict)) result.push_back(tensor);
  return result;
}

/// A group of the same ranks, used by no one else, for the module's device.
comm::CommunicatorPtr own_group(const comm::CommunicatorPtr& group, at::Device device) {
  std::vector<int> all(group->size());
  for (int rank = 0; rank < group->size(); ++rank) all[rank] = rank;
  return comm::make_device_communicator(group->split(all, "ddp of " + group->name()), device);
}

int64_t bytes_of(double mib) { return static_cast<int64_t>(mib * (1 << 20)); }

}  // namespace

DataParallelCore::DataParallelCore(std::shared_ptr<torch::nn::Module> module,
                                   const DDPOptions& options)
    : Joinable("DistributedDataParallel"), module_(std::move(module)), options_(options) {
  check_module();
  const Group& replicas = options.process_group();
  group_ = own_group(replicas.core().communicator(), module_->parameters().front().device());
  check_replicas();
  buffers_ = std::make_unique<TensorBroadcast>(tensors_of(module_->named_buffers()), group_);
  if (options.init_sync()) take_model_of(0);
  std::vector<at::Tensor> parameters;
  std::vector<std::string> names;
  for (auto& [name, parameter] : unique(module_->named_parameters())) {
    if (!parameter.requires_grad()) continue;
    parameters.push_back(parameter);
    names.push_back(name);
  }
  ReducerOptions reducer;
  reducer.bucket_sizes = {bytes_of(options.first_bucket_cap_mb()),
                          bytes_of(options.bucket_cap_mb())};
  reducer.find_unused_parameters = options.find_unused_parameters();
  reducer.gradient_as_bucket_view = options.gradient_as_bucket_view();
  reducer.static_graph = options.static_graph();
  reducer_ = std::make_unique<Reducer>(std::move(parameters), std::move(names),
                                       comm::make_public_group(group_, replicas.ranks()), reducer);
}

void DataParallelCore::check_module() const {
  const auto parameters = module_->parameters();
  SMP_CHECK_WITH(UsageError,
                 std::any_of(parameters.begin(), parameters.end(),
                             [](const at::Tensor& each) { return each.requires_grad(); }),
                 "DistributedDataParallel was given a module without a parameter that requires a "
                 "gradient, so there is nothing to reduce. Use the module as it is");
  for (const at::Tensor& parameter : parameters) {
    SMP_CHECK_WITH(UsageError, parameter.device() == parameters.front().device(),
                   "DistributedDataParallel: expected all parameters of a replica on one device, "
                   "got ",
                   parameters.front().device(), " and ", parameter.device(),
                   ". Move the module before it is wrapped");
  }
  SMP_CHECK_WITH(UsageError, options_.bucket_cap_mb() > 0 && options_.first_bucket_cap_mb() > 0,
                 "DDPOptions: expected a positive bucket_cap_mb and first_bucket_cap_mb, got ",
                 options_.bucket_cap_mb(), " and ", options_.first_bucket_cap_mb());
  SMP_CHECK_WITH(UsageError, options_.backward_passes_per_step() >= 1,
                 "DDPOptions: expected backward_passes_per_step of 1 or more, got ",
                 options_.backward_passes_per_step());
}

void DataParallelCore::check_replicas() const {
  std::vector<std::pair<std::string, std::string>> lines;
  const auto add = [&](const char* what, const TensorDict& dict) {
    for (const auto& [name, tensor] : unique(dict)) {
      lines.emplace_back(c10::str(what, " ", name), describe_tensor(tensor));
    }
  };
  add("parameter", module_->named_parameters());
  add("buffer", module_->named_buffers());
  const auto option = [&](const char* name, auto value) {
    lines.emplace_back(c10::str("option ", name), c10::str(value));
  };
  option("bucket_cap_mb", options_.bucket_cap_mb());
  option("first_bucket_cap_mb", options_.first_bucket_cap_mb());
  option("find_unused_parameters", options_.find_unused_parameters());
  option("static_graph", options_.static_graph());
  option("broadcast_buffers", options_.broadcast_buffers());
  option("init_sync", options_.init_sync());
  option("backward_passes_per_step", options_.backward_passes_per_step());
  check_same_on_all_ranks(*group_, lines);
}

bool DataParallelCore::broadcasts_now(bool reduces) const {
  return reduces && options_.broadcast_buffers() && module_->is_training() && !buffers_->is_empty();
}

bool DataParallelCore::begin_forward() {
  if (!at::GradMode::is_enabled()) return false;
  reducer_->check_complete();
  reducer_->keep_hooks();
  reduces_ = synchronizes_ && reducer_->local_passes() + 1 >= options_.backward_passes_per_step();
  const bool reduces = reduces_ && (is_joining() || module_->is_training());
  prepare(begin_round(reduces, broadcasts_now(reduces_)));
  return true;
}

void DataParallelCore::end_forward(const std::vector<at::Tensor>& outputs) {
  reducer_->expect_backward(reduces_, outputs);
}

/// Does the replicas' common work before a forward pass.
void DataParallelCore::prepare(const Round& round) {
  reducer_->set_divisor(divisor(round));
  if (round.reduces && reducer_->rebuild_is_due()) reducer_->rebuild(round.first_active);
  if (round.broadcasts) broadcast_buffers(round.first_active);
}

void DataParallelCore::broadcast_buffers(int root) {
  const auto where = [&] {
    return c10::str(" [while DistributedDataParallel gave rank ", root,
                    "'s buffers to all before a forward pass. If the ranks have different numbers "
                    "of batches, drop the surplus or wrap the loop in model.join()]");
  };
  with_where_in_errors(where, [&] { buffers_->run(root); });
}

/// Takes part with zeros.
void DataParallelCore::take_part(const Round& round) {
  prepare(round);
  if (round.reduces) reducer_->reduce_zeros();
}

void DataParallelCore::leave_join() {
  Joinable::leave_join();
  reducer_->set_divisor(group_->size());
}

void DataParallelCore::take_model_of(int root) {
  broadcast_in_chunks(tensors_of(module_->named_parameters()), group_, root);
  buffers_->run(root);
}

}  // namespace smp::dp
