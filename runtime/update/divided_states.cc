// SPDX-License-Identifier: Apache-2.0
#include "runtime/update/divided_states.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <cstddef>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>
#include <vector>

#include "checkpoint/safetensors.h"
#include "core/check.h"
#include "runtime/parameters/whole.h"

namespace smp::runtime {
namespace {

using nlohmann::json;

constexpr const char* kScalars = "scalars";
constexpr const char* kFields = "fields";
// A field: the dtype where it is divided; these where the ranks have the same; else what is wrong.
constexpr const char* kDtype = "dtype";
constexpr const char* kSizes = "sizes";
constexpr const char* kHash = "hash";

/// How a tensor along dimensions of a parameter lies; nothing for a parameter without these.
std::optional<comm::Sharding> sharding_along(std::vector<int64_t> dims,
                                             const comm::Sharding& parameter) {
  comm::Sharding lies;
  const auto count = static_cast<int64_t>(parameter.sizes.size());
  for (int64_t& dim : dims) {
    if (dim < -count || dim >= count) return std::nullopt;
    if (dim < 0) dim += count;
    lies.sizes.push_back(parameter.sizes[dim]);
  }
  for (const auto& [over, how] : parameter.cuts) {
    const auto& blocks = std::get<comm::Blocks>(how);  // optim::check_of_ranges refuses others
    const auto found = std::find(dims.begin(), dims.end(), blocks.dim);
    if (found != dims.end())
      lies.cuts.push_back({over, comm::Blocks{found - dims.begin(), blocks.extents}});
  }
  return lies;
}

/// How a field lies, given how its parameter does and the sizes that this has where the tensor is;
/// nothing for a field that such a parameter has not.
std::optional<comm::Sharding> sharding_of(const StateFields& fields, const std::string& field,
                                          const at::Tensor& tensor, const comm::Sharding& parameter,
                                          at::IntArrayRef sizes) {
  using Kind = optim::FieldLayout::Kind;
  const auto found = fields.layouts.find(field);
  // That of a parameter without dimensions has an element for its only one.
  const bool is_number = tensor.defined() && tensor.dim() == 0 && !sizes.empty();
  const Kind kind = found != fields.layouts.end() ? found->second.kind
                    : is_number                   ? Kind::kWhole
                                                  : Kind::kElementwise;
  if (kind == Kind::kElementwise) return parameter;
  if (kind == Kind::kAlong) return sharding_along(found->second.dims, parameter);
  return comm::Sharding{tensor.sizes().vec(), {}, {}};
}

/// The error of a field that has other sizes than those where it lies.
std::string misfit(const StateFields& fields, const std::string& field, const at::Tensor& tensor,
                   const std::optional<comm::Sharding>& lies, at::IntArrayRef expected) {
  const auto found = fields.layouts.find(field);
  const bool is_along =
      found != fields.layouts.end() && found->second.kind == optim::FieldLayout::Kind::kAlong;
  const std::string layout =
      is_along ? c10::str("lies along dimensions ", at::IntArrayRef(found->second.dims), " of it")
               : "has an element for each of the parameter's";
  const std::string sizes =
      lies ? c10::str("here sizes ", expected) : "of which the parameter lacks one";
  return c10::str("\"", field, "\" ", layout, ", ", sizes, ", and is ", tensor.scalar_type(),
                  tensor.sizes(), ". Say how it lies: specialise smp::optim::StateLayout<",
                  fields.optimizer, "> (smp/optim/traits.h)");
}

/// A parameter that the ranks along an axis divide.
struct Divided {
  const ParameterTable::Entry* entry;
  comm::Sharding lies;  // sharding by their cut alone

  bool in_pieces() const { return std::holds_alternative<comm::Range>(lies.cuts.back().how); }
};

/// The states that the ranks along an axis put together.
struct Together {
  comm::Communicator& group;
  const int rank;  // this rank's in the world
  const StateFields& fields;
  std::vector<Divided> divided;
};

/// Everything of a state but the elements.
json describe(const Together& states, const comm::Sharding& parameter,
              const OptimizerState::Param& param) {
  json described = json::object();
  const auto sizes = parameter.sizes_of(states.rank);
  for (const auto& [field, tensor] : param.tensors) {
    const auto lies = sharding_of(states.fields, field, tensor, parameter, sizes);
    const auto expected = lies ? lies->sizes_of(states.rank) : std::vector<int64_t>();
    const auto dtype = static_cast<int>(tensor.scalar_type());
    if (!lies || tensor.sizes() != at::IntArrayRef(expected)) {
      described[field] = misfit(states.fields, field, tensor, lies, expected);
    } else if (lies->cuts.empty()) {
      described[field] = {{kDtype, dtype},
                          {kSizes, expected},
                          {kHash, checkpoint::hash_of(tensor.cpu().contiguous())}};
    } else {
      described[field] = dtype;
    }
  }
  return {{kScalars, optim::parse_fields(param.scalars)}, {kFields, std::move(described)}};
}

/// The description of a parameter's state, and the first rank of the group that has one.
struct Described {
  json state;
  int first;
};

/// Throws unless a rank has the same as the first one.
void check_same(const StateFields& fields, const std::string& parameter, const Described& expected,
                int first, const json& got, int other) {
  const auto& of_first = expected.state[kFields];
  for (const auto& [field, description] : of_first.items()) {
    const bool has_it = got.is_object() && got[kFields].contains(field);
    for (const json& text : {description, has_it ? got[kFields][field] : json()}) {
      SMP_CHECK_WITH(UsageError, !text.is_string(),
                     "cannot put the optimizer's state of parameter \"", parameter,
                     "\" together: ", text.get<std::string>());
    }
    SMP_CHECK_WITH(
        UsageError, !has_it || !description.is_object() || got[kFields][field] == description,
        "cannot put the optimizer's state of parameter \"", parameter, "\" together: \"", field,
        "\" differs between the ranks ", first, " and ", other, ", and smp::optim::StateLayout<",
        fields.optimizer,
        "> says that ranks with these parts of the parameter have the same. Update it by what they "
        "have alike, or set \"tensor_parallel_degree\" to 1");
  }
  SMP_CHECK_WITH(UsageError, got == expected.state, "the optimizer's state of parameter \"",
                 parameter, "\" differs between ranks that divide it: expected ",
                 expected.state.dump(), ", rank ", other, " has ",
                 got.is_null() ? "none" : got.dump(), ". Call optimizer.step() on all ranks alike");
}

/// The descriptions of the states of divided parameters, by name; the same on all ranks of a group,
/// and so are the errors.
std::map<std::string, Described> agree_on_states(const Together& states,
                                                 const OptimizerState& state) {
  json mine = json::object();
  for (const auto& [entry, lies] : states.divided) {
    const auto found = state.params.find(entry->name);
    if (found != state.params.end()) mine[entry->name] = describe(states, lies, found->second);
  }
  std::vector<json> all;
  for (const auto& text : comm::all_gather_bytes(states.group, mine.dump())) {
    all.push_back(json::parse(text));
  }
  std::map<std::string, Described> agreed;
  for (const auto& [entry, lies] : states.divided) {
    const std::string& name = entry->name;
    const auto has_it = [&](const json& of) { return of.contains(name); };
    const auto first = std::find_if(all.begin(), all.end(), has_it);
    if (first == all.end()) continue;
    const Described expected{(*first)[name], static_cast<int>(first - all.begin())};
    const auto& over = lies.cuts.back().over;
    for (size_t r = 0; r < all.size(); ++r) {
      const int other = over.member(states.rank, static_cast<int>(r));
      if (c10::multiply_integers(lies.sizes_of(other)) == 0) continue;
      check_same(states.fields, name, expected, over.member(states.rank, expected.first),
                 all[r].value(name, json()), other);
    }
    agreed.emplace(name, expected);
  }
  return agreed;
}

/// Whether the ranks along an axis divide parameters, perhaps of other stages only.
bool divide_any(const Runtime& runtime, const core::Axis& over) {
  if (over == runtime.topology().axis(CommGroup::kTp)) return runtime.table().any_divided();
  return !pieces_of(runtime).empty();
}

/// This rank's share of a field that is described so; `tensor` is undefined where it has none. One
/// that ranks have alike is the first one's alone.
Held share_of(const Together& states, const Divided& parameter, const std::string& field,
              const Described& described, at::Tensor tensor) {
  const auto& [entry, lies] = parameter;
  const core::Axis& over = lies.cuts.back().over;
  // On the host where the device has no room for all wholes.
  const auto device = parameter.in_pieces() ? entry->tensor.device() : at::kCPU;
  if (tensor.defined()) tensor = tensor.to(device);
  const json& description = described.state[kFields][field];
  if (description.is_number()) {
    auto of_field = *sharding_of(states.fields, field, tensor, lies, lies.sizes_of(states.rank));
    return {entry, std::move(of_field), std::move(tensor), description.get<at::ScalarType>(),
            /*exists=*/true};
  }
  const auto sizes = description[kSizes].get<std::vector<int64_t>>();
  const comm::Owner first{described.first};
  comm::Sharding of_field{sizes, {}, {{over, first}}};
  return {entry, std::move(of_field), std::move(tensor), description[kDtype].get<at::ScalarType>(),
          /*exists=*/true};
}

/// Adds to `joined` this rank's share of the states of divided parameters.
void join_divided(const Runtime& runtime, const Together& states, const OptimizerState& state,
                  OptimizerState& joined) {
  const auto agreed = agree_on_states(states, state);
  std::vector<Held> held;
  std::vector<std::string> names;  // names of fields, by index in `held`
  for (const Divided& parameter : states.divided) {
    const auto described = agreed.find(parameter.entry->name);
    if (described == agreed.end()) continue;
    const auto own = state.params.find(parameter.entry->name);
    for (const auto& [field, description] : described->second.state[kFields].items()) {
      at::Tensor tensor = own != state.params.end() ? own->second.tensors.at(field) : at::Tensor();
      held.push_back(share_of(states, parameter, field, described->second, std::move(tensor)));
      names.push_back(field);
    }
  }
  for_each_whole(runtime, held, [&](size_t i, const at::Tensor& tensor) {
    joined.params[held[i].entry->name].tensors[names[i]] = tensor;
  });
  for (const auto& [entry, lies] : states.divided) {
    const auto described = agreed.find(entry->name);
    if (described == agreed.end()) continue;
    const bool has_tensors = !described->second.state[kFields].empty();
    const bool is_mine =
        has_tensors ? joined.params.count(entry->name) > 0 : states.group.rank() == 0;
    if (!is_mine) continue;
    OptimizerState::Param& param = joined.params[entry->name];
    param.shape = lies.sizes;
    param.scalars = optim::text_of(described->second.state[kScalars]);
  }
}

/// Cuts a state of a parameter, from the whole or a part to what a rank updates.
void cut_state(const comm::Sharding& sharding, int rank, const StateFields& fields,
               const std::string& name, OptimizerState::Param& param) {
  const size_t cuts = sharding.cuts.size();
  size_t done = 0;
  while (done <= cuts && param.shape != sharding.sizes_of(rank, done)) ++done;
  SMP_CHECK_WITH(CheckpointError, done <= cuts,
                 "the saved optimizer state does not fit this optimizer: ", name,
                 ": expected shape ", at::IntArrayRef(sharding.sizes), ", got ",
                 at::IntArrayRef(param.shape));
  const auto to_do = sharding.cuts.begin() + static_cast<std::ptrdiff_t>(done);
  const comm::Sharding rest{param.shape, sharding.order, {to_do, sharding.cuts.end()}};
  for (auto& [field, tensor] : param.tensors) {
    const auto lies = sharding_of(fields, field, tensor, rest, rest.sizes);
    const auto expected = lies ? lies->sizes : std::vector<int64_t>();
    SMP_CHECK_WITH(CheckpointError, lies && tensor.sizes() == at::IntArrayRef(expected),
                   "cannot divide the optimizer's state of parameter \"", name,
                   "\": ", misfit(fields, field, tensor, lies, expected));
    tensor = lies->cut(tensor, rank);
  }
  param.shape = sharding.sizes_of(rank);
}

}  // namespace

bool find_wholes(const Runtime& runtime, const StateFields& fields, OptimizerState& state) {
  bool any = false;
  for (auto& [name, param] : state.params) {
    const auto& entry = runtime.table().at(name);
    if (!entry.is_divided()) continue;
    const comm::Sharding part = entry.part();
    const bool is_whole =
        std::any_of(param.tensors.begin(), param.tensors.end(), [&](const auto& item) {
          const auto& [field, tensor] = item;
          const auto lies = sharding_of(fields, field, tensor, part, part.sizes);
          return lies && tensor.sizes() == at::IntArrayRef(lies->sizes) &&
                 lies->sizes != lies->sizes_of(runtime.rank());
        });
    if (is_whole) param.shape = part.sizes;
    any = any || is_whole;
  }
  return any;
}

void cut_states(const Runtime& runtime, const StateFields& fields, OptimizerState& state) {
  at::NoGradGuard no_grad;
  const int rank = runtime.rank();
  for (const auto& entry : runtime.table().entries()) {
    const comm::Sharding sharding = entry.within_owner();
    const auto found = state.params.find(entry.name);
    if (sharding.cuts.empty() || found == state.params.end()) continue;
    if (!entry.updated().defined()) {
      state.params.erase(found);
      continue;
    }
    cut_state(sharding, rank, fields, entry.name, found->second);
    if (!entry.piece) continue;
    // So as to let go of the rest.
    for (auto& [field, tensor] : found->second.tensors) tensor = tensor.clone();
  }
}

void join_states(const Runtime& runtime, const StateFields& fields, const core::Axis& over,
                 OptimizerState& state) {
  at::NoGradGuard no_grad;
  if (!divide_any(runtime, over)) return;
  const auto group = runtime.along(over);
  const bool is_first = group->rank() == 0;
  Together states{*group, runtime.rank(), fields, {}};
  OptimizerState joined{{}, state.groups};
  for (const auto& entry : runtime.table().entries()) {
    auto lies = entry.sharding.along(over);
    if (lies) {
      states.divided.push_back({&entry, *std::move(lies)});
    } else if (const auto found = state.params.find(entry.name); found != state.params.end()) {
      if (is_first) joined.params.insert(*found);
    }
  }
  for (auto& of : joined.groups) {
    if (!is_first) of.params.clear();
  }
  join_divided(runtime, states, state, joined);
  state = std::move(joined);
}

}  // namespace smp::runtime
