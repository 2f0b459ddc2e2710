// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "optim/state_dict.h"
#include "runtime/parameters/whole.h"
#include "runtime/runtime.h"
#include "runtime/update/divided_states.h"
#include "runtime/update/master_weights.h"
#include "smp/optim/uses_tensor_norms.h"

namespace smp::runtime {

/// The names of all parameters, by identity and alone.
optim::ParameterNames parameter_names(const Runtime& runtime);
std::set<std::string> names_of_parameters(const Runtime& runtime);

/// Makes an optimizer update this replica's pieces of parameters (`Model::pieces`) instead of the
/// parameters, and with `fp16` or `bf16` the master weights of either. Its param groups hold the
/// parameters as ever: pieces and masters stand in for them only while it works, so that it has
/// state for these. Parameters that are not divided, and of full precision, stay as they are.
/// Internal.
///
/// Master weights go through checkpoints as a tensor of the parameter's state,
/// `checkpoint::kMasterField`.
class OptimizerPieces {
 public:
  using SetState = std::function<void(const OptimizerState&, const optim::ParameterNames&)>;
  using LossClosure = torch::optim::Optimizer::LossClosure;
  using Update = std::function<at::Tensor(LossClosure)>;

  /// `optimizer`, `runtime` and `fields` must outlive this.
  OptimizerPieces(torch::optim::Optimizer& optimizer, const Runtime& runtime, SetState set_state,
                  const StateFields& fields);

  /// Calls `update`, the optimizer's step, on the pieces and masters, rounds masters into the
  /// parameters and gives the changes to all replicas. The closure sees the parameters. Collective
  /// over the replicas.
  at::Tensor step(const Update& update, const LossClosure& closure);
  /// Does the same as the optimizer's own.
  void zero_grad(bool set_to_none);

  /// While `step` calls `update`: norms of wholes, given the optimizer's parts of them; as
  /// `optim::TensorNorms`. Collective over the ranks that have parameters together.
  std::vector<double> norms_of(const std::vector<optim::TensorOfParameter>& tensors,
                               double norm_type) const;

  /// The gradients that the next update would read: the defined gradients of this rank, of divided
  /// parameters those of this replica's pieces.
  std::vector<at::Tensor> gradients();
  /// Gives the tensor from which the optimizer would go on for a parameter: that, its piece, or the
  /// values that the master of either has in the next step; undefined where this replica has no
  /// piece of it.
  at::Tensor updated(const at::Tensor& parameter) const;
  /// Gives master weights the values that the parameters have now.
  void reload_masters();

  /// The states of whole parameters, put together from the pieces of all replicas: of some buckets'
  /// parameters on each, so that none needs the memory for all. The first replica has the states of
  /// undivided parameters, too, and the names in the groups. Collective over the replicas.
  OptimizerState gather_state();
  /// The states of this replica's pieces, under the names of `Entry::name_on`, and of undivided
  /// parameters that this rank owns. Tensors of both may be the optimizer's own. Throws
  /// `UsageError` where another parameter has the name of a piece.
  OptimizerState local_state();
  /// The name of this replica's part of a parameter in `local_state`: its name where it is not
  /// divided, nothing where this replica has no piece of it.
  std::string name_of_piece(const std::string& parameter) const;
  /// Replaces the state by the pieces of that of whole parameters, which fits the values that
  /// parameters had after `parameter_loads` (see `Runtime`); those of this replica's pieces are
  /// taken as they are. Masters that are not in it begin with the parameters' values.
  void set_state(OptimizerState whole, int64_t parameter_loads);

 private:
  using Piece = ParameterTable::Piece;
  class StandIn;
  /// The parameters that some rank is about to update.
  struct Updated {
    const ParameterTable::Entry* entry;
    at::Tensor stand_in;   // undefined where this rank has nothing of it
    at::ScalarType dtype;  // type of stand-ins
  };

  /// Divides the parameters, if no step has.
  void divide() const { pieces_of(runtime_); }
  void for_each(const std::function<void(const at::Tensor&)>& body) const;
  void for_each_divided(const std::function<void(const at::Tensor&, const Piece&)>& body) const;
  at::Tensor target_of(const at::Tensor& parameter) const;
  at::Tensor stand_in_for(const at::Tensor& parameter) const;
  bool has_loaded() const;
  at::Tensor reconciled_master(const at::Tensor& target) const;
  optim::ParameterNames names() const;
  void bind_pieces();
  void prepare();
  void make_masters();
  void adopt_states(bool before_masters = false);
  void forget_replaced();
  void list_updated();
  void clip() const;
  void write_back();
  void gather();
  OptimizerState own_state();
  void add_masters(OptimizerState& state) const;
  void take_masters(OptimizerState& state);

  torch::optim::Optimizer& optimizer_;
  const Runtime& runtime_;
  SetState set_state_;
  const StateFields& fields_;
  bool has_masters_;
  MasterWeights masters_;
  std::vector<Updated> updated_;     // in the order of the groups
  int64_t parameter_loads_ = 0;      // when masters were last as the parameters
  bool states_are_divided_ = false;  // those made of wholes, before the first step divided them
};

}  // namespace smp::runtime
