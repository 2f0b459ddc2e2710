// SPDX-License-Identifier: Apache-2.0
#include "runtime/parameters/sharding.h"

#include <c10/util/flat_hash_map.h>

#include <algorithm>
#include <map>
#include <set>
#include <unordered_set>
#include <utility>

#include "core/check.h"
#include "graph/leaf.h"
#include "graph/visit.h"

namespace smp::runtime {
namespace {

using graph::ValueKind;

/// Which divided parameters each operator reads, directly or through views.
std::vector<std::vector<size_t>> find_uses(const graph::Graph& graph,
                                           const std::vector<int64_t>& parameter_of) {
  std::vector<std::vector<size_t>> uses(graph.operators.size());
  for (size_t i = 0; i < graph.operators.size(); ++i) {
    graph::for_each_argument(graph.operators[i], [&](graph::ValueId id) {
      if (parameter_of[id] < 0) return;
      const auto parameter = static_cast<size_t>(parameter_of[id]);
      if (std::count(uses[i].begin(), uses[i].end(), parameter) == 0) {
        uses[i].push_back(parameter);
      }
    });
  }
  return uses;
}

class ShardedResidency final : public graph::ParameterResidency {
 public:
  ShardedResidency(const Sharding& sharding, const graph::Graph& graph,
                   const std::vector<int64_t>& parameter_of, int microbatches)
      : parameters_(sharding.parameters()),
        window_(sharding.window()),
        trains_(graph.trains()),
        uses_(find_uses(graph, parameter_of)),
        held_(microbatches) {
    for (size_t i = 0; i < uses_.size(); ++i) {
      forward_order_.insert(forward_order_.end(), uses_[i].begin(), uses_[i].end());
      is_leaf_.push_back(graph::is_leaf(graph.operators[i].handle));
    }
    backward_order_.assign(forward_order_.rbegin(), forward_order_.rend());
    for (size_t p = 0; p < parameters_->size(); ++p) {
      index_of_[parameters_->parameter(p).storage().unsafeGetStorageImpl()] = p;
    }
  }

  void begin(Pass pass, int microbatch) override {
    pass_ = pass;
    microbatch_ = static_cast<size_t>(microbatch);
    observed_.clear();
    std::vector<size_t> order = pass == Pass::kForward ? forward_order_ : backward_order_;
    const std::vector<size_t> then = after_pass();
    order.insert(order.end(), then.begin(), then.end());
    window_->expect(std::move(order));
  }

  void end(Pass pass, int) override {
    if (pass == Pass::kBackward) {
      window_->release(std::exchange(held_[microbatch_], {}));
      backward_order_ = std::move(observed_);
    }
    window_->expect(after_pass());
  }

  bool concerns(int index) const override { return !uses_[index].empty(); }

  void before(int index) override { acquire(uses_[index]); }

  void after(int index) noexcept override {
    if (trains_ && is_leaf_[index]) {
      auto& held = held_[microbatch_];
      held.insert(held.end(), uses_[index].begin(), uses_[index].end());
    } else {
      window_->release(uses_[index]);
    }
  }

  void before_read(const at::Tensor& tensor) override {
    const auto parameter = find(tensor);
    if (parameter && !is_held(*parameter)) acquire({*parameter});
  }

  void after_read(const at::Tensor& tensor) noexcept override {
    const auto parameter = find(tensor);
    if (parameter && !is_held(*parameter)) window_->release({*parameter});
  }

 private:
  /// The parameters that are read after the pass under way, most likely.
  std::vector<size_t> after_pass() const {
    if (pass_ == Pass::kForward && trains_) return backward_order_;
    const bool is_last = microbatch_ + 1 == held_.size();
    return is_last ? std::vector<size_t>() : forward_order_;
  }

  void acquire(const std::vector<size_t>& parameters) {
    if (pass_ == Pass::kBackward) {
      observed_.insert(observed_.end(), parameters.begin(), parameters.end());
    }
    window_->acquire(parameters);
  }

  std::optional<size_t> find(const at::Tensor& tensor) const {
    if (!tensor.defined() || !tensor.has_storage()) return std::nullopt;
    const auto found = index_of_.find(tensor.storage().unsafeGetStorageImpl());
    return found == index_of_.end() ? std::nullopt : std::optional(found->second);
  }

  /// Until the microbatch's backward is over.
  bool is_held(size_t parameter) const {
    const auto& held = held_[microbatch_];
    return std::find(held.begin(), held.end(), parameter) != held.end();
  }

  const std::shared_ptr<dp::ShardedParameters> parameters_;
  const std::shared_ptr<dp::ParameterWindow> window_;
  const bool trains_;
  const std::vector<std::vector<size_t>> uses_;  // uses by operator
  std::vector<bool> is_leaf_;                    // whether each operator is one
  std::vector<size_t> forward_order_;
  std::vector<size_t> backward_order_;
  std::vector<size_t> observed_;           // in the backward under way
  std::vector<std::vector<size_t>> held_;  // leaf modules' by microbatch
  ska::flat_hash_map<const c10::StorageImpl*, size_t> index_of_;
  Pass pass_ = Pass::kForward;
  size_t microbatch_ = 0;
};

}  // namespace

Sharding::Sharding(Runtime& runtime,
                   const std::function<void(const ParameterTable::Entry&)>& prepare) {
  const Config& config = runtime.config();
  const auto degree = static_cast<int>(config.sharded_data_parallel_degree());
  const auto replicas = runtime.replicas();
  const auto split = [&](const char* name, const core::Axis& axis) {
    const std::vector<int> members = core::Axes{{axis}}.members(replicas->rank());
    return replicas->split(members, c10::str(name, members));
  };
  const auto [shards, same_shard] = core::Axis{1, replicas->size()}.split(degree);
  replication_group_ = split("replication group", same_shard);
  parameters_ = std::make_shared<dp::ShardedParameters>(split("shards", shards));
  for (const auto& entry : runtime.table().entries()) {
    prepare(entry);
    const bool divides = entry.is_parameter() &&
                         entry.tensor.numel() >= config.sdp_param_persistence_threshold() &&
                         dp::ShardedParameters::is_divisible(entry.tensor) &&
                         !entry.shares_storage_in(runtime.table());
    if (divides) parameters_->add(entry.tensor, entry.name);
  }
  runtime.table().set_slices(parameters_, runtime.topology().pieces(),
                             /*are_shards=*/true);
  window_ = std::make_shared<dp::ParameterWindow>(parameters_, config.sdp_max_live_parameters());
}

std::vector<int64_t> Sharding::parameters_of_values(const Runtime& runtime,
                                                    const graph::Graph& graph) const {
  std::map<int, int64_t> of_alias_set;
  for (const graph::Value& value : graph.values) {
    if (value.kind != ValueKind::kParameter) continue;
    if (const auto index = runtime.table().at(value.name).shard()) {
      of_alias_set[value.alias_set] = static_cast<int64_t>(*index);
    }
  }
  std::vector<int64_t> result;
  for (const graph::Value& value : graph.values) {
    const auto found = of_alias_set.find(value.alias_set);
    result.push_back(found == of_alias_set.end() ? -1 : found->second);
  }
  return result;
}

std::shared_ptr<graph::ParameterResidency> make_residency(const Runtime& runtime,
                                                          const graph::Graph& graph,
                                                          int microbatches) {
  const Sharding& sharding = *runtime.sharding();
  return std::make_shared<ShardedResidency>(
      sharding, graph, sharding.parameters_of_values(runtime, graph), microbatches);
}

std::vector<size_t> gradient_order(const Runtime& runtime, const graph::Graph& graph,
                                   const std::vector<graph::ValueId>& values) {
  const auto parameter_of = runtime.sharding()->parameters_of_values(runtime, graph);
  std::set<size_t> wanted;
  for (graph::ValueId id : values) {
    if (parameter_of[id] >= 0) wanted.insert(static_cast<size_t>(parameter_of[id]));
  }
  std::vector<size_t> order;
  for (const auto& uses : find_uses(graph, parameter_of)) {
    for (size_t parameter : uses) {
      if (wanted.erase(parameter) > 0) order.push_back(parameter);
    }
  }
  order.insert(order.end(), wanted.begin(), wanted.end());  // where the backward begins
  // A gradient is complete when the backward has passed the first use.
  std::reverse(order.begin(), order.end());
  return order;
}

}  // namespace smp::runtime
