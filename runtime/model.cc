// SPDX-License-Identifier: Apache-2.0
#include "runtime/model.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <mutex>
#include <unordered_set>

#include "checkpoint/apply.h"
#include "comm/communicator.h"
#include "comm/group_core.h"
#include "core/check.h"
#include "core/log.h"
#include "dp/gradient_buckets.h"
#include "dp/local_gradients.h"
#include "dp/parameter_slices.h"
#include "graph/absent.h"
#include "graph/tracer.h"
#include "runtime/first_difference.h"
#include "runtime/parameters/delayed.h"
#include "runtime/parameters/dividing.h"
#include "runtime/parameters/sharding.h"
#include "runtime/parameters/storage.h"
#include "runtime/parameters/whole.h"
#include "runtime/save/average.h"
#include "runtime/save/loading.h"
#include "runtime/step/agreement.h"
#include "runtime/step/replica_join.h"
#include "runtime/update/loss_scaler.h"
#include "runtime/update/optimizer_pieces.h"
#include "runtime/update/precision.h"
#include "smp/nn/split_module.h"

namespace smp::runtime {
namespace {

/// named_parameters() of libtorch leaves out a tensor's second registration in the same module;
/// across modules it lists every name.
Model::TensorDict named(const torch::nn::Module& module, bool parameters) {
  return parameters ? module.named_parameters() : module.named_buffers();
}

void check_partitioned(const Runtime& runtime) {
  SMP_CHECK_WITH(UsageError, runtime.partitioned(),
                 "local parameters and buffers are known after the first step, which partitions "
                 "the model; use register_post_partition_hook to be called as soon as they are");
}

}  // namespace

std::vector<at::Tensor> unique_values(const Model::TensorDict& dict) {
  std::vector<at::Tensor> result;
  std::unordered_set<const c10::TensorImpl*> seen;
  for (const auto& item : dict) {
    if (seen.insert(item.value().unsafeGetTensorImpl()).second) result.push_back(item.value());
  }
  return result;
}

Model::Model(std::shared_ptr<torch::nn::Module> module, ModelOptions options,
             std::shared_ptr<Runtime> runtime)
    : module_(std::move(module)), options_(std::move(options)), runtime_(std::move(runtime)) {
  SMP_CHECK_WITH(UsageError, module_ != nullptr,
                 "DistributedModel was given an empty module holder; construct the module first");
  half_ = half_type(runtime_->config());
  if (half_) convert_module(*module_, *half_);
}

std::string Model::full_name(const std::string& name) const {
  return options_.name().empty() ? name : options_.name() + "." + name;
}

void Model::add_to(ParameterTable& table) const {
  for (const auto& item : named_parameters()) {
    table.add(graph::ValueKind::kParameter, full_name(item.key()), item.value());
  }
  for (const auto& item : named_buffers()) {
    table.add(graph::ValueKind::kBuffer, full_name(item.key()), item.value());
  }
}

void Model::backward(const std::vector<at::Tensor>& tensors,
                     const std::vector<at::Tensor>& gradients) {
  graph::Tracer* tracer = graph::Tracer::current();
  SMP_CHECK_WITH(UsageError, tracer != nullptr,
                 "model->backward was called outside a step function. Call it inside: auto train = "
                 "smp::step([&](torch::Tensor x) { ...; model->backward(loss); return loss; })");
  const auto scaler = runtime_->step_inputs.loss_scaler.lock();
  tracer->backward(scaler ? scaler->scale(tensors, gradients.empty()) : tensors, gradients);
}

Model::TensorDict Model::named_parameters() const { return named(*module_, true); }
Model::TensorDict Model::named_buffers() const { return named(*module_, false); }
std::vector<at::Tensor> Model::parameters() const { return unique_values(named_parameters()); }
std::vector<at::Tensor> Model::buffers() const { return unique_values(named_buffers()); }

bool Model::is_local(const at::Tensor& tensor) const {
  check_partitioned(*runtime_);
  const auto* entry = runtime_->table().find(tensor);
  return entry != nullptr && runtime_->owns(*entry);
}

Model::TensorDict Model::local(const TensorDict& all) const {
  check_partitioned(*runtime_);
  TensorDict result;
  for (const auto& item : all) {
    if (is_local(item.value())) result.insert(item.key(), item.value());
  }
  return result;
}

Model::TensorDict Model::local_named_parameters() const { return local(named_parameters()); }
Model::TensorDict Model::local_named_buffers() const { return local(named_buffers()); }
Model::TensorDict Model::virtual_named_parameters() {
  take_back_wholes(*runtime_);
  for (const auto& slices : slices_of(*runtime_)) slices->bind();
  TensorDict result;
  std::unordered_set<const c10::TensorImpl*> seen;
  for (const auto& item : local_named_parameters()) {
    if (!seen.insert(item.value().unsafeGetTensorImpl()).second) continue;
    const at::Tensor& tensor = runtime_->table().at(item.value()).updated();
    if (tensor.defined()) result.insert(item.key(), tensor);
  }
  return result;
}

std::vector<at::Tensor> Model::trained_parameters() const {
  std::unordered_set<const c10::TensorImpl*> of_later;
  const auto models = runtime_->models();
  for (auto it = models.rbegin(); it != models.rend() && it->get() != this; ++it) {
    for (const at::Tensor& tensor : (*it)->parameters()) {
      of_later.insert(tensor.unsafeGetTensorImpl());
    }
  }
  std::vector<at::Tensor> result;
  for (const at::Tensor& parameter : parameters()) {
    const bool mine = parameter.requires_grad() &&
                      of_later.count(parameter.unsafeGetTensorImpl()) == 0 &&
                      runtime_->owns(runtime_->table().at(parameter));
    if (mine) result.push_back(parameter);
  }
  return result;
}

int64_t Model::bucket_bytes() const {
  const double own = options_.bucket_cap_mb();
  return static_cast<int64_t>((own > 0 ? own : runtime_->config().bucket_cap_mb()) * (1 << 20));
}

std::shared_ptr<dp::ParameterSlices> Model::slices() {
  if (slices_ != nullptr || !partitioned() || !shards_optimizer_state(*runtime_)) return slices_;
  auto trained = trained_parameters();
  std::vector<std::string> names;
  for (const at::Tensor& tensor : trained) names.push_back(runtime_->table().at(tensor).name);
  slices_ = std::make_shared<dp::ParameterSlices>(std::move(trained), std::move(names),
                                                  runtime_->replicas(), bucket_bytes());
  runtime_->table().set_slices(slices_, runtime_->axis(CommGroup::kRdp), /*are_shards=*/false);
  return slices_;
}

std::shared_ptr<dp::WholeGradients> Model::gradients(const std::vector<at::Tensor>& parameters,
                                                     const dp::BucketOptions& options) {
  const auto same = [](const at::Tensor& a, const at::Tensor& b) { return a.is_same(b); };
  for (auto it = shared_gradients_.begin(); it != shared_gradients_.end();) {
    const auto gradients = it->gradients.lock();
    const auto& held = it->parameters;
    if (gradients == nullptr) {
      it = shared_gradients_.erase(it);
    } else if (it->options.same_sums(options) &&
               std::equal(held.begin(), held.end(), parameters.begin(), parameters.end(), same)) {
      return gradients;
    } else {
      ++it;
    }
  }
  const auto gradients = make_gradients(parameters, options);
  shared_gradients_.push_back({parameters, options, gradients});
  return gradients;
}

std::shared_ptr<dp::WholeGradients> Model::make_gradients(const std::vector<at::Tensor>& parameters,
                                                          const dp::BucketOptions& options) {
  if (const auto divided = slices()) return std::make_shared<dp::GradientBuckets>(divided, options);
  std::vector<std::string> names;
  for (const at::Tensor& tensor : parameters) names.push_back(runtime_->table().at(tensor).name);
  const comm::CommunicatorPtr replicas = runtime_->replicas();
  if (replicas->size() == 1 && !comm_hook_) {
    return std::make_shared<dp::LocalGradients>(parameters, names, replicas, options);
  }
  auto buckets = std::make_shared<dp::GradientBuckets>(parameters, names, replicas, options);
  if (comm_hook_) {
    auto ranks = runtime_->topology().members(CommGroup::kRdp, runtime_->rank());
    buckets->set_hook(comm_hook_, comm::make_public_group(replicas, std::move(ranks)));
  }
  return buckets;
}

void Model::register_comm_hook(CommHook hook) {
  SMP_CHECK_WITH(UsageError, !partitioned(),
                 "DistributedModel: register_comm_hook was called after the first step, when "
                 "buckets had been made. Call it before");
  SMP_CHECK_WITH(UsageError, !comm_hook_,
                 "DistributedModel: register_comm_hook was called twice; a model has one "
                 "communication hook");
  const Config& config = runtime_->config();
  const char* divided = config.shard_optimizer_state() ? "\"shard_optimizer_state\""
                        : config.sharded_data_parallel_degree() > 1
                            ? "\"sharded_data_parallel_degree\" above 1"
                            : nullptr;
  SMP_CHECK_WITH(UsageError, divided == nullptr,
                 "DistributedModel: a communication hook reduces whole gradients, and with ",
                 divided,
                 " a replica gets its part of them only. Leave out the hook or that parameter");
  const int64_t shards = config.gradient_shards();
  SMP_CHECK_WITH(UsageError, shards == 0 || shards == runtime_->replicas()->size(),
                 "DistributedModel: a communication hook is given one sum by each of the ",
                 runtime_->replicas()->size(), " replicas, and \"gradient_shards\" is ", shards,
                 ". Leave it at 0");
  comm_hook_ = std::move(hook);
}

Join Model::join(const JoinOptions& options) {
  begin_outside_step("join");
  if (options.enable()) runtime_->replica_join->check_possible();
  return Join(runtime_->replica_join, options);
}

Model::TensorDict Model::state_dict(bool gather_to_rank0) const {
  begin_outside_step("state_dict");
  std::map<const c10::TensorImpl*, at::Tensor> copies;
  TensorDict result;
  for (const auto& dict : {named_parameters(), named_buffers()}) {
    for (const auto& item : dict) {
      const auto [place, is_new] = copies.try_emplace(item.value().unsafeGetTensorImpl());
      at::Tensor& copy = place->second;
      if (is_new) {
        const auto& entry = runtime_->table().at(item.value());
        copy = gather_to_rank0 ? whole_on_first(*runtime_, entry) : whole_on_all(*runtime_, entry);
      }
      if (copy.defined()) result.insert(item.key(), copy);
    }
  }
  return result;
}

/// The tensors of the model that this rank holds, by name: of divided ones its part or shard.
Model::TensorDict Model::held() const {
  TensorDict result;
  for (const auto& dict : {local_named_parameters(), local_named_buffers()}) {
    for (const auto& item : dict) {
      const auto shard = runtime_->table().at(item.value()).shard();
      result.insert(item.key(),
                    shard ? runtime_->sharding()->parameters()->shard(*shard) : item.value());
    }
  }
  return result;
}

Model::TensorDict Model::local_state_dict() const {
  take_back_wholes(*runtime_);
  const at::NoGradGuard no_grad;
  TensorDict result;
  for (const auto& item : held()) result.insert(item.key(), item.value().detach().clone());
  return result;
}

/// The misfits, one line each: names, sizes (`sizes` says which are expected) and types.
std::string Model::misfits(
    const TensorDict& own, const TensorDict& given, bool strict,
    const std::function<std::vector<int64_t>(const at::Tensor&)>& sizes) const {
  const auto fits = [&](const at::Tensor& value, const at::Tensor& held) {
    if (half_ && value.is_floating_point() && held.is_floating_point()) return true;
    return value.scalar_type() == held.scalar_type();
  };
  std::string problems;
  for (const auto& item : own) {
    const at::Tensor* value = given.find(item.key());
    if (value == nullptr) {
      if (strict) problems += "\n  missing: " + item.key();
      continue;
    }
    const auto expected = sizes(item.value());
    if (value->sizes() != at::IntArrayRef(expected) || !fits(*value, item.value())) {
      problems +=
          c10::str("\n  ", item.key(), ": expected ", item.value().scalar_type(),
                   at::IntArrayRef(expected), ", got ", value->scalar_type(), value->sizes());
    }
  }
  for (const auto& item : given) {
    if (strict && !own.contains(item.key())) problems += "\n  unexpected: " + item.key();
  }
  return problems;
}

void Model::load_state_dict(const TensorDict& state, bool strict) {
  begin_outside_step("load_state_dict");
  check_no_average_in_use(*runtime_, *this, "load_state_dict");
  const TensorDict own = checkpoint::state_dict(*module_);
  const std::string problems = misfits(own, state, strict, [&](const at::Tensor& tensor) {
    return runtime_->table().at(tensor).whole_sizes();
  });
  SMP_CHECK_WITH(
      CheckpointError, problems.empty(), "the state dictionary does not fit the model:", problems,
      "\nNothing was loaded. Pass strict = false to accept missing and unexpected names");
  at::NoGradGuard no_grad;
  ++runtime_->progress.parameter_loads;
  for (const auto& item : own) {
    const at::Tensor* given = state.find(item.key());
    if (given == nullptr) continue;
    assign(*runtime_, item.value(), [given = *given, version = given->_version()] {
      SMP_CHECK_WITH(UsageError, given._version() == version,
                     "load_state_dict: a tensor that was given for a delayed parameter has "
                     "changed before the first step, which needs it. Give a copy");
      return given;
    });
  }
}

void Model::load_local_state_dict(const TensorDict& state, bool strict) {
  if (!partitioned()) {
    // It runs once.
    post_partition_->push_back([this, state, strict] { load_local_state_dict(state, strict); });
    return;
  }
  begin_outside_step("load_state_dict");
  check_no_average_in_use(*runtime_, *this, "load_state_dict");
  const TensorDict own = held();
  const std::string problems =
      misfits(own, state, strict, [](const at::Tensor& tensor) { return tensor.sizes().vec(); });
  SMP_CHECK_WITH(CheckpointError, problems.empty(),
                 "the local state dictionary does not fit what this rank owns:", problems,
                 "\nNothing was loaded here. With same_partition_load, give each rank what its "
                 "local_state_dict() was, in a run with the same partition (partition_file, "
                 "load_partition); state_dict() fits any");
  const at::NoGradGuard no_grad;
  ++runtime_->progress.parameter_loads;
  for (const auto& item : own) {
    const at::Tensor* given = state.find(item.key());
    if (given != nullptr) item.value().detach().copy_(*given);
  }
}

/// Before a call that uses the tensors as this rank holds them.
void Model::begin_outside_step(const char* call) const {
  SMP_CHECK_WITH(UsageError, !runtime_->current_step.is_running, call,
                 " was called inside a step function; call it before or after the step");
  take_back_wholes(*runtime_);
}

void Model::zero_grad() {
  begin_outside_step("zero_grad");
  module_->zero_grad();
  for (const at::Tensor& parameter : parameters()) {
    const auto* entry = runtime_->table().find(parameter);
    // Drops the piece's with it.
    if (entry != nullptr && entry->slice) entry->slice->has_gradient();
  }
}

void Model::cpu() {
  begin_outside_step("cpu");
  check_no_average_in_use(*runtime_, *this, "cpu");
  partitioned() ? gather_from_owners() : materialize(*module_);
  runtime_->lent = std::make_shared<LentWholes>(*runtime_);
  gathered_ = runtime_->lent;
}

void Model::gather_from_owners() {
  at::NoGradGuard no_grad;
  const auto pipeline = runtime_->group(CommGroup::kPp);
  if (runtime_->sharding()) {
    runtime_->sharding()->parameters()->take_back();  // tensors that an earlier call gathered
    runtime_->sharding()->parameters()->lend();
  }
  for (const auto& tensors : {parameters(), buffers()}) {
    for (const at::Tensor& tensor : tensors) {
      const int root = *runtime_->table().at(tensor).owner;
      allocate_data(tensor);
      graph::become_present(tensor);
      const at::Tensor copy = tensor.detach().cpu().contiguous();
      pipeline->broadcast(copy, root);
      if (!copy.is_alias_of(tensor)) tensor.detach().copy_(copy);
    }
  }
}

std::optional<uint64_t> Model::begin_shared_call(const std::vector<at::Tensor>& inputs) {
  if (runtime_->lent && gathered_.lock() == runtime_->lent) return std::nullopt;
  const auto& entries = runtime_->table().entries();
  const bool in_parts = std::any_of(entries.begin(), entries.end(),
                                    [](const auto& entry) { return entry.captured_whole; });
  const bool elsewhere =
      runtime_->topology().pp_size() > 1 || runtime_->config().sharded_data_parallel_degree() > 1;
  SMP_CHECK_WITH(UsageError, !in_parts && !elsewhere,
                 "a DistributedModel was called outside a step function: its parameters lie on "
                 "several ranks. Call it inside smp::step([&](torch::Tensor x) { return "
                 "model(x); }), or gather them by model->cpu()");
  if (!runtime_->table().any_divided()) return std::nullopt;
  SMP_CHECK_WITH(UsageError, partitioned(),
                 "a DistributedModel whose layers are divided among the ranks of a tensor-parallel "
                 "group was called before the first step, which makes what they share alike. Run a "
                 "step function first");
  check_same_inputs(inputs);
  return shared_calls_++;
}

void Model::check_same_inputs(const std::vector<at::Tensor>& inputs) const {
  const auto all =
      comm::all_gather_bytes(*runtime_->group(CommGroup::kTp), std::to_string(hash_inputs(inputs)));
  const size_t other = first_other(all);
  SMP_CHECK_WITH(UsageError, other == 0,
                 "a DistributedModel was called outside a step function with other tensors on tp "
                 "rank ",
                 other,
                 " than on tp rank 0. Its layers are divided among the ranks of a "
                 "tensor-parallel group, which work on one batch together: give all of them the "
                 "same");
}

bool Model::is_distributed_parameter(const at::Tensor& parameter) const {
  const auto* entry = runtime_->table().find(parameter);
  return entry != nullptr && entry->is_divided();
}

Model::TensorDict Model::parameters_that_are(bool distributed) const {
  TensorDict result;
  for (const auto& item : named_parameters()) {
    if (is_distributed_parameter(item.value()) == distributed) {
      result.insert(item.key(), item.value());
    }
  }
  return result;
}

std::vector<std::pair<std::string, nn::ParameterSplit>> Model::split_parameters() const {
  std::vector<std::pair<std::string, nn::ParameterSplit>> result;
  for (const auto& item : module_->named_modules()) {
    const auto* const split_module = dynamic_cast<const nn::SplitModule*>(item.value().get());
    if (split_module == nullptr) continue;
    const std::string path = item.key().empty() ? "" : item.key() + ".";
    for (const auto& [name, split] : split_module->split_parameters()) {
      result.emplace_back(full_name(path + name), split);
    }
  }
  return result;
}

bool Model::partitioned() const { return runtime_->partitioned(); }

const std::string& Model::tensor_parallelism_report() const {
  return runtime_->first_step.tensor_parallelism_report;
}

RemovableHandle Model::add_hook(const std::shared_ptr<Hooks>& hooks, std::function<void()> hook) {
  const auto position = hooks->insert(hooks->end(), std::move(hook));
  // Copies of the handle remove the hook once.
  auto registered = std::make_shared<bool>(true);
  return RemovableHandle([hooks, position, registered] {
    if (std::exchange(*registered, false)) hooks->erase(position);
  });
}

RemovableHandle Model::register_post_partition_hook(std::function<void()> hook) {
  if (partitioned()) hook();
  return add_hook(post_partition_, std::move(hook));
}

RemovableHandle Model::register_post_step_hook(std::function<void()> hook) {
  return add_hook(post_step_, std::move(hook));
}

void Model::run_post_partition_hooks() {
  for (const auto& hook : Hooks(*post_partition_)) hook();
}

void Model::run_post_step_hooks() {
  for (const auto& hook : Hooks(*post_step_)) hook();
}

}  // namespace smp::runtime
