#include "smp/optimizer_pieces.h"

#include <utility>

#include "smp/model_core.h"
#include "smp/sharding.h"
#include "smp/state_pieces.h"

namespace smp {

bool shards_optimizer_state(const Runtime& runtime) {
  return runtime.config().shard_optimizer_state() && runtime.group(CommGroup::kDp)->size() > 1;
}

std::vector<std::shared_ptr<dp::ParameterSlices>> slices_of(const Runtime& runtime) {
  std::vector<std::shared_ptr<dp::ParameterSlices>> result;
  for (const auto& model : runtime.models()) {
    if (auto slices = model->slices()) result.push_back(std::move(slices));
  }
  if (runtime.sharding) result.push_back(runtime.sharding->parameters());
  return result;
}

optim::ParameterNames parameter_names(const Runtime& runtime) {
  optim::ParameterNames names;
  for (const auto& entry : runtime.table().entries()) {
    if (entry.kind == graph::ValueKind::kParameter) {
      names.emplace(entry.tensor.unsafeGetTensorImpl(), entry.name);
    }
  }
  return names;
}

/// Puts the pieces in the place of the parameters.
class OptimizerPieces::StandIn {
 public:
  explicit StandIn(const OptimizerPieces& pieces) : optimizer_(pieces.optimizer_) {
    for (auto& group : optimizer_.param_groups()) {
      std::vector<at::Tensor> stand_ins;
      for (const at::Tensor& parameter : group.params()) {
        const auto divided = pieces.find(parameter);
        const at::Tensor& tensor = divided ? divided->piece().tensor : parameter;
        if (tensor.defined()) stand_ins.push_back(tensor);
      }
      parameters_.push_back(std::exchange(group.params(), std::move(stand_ins)));
    }
  }
  ~StandIn() {
    for (size_t i = 0; i < parameters_.size(); ++i) {
      optimizer_.param_groups()[i].params() = std::move(parameters_[i]);
    }
  }
  StandIn(const StandIn&) = delete;
  StandIn& operator=(const StandIn&) = delete;

 private:
  torch::optim::Optimizer& optimizer_;
  std::vector<std::vector<at::Tensor>> parameters_;  // by group
};

OptimizerPieces::OptimizerPieces(torch::optim::Optimizer& optimizer, const Runtime& runtime,
                                 SetState set_state)
    : optimizer_(optimizer), runtime_(runtime), set_state_(std::move(set_state)) {}

std::optional<OptimizerPieces::Divided> OptimizerPieces::find(const at::Tensor& parameter) const {
  for (const auto& slices : slices_) {
    const auto index = slices->find(parameter);
    if (index) return Divided{slices.get(), *index};
  }
  return std::nullopt;
}

/// Of the parameters in the groups.
void OptimizerPieces::for_each_divided(
    const std::function<void(const at::Tensor&, const Divided&)>& body) const {
  for (const auto& group : optimizer_.param_groups()) {
    for (const at::Tensor& parameter : group.params()) {
      if (const auto divided = find(parameter)) body(parameter, *divided);
    }
  }
}

/// Of parameters and of pieces, which have their parameter's.
optim::ParameterNames OptimizerPieces::names() const {
  optim::ParameterNames names = parameter_names(runtime_);
  for (const auto& slices : slices_) {
    for (size_t i = 0; i < slices->names().size(); ++i) {
      const at::Tensor& piece = slices->pieces()[i].tensor;
      if (piece.defined()) names.emplace(piece.unsafeGetTensorImpl(), slices->names()[i]);
    }
  }
  return names;
}

/// Before the pieces are updated.
void OptimizerPieces::prepare() {
  find_slices();
  for (const auto& slices : slices_) slices->bind();
  for_each_divided([](const at::Tensor&, const Divided& divided) { divided.has_gradient(); });
  adopt_states();
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
      at::Tensor loss = closure();
      begin();
      return loss;
    };
  }
  begin();
  at::Tensor loss = update(on_parameters);
  stand_in.reset();
  gather();
  return loss;
}

/// With sharded data parallelism: `sdp_gradient_clipping`.
void OptimizerPieces::clip() const {
  if (runtime_.sharding == nullptr) return;
  std::vector<at::Tensor> shards, whole;
  for (const auto& group : optimizer_.param_groups()) {
    for (const at::Tensor& parameter : group.params()) {
      const auto divided = find(parameter);
      if (!divided) {
        whole.push_back(parameter.grad());
      } else if (divided->piece().tensor.defined()) {
        shards.push_back(divided->piece().tensor.grad());
      }
    }
  }
  clip_gradients(*runtime_.sharding, shards, whole, runtime_.config().sdp_gradient_clipping());
}

/// Updated pieces go to all replicas.
void OptimizerPieces::gather() {
  for (const auto& slices : slices_) {
    std::vector<bool> updated(slices->parameters().size(), false);
    for_each_divided([&](const at::Tensor&, const Divided& divided) {
      if (divided.slices == slices.get()) updated[divided.index] = divided.has_gradient();
    });
    slices->all_gather(updated);
  }
}

void OptimizerPieces::zero_grad(bool set_to_none) {
  find_slices();
  {
    const StandIn stand_in(*this);
    optimizer_.zero_grad(set_to_none);
  }
  if (!set_to_none) return;
  for_each_divided(
      [](const at::Tensor& parameter, const Divided&) { parameter.mutable_grad().reset(); });
}

/// States that the optimizer has for whole parameters become those of the pieces: Adagrad makes
/// them in its constructor.
void OptimizerPieces::adopt_states() {
  bool has_whole = false;
  for_each_divided([&](const at::Tensor& parameter, const Divided&) {
    has_whole = has_whole || optimizer_.state().count(parameter.unsafeGetTensorImpl()) > 0;
  });
  if (!has_whole) return;
  optim::OptimizerState whole = optim::get_state(optimizer_, names());
  {
    const StandIn stand_in(*this);
    const auto pieces = optim::get_state(optimizer_, names());
    for (const auto& slices : slices_) cut_states(*slices, whole);
    whole.groups = pieces.groups;
    whole.params.insert(pieces.params.begin(), pieces.params.end());
    set_state_(whole, names());
  }
  for_each_divided([&](const at::Tensor& parameter, const Divided&) {
    optimizer_.state().erase(parameter.unsafeGetTensorImpl());
  });
}

optim::OptimizerState OptimizerPieces::gather_state() {
  find_slices();
  adopt_states();
  optim::OptimizerState whole = optim::get_state(optimizer_, names());
  if (slices_.empty()) return whole;
  optim::OptimizerState pieces;
  {
    const StandIn stand_in(*this);
    pieces = optim::get_state(optimizer_, names());
  }
  if (runtime_.rank_in(CommGroup::kDp) > 0) {
    whole.params.clear();
    for (auto& group : whole.groups) group.params.clear();
  }
  for (const auto& slices : slices_) join_states(*slices, pieces, whole);
  return whole;
}

optim::OptimizerState OptimizerPieces::local_state() {
  find_slices();
  adopt_states();
  const StandIn stand_in(*this);
  optim::OptimizerState state = optim::get_state(optimizer_, names());
  for (const auto& slices : slices_) name_pieces(*slices, state);
  return state;
}

std::string OptimizerPieces::name_of_part(const std::string& parameter) const {
  const at::Tensor& tensor = runtime_.table().at(parameter).tensor;
  for (const auto& slices : slices_of(runtime_)) {
    if (const auto index = slices->find(tensor)) return piece_name(*slices, *index);
  }
  return parameter;
}

void OptimizerPieces::set_state(optim::OptimizerState whole) {
  find_slices();
  for (const auto& slices : slices_) cut_states(*slices, whole);
  {
    const StandIn stand_in(*this);
    set_state_(whole, names());
  }
  for_each_divided([&](const at::Tensor& parameter, const Divided&) {
    optimizer_.state().erase(parameter.unsafeGetTensorImpl());
  });
}

std::function<bool(const std::string&)> OptimizerPieces::has_part() {
  find_slices();
  return [this](const std::string& name) {
    const auto divided = find(runtime_.table().at(name).tensor);
    return !divided || divided->piece().numel() > 0;
  };
}

}  // namespace smp
