// SPDX-License-Identifier: Apache-2.0
#include "runtime/update/divided_states.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "core/check.h"
#include "runtime/parameters/whole.h"

namespace smp::runtime {
namespace {

using nlohmann::json;

constexpr const char* kScalars = "scalars";
constexpr const char* kFields = "fields";  // the dtype of a field that is divided, text of others

/// A parameter that the ranks along an axis divide.
struct Divided {
  const ParameterTable::Entry* entry;
  comm::Sharding lies;  // sharding by their cut alone

  bool in_pieces() const { return std::holds_alternative<comm::Range>(lies.cuts.back().how); }
};

/// Everything of a state but the elements, which is the same on all ranks that have some.
json describe(const comm::Sharding& sharding, int rank, const OptimizerState::Param& param) {
  const auto sizes = sharding.sizes_of(rank);
  json fields = json::object();
  for (const auto& [field, tensor] : param.tensors) {
    const bool is_divided = tensor.sizes() == at::IntArrayRef(sizes);
    fields[field] = is_divided ? json(static_cast<int>(tensor.scalar_type()))
                               : json(c10::str(tensor.scalar_type(), tensor.sizes()));
  }
  return {{kScalars, optim::parse_fields(param.scalars)}, {kFields, std::move(fields)}};
}

/// Refuses fields that replicas cannot put together.
void check_elementwise(const std::string& name, const json& state) {
  for (const auto& [field, text] : state[kFields].items()) {
    SMP_CHECK_WITH(UsageError, text.is_number(),
                   "cannot save the optimizer's state of parameter \"", name,
                   "\": with \"shard_optimizer_state\" each of its tensors has an element for each "
                   "of the parameter's, but \"",
                   field, "\" is ", text.get<std::string>(),
                   ". Keep it as a number, or set \"shard_optimizer_state\" to false");
  }
}

/// The descriptions of the states of divided parameters, by name; the same on all ranks of a group,
/// and so are the errors.
json agree_on_states(comm::Communicator& group, int rank, const std::vector<Divided>& divided,
                     const OptimizerState& state) {
  json mine = json::object();
  for (const auto& [entry, lies] : divided) {
    const auto found = state.params.find(entry->name);
    if (found != state.params.end()) mine[entry->name] = describe(lies, rank, found->second);
  }
  json merged = json::object();
  std::vector<json> all;
  for (const auto& text : comm::all_gather_bytes(group, mine.dump())) {
    all.push_back(json::parse(text));
    merged.update(all.back());
  }
  for (const Divided& parameter : divided) {
    const auto& [entry, lies] = parameter;
    if (!merged.contains(entry->name)) continue;
    const json& expected = merged[entry->name];
    for (size_t r = 0; r < all.size(); ++r) {
      const int other = lies.cuts.back().over.member(rank, static_cast<int>(r));
      if (c10::multiply_integers(lies.sizes_of(other)) == 0) continue;
      const json got = all[r].value(entry->name, json());
      SMP_CHECK_WITH(UsageError, got == expected, "the optimizer's state of parameter \"",
                     entry->name, "\" differs between ranks that divide it: expected ",
                     expected.dump(), ", rank ", other, " has ",
                     got.is_null() ? "none" : got.dump(),
                     ". Call optimizer.step() on all ranks alike");
    }
    if (parameter.in_pieces()) check_elementwise(entry->name, expected);
  }
  return merged;
}

/// Whether the ranks along an axis divide parameters, perhaps of other stages only.
bool divide_any(const Runtime& runtime, const core::Axis& over) {
  if (over == runtime.topology().axis(CommGroup::kTp)) return runtime.table().any_divided();
  return !slices_of(runtime).empty();
}

/// Adds to `joined` this rank's share of the states of divided parameters.
void join_divided(const Runtime& runtime, const comm::Communicator& group, const json& described,
                  const std::vector<Divided>& divided, const OptimizerState& state,
                  OptimizerState& joined) {
  std::vector<Held> held;
  std::vector<std::string> fields;  // field names, by index in `held`
  for (const Divided& parameter : divided) {
    const auto& [entry, lies] = parameter;
    if (!described.contains(entry->name)) continue;
    const auto found = state.params.find(entry->name);
    const bool has_own = found != state.params.end();
    for (const auto& [field, dtype] : described[entry->name][kFields].items()) {
      if (!dtype.is_number()) continue;
      at::Tensor own = has_own ? found->second.tensors.at(field) : at::Tensor();
      // On the host where the device has no room for all wholes.
      if (has_own && !parameter.in_pieces()) own = own.cpu();
      held.push_back({entry, lies, std::move(own), dtype.get<at::ScalarType>(), /*exists=*/true});
      fields.push_back(field);
    }
  }
  for_each_whole(runtime, held, [&](size_t i, const at::Tensor& tensor) {
    joined.params[held[i].entry->name].tensors[fields[i]] = tensor;
  });
  for (const auto& [entry, lies] : divided) {
    if (!described.contains(entry->name)) continue;
    const json& all = described[entry->name];
    const bool has_joined = std::any_of(all[kFields].begin(), all[kFields].end(),
                                        [](const json& dtype) { return dtype.is_number(); });
    if (has_joined ? joined.params.count(entry->name) == 0 : group.rank() > 0) continue;
    OptimizerState::Param& param = joined.params[entry->name];
    param.shape = lies.sizes;
    param.scalars = optim::text_of(all[kScalars]);
    const auto found = state.params.find(entry->name);
    if (found == state.params.end()) continue;
    param.tensors.insert(found->second.tensors.begin(), found->second.tensors.end());
  }
}

}  // namespace

std::string whole_name(const std::string& name) {
  return name.empty() || name.back() != ']' ? name : name.substr(0, name.rfind('['));
}

void cut_states(const Runtime& runtime, OptimizerState& state) {
  at::NoGradGuard no_grad;
  const int rank = runtime.rank();
  for (const auto& entry : runtime.table().entries()) {
    const comm::Sharding& sharding = entry.sharding;
    const size_t cuts = sharding.cuts.size();
    const std::string name = entry.name_on(rank);
    if (auto node =
            entry.slice ? state.params.extract(name) : decltype(state.params)::node_type()) {
      node.key() = entry.name;
      state.params.insert(std::move(node));
      continue;
    }
    const auto found = state.params.find(entry.name);
    if (cuts == 0 || found == state.params.end()) continue;
    if (name.empty()) {
      state.params.erase(found);
      continue;
    }
    const auto cuts_of = [&](at::IntArrayRef sizes) {
      size_t done = 0;
      while (done < cuts && sizes != at::IntArrayRef(sharding.sizes_of(rank, done))) ++done;
      return done;
    };
    OptimizerState::Param& param = found->second;
    SMP_CHECK_WITH(CheckpointError, !entry.slice || cuts_of(param.shape) < cuts,
                   "the saved optimizer state does not fit this optimizer: ", entry.name,
                   ": expected shape ", entry.tensor.sizes(), ", got ",
                   at::IntArrayRef(param.shape));
    for (auto& [field, tensor] : param.tensors) {
      const size_t done = cuts_of(tensor.sizes());
      if (done == cuts) continue;
      tensor = sharding.cut(tensor, rank, done);
      if (entry.slice) tensor = tensor.clone();  // so as to let go of the rest
    }
    param.shape = sharding.sizes_of(rank);
  }
}

void join_states(const Runtime& runtime, const core::Axis& over, OptimizerState& state) {
  at::NoGradGuard no_grad;
  if (!divide_any(runtime, over)) return;
  std::vector<Divided> divided;
  OptimizerState joined{{}, state.groups};
  for (const auto& entry : runtime.table().entries()) {
    if (auto lies = entry.sharding.along(over)) divided.push_back({&entry, *std::move(lies)});
  }
  const auto group = group_along(runtime, over);
  const bool is_first = group->rank() == 0;
  for (const auto& [name, param] : state.params) {
    if (is_first && !runtime.table().at(name).sharding.along(over)) {
      joined.params.emplace(name, param);
    }
  }
  for (auto& of : joined.groups) {
    if (!is_first) of.params.clear();
  }
  const json described = agree_on_states(*group, runtime.rank(), divided, state);
  join_divided(runtime, *group, described, divided, state, joined);
  state = std::move(joined);
}

}  // namespace smp::runtime
