// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "dp/joinable.h"
#include "runtime/runtime.h"

namespace smp::runtime {

class StepProgram;

/// Lets replicas run out of batches one after the other: see `ModelCore::join`. A round is a step
/// that trains; one without batches takes part in it with the program that it ran last of that step
/// function. Internal.
class ReplicaJoin final : public dp::Joinable {
 public:
  /// The replicas' common work in a step that trains.
  struct Step {
    int divisor = 1;          ///< number of replicas whose microbatches divide the gradients
    int source = 0;           ///< rank whose buffers are given to all
    bool is_complete = true;  ///< all replicas have a batch
  };

  /// `runtime` must outlive this.
  explicit ReplicaJoin(Runtime& runtime) : Joinable("DistributedModel"), runtime_(runtime) {}

  using Joinable::is_joining;

  /// Throws `UsageError` where a replica without batches would stay behind for ever.
  void check_possible() const;
  /// A step function begins to train by `program`. Collective under a join.
  Step begin_step(const std::shared_ptr<StepProgram>& program, const std::string& step_name);

  void end_join() override;

 private:
  /// The last training of a step function.
  struct Trained {
    std::string step_name;
    std::weak_ptr<StepProgram> program;
  };

  comm::Communicator& replicas() const override { return *runtime_.replicas(); }
  void take_part(const Round& round) override;
  void take_model_of(int root) override;
  void take_counts_of(int root);
  Step step_of(const Round& round) const;

  Runtime& runtime_;
  std::map<int64_t, Trained> trained_;  // trainings by step function, as rounds tell them apart
  bool took_part_ = false;              // in steps of others
};

}  // namespace smp::runtime
