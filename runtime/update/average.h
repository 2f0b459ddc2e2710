// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "optim/state_dict.h"
#include "runtime/model.h"
#include "runtime/runtime.h"
#include "runtime/update/optimizer.h"
#include "smp/removable_handle.h"

namespace smp::runtime {

/// An exponential moving average of a model's parameters, which lies on the ranks as an optimizer's
/// state does: for the values of each parameter that this rank updates, in float32 where that is of
/// half precision. A checkpoint has it as a tensor of the parameter's state,
/// `checkpoint::average_field(name)`, and under `checkpoint::kAverages` the number of its updates.
/// Belongs to the rank's thread. Internal.
///
/// Until the first update it equals the parameters, and takes no memory.
class Average {
 public:
  /// Gives the whole average of a parameter; undefined where there is none.
  using Read = std::function<at::Tensor(const std::string& parameter)>;

  /// Averages masters where `optimizer`, unless null, has them. The model must outlive this, and
  /// all ranks make the same averages in the same order. Throws `UsageError` for a decay that is
  /// none, and for a name that is none or that another average of the model has.
  Average(Model& model, std::shared_ptr<Optimizer> optimizer, std::string name, double decay);
  ~Average();
  Average(const Average&) = delete;
  Average& operator=(const Average&) = delete;

  /// Throws `UsageError` in a step function, before the first step and while the average is in use.
  void update();
  /// Gives the parameters the average's values until `end_use`. Throws as `update`; after any error
  /// they have their own. Collective over the replicas with `shard_optimizer_state`.
  void begin_use();
  /// Gives them back their own. Not collective. An error is this rank's failure.
  void end_use() noexcept;
  bool is_in_use() const { return is_in_use_; }

  const std::string& name() const { return name_; }
  /// How often it was updated.
  int64_t updates() const { return updates_; }
  Model& model() const { return model_; }

  /// Gives the states, with one tensor each, that this rank writes into a checkpoint, as
  /// `Optimizer::local_state` does. Collective over the replicas with `shard_optimizer_state` and
  /// sharded parameters.
  OptimizerState local_state();
  /// Replaces it by one with so many updates, now or, before the first step, when that has divided
  /// the parameters.
  void load(int64_t updates, Read read);
  /// Replaces it by that of replica `root`. Parameters are neither divided among the replicas nor
  /// of half precision. Collective over the replicas.
  void take_of(const comm::CommunicatorPtr& replicas, int root);

 private:
  using Entry = ParameterTable::Entry;

  void begin(const char* call) const;
  std::vector<const Entry*> averaged() const;
  OptimizerState::Param param_of(std::vector<int64_t> shape, const at::Tensor& tensor) const;
  void give_to_parameters();
  void take_loaded();

  Model& model_;
  const std::shared_ptr<Optimizer> optimizer_;
  const std::string name_;
  const double decay_;
  const std::shared_ptr<Runtime> runtime_;
  int64_t updates_ = 0;
  std::map<std::string, at::Tensor> averages_;  // averages by parameter
  Read loaded_;                                 // before partitioning
  RemovableHandle hook_{nullptr};               // takes it
  bool is_in_use_ = false;
  std::vector<std::pair<at::Tensor, at::Tensor>> own_;  // parameters or shards with their values
};

/// The averages of models, model by model, in the order in which they were made.
std::vector<Average*> averages_of(const std::vector<Model*>& models);

/// Throws `UsageError` while a model's parameters have the values of an average. `call` is the
/// user's call, for errors.
void check_no_average_in_use(const Model& model, const std::string& call);
/// The same of several models.
void check_no_average_in_use(const std::vector<std::shared_ptr<Model>>& models,
                             const std::string& call);

}  // namespace smp::runtime
