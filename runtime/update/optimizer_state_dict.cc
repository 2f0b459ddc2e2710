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

#include "checkpoint/apply.h"
#include "core/check.h"
#include "dp/bucket_layout.h"
#include "runtime/together.h"
#include "runtime/update/average.h"
#include "runtime/update/complete_gradients.h"
#include "runtime/update/divided_states.h"
#include "runtime/update/optimizer.h"

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
    std::set<std::string> added;  // several ranks' values: the first counts
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

/// An optimizer's parameter that is a model's, too.
struct Known {
  size_t group;
  const ParameterTable::Entry* entry;
};

std::vector<Known> known_parameters(const torch::optim::Optimizer& optimizer,
                                    const Runtime& runtime) {
  std::vector<Known> known;
  for (size_t i = 0; i < optimizer.param_groups().size(); ++i) {
    for (const at::Tensor& parameter : optimizer.param_groups()[i].params()) {
      const auto* entry = runtime.table().find(parameter);
      if (entry != nullptr && entry->is_parameter()) known.push_back({i, entry});
    }
  }
  return known;
}

/// "0, 2".
std::string listed(const std::set<size_t>& numbers) {
  std::string text;
  for (const size_t number : numbers) text += (text.empty() ? "" : ", ") + std::to_string(number);
  return text;
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
  const bool in_parts = runtime_->table().any_divided();
  if (!runtime_->partitioned() && !in_parts) return optim::copy_of(local_state());
  const auto whole = !runtime_->partitioned() ? CommGroup::kTp
                     : divides()              ? CommGroup::kWorld
                     : in_parts               ? CommGroup::kMp
                                              : CommGroup::kPp;
  const auto group = runtime_->group(whole);
  OptimizerState mine;
  // Ranks that have pieces of one part of a parameter, or a stage, together may find that states
  // lie otherwise than said.
  together_as_thrown(*group, [&] { mine = local_state(); });
  together_as_thrown(*group, [&] {
    join_states(*runtime_, fields_, runtime_->topology().axis(CommGroup::kTp), mine);
  });
  return merge(*group, mine);
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
  check_no_average_in_use(runtime_->models(), "optimizer.load_state_dict()");
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
  return runtime_->shards_optimizer_state() || runtime_->parameter_shards() != nullptr;
}

/// Where saved groups and the optimizer's have a parameter, by its name.
struct Optimizer::Groups {
  std::map<std::string, size_t> own, saved;

  /// The names that only `names` have, a line each.
  static std::string only(const std::string& word, const std::map<std::string, size_t>& names,
                          const std::map<std::string, size_t>& others) {
    std::string lines;
    for (const auto& [name, group] : names) {
      if (others.count(name) == 0) lines += c10::str("\n  ", word, ": ", name);
    }
    return lines;
  }

  /// A line for each group that is not one and the same group on the other side; in any order.
  std::string unequal() const {
    std::map<size_t, std::set<size_t>> sources, targets;
    for (const auto& [name, group] : own) {
      const auto found = saved.find(name);
      if (found == saved.end()) continue;
      sources[group].insert(found->second);
      targets[found->second].insert(group);
    }
    std::string lines;
    for (const auto& [group, from] : sources) {
      if (from.size() == 1) continue;
      lines += c10::str("\n  group ", group, ": its parameters were in the groups ", listed(from));
    }
    for (const auto& [group, to] : targets) {
      if (to.size() == 1) continue;
      lines += c10::str("\n  groups ", listed(to), ": their parameters were in one, group ", group);
    }
    return lines;
  }
};

std::set<std::string> Optimizer::parameters() const {
  std::set<std::string> names;
  for (const auto& [group, entry] : known_parameters(optimizer_, *runtime_)) {
    names.insert(entry->name);
  }
  return names;
}

Optimizer::Groups Optimizer::compare_groups(const std::vector<OptimizerState::Group>& saved) const {
  Groups groups;
  for (const auto& [group, entry] : known_parameters(optimizer_, *runtime_)) {
    groups.own.emplace(entry->name, group);
  }
  for (size_t i = 0; i < saved.size(); ++i) {
    for (const std::string& name : saved[i].params) groups.saved.emplace(whole_name(name), i);
  }
  return groups;
}

/// A line for each parameter that has another shape than the state that was saved for it.
std::string Optimizer::other_shapes(const OptimizerState& saved) const {
  std::string lines;
  for (const auto& [group, entry] : known_parameters(optimizer_, *runtime_)) {
    const auto found = saved.params.find(entry->name);
    if (found == saved.params.end()) continue;
    const auto whole = entry->whole_sizes();
    const auto& shape = found->second.shape;
    if (whole == shape || entry->tensor.sizes() == at::IntArrayRef(shape)) continue;
    lines += c10::str("\n  ", entry->name, ": expected shape ", at::IntArrayRef(whole), ", got ",
                      at::IntArrayRef(shape));
  }
  return lines;
}

void Optimizer::check_loadable(const OptimizerState& saved, const std::string& path,
                               bool strict) const {
  std::string problems = other_shapes(saved);
  if (strict) {
    const Groups groups = compare_groups(saved.groups);
    problems += Groups::only("missing", groups.own, groups.saved) +
                Groups::only("unexpected", groups.saved, groups.own) + groups.unequal();
  }
  SMP_CHECK_WITH(CheckpointError, problems.empty(), "checkpoint \"", path,
                 "\" does not fit the optimizer:", problems,
                 "\nNothing was loaded. Build the optimizer as it was when it was saved",
                 strict
                     ? ", or load with strict = false, by which parameters that only one of them "
                       "has are left out, and every group takes what was saved with its "
                       "parameters"
                     : "");
  OptimizerState cut, rehearsal{{}, saved.groups};
  for (const auto& [group, entry] : known_parameters(optimizer_, *runtime_)) {
    const auto found = saved.params.find(entry->name);
    if (found == saved.params.end()) continue;
    auto param = found->second;
    const bool has_part = runtime_->partitioned() && runtime_->owns(entry->name) &&
                          !pieces_.name_of_piece(entry->name).empty();
    if (has_part) cut.params.emplace(entry->name, param);
    param.shape = entry->tensor.sizes().vec();
    param.tensors.erase(checkpoint::kMasterField);
    if (param.tensors.empty() && param.scalars.empty()) continue;
    for (auto& [field, tensor] : param.tensors) {
      tensor = at::empty({0}, tensor.options().device(at::kCPU));
    }
    rehearsal.params.emplace(entry->name, std::move(param));
  }
  cut_states(*runtime_, fields_, cut);
  optim::check_state(optimizer_, rehearsal, parameter_names(*runtime_), state_factory_(optimizer_));
}

/// Checks the parts that are known before the parameters are divided.
void Optimizer::check_fits(const OptimizerState& state) const {
  const Groups groups = compare_groups(state.groups);
  const std::string problems =
      Groups::only("unexpected", groups.saved, groups.own) + other_shapes(state) + groups.unequal();
  SMP_CHECK_WITH(
      CheckpointError, problems.empty(),
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
  for (const auto& [group, entry] : known_parameters(optimizer_, *runtime_)) {
    const std::string piece = wanted(entry->name) ? pieces_.name_of_piece(entry->name) : "";
    if (piece.empty() || known.count(entry->name) > 0 || known.count(piece) > 0) continue;
    missing += "\n  missing: " + piece;
  }
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
  for (const auto& [i, entry] : known_parameters(optimizer_, *runtime_)) {
    const std::string& name = entry->name;
    if (i < groups.size() && known.insert(name).second) groups[i].params.push_back(name);
  }
  return groups;
}

}  // namespace smp::runtime
