// SPDX-License-Identifier: Apache-2.0
#include "runtime/update/optimizer_pieces.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/eq.h>
#include <ATen/ops/where.h>

#include <algorithm>
#include <map>
#include <utility>

#include "checkpoint/apply.h"
#include "core/check.h"
#include "core/tensor_lists.h"
#include "graph/absent.h"
#include "optim/grad_norm.h"
#include "runtime/parameters/parameter_shards.h"
#include "runtime/precision.h"
#include "runtime/update/clip_grad.h"
#include "runtime/update/divided_states.h"
#include "runtime/update/grad_norm.h"

namespace smp::runtime {

optim::ParameterNames parameter_names(const Runtime& runtime) {
  optim::ParameterNames names;
  for (const auto& entry : runtime.table().entries()) {
    if (entry.is_parameter()) {
      names.emplace(entry.tensor.unsafeGetTensorImpl(), entry.name);
    }
  }
  return names;
}

std::set<std::string> names_of_parameters(const Runtime& runtime) {
  std::set<std::string> names;
  for (const auto& entry : runtime.table().entries()) {
    if (entry.is_parameter()) names.insert(entry.name);
  }
  return names;
}

/// Puts the pieces in the place of the parameters, and masters, which borrow the gradients, in the
/// place of either.
class OptimizerPieces::StandIn {
 public:
  enum class Masters { kUse, kLeave };
  /// The treatment of parameters of which this replica has no piece.
  enum class Absent { kLeaveOut, kKeep };

  explicit StandIn(const OptimizerPieces& pieces, Masters masters = Masters::kUse,
                   Absent absent = Absent::kLeaveOut)
      : optimizer_(pieces.optimizer_) {
    for (auto& group : optimizer_.param_groups()) {
      std::vector<at::Tensor> stand_ins;
      for (const at::Tensor& parameter : group.params()) {
        const at::Tensor target = pieces.target_of(parameter);
        if (!target.defined()) {
          if (absent == Absent::kKeep) stand_ins.push_back(parameter);
          continue;
        }
        const bool may_be_master = masters == Masters::kUse;
        stand_ins.push_back(may_be_master ? pieces.stand_in_for(parameter) : target);
        if (!stand_ins.back().is_same(target)) lend_gradient(target, stand_ins.back());
      }
      parameters_.push_back(std::exchange(group.params(), std::move(stand_ins)));
    }
  }
  ~StandIn() {
    for (const at::Tensor& master : lent_) master.mutable_grad().reset();
    for (size_t i = 0; i < parameters_.size(); ++i) {
      optimizer_.param_groups()[i].params() = std::move(parameters_[i]);
    }
  }
  StandIn(const StandIn&) = delete;
  StandIn& operator=(const StandIn&) = delete;

 private:
  void lend_gradient(const at::Tensor& target, const at::Tensor& master) {
    if (!target.grad().defined()) return;
    master.mutable_grad() = target.grad().to(at::kFloat);
    lent_.push_back(master);
  }

  torch::optim::Optimizer& optimizer_;
  std::vector<std::vector<at::Tensor>> parameters_;  // parameters by group
  std::vector<at::Tensor> lent_;                     // masters that have a gradient
};

OptimizerPieces::OptimizerPieces(torch::optim::Optimizer& optimizer, const Runtime& runtime,
                                 SetState set_state, const StateFields& fields)
    : optimizer_(optimizer),
      runtime_(runtime),
      set_state_(std::move(set_state)),
      fields_(fields),
      has_masters_(half_type(runtime.config()).has_value()) {}

/// Runs `body` on the parameters in the groups.
void OptimizerPieces::for_each(const std::function<void(const at::Tensor&)>& body) const {
  for (const auto& group : optimizer_.param_groups()) {
    for (const at::Tensor& parameter : group.params()) body(parameter);
  }
}

void OptimizerPieces::for_each_divided(
    const std::function<void(const at::Tensor&, const Piece&)>& body) const {
  for_each([&](const at::Tensor& parameter) {
    const auto* entry = runtime_.table().find(parameter);
    if (entry != nullptr && entry->piece) body(parameter, *entry->piece);
  });
}

/// The tensor with the values that this replica updates: the parameter or its piece, which is
/// undefined where there is nothing.
at::Tensor OptimizerPieces::target_of(const at::Tensor& parameter) const {
  const auto* entry = runtime_.table().find(parameter);
  return entry != nullptr ? entry->updated() : parameter;
}

/// Gives the tensor that the optimizer updates for a parameter: that, its piece, or the master of
/// either; undefined where this replica has no piece of it.
at::Tensor OptimizerPieces::stand_in_for(const at::Tensor& parameter) const {
  const at::Tensor target = target_of(parameter);
  if (!target.defined()) return target;
  const at::Tensor master = masters_.find(target.unsafeGetTensorImpl());
  return master.defined() ? master : target;
}

/// Tells whether values were loaded into parameters since masters were last as these.
bool OptimizerPieces::has_loaded() const {
  return parameter_loads_ != runtime_.progress.parameter_loads;
}

/// Gives the values that a target's master has to have, undefined if there is none. After values
/// were loaded into parameters, masters that do not round to them take them: the others may have
/// been loaded, too.
at::Tensor OptimizerPieces::reconciled_master(const at::Tensor& target) const {
  const at::Tensor master = masters_.find(target.unsafeGetTensorImpl());
  if (!master.defined() || !has_loaded()) return master;
  const at::Tensor rounds = at::eq(master.to(target.scalar_type()), target);
  return at::where(rounds, master, target.to(at::kFloat));
}

at::Tensor OptimizerPieces::updated(const at::Tensor& parameter) const {
  const at::Tensor target = target_of(parameter);
  if (!target.defined()) return target;
  const at::Tensor master = reconciled_master(target);
  return master.defined() ? master : target;
}

/// Names of parameters, and of pieces and masters, which have their parameter's.
optim::ParameterNames OptimizerPieces::names() const {
  optim::ParameterNames names = parameter_names(runtime_);
  for (const auto& entry : runtime_.table().entries()) {
    const bool has_piece = entry.piece && entry.updated().defined();
    if (has_piece) names.emplace(entry.updated().unsafeGetTensorImpl(), entry.name);
  }
  optim::ParameterNames of_masters;
  for (const auto& [tensor, name] : names) {
    const at::Tensor master = masters_.find(tensor);
    if (master.defined()) of_masters.emplace(master.unsafeGetTensorImpl(), name);
  }
  names.merge(of_masters);
  return names;
}

/// Binds pieces to the parameters' memory, with the gradients that the program has not dropped.
void OptimizerPieces::bind_pieces() {
  for (const auto& pieces : pieces_of(runtime_)) pieces->bind();
  for_each_divided([](const at::Tensor&, const Piece& piece) { piece.has_gradient(); });
}

/// Before the pieces are updated.
void OptimizerPieces::prepare() {
  bind_pieces();
  make_masters();
  adopt_states();
  list_updated();
}

/// The same list on all ranks that have parameters together.
void OptimizerPieces::list_updated() {
  updated_.clear();
  for_each([&](const at::Tensor& parameter) {
    const auto* entry = runtime_.table().find(parameter);
    if (entry == nullptr) return;
    const bool has_gradient =
        entry->piece ? entry->piece->has_gradient() : parameter.grad().defined();
    const bool has_master = has_masters_ && MasterWeights::concerns(parameter);
    if (has_gradient) {
      updated_.push_back(
          {entry, stand_in_for(parameter), has_master ? at::kFloat : parameter.scalar_type()});
    }
  });
}

std::vector<double> OptimizerPieces::norms_of(const std::vector<optim::TensorOfParameter>& tensors,
                                              double norm_type) const {
  std::map<const c10::TensorImpl*, size_t> place;
  std::vector<Held> held;
  for (const auto& [entry, stand_in, dtype] : updated_) {
    if (stand_in.defined()) place[stand_in.unsafeGetTensorImpl()] = held.size();
    held.push_back({entry, entry->within_owner(), {}, dtype, /*exists=*/entry->piece.has_value()});
  }
  for (const auto& [parameter, tensor] : tensors) {
    const auto found = place.find(parameter.unsafeGetTensorImpl());
    if (found == place.end()) continue;
    held[found->second].own = tensor;
    held[found->second].exists = true;
  }
  const auto group = runtime_.group(pieces_of(runtime_).empty() ? CommGroup::kTp : CommGroup::kDp);
  const auto norms = share_norms(norms_of_wholes(runtime_, held, norm_type), *group);
  std::vector<double> result;
  for (const auto& [parameter, tensor] : tensors) {
    const auto found = place.find(parameter.unsafeGetTensorImpl());
    result.push_back(found != place.end()  // else it is no model's
                         ? norms[found->second].value()
                         : optim::gradient_norm(tensor, norm_type).item<double>());
  }
  return result;
}

/// Makes masters of values that have a gradient; existing ones are reconciled.
void OptimizerPieces::make_masters() {
  if (!has_masters_) return;
  at::NoGradGuard no_grad;
  for_each([&](const at::Tensor& parameter) {
    const at::Tensor target = target_of(parameter);
    if (!target.defined() || !MasterWeights::concerns(target)) return;
    const at::Tensor master = has_loaded() ? reconciled_master(target) : at::Tensor();
    if (master.defined()) masters_.set(target, master);
    if (target.grad().defined()) masters_.make(target);
  });
  parameter_loads_ = runtime_.progress.parameter_loads;
}

at::Tensor OptimizerPieces::step(const Update& update, const LossClosure& closure) {
  std::optional<StandIn> stand_in;
  const auto begin = [&] {
    prepare();
    clip();
    stand_in.emplace(*this);
  };
  LossClosure on_parameters;
  if (closure) {
    on_parameters = [&] {
      stand_in.reset();
      write_back();
      at::Tensor loss = closure();
      begin();
      return loss;
    };
  }
  begin();
  at::Tensor loss = update(on_parameters);
  stand_in.reset();
  write_back();
  gather();
  return loss;
}

std::vector<at::Tensor> OptimizerPieces::gradients() {
  bind_pieces();
  std::vector<at::Tensor> result;
  for_each([&](const at::Tensor& parameter) {
    const at::Tensor target = target_of(parameter);
    if (!target.defined() || !target.grad().defined()) return;
    if (!graph::is_absent(target.grad())) result.push_back(target.grad());
  });
  return result;
}

void OptimizerPieces::reload_masters() {
  for (const auto& pieces : pieces_of(runtime_)) pieces->bind();
  masters_.reload();
}

/// Clips by `sdp_gradient_clipping`, with sharded data parallelism.
void OptimizerPieces::clip() const {
  if (runtime_.parameter_shards() == nullptr) return;
  clip_grad_norm_(optim::parameters_of(optimizer_), runtime_.config().sdp_gradient_clipping());
}

/// Rounds the updated masters to the parameters.
void OptimizerPieces::write_back() {
  const at::NoGradGuard no_grad;
  core::TensorUpdates updates;
  for_each([&](const at::Tensor& parameter) {
    const at::Tensor target = target_of(parameter);
    if (!target.defined() || !target.grad().defined() || graph::is_absent(target)) return;
    if (masters_.find(target.unsafeGetTensorImpl()).defined()) masters_.write_back(target, updates);
  });
  updates.run();
}

/// Updated pieces go to all replicas.
void OptimizerPieces::gather() {
  for (const auto& pieces : pieces_of(runtime_)) {
    std::vector<bool> updated(pieces->parameters().size(), false);
    for_each_divided([&](const at::Tensor&, const Piece& piece) {
      if (piece.pieces == pieces) updated[piece.index] = piece.has_gradient();
    });
    pieces->all_gather(updated);
  }
}

void OptimizerPieces::zero_grad(bool set_to_none) {
  divide();
  {
    const StandIn stand_in(*this, StandIn::Masters::kLeave);
    optimizer_.zero_grad(set_to_none);
  }
  if (!set_to_none) return;
  for_each_divided(
      [](const at::Tensor& parameter, const Piece&) { parameter.mutable_grad().reset(); });
}

/// States that the optimizer has for parameters become those of the tensors that stand in for them:
/// Adagrad makes them in its constructor, perhaps of parameters that were whole then, and a
/// checkpoint may have a state without a master. With `before_masters` those of parameters that
/// will have masters get their type.
void OptimizerPieces::adopt_states(bool before_masters) {
  const bool may_be_whole = runtime_.partitioned() && !std::exchange(states_are_divided_, true);
  bool has_others = false, has_wholes = false;
  for_each([&](const at::Tensor& parameter) {
    if (optimizer_.state().count(parameter.unsafeGetTensorImpl()) == 0) return;
    const auto* entry = runtime_.table().find(parameter);
    has_others = has_others || !stand_in_for(parameter).is_same(parameter) ||
                 (before_masters && MasterWeights::concerns(parameter));
    has_wholes = has_wholes || (may_be_whole && entry != nullptr && entry->is_divided());
  });
  if (!has_others && !has_wholes) return;
  OptimizerState whole = optim::share_state(optimizer_, names());
  if (has_wholes) has_wholes = find_wholes(runtime_, fields_, whole);
  if (!has_others && !has_wholes) return;
  for (auto& [name, param] : whole.params) {
    for (auto& [field, tensor] : param.tensors) {
      if (has_masters_ && MasterWeights::concerns(tensor)) tensor = tensor.to(at::kFloat);
    }
  }
  {
    const StandIn stand_in(*this);
    const auto pieces = optim::share_state(optimizer_, names());
    cut_states(runtime_, fields_, whole);
    whole.groups = pieces.groups;
    whole.params.insert(pieces.params.begin(), pieces.params.end());
    set_state_(whole, names());
  }
  forget_replaced();
}

/// The states of parameters that something stands in for.
void OptimizerPieces::forget_replaced() {
  for_each([&](const at::Tensor& parameter) {
    if (!stand_in_for(parameter).is_same(parameter)) {
      optimizer_.state().erase(parameter.unsafeGetTensorImpl());
    }
  });
}

/// That of the tensors that the optimizer updates here, under the parameters' names.
OptimizerState OptimizerPieces::own_state() {
  divide();
  adopt_states(/*before_masters=*/has_masters_);
  OptimizerState state = optim::share_state(optimizer_, names());
  {
    const StandIn stand_in(*this);
    state.params = optim::share_state(optimizer_, names()).params;
  }
  add_masters(state);
  return state;
}

OptimizerState OptimizerPieces::gather_state() {
  OptimizerState state = own_state();
  join_states(runtime_, fields_, runtime_.topology().pieces(), state);
  return state;
}

OptimizerState OptimizerPieces::local_state() {
  OptimizerState state = own_state();
  optim::erase_params(state, [&](const std::string& name) {
    return !runtime_.owns(name) || name_of_piece(name).empty();
  });
  const auto parameters = names_of_parameters(runtime_);
  const auto name_of = [&](const std::string& name) {
    std::string piece = name_of_piece(name);
    SMP_CHECK_WITH(UsageError, piece == name || parameters.count(piece) == 0,
                   "cannot name the state of this replica's piece of parameter \"", name, "\": \"",
                   piece,
                   "\" is another parameter. Give that another name, or gather the state: "
                   "local_state_dict(true)");
    return piece;
  };
  for (auto& [name, param] : std::exchange(state.params, {})) {
    state.params.emplace(name_of(name), std::move(param));
  }
  for (auto& group : state.groups) {
    for (std::string& name : group.params) name = name_of(name);
  }
  return state;
}

std::string OptimizerPieces::name_of_piece(const std::string& parameter) const {
  divide();
  return runtime_.table().at(parameter).name_on(runtime_.rank());
}

void OptimizerPieces::add_masters(OptimizerState& state) const {
  for_each([&](const at::Tensor& parameter) {
    const at::Tensor target = target_of(parameter);
    if (!target.defined()) return;
    const at::Tensor master = masters_.find(target.unsafeGetTensorImpl());
    if (!master.defined()) return;
    auto& param = state.params[runtime_.table().find(parameter)->name];
    param.shape = target.sizes().vec();
    param.tensors[checkpoint::kMasterField] = master.detach();
  });
}

void OptimizerPieces::take_masters(OptimizerState& state) {
  masters_.clear();
  const auto take = [&](const std::string& name) {
    const auto param = state.params.find(name);
    if (param == state.params.end()) return at::Tensor();
    const auto saved = param->second.tensors.find(checkpoint::kMasterField);
    if (saved == param->second.tensors.end()) return at::Tensor();
    at::Tensor values = saved->second;
    param->second.tensors.erase(saved);
    // An optimizer without a state of its own.
    if (param->second.tensors.empty() && param->second.scalars.empty()) state.params.erase(param);
    return values;
  };
  for_each([&](const at::Tensor& parameter) {
    const auto* entry = runtime_.table().find(parameter);
    const at::Tensor values = entry == nullptr ? at::Tensor() : take(entry->name);
    const at::Tensor target = target_of(parameter);
    const bool used = has_masters_ && values.defined() && target.defined();
    if (used && MasterWeights::concerns(target)) masters_.set(target, values);
  });
}

void OptimizerPieces::set_state(OptimizerState whole, int64_t parameter_loads) {
  divide();
  cut_states(runtime_, fields_, whole);
  take_masters(whole);
  parameter_loads_ = parameter_loads;
  {
    // A group gets the options that were saved with its parameters, so it needs them all.
    const StandIn stand_in(*this, StandIn::Masters::kUse, StandIn::Absent::kKeep);
    set_state_(whole, names());
  }
  forget_replaced();
}

}  // namespace smp::runtime
