// SPDX-License-Identifier: Apache-2.0
#include "optim/state_dict.h"

#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <c10/util/Type.h>
#include <torch/optim/lbfgs.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <set>
#include <utility>

#include "core/check.h"
#include "core/text.h"
#include "optim/state_dict_fields.h"

namespace smp::optim {
namespace {

using nlohmann::json;
using torch::optim::Optimizer;
using torch::optim::OptimizerParamGroup;
using torch::optim::OptimizerParamState;

std::string type_of(const OptimizerParamGroup& group) {
  const torch::optim::OptimizerOptions& options = group.options();
  return c10::demangle(typeid(options).name());
}

/// One problem a line, sorted; each once.
using Problems = std::set<std::string>;

std::string list(const Problems& problems) {
  std::vector<std::string> lines;
  for (const std::string& problem : problems) lines.push_back(core::printable(problem));
  return core::indented(lines);
}

/// The parameters of a group by name, each once.
using NamedParams = std::map<std::string, at::Tensor>;

NamedParams name_params(const OptimizerParamGroup& group, size_t group_index,
                        const ParameterNames& names, Problems& problems) {
  NamedParams named;
  for (size_t i = 0; i < group.params().size(); ++i) {
    const at::Tensor& param = group.params()[i];
    const auto found = names.find(param.unsafeGetTensorImpl());
    if (found == names.end()) {
      problems.insert(c10::str("parameter ", i, " of group ", group_index, ", shape ",
                               param.sizes(), ": has no name"));
      continue;
    }
    const auto [entry, is_new] = named.emplace(found->second, param);
    if (!is_new && !entry->second.is_same(param)) {
      problems.insert(found->second + ": names two parameters");
    }
  }
  return named;
}

/// Matches a saved state with an optimizer: first all checks, then all new values, and only
/// then the first change.
class Restore {
 public:
  Restore(Optimizer& optimizer, const OptimizerState& state, const ParameterNames& names,
          detail::ParamStateFactory make_state, const FieldLayouts& layouts)
      : optimizer_(optimizer), state_(state) {
    for (size_t i = 0; i < optimizer.param_groups().size(); ++i) {
      groups_.push_back(name_params(optimizer.param_groups()[i], i, names, problems_));
    }
    for (size_t i = 0; i < state.groups.size(); ++i) {
      for (const std::string& name : state.groups[i].params) {
        saved_group_[name] = i;
      }
    }
    check();
    prepare(make_state, layouts);
  }

  void apply() {
    for (size_t i = 0; i < groups_.size(); ++i) {
      assign_options(i, optimizer_.param_groups()[i].options());
    }
    for (auto& [param, new_state] : new_states_) {
      if (new_state) {
        optimizer_.state()[param] = std::move(new_state);
      } else {
        optimizer_.state().erase(param);
      }
    }
  }

 private:
  void check() {
    for (size_t i = 0; i < groups_.size(); ++i) {
      for (const auto& [name, param] : groups_[i]) check_shape(name, param);
      sources_.push_back(find_source(i));
    }
    SMP_CHECK_WITH(CheckpointError, problems_.empty(),
                   "the saved optimizer state does not fit this optimizer:", list(problems_),
                   "\nBuild the optimizer as it was when the state was saved.");
  }

  void prepare(detail::ParamStateFactory make_state, const FieldLayouts& layouts) {
    for (size_t i = 0; i < groups_.size(); ++i) {
      for (const auto& [name, param] : groups_[i]) {
        // Replicas that divide parameters have no state of one without elements: it keeps its own.
        if (param.numel() == 0 && state_.params.count(name) == 0) continue;
        new_states_[param.unsafeGetTensorImpl()] = make_param(name, param, make_state, layouts);
      }
      // A rehearsal: values that cannot be assigned throw here.
      auto options = optimizer_.param_groups()[i].options().clone();
      assign_options(i, *options);
    }
  }

  void check_shape(const std::string& name, const at::Tensor& param) {
    const auto saved = state_.params.find(name);
    if (saved != state_.params.end() && param.sizes() != saved->second.shape) {
      problems_.insert(c10::str(name, ": expected shape ", param.sizes(), ", got ",
                                at::IntArrayRef(saved->second.shape)));
    }
  }

  /// The saved group whose options group `i` gets; none if it has nothing to go by.
  std::optional<size_t> find_source(size_t i) {
    std::optional<size_t> source;
    for (const auto& [name, param] : groups_[i]) {
      const auto saved = saved_group_.find(name);
      if (saved == saved_group_.end()) {
        continue;
      }
      if (source && state_.groups[*source].options != state_.groups[saved->second].options) {
        problems_.insert(c10::str("group ", i, ": its parameters were saved in groups ", *source,
                                  " and ", saved->second, " with different options"));
      }
      source = source ? source : saved->second;
    }
    if (groups_[i].empty() && i < state_.groups.size()) {
      source = i;  // a rank that holds no parameter of this group
    }
    if (source) {
      check_options(i, state_.groups[*source]);
    }
    return source;
  }

  void check_options(size_t i, const OptimizerState::Group& saved) {
    const std::string expected = type_of(optimizer_.param_groups()[i]);
    if (saved.type != expected) {
      problems_.insert(
          c10::str("group ", i, ": expected options of type ", expected, ", got ", saved.type));
    }
  }

  std::unique_ptr<OptimizerParamState> make_param(const std::string& name, const at::Tensor& param,
                                                  detail::ParamStateFactory make_state,
                                                  const FieldLayouts& layouts) const {
    const auto saved = state_.params.find(name);
    if (saved == state_.params.end()) {
      return nullptr;
    }
    Fields fields{{}, parse_fields(saved->second.scalars)};
    for (const auto& [field, tensor] : saved->second.tensors) {
      const auto layout = layouts.find(field);
      const bool is_elementwise =
          layout == layouts.end() || layout->second.kind == FieldLayout::Kind::kElementwise;
      fields.tensors[field] =
          is_elementwise ? place_like(param, tensor) : tensor.to(param.device());
    }
    auto result = make_state();
    guarded("state of parameter \"" + name + "\"", [&] { assign_fields(*result, fields); });
    return result;
  }

  /// Assigns the saved options. Throws CheckpointError if they lack one.
  void assign_options(size_t i, torch::optim::OptimizerOptions& options) const {
    if (sources_[i]) {
      const json saved = parse_fields(state_.groups[*sources_[i]].options);
      guarded(c10::str("options of group ", i), [&] { assign_fields(options, {{}, saved}); });
    }
  }

  /// libtorch answers a missing field with an internal assertion; tell its meaning here.
  template <class Action>
  static void guarded(const std::string& what, const Action& action) {
    std::string reason = "a field is missing, or of another type than the optimizer's";
    try {
      action();
      return;
    } catch (const Error& error) {
      reason = core::text_without_prefix(error);
    } catch (const c10::Error&) {
    }
    core::fail<CheckpointError>("the saved optimizer state is malformed: ", core::printable(what),
                                " cannot be read (", reason, "). Use another checkpoint.");
  }

  /// On the parameter's device, and with its strides if it has its shape.
  static at::Tensor place_like(const at::Tensor& param, const at::Tensor& tensor) {
    if (tensor.sizes() != param.sizes()) {
      return tensor.to(param.device());
    }
    const auto options = at::TensorOptions(param.device()).dtype(tensor.scalar_type());
    // `empty_like` makes an absent tensor where the parameter is absent (graph/absent.h).
    const at::Tensor placed = param.is_non_overlapping_and_dense()
                                  ? at::empty_strided(param.sizes(), param.strides(), options)
                                  : at::empty_like(param, options, at::MemoryFormat::Preserve);
    return placed.copy_(tensor);
  }

  Optimizer& optimizer_;
  const OptimizerState& state_;
  std::vector<NamedParams> groups_;                                   // the optimizer's
  std::map<std::string, size_t> saved_group_;                         // keys are names
  std::vector<std::optional<size_t>> sources_;                        // saved group for each group
  std::map<void*, std::unique_ptr<OptimizerParamState>> new_states_;  // null: none was saved
  Problems problems_;
};

}  // namespace

void check_state_per_parameter(const torch::optim::Optimizer& optimizer) {
  SMP_CHECK_WITH(UsageError, dynamic_cast<const torch::optim::LBFGS*>(&optimizer) == nullptr,
                 "cannot save or restore the state of torch::optim::LBFGS by parameter name: it "
                 "has one state for all parameters together. Use another optimizer.");
}

OptimizerState copy_of(OptimizerState state) {
  for (auto& [name, param] : state.params) {
    for (auto& [field, tensor] : param.tensors) tensor = tensor.detach().clone();
  }
  return state;
}

void erase_params(OptimizerState& state, const std::function<bool(const std::string&)>& which) {
  for (auto it = state.params.begin(); it != state.params.end();) {
    it = which(it->first) ? state.params.erase(it) : std::next(it);
  }
  for (auto& group : state.groups) {
    group.params.erase(std::remove_if(group.params.begin(), group.params.end(), which),
                       group.params.end());
  }
}

OptimizerState share_state(const Optimizer& optimizer, const ParameterNames& names) {
  check_state_per_parameter(optimizer);
  OptimizerState result;
  Problems problems;
  for (size_t i = 0; i < optimizer.param_groups().size(); ++i) {
    const OptimizerParamGroup& group = optimizer.param_groups()[i];
    OptimizerState::Group& saved = result.groups.emplace_back();
    saved.type = type_of(group);
    saved.options = text_of(fields_of(group.options()).scalars);
    for (const auto& [name, param] : name_params(group, i, names, problems)) {
      saved.params.push_back(name);
      const auto found = optimizer.state().find(param.unsafeGetTensorImpl());
      if (found != optimizer.state().end()) {
        Fields fields = fields_of(*found->second);
        result.params[name] = {param.sizes().vec(), std::move(fields.tensors),
                               text_of(fields.scalars)};
      }
    }
  }
  SMP_CHECK_WITH(UsageError, problems.empty(),
                 "cannot save the optimizer state by name:", list(problems),
                 "\nGive the optimizer parameters of the model that is saved.");
  return result;
}

void set_state(Optimizer& optimizer, const OptimizerState& state, const ParameterNames& names,
               detail::ParamStateFactory make_state, const FieldLayouts& layouts) {
  Restore(optimizer, state, names, make_state, layouts).apply();
}

void check_state(Optimizer& optimizer, const OptimizerState& state, const ParameterNames& names,
                 detail::ParamStateFactory make_state) {
  const Restore rehearsal(optimizer, state, names, make_state, {});
}

json parse_fields(const std::string& text) {
  if (text.empty()) return json::object();
  json fields = json::parse(text, nullptr, /*allow_exceptions=*/false);
  SMP_CHECK_WITH(CheckpointError, fields.is_object(),
                 "the saved optimizer state is malformed: expected text of a JSON object, got ",
                 core::printable(text, 100), ". Use another checkpoint.");
  return fields;
}

std::string text_of(const json& fields) { return fields.empty() ? "" : fields.dump(); }

json to_json(const OptimizerState& state) {
  json groups = json::array();
  for (const OptimizerState::Group& group : state.groups) {
    groups.push_back(
        {{"type", group.type}, {"options", parse_fields(group.options)}, {"params", group.params}});
  }
  json params = json::object();
  for (const auto& [name, param] : state.params) {
    params[name] = {{"shape", param.shape}, {"scalars", parse_fields(param.scalars)}};
  }
  return {{"param_groups", std::move(groups)}, {"state", std::move(params)}};
}

std::map<std::string, at::Tensor> tensors_of(const OptimizerState& state) {
  std::map<std::string, at::Tensor> tensors;
  for (const auto& [name, param] : state.params) {
    for (const auto& [field, tensor] : param.tensors) {
      tensors[name + "/" + field] = tensor;
    }
  }
  return tensors;
}

OptimizerState from_parts(const json& parts, const std::map<std::string, at::Tensor>& tensors) {
  OptimizerState state;
  try {
    for (const json& group : parts.at("param_groups")) {
      state.groups.push_back({group.at("type").get<std::string>(), text_of(group.at("options")),
                              group.at("params").get<std::vector<std::string>>()});
    }
    for (const auto& [name, param] : parts.at("state").items()) {
      state.params[name] = {
          param.at("shape").get<std::vector<int64_t>>(), {}, text_of(param.at("scalars"))};
    }
  } catch (const json::exception& error) {
    smp::core::fail<CheckpointError>(
        "the saved optimizer state is malformed: expected param_groups and state, got ",
        error.what(), ". Use another checkpoint.");
  }
  for (const auto& [key, tensor] : tensors) {
    const size_t slash = key.rfind('/');
    const auto param = state.params.find(key.substr(0, slash));
    SMP_CHECK_WITH(CheckpointError, slash != std::string::npos && param != state.params.end(),
                   "the saved optimizer state is malformed: expected a tensor named "
                   "\"parameter/field\" of a parameter with state, got \"",
                   core::printable(key), "\". Use another checkpoint.");
    param->second.tensors[key.substr(slash + 1)] = tensor;
  }
  return state;
}

}  // namespace smp::optim
