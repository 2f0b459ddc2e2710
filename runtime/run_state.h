// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "dp/step_gradients.h"
#include "graph/graph.h"
#include "graph/hash_log.h"
#include "graph/whole_tensors.h"
#include "partitioner/cost_model.h"
#include "partitioner/plan.h"
#include "partitioner/predict.h"
#include "pipeline/observer.h"
#include "runtime/living.h"
#include "runtime/step_functions.h"

// State of a rank's program, by its writer. Internal; parts of `Runtime`.
namespace smp::runtime {

class LossScaler;
class ParameterShards;
class StepValue;

/// The state that a resumed run continues. Written by steps, and by loading.
struct Progress {
  /// The seed of all random streams, the same on all ranks; settled in the first step.
  std::optional<uint64_t> seed;
  /// Steps that trained, over all step functions.
  int64_t training_steps = 0;
  /// `gradient_shards` of the checkpoint that was loaded; 0 without one.
  int gradient_shards = 0;
  StepFunctions step_functions;
  /// How often values were loaded into parameters: master weights made before are of old values.
  int64_t parameter_loads = 0;
  /// Whether the job has said where it goes on after a restart.
  bool restart_is_told = false;
  /// Whether all ranks know that the job was asked to stop.
  bool stop_is_agreed = false;
};

/// The results of the first step for the rest of the program. Written by runtime/step in that step.
struct FirstStep {
  /// The schedule of `"pipeline": "file"` in its text form; the same on all ranks.
  std::string schedule;
  /// Bytes of its device that each rank may count on; 0 on the CPU, and once no plan keeps it.
  int64_t device_share = 0;
  /// Costs of computing and sending, as far as the model itself is not measured.
  partitioner::CostModel costs;
  /// How much state the program's optimizers keep for the parameters of all models, masters of half
  /// precision included; nothing where the configuration says it.
  partitioner::StateFactors state_factors;
  /// The graph whose costs were measured, as it was captured: the first one, or none.
  std::shared_ptr<const graph::Graph> measured;
  /// How many microbatches of the first graph run as one; 0 as long as that is not decided.
  int coalescing = 0;
  /// Which parameters the ranks of a tensor-parallel group divided, and why not the others; empty
  /// without tensor parallelism.
  std::string tensor_parallelism_report;
  /// The plan, and the graph in its order; null before partitioning.
  std::shared_ptr<const graph::Graph> graph;
  std::shared_ptr<const partitioner::Plan> plan;
  /// Sharded data parallelism; null: parameters are whole.
  std::shared_ptr<ParameterShards> parameter_shards;
};

/// The step function that runs, if one does. Written by runtime/step.
struct CurrentStep {
  bool is_running = false;  ///< on this thread
  bool is_captured = false;
  int microbatches = 0;  ///< those of this replica, in the call that the function runs for
  /// The program whose gradients wait for later steps (`backward_passes_per_step`); null: none.
  const void* adding_up = nullptr;
};

/// Inputs that reach steps from outside. Each is registered by the object that it belongs to.
struct StepInputs {
  /// Numbers that are inputs of every step function.
  Living<StepValue> values;
  /// Tensors that step functions read, are not given, and need not be given.
  graph::WholeTensors wholes;
  /// The factor of the loss in `model->backward`: that of the optimizer that has one.
  std::weak_ptr<LossScaler> loss_scaler;
};

/// How `ScheduleRunner`s run schedules. Written by them, and by tests before the first step.
struct Execution {
  /// State of the configuration's `timeline`: the same on all ranks.
  enum class TimelineState { kNotBegun, kRecorded, kDone };
  TimelineState timeline = TimelineState::kNotBegun;
  /// In how many steps of training schedules can still be tried.
  int trial_steps = 64;
  /// Hashes for the configuration's `record_hashes`; null before the first step.
  std::shared_ptr<graph::HashLogWriter> hash_log;
  /// How many messages a channel takes beyond those that its receiver holds, at least: two let one
  /// arrive while the one before it is used.
  int messages_ahead = 2;
  /// Look at all steps. Each is here for as long as it lives.
  std::vector<pipeline::Observer*> observers;
  /// Told of reductions of gradients, if set; for tests.
  dp::ReductionObserver on_reduction;
};

}  // namespace smp::runtime
