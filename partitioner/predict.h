// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/arg.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "graph/graph.h"
#include "partitioner/cost_model.h"
#include "partitioner/plan.h"
#include "partitioner/replica_sharding.h"
#include "partitioner/units.h"

namespace smp::partitioner {

/// Bytes of optimizer state for each byte of a trained parameter, by the parameter's name.
using StateFactors = std::map<std::string, double>;

/// The step in which a plan is used, as far as its time and memory depend on it.
struct StepModel {
  explicit StepModel(int microbatches = 1) : microbatches_(microbatches) {}

  /// The same step of the graph with its operators in another order (order.h).
  StepModel in_order(const std::vector<int>& order) const;

  /// How many microbatches a step has.
  TORCH_ARG(int, microbatches);
  /// The schedule: `interleaved`, or else `simple`.
  TORCH_ARG(bool, interleaved) = true;
  /// How many microbatches `interleaved` has in flight on a rank at most.
  TORCH_ARG(int, active_microbatches) = 1;
  /// Whether backwards are split, and a late stage keeps parts of as many as the first.
  TORCH_ARG(bool, splits) = false;
  /// Bytes of optimizer state for each byte of a trained parameter: 2 for Adam, 1 for momentum, 0
  /// for plain SGD.
  TORCH_ARG(double, optimizer_state) = 2.0;
  /// The same of the parameters whose optimizer is known.
  TORCH_ARG(StateFactors, optimizer_states);
  /// How many messages of a channel lie in the memory of the sender's device while they are under
  /// way, at most; 0: they pass through the host's.
  TORCH_ARG(int, messages) = 0;
  /// Bytes that a rank needs in addition while a region runs again (see checkpointing.h).
  TORCH_ARG(int64_t, largest_region) = 0;
  /// The region of each operator, -1 for none; or empty.
  TORCH_ARG(std::vector<int>, regions);
  /// Replicas that add up their gradients.
  TORCH_ARG(int, replicas) = 1;
  /// Into how many sums each of them adds up the gradients of its microbatches.
  TORCH_ARG(int, shards) = 1;
  /// The division among replicas.
  TORCH_ARG(ReplicaSharding, sharding);
  /// Costs of computing and sending.
  TORCH_ARG(CostModel, costs);
  /// Bytes that a rank may use for parameters, gradients, optimizer state and activations; 0: any.
  TORCH_ARG(int64_t, memory_limit) = 0;
};

/// Bytes of optimizer state for each byte of a trained parameter.
double state_factor(const StepModel& step, const graph::Value& parameter);

/// How many microbatches' activations a stage keeps at once (docs/schedules.md): M with `simple`,
/// min(M, A, 2 (S - s) - 1) with `interleaved`, min(M, A) where backwards are split, none if the
/// graph does not train.
int microbatches_in_flight(const StepModel& step, bool trains, int stage, int stages);

/// Bytes that a parameter takes where it belongs: itself and, if it is trained, the sum of its
/// gradients over the step's microbatches, `.grad`, which the sum becomes where there is one
/// replica (of several shards one is added up beside the others' sum), and the optimizer's state.
/// If replicas divide it, this rank's part counts, and its sum where there are several
/// microbatches.
struct ParameterMemory {
  int64_t weights = 0;
  int64_t gradients = 0;
  int64_t optimizer = 0;

  ParameterMemory(const graph::Graph& graph, const graph::Value& value, const StepModel& step);
  int64_t total() const { return weights + gradients + optimizer; }
};

/// Bytes that a parameter takes on a stage that reads it without owning it: a copy, and the
/// gradient of one microbatch if it is trained.
int64_t replica_bytes(const graph::Graph& graph, const graph::Value& value);

/// Bytes that the messages of a tensor take on the device of the stage that sends them.
int64_t message_bytes(const StepModel& step, int64_t bytes);

/// Us that each end of a transfer spends on a tensor, forward and back; and on the messages of a
/// boundary.
double transfer_us(const Link& link, int64_t bytes, bool needs_gradient);
double message_us(const Link& link, bool trains);

/// The cost of one stage according to the model. Times are of one microbatch, forward and backward.
struct StagePrediction {
  double forward_us = 0;
  double backward_us = 0;
  // Its ends of transfers from and to stages of other ranks:
  double values_us = 0;
  double gradients_us = 0;
  int in_flight = 0;
  int64_t weights = 0;
  int64_t gradients = 0;
  int64_t optimizer = 0;
  int64_t replicas = 0;
  int64_t casts = 0;        ///< weights in lower precision, under autocast
  int64_t messages = 0;     ///< under way from here, on a device
  int64_t activations = 0;  ///< saved and received, of all microbatches in flight

  double transfer_us() const { return values_us + gradients_us; }
  double time_us() const { return forward_us + backward_us + transfer_us(); }
  int64_t memory() const {
    return weights + gradients + optimizer + replicas + casts + messages + activations;
  }
};

/// The cost of a plan: each stage, and the ranks that run them.
struct Prediction {
  std::vector<StagePrediction> stages;
  std::vector<double> rank_us;       ///< per rank: time of one microbatch
  std::vector<int64_t> rank_memory;  ///< per rank: bytes
  int64_t recomputed = 0;            ///< a region that runs again, on each rank
  std::vector<int64_t> gathered;     ///< per rank: divided parameters while they are whole
  /// Per rank: sums of their gradients on the way, with one microbatch (else they are the stages').
  std::vector<int64_t> buckets;
  Units units;  ///< those of the plan, where replicas divide parameters
  /// sum t_r + (M - 1) max t_r over the ranks: exact for `simple` with equal ratios of backward
  /// to forward, and close for `interleaved`.
  double step_us = 0;
};

Prediction predict(const graph::Graph& graph, const Plan& plan, const StepModel& step);

/// `Prediction::gathered` and `buckets` of a rank that runs the whole graph: an estimate of those
/// of one with a part of it.
int64_t working_bytes(const graph::Graph& graph, const StepModel& step);

/// The uses of a rank's memory: "12.3 MiB: weights 2.0 MiB, gradients 4.0 MiB, optimizer state 4.0
/// MiB, activations of 3 microbatches 2.3 MiB", and, if there is any, ", casts of weights 1.0 MiB",
/// ", messages under way 0.5 MiB", ", a region that runs again 1.0 MiB" and ", divided parameters
/// while they are whole 3.0 MiB".
std::string describe_memory(const Plan& plan, const Prediction& prediction, int rank);

}  // namespace smp::partitioner
