// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <string>
#include <vector>

#include "checkpoint/writer.h"
#include "optim/state_dict.h"
#include "runtime/model.h"
#include "runtime/runtime.h"
#include "smp/checkpoint_parts.h"

/// The part of a checkpoint that each rank writes.
namespace smp::runtime {

/// Which replica writes the values of a parameter, where all replicas have the same.
class Turns {
 public:
  /// The first writes everything; in memory, which takes as much as one gives, each about as many
  /// bytes of this rank's parameters.
  Turns(const Runtime& runtime, const std::vector<Model*>& models, checkpoint::Medium medium);

  bool are_taken() const { return are_taken_; }
  /// Buffers are the first replica's.
  int of(const std::string& name) const;

  /// Leaves this replica's part of a state that all have.
  void keep_mine(OptimizerState& state) const;

 private:
  const bool are_taken_;
  const int replica_;
  std::map<std::string, int> replica_of_;
};

/// The ranks that write, numbered.
struct Writers {
  /// The stages of the first replica, with all ranks of their tensor-parallel groups; where
  /// replicas take turns or have parts of the optimizer's state those of all, and of the first that
  /// together have all parameters. Before partitioning every stage has the whole model, so the
  /// first writes it. Tensors that lie on the ranks like an optimizer's state are written like it.
  Writers(const Runtime& runtime, const Turns& turns, bool writes_states);

  int count = 1;
  int mine;
};

/// The tensors that this rank writes.
checkpoint::Shard shard_of(const Runtime& runtime, const CheckpointParts& parts,
                           const Turns& turns);

}  // namespace smp::runtime
