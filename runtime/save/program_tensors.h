// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "checkpoint/apply.h"
#include "checkpoint/reader.h"
#include "optim/state_dict.h"
#include "runtime/model.h"
#include "runtime/save/background_save.h"
#include "smp/removable_handle.h"

namespace smp::runtime {

/// Tensors of the program, one for a parameter of a model, which lie on the ranks as the parameters
/// do: see `smp::register_checkpoint_tensors`. A checkpoint has them as tensors of the parameters'
/// states, `checkpoint::tensors_field(name)`. Belongs to the rank's thread. Internal.
class ProgramTensors {
 public:
  using Save = std::function<Model::TensorDict()>;
  using Load = std::function<void(const Model::TensorDict&)>;

  ProgramTensors(std::string name, Model& model, Save save, Load load);

  const std::string& name() const { return name_; }
  /// Null after the model's end, when nothing else of this may be called.
  Model* model() const { return life_.expired() ? nullptr : &model_; }

  /// Gives the states, with one tensor each, that this rank has of its parts of parameters. Throws
  /// `UsageError` for a tensor that is of no parameter that it owns, or has other sizes.
  OptimizerState local_state() const;
  /// Throws `CheckpointError`, with `strict`, where the checkpoint has none of a parameter's sizes.
  /// `path` is for the message.
  void check(const checkpoint::Index& index, const std::string& path, bool strict) const;
  /// Gives the program this rank's tensors, now or, before the first step, when that has divided
  /// the parameters. Does nothing where the checkpoint has none.
  void load(std::shared_ptr<checkpoint::Reader> reader);
  /// Gives the program the tensors loaded before the first step, which has divided the parameters
  /// now.
  void take_loaded();

 private:
  struct Stored {
    const ParameterTable::Entry* entry;
    std::string tensor;  // the optimizer's tensor in the checkpoint
  };
  std::vector<Stored> stored_in(const checkpoint::Index& index) const;

  const std::string name_;
  Model& model_;
  std::weak_ptr<const Model> life_;  // identity of the model, whose address a later one may have
  Save save_;
  Load load_;
  std::shared_ptr<checkpoint::Reader> loaded_;  // until the program has its tensors
};

/// Those of models, in the order in which they were registered.
std::vector<std::shared_ptr<ProgramTensors>> program_tensors_of(const CheckpointContext& context,
                                                                const std::vector<Model*>& models);

/// Has checkpoints of a model hold tensors under a name. Throws `UsageError` for a name that is
/// none or that the model has tensors of.
RemovableHandle register_program_tensors(const std::string& name, Model& model,
                                         ProgramTensors::Save save, ProgramTensors::Load load);

}  // namespace smp::runtime
