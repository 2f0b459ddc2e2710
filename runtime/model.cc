// SPDX-License-Identifier: Apache-2.0
#include "runtime/model.h"

#include <algorithm>
#include <unordered_set>
#include <utility>

#include "comm/communicator.h"
#include "comm/group_core.h"
#include "core/check.h"
#include "dp/gradient_buckets.h"
#include "dp/local_gradients.h"
#include "dp/parameter_pieces.h"
#include "runtime/precision.h"
#include "smp/nn/split_module.h"

namespace smp::runtime {
namespace {

template <class Predicate>
Model::TensorDict those_that(const Model::TensorDict& all, const Predicate& predicate) {
  Model::TensorDict result;
  for (const auto& item : all) {
    if (predicate(item.value())) result.insert(item.key(), item.value());
  }
  return result;
}

void check_partitioned(const Model& model) {
  SMP_CHECK_WITH(UsageError, model.partitioned(),
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

std::vector<checkpoint::NamedTensor> tensors_of(const ParameterTable& table,
                                                const std::vector<Model*>& models) {
  // One set for each model: names of other models may begin alike.
  std::vector<std::unordered_set<const c10::TensorImpl*>> own(models.size());
  for (size_t i = 0; i < models.size(); ++i) {
    for (const auto& dict : {models[i]->named_parameters(), models[i]->named_buffers()}) {
      for (const auto& item : dict) own[i].insert(item.value().unsafeGetTensorImpl());
    }
  }
  const auto is_of = [&](const ParameterTable::Entry& entry, size_t i) {
    return own[i].count(entry.tensor.unsafeGetTensorImpl()) > 0 &&
           entry.name.rfind(models[i]->full_name(""), 0) == 0;
  };
  std::vector<checkpoint::NamedTensor> result;
  for (const auto& entry : table.entries()) {
    bool is_own = false;
    for (size_t i = 0; i < models.size(); ++i) is_own |= is_of(entry, i);
    if (is_own) result.push_back({entry.name, entry.tensor, entry.aliases});
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

/// libtorch leaves out a tensor's second registration in the same module; across modules it lists
/// every name.
Model::TensorDict Model::named_parameters() const { return module_->named_parameters(); }
Model::TensorDict Model::named_buffers() const { return module_->named_buffers(); }
std::vector<at::Tensor> Model::parameters() const { return unique_values(named_parameters()); }
std::vector<at::Tensor> Model::buffers() const { return unique_values(named_buffers()); }

bool Model::is_local(const at::Tensor& tensor) const {
  check_partitioned(*this);
  const auto* entry = runtime_->table().find(tensor);
  return entry != nullptr && runtime_->owns(*entry);
}

Model::TensorDict Model::local(const TensorDict& all) const {
  check_partitioned(*this);
  return those_that(all, [this](const at::Tensor& tensor) { return is_local(tensor); });
}
Model::TensorDict Model::local_named_parameters() const { return local(named_parameters()); }
Model::TensorDict Model::local_named_buffers() const { return local(named_buffers()); }

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

std::shared_ptr<dp::ParameterPieces> Model::pieces() {
  if (pieces_ != nullptr || !partitioned() || !runtime_->shards_optimizer_state()) return pieces_;
  auto trained = trained_parameters();
  std::vector<std::string> names;
  for (const at::Tensor& tensor : trained) names.push_back(runtime_->table().at(tensor).name);
  pieces_ = std::make_shared<dp::ParameterPieces>(std::move(trained), std::move(names),
                                                  runtime_->replicas(), bucket_bytes());
  runtime_->table().set_pieces(pieces_, runtime_->topology().pieces());
  return pieces_;
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
  if (const auto divided = pieces()) return std::make_shared<dp::GradientBuckets>(divided, options);
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

bool Model::is_distributed_parameter(const at::Tensor& parameter) const {
  const auto* entry = runtime_->table().find(parameter);
  return entry != nullptr && entry->is_divided();
}

Model::TensorDict Model::parameters_that_are(bool distributed) const {
  return those_that(named_parameters(), [&](const at::Tensor& tensor) {
    return is_distributed_parameter(tensor) == distributed;
  });
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
