// SPDX-License-Identifier: Apache-2.0
// State dictionaries of optimizers: the methods of Optimizer that give and take them.

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <map>
#include <nlohmann/json.hpp>
#include <optional>
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

constexpr const char* kTensors = "tensors";

/// A rank's part, without the elements of its tensors.
std::string text_of(const OptimizerState& state) {
  json result = optim::to_json(state);
  result[kTensors] = json::object();
  for (const auto& [key, tensor] : optim::tensors_of(state)) {
    const auto dtype = static_cast<int>(tensor.scalar_type());
    result[kTensors][key] = {{"shape", tensor.sizes().vec()}, {"dtype", dtype}};
  }
  return result.dump();
}

/// The inverse, with tensors that have no elements.
OptimizerState outline_of(const std::string& text) {
  const json described = json::parse(text);
  std::map<std::string, at::Tensor> tensors;
  for (const auto& [key, of] : described[kTensors].items()) {
    const auto dtype = static_cast<at::ScalarType>(of["dtype"].get<int>());
    tensors[key] = at::empty(of["shape"].get<std::vector<int64_t>>(),
                             at::TensorOptions(dtype).device(at::kMeta));
  }
  return optim::from_parts(described, tensors);
}

/// The states that the ranks of a group have, on all of them, with the groups of the first rank, in
/// which the parameters are that any rank has there. Collective.
OptimizerState merge(comm::Communicator& group, const OptimizerState& mine) {
  OptimizerState merged;
  std::vector<WorkPtr> works;
  const auto texts = comm::all_gather_bytes(group, text_of(mine));
  for (int r = 0; r < group.size(); ++r) {
    OptimizerState theirs = outline_of(texts[r]);
    if (r == 0) merged.groups = theirs.groups;
    for (size_t i = 0; i < merged.groups.size(); ++i) {
      std::set<std::string> names(theirs.groups[i].params.begin(), theirs.groups[i].params.end());
      names.insert(merged.groups[i].params.begin(), merged.groups[i].params.end());
      merged.groups[i].params.assign(names.begin(), names.end());
    }
    for (auto& [name, param] : theirs.params) {
      if (merged.params.count(name) > 0) continue;  // several ranks' values: the first counts
      for (auto& [field, tensor] : param.tensors) {
        tensor = group.rank() == r
                     ? mine.params.at(name).tensors.at(field).cpu().contiguous().clone()
                     : at::empty(tensor.sizes(), tensor.scalar_type());
        works.push_back(group.async().broadcast(dp::as_real(tensor), r));
      }
      merged.params.emplace(name, std::move(param));
    }
  }
  for (const auto& work : works) work->wait();
  return merged;
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

/// The parameter of which a name is that of a piece (`Entry::name_on`), if it is one.
std::optional<std::string> whole_name(const std::string& piece,
                                      const std::set<std::string>& parameters) {
  const size_t range = piece.rfind('[');
  if (range == std::string::npos || piece.find(':', range) == std::string::npos) return {};
  const std::string whole = piece.substr(0, range);
  if (parameters.count(whole) == 0) return {};
  return whole;
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
  return optim::copy_of(pieces_.local_state());
}

/// A dictionary that was given. One by pieces may come before the first step, which makes these.
struct Optimizer::Dictionary {
  OptimizerState state;                                 // its groups name parameters
  std::map<std::string, std::set<std::string>> pieces;  // names of those that it has, by parameter

  Dictionary(const OptimizerState& given, const Runtime& runtime) : state(given) {
    const auto parameters = names_of_parameters(runtime);
    const auto name_of = [&](const std::string& name) {
      if (parameters.count(name) > 0) return name;
      const auto whole = whole_name(name, parameters);
      if (whole) pieces[*whole].insert(name);
      return whole.value_or(name);
    };
    for (const auto& [name, param] : given.params) name_of(name);
    for (auto& group : state.groups) {
      for (std::string& name : group.params) name = name_of(name);
    }
  }

  bool has_piece(const std::string& parameter, const std::string& piece) const {
    const auto found = pieces.find(parameter);
    return found != pieces.end() && found->second.count(piece) > 0;
  }
};

void Optimizer::load_state_dict(const OptimizerState& state) {
  begin_use_of_gradients("optimizer.load_state_dict()");
  check_no_average_in_use(runtime_->models(), "optimizer.load_state_dict()");
  at::NoGradGuard no_grad;
  const Dictionary given(state, *runtime_);
  check_fits(given);
  load(complete_groups(given.state), [this, given](const auto& wanted) {
    check_complete(given, wanted);
    std::map<std::string, OptimizerState::Param> params;
    for (const std::string& name : parameters()) {
      if (!wanted(name)) continue;
      const std::string piece = pieces_.name_of_piece(name);
      const auto found = given.state.params.find(given.has_piece(name, piece) ? piece : name);
      if (found != given.state.params.end()) params.emplace(name, found->second);
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
    for (const std::string& name : saved[i].params) groups.saved.emplace(name, i);
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
void Optimizer::check_fits(const Dictionary& given) const {
  const Groups groups = compare_groups(given.state.groups);
  const std::string problems = Groups::only("unexpected", groups.saved, groups.own) +
                               other_shapes(given.state) + groups.unequal();
  SMP_CHECK_WITH(
      CheckpointError, problems.empty(),
      "the state dictionary does not fit the optimizer:", problems,
      "\nNothing was loaded. Build the optimizer as it was when the dictionary was made");
  if (runtime_->partitioned()) {
    check_complete(given, [this](const std::string& name) { return runtime_->owns(name); });
  }
}

/// Whether the dictionary knows all parameters of the optimizer that this rank needs a state for.
void Optimizer::check_complete(const Dictionary& given,
                               const std::function<bool(const std::string&)>& wanted) const {
  const std::set<std::string> known = names_in(given.state);
  std::string missing;
  for (const auto& [group, entry] : known_parameters(optimizer_, *runtime_)) {
    const std::string piece = wanted(entry->name) ? pieces_.name_of_piece(entry->name) : "";
    const bool is_other =
        given.pieces.count(entry->name) > 0 && !given.has_piece(entry->name, piece);
    if (piece.empty() || (known.count(entry->name) > 0 && !is_other)) continue;
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
  for (const auto& group : groups) known.insert(group.params.begin(), group.params.end());
  for (const auto& [i, entry] : known_parameters(optimizer_, *runtime_)) {
    const std::string& name = entry->name;
    if (i < groups.size() && known.insert(name).second) groups[i].params.push_back(name);
  }
  return groups;
}

}  // namespace smp::runtime
