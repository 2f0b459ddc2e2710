// SPDX-License-Identifier: Apache-2.0
// State dictionaries of optimizers: the methods of Optimizer that give and take them.

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "core/check.h"
#include "dp/bucket_layout.h"
#include "runtime/update/complete_gradients.h"
#include "runtime/update/divided_states.h"
#include "runtime/update/optimizer.h"
#include "runtime/update/state_pieces.h"

namespace smp::runtime {
namespace {

using nlohmann::json;

constexpr const char* kState = "state";
constexpr const char* kGroups = "param_groups";
constexpr const char* kTensors = "tensors";

/// A rank's part, without the elements of its tensors.
json describe(const OptimizerState& state) {
  json result = optim::to_json(state);
  result[kTensors] = json::object();
  for (const auto& [key, tensor] : optim::tensors_of(state)) {
    const auto dtype = static_cast<int>(tensor.scalar_type());
    result[kTensors][key] = {{"shape", tensor.sizes().vec()}, {"dtype", dtype}};
  }
  return result;
}

/// The groups of the first rank, with the parameters that any rank has in them.
json merge_groups(const std::vector<json>& parts) {
  json merged = parts.front()[kGroups];
  for (size_t i = 0; i < merged.size(); ++i) {
    std::set<std::string> names;
    for (const json& part : parts) {
      for (const json& name : part[kGroups][i]["params"]) names.insert(name.get<std::string>());
    }
    merged[i]["params"] = names;
  }
  return merged;
}

/// The states that the ranks of a group have, on all of them. Collective.
OptimizerState merge(comm::Communicator& group, const OptimizerState& mine) {
  std::vector<json> parts;
  for (const auto& text : comm::all_gather_bytes(group, describe(mine).dump())) {
    parts.push_back(json::parse(text));
  }
  json merged = {{kGroups, merge_groups(parts)}, {kState, json::object()}};
  const auto own = optim::tensors_of(mine);
  std::map<std::string, at::Tensor> tensors;
  std::vector<WorkPtr> works;
  for (size_t r = 0; r < parts.size(); ++r) {
    std::set<std::string> added;  // what several ranks have is the first one's
    for (const auto& [name, state] : parts[r][kState].items()) {
      if (merged[kState].contains(name)) continue;
      merged[kState][name] = state;
      added.insert(name);
    }
    for (const auto& [key, of] : parts[r][kTensors].items()) {
      if (added.count(key.substr(0, key.rfind('/'))) == 0) continue;
      const auto dtype = static_cast<at::ScalarType>(of["dtype"].get<int>());
      const bool is_mine = group.rank() == static_cast<int>(r);
      tensors[key] = is_mine ? own.at(key).cpu().contiguous().clone()
                             : at::empty(of["shape"].get<std::vector<int64_t>>(), dtype);
      works.push_back(group.async().broadcast(dp::as_real(tensors[key]), static_cast<int>(r)));
    }
  }
  for (const auto& work : works) work->wait();
  return optim::from_parts(merged, tensors);
}

/// Calls body(group, name, parameter) for the optimizer's parameters that are a model's.
template <class Body>
void for_each_named(const torch::optim::Optimizer& optimizer, const Runtime& runtime,
                    const Body& body) {
  const auto names = parameter_names(runtime);
  for (size_t i = 0; i < optimizer.param_groups().size(); ++i) {
    for (const at::Tensor& parameter : optimizer.param_groups()[i].params()) {
      const auto found = names.find(parameter.unsafeGetTensorImpl());
      if (found != names.end()) body(i, found->second, parameter);
    }
  }
}

std::set<std::string> names_in(const OptimizerState& state) {
  std::set<std::string> names;
  for (const auto& group : state.groups) names.insert(group.params.begin(), group.params.end());
  return names;
}

}  // namespace

OptimizerState Optimizer::state_dict() {
  begin_use_of_gradients("optimizer.state_dict()");
  at::NoGradGuard no_grad;
  OptimizerState mine = local_state();
  join_states_of_parts(*runtime_, mine, JoinOn::kAll);
  if (!runtime_->partitioned()) return optim::copy_of(std::move(mine));
  return merge(*runtime_->group(divides() ? CommGroup::kWorld : CommGroup::kPp), mine);
}

OptimizerState Optimizer::local_state_dict(bool gather_if_shard) {
  begin_use_of_gradients("optimizer.local_state_dict()");
  SMP_CHECK_WITH(UsageError, runtime_->partitioned(),
                 "optimizer.local_state_dict() was called before the first step, which divides the "
                 "parameters among the ranks. Call it later, or state_dict()");
  at::NoGradGuard no_grad;
  if (!divides()) return optim::copy_of(local_state());
  if (gather_if_shard) return merge(*runtime_->replicas(), local_state());
  return optim::copy_of(own_part(pieces_.local_state()));
}

void Optimizer::load_state_dict(const OptimizerState& state) {
  begin_use_of_gradients("optimizer.load_state_dict()");
  at::NoGradGuard no_grad;
  check_fits(state);
  load(complete_groups(state), [this, state](const auto& wanted) {
    check_complete(state, wanted);
    std::map<std::string, OptimizerState::Param> params;
    for (const auto& [name, param] : state.params) {
      if (wanted(whole_name(name))) params.emplace(name, param);
    }
    return params;
  });
}

bool Optimizer::divides() const {
  return shards_optimizer_state(*runtime_) || runtime_->sharding() != nullptr;
}

/// What can be said before the parameters are divided.
void Optimizer::check_fits(const OptimizerState& state) const {
  std::map<std::string, at::Tensor> own;
  for_each_named(optimizer_, *runtime_,
                 [&](size_t, const std::string& name, const at::Tensor& parameter) {
                   own.emplace(name, parameter);
                 });
  std::string problems;
  for (const std::string& name : names_in(state)) {
    if (own.count(whole_name(name)) == 0) problems += "\n  unexpected: " + name;
  }
  for (const auto& [name, param] : state.params) {
    const auto found = own.find(name);
    if (found == own.end() || found->second.sizes() == param.shape) continue;
    const auto whole = runtime_->table().at(found->second).whole_sizes();
    if (whole == param.shape) continue;
    problems += c10::str("\n  ", name, ": expected shape ", at::IntArrayRef(whole), ", got ",
                         at::IntArrayRef(param.shape));
  }
  SMP_CHECK_WITH(CheckpointError, problems.empty(),
                 "the state dictionary does not fit the optimizer:", problems,
                 "\nNothing was loaded. Build the optimizer as it was when the dictionary was made");
  if (runtime_->partitioned()) {
    check_complete(state, [this](const std::string& name) { return runtime_->owns(name); });
  }
}

/// Whether the dictionary knows all parameters of the optimizer that this rank needs a state for.
void Optimizer::check_complete(const OptimizerState& state,
                               const std::function<bool(const std::string&)>& wanted) const {
  const std::set<std::string> known = names_in(state);
  std::string missing;
  for_each_named(optimizer_, *runtime_, [&](size_t, const std::string& name, const at::Tensor&) {
    const std::string piece = wanted(name) ? pieces_.name_of_part(name) : "";
    if (piece.empty() || known.count(name) > 0 || known.count(piece) > 0) return;
    missing += "\n  missing: " + piece;
  });
  SMP_CHECK_WITH(CheckpointError, missing.empty(),
                 "the state dictionary does not fit the optimizer:", missing,
                 "\nNothing was loaded. What local_state_dict() gives fits the ranks that it was "
                 "taken from; state_dict() fits any");
}

/// The groups of a dictionary with the names of all parameters of this optimizer: a local one names
/// some.
std::vector<OptimizerState::Group> Optimizer::complete_groups(const OptimizerState& state) const {
  auto groups = state.groups;
  std::set<std::string> known;
  for (auto& group : groups) {
    for (std::string& name : group.params) {
      name = whole_name(name);
      known.insert(name);
    }
  }
  for_each_named(optimizer_, *runtime_, [&](size_t i, const std::string& name, const at::Tensor&) {
    if (i < groups.size() && known.insert(name).second) groups[i].params.push_back(name);
  });
  return groups;
}

}  // namespace smp::runtime
