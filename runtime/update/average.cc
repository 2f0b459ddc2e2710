// SPDX-License-Identifier: Apache-2.0
#include "runtime/update/average.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_lerp.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <exception>
#include <nlohmann/json.hpp>

#include "checkpoint/apply.h"
#include "comm/communicator.h"
#include "core/check.h"
#include "core/text.h"
#include "dp/replica_state.h"
#include "runtime/parameters/dividing.h"
#include "runtime/parameters/whole.h"
#include "runtime/update/divided_states.h"
#include "runtime/update/master_weights.h"

namespace smp::runtime {
namespace {

using Pieces = std::vector<std::shared_ptr<dp::ParameterPieces>>;

/// How replicas divide parameters, with pieces that share the parameters' memory.
Pieces bound_pieces(const Runtime& runtime) {
  Pieces all = pieces_of(runtime);
  for (const auto& pieces : all) pieces->bind();
  return all;
}

/// A tensor with the strides of `target` for an average of it, which has the values of `source`.
at::Tensor begun(const at::Tensor& target, const at::Tensor& source) {
  const bool is_half = MasterWeights::concerns(target);
  const auto dtype = is_half ? at::kFloat : target.scalar_type();
  return at::empty_like(target, at::TensorOptions().dtype(dtype)).copy_(source);
}

}  // namespace

Average::Average(Model& model, std::shared_ptr<Optimizer> optimizer, std::string name, double decay)
    : model_(model),
      optimizer_(std::move(optimizer)),
      name_(std::move(name)),
      decay_(decay),
      runtime_(Runtime::get_shared()) {
  SMP_CHECK_WITH(UsageError, 0 <= decay && decay < 1,
                 "smp::Ema: expected a decay of at least 0 and below 1, got ", decay,
                 ". It is the share of the average that an update leaves, such as 0.999");
  checkpoint::check_field_name("smp::Ema", name_, checkpoint::average_field);
  for (const Average* other : model.averages) {
    SMP_CHECK_WITH(UsageError, other->name() != name_, "smp::Ema: the model has an average \"",
                   core::printable(name_),
                   "\" already. Give each a name of its own: smp::EmaOptions().name(...)");
  }
  model_.averages.push_back(this);
}

Average::~Average() {
  hook_.remove();
  auto& all = model_.averages;
  all.erase(std::remove(all.begin(), all.end(), this), all.end());
}

/// Checks a call of the user's.
void Average::begin(const char* call) const {
  SMP_CHECK_WITH(UsageError, !runtime_->current_step.is_running, call,
                 " was called inside a step function; call it before or after the step");
  SMP_CHECK_WITH(UsageError, runtime_->partitioned(), call,
                 " was called before the first step, which divides the parameters among the ranks. "
                 "Call it later; smp::load with LoadOptions().average(\"",
                 core::printable(name_), "\") gives a model averaged values before");
  check_no_average_in_use(model_, call);
  check_pieces_unwritten(*runtime_);
}

/// The model's parameters that this rank owns, but those of integers.
std::vector<const ParameterTable::Entry*> Average::averaged() const {
  std::vector<const Entry*> result;
  for (const checkpoint::NamedTensor& named : tensors_of(runtime_->table(), {&model_})) {
    const Entry& entry = runtime_->table().at(named.name);
    const bool is_number = named.tensor.is_floating_point() || named.tensor.is_complex();
    if (entry.is_parameter() && is_number && runtime_->owns(entry)) result.push_back(&entry);
  }
  return result;
}

void Average::update() {
  begin("ema.update()");
  const OwnUse parameters(*runtime_);
  const at::NoGradGuard no_grad;
  take_loaded();
  bound_pieces(*runtime_);
  std::vector<at::Tensor> averages, sources;
  for (const Entry* entry : averaged()) {
    const at::Tensor target = entry->updated();
    if (!target.defined()) continue;
    const at::Tensor source = (optimizer_ ? optimizer_->updated(entry->tensor) : target).detach();
    at::Tensor& average = averages_[entry->name];
    if (!average.defined()) {
      average = begun(target, source);
    } else if (average.scalar_type() != source.scalar_type()) {
      average.lerp_(source.to(average.scalar_type()), 1 - decay_);  // one copy at a time
    } else {
      averages.push_back(average);
      sources.push_back(source);
    }
  }
  if (!averages.empty()) at::_foreach_lerp_(averages, sources, 1 - decay_);
  ++updates_;
}

void Average::begin_use() {
  begin("ema.averaged()");
  const OwnUse parameters(*runtime_);
  is_in_use_ = true;
  if (updates_ == 0) return;
  try {
    give_to_parameters();
  } catch (...) {
    end_use();
    throw;
  }
}

void Average::give_to_parameters() {
  const at::NoGradGuard no_grad;
  take_loaded();
  const Pieces all = bound_pieces(*runtime_);
  std::map<const dp::ParameterPieces*, std::vector<bool>> changed;
  for (const Entry* entry : averaged()) {
    if (entry->piece) {
      auto& flags = changed[entry->piece->pieces.get()];
      flags.resize(entry->piece->pieces->parameters().size());
      flags[entry->piece->index] = true;
    }
    const at::Tensor target = entry->updated();
    // The whole where replicas have it, so that to give it back no rank needs another.
    const at::Tensor own = entry->shard() ? target : entry->tensor;
    if (own.defined()) own_.emplace_back(own, own.detach().clone());
    const auto average = averages_.find(entry->name);
    if (average != averages_.end()) target.detach().copy_(average->second);
  }
  for (const auto& pieces : all) {
    const auto found = changed.find(pieces.get());
    if (found != changed.end()) pieces->all_gather(found->second);
  }
}

void Average::end_use() noexcept {
  try {
    const at::NoGradGuard no_grad;
    const OwnUse parameters(*runtime_);
    for (const auto& [own, values] : own_) own.detach().copy_(values);
  } catch (const std::exception& error) {
    runtime_->fail(error);
  }
  own_.clear();
  is_in_use_ = false;
}

OptimizerState::Param Average::param_of(std::vector<int64_t> shape,
                                        const at::Tensor& tensor) const {
  return {std::move(shape), {{checkpoint::average_field(name_), tensor}}, ""};
}

OptimizerState Average::local_state() {
  if (updates_ == 0) return {};
  const at::NoGradGuard no_grad;
  take_loaded();
  OptimizerState state;
  if (loaded_) {
    for (const Entry* entry : averaged()) {
      const at::Tensor whole = loaded_(entry->name);
      if (!whole.defined()) continue;
      const at::Tensor tensor = entry->part().cut(whole, runtime_->rank());
      state.params[entry->name] = param_of(tensor.sizes().vec(), tensor);
    }
    return state;
  }
  for (const auto& [name, average] : averages_) {
    state.params[name] = param_of(average.sizes().vec(), average);
  }
  join_states(*runtime_, {}, runtime_->topology().pieces(), state);
  return state;
}

void Average::load(int64_t updates, Read read) {
  updates_ = updates;
  averages_.clear();
  loaded_ = nullptr;
  hook_.remove();
  if (updates == 0) return;
  loaded_ = std::move(read);
  hook_ = model_.register_post_partition_hook([this] { take_loaded(); });  // now, if that is over
}

/// Cuts loaded values to this rank's part, once that is settled.
void Average::take_loaded() {
  if (!loaded_ || !runtime_->partitioned()) return;
  const at::NoGradGuard no_grad;
  pieces_of(*runtime_);  // which divides the parameters, if nothing has
  std::map<std::string, at::Tensor> averages;
  for (const Entry* entry : averaged()) {
    const at::Tensor target = entry->updated();
    if (!target.defined()) continue;
    const at::Tensor values = loaded_(entry->name);
    if (!values.defined()) continue;
    averages[entry->name] = begun(target, entry->sharding.cut(values, runtime_->rank()));
  }
  averages_ = std::move(averages);
  loaded_ = nullptr;
}

void Average::take_of(const comm::CommunicatorPtr& replicas, int root) {
  const at::NoGradGuard no_grad;
  take_loaded();
  nlohmann::json outline = {{"updates", updates_}, {"parameters", nlohmann::json::array()}};
  for (const auto& [name, average] : averages_) outline["parameters"].push_back(name);
  outline = nlohmann::json::parse(comm::broadcast_bytes(*replicas, outline.dump(), root));
  std::map<std::string, at::Tensor> averages;
  std::vector<at::Tensor> tensors;
  for (const auto& item : outline.at("parameters")) {
    const auto name = item.get<std::string>();
    const at::Tensor& own = averages_[name];
    const at::Tensor& parameter = runtime_->table().at(name).tensor;
    tensors.push_back(own.defined() ? own : begun(parameter, parameter));
    averages[name] = tensors.back();
  }
  dp::broadcast_in_chunks(std::move(tensors), replicas, root);
  averages_ = std::move(averages);
  updates_ = outline.at("updates").get<int64_t>();
}

std::vector<Average*> averages_of(const std::vector<Model*>& models) {
  std::vector<Average*> result;
  for (const Model* model : models) {
    result.insert(result.end(), model->averages.begin(), model->averages.end());
  }
  return result;
}

void check_no_average_in_use(const Model& model, const std::string& call) {
  for (const Average* average : model.averages) {
    SMP_CHECK_WITH(UsageError, !average->is_in_use(), call,
                   " was called while the parameters have the values of average \"",
                   core::printable(average->name()),
                   "\". End the block of ema.averaged() first, which gives them back their own");
  }
}

void check_no_average_in_use(const std::vector<std::shared_ptr<Model>>& models,
                             const std::string& call) {
  for (const auto& model : models) check_no_average_in_use(*model, call);
}

}  // namespace smp::runtime
