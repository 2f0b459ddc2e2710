// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/channel_pool.h"
#include "core/refusal.h"
#include "core/status.h"
#include "dp/sharded_parameters.h"
#include "pipeline/copies.h"
#include "pipeline/gradient_sums.h"
#include "pipeline/message.h"
#include "pipeline/observer.h"
#include "pipeline/outputs.h"
#include "pipeline/schedule.h"
#include "pipeline/stage.h"
#include "pipeline/step_device_graphs.h"

namespace smp::pipeline {

/// How many messages of the edge `from` -> `to` (of its backward: `to` -> `from`) the receiver has
/// at one time: each from its receive to the receiving stage's last computation of the microbatch.
int messages_held(const Schedule& schedule, int from, int to, bool is_backward);

/// Runs this rank's part of a schedule: its actions, one after the other. The schedule is a fixed
/// program; nothing is negotiated, and the needs of an action are looked up before the first step.
/// Each edge has a port of the pool for each direction, with room for the messages that the
/// schedule lets its receiver hold and for as many ahead as it takes that no send waits for ever.
///
/// An executor belongs to one thread.
class Executor {
 public:
  /// The needs of all steps on this rank besides their schedule: tensors, and how to run on them.
  struct Setup {
    const graph::TensorTable& table;  ///< parameters and buffers
    /// Takes the gradients of the parameters whose stages reduce; null: no stage has a backward.
    GradientSums* gradients = nullptr;
    std::vector<int> regions = {};                        ///< see `Stage`
    std::shared_ptr<graph::TensorStore> store = nullptr;  ///< see `Stage`
    /// Divided parameters, which are gathered and freed as the schedule says, and per value of the
    /// graph its number among them, if it is one; null and empty: none is divided.
    std::shared_ptr<dp::ShardedParameters> sharded = nullptr;
    std::vector<std::optional<size_t>> shard_of_value = {};
    std::vector<Frame::Copy> copies = {};       ///< those of the schedule (frame.h)
    std::map<int, SharedOutputs> outputs = {};  ///< outputs that go to all ranks, by stage
    /// Whether computations run as device graphs, and whether all have to: see `StepDeviceGraphs`.
    bool uses_device_graphs = false;
    bool requires_device_graphs = false;
  };

  /// For the stages of `partitioned`, which outlives it; so do `setup` and all that it refers to.
  /// Takes ports of `channels`: collective over its group, whose ranks are those of the schedule.
  /// Executors with the same pool run one after the other, on all ranks in one order. The ports
  /// take `ahead` messages beyond those held, or more where sends would wait in a circle. Throws a
  /// `CommError` when there is not the memory for them, the error of `verify` if the schedule
  /// cannot run to its end on them, and those of `StepDeviceGraphs`.
  Executor(Schedule schedule, const PartitionedGraph& partitioned, const Setup& setup,
           std::shared_ptr<comm::ChannelPool> channels, int ahead);
  ~Executor();
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  const Schedule& schedule() const { return schedule_; }

  /// Describes this rank's step: its stages, then its actions, a line for each. `unwritten`: as of
  /// `Step`.
  std::string describe(const CopiedTensors::Unwritten& unwritten) const;

  /// The stages of this rank, by number.
  const std::map<int, std::unique_ptr<Stage>>& stages() const { return stages_; }
  /// The bytes of each action's message, 0 where it has none. `unwritten`: as of `Step`.
  std::vector<int64_t> message_bytes(const CopiedTensors::Unwritten& unwritten) const;

  /// The operands of a microbatch.
  struct Microbatch {
    std::vector<at::Tensor> inputs;  ///< inputs by graph input
    graph::RandomKey key;
    /// Constants and contents that are others from this microbatch on.
    std::vector<graph::ConstantOverride> constants;
    std::vector<graph::ContentOverride> contents;
  };

  /// The operands of a step, but for messages.
  struct Step {
    std::vector<Microbatch> microbatches;
    CopiedTensors::Unwritten unwritten;
    /// See `StepResults`.
    bool keeps_history = false;
    bool keeps_losses = false;
    /// Records of the microbatches on stages that are recorded, see `StageState::record`; null:
    /// none is.
    StepRecords* records = nullptr;
    /// Why the step cannot run as device graphs.
    core::Refusal why_no_device_graphs;
    std::vector<Observer*> observers;
  };

  /// Runs all actions. Throws the errors of communication and operators; the executor is not usable
  /// after that.
  StepResults run(const Step& step);

 private:
  /// Messages of one kind over one edge, in one direction.
  struct Channel {
    MessageLayout layout;
    comm::ChannelPool::Port* port = nullptr;
    int messages = 0;  // received in a step

    void begin_step() const;
  };

  /// A computation's result for another stage of this rank.
  struct HandOver {
    Message* from;
    Message* to;
  };

  /// A message that is being copied from a device to the host, from where it is to be sent.
  struct Outgoing {
    c10::Event copied;
    Message tensors;  // until then
    comm::Sender* sender;
  };

  /// An action with its needs.
  struct Instruction {
    Action action;
    core::Label label;  // label for others to see
    Stage* stage = nullptr;
    Channel* channel = nullptr;  // channel of a transfer
    Message* message = nullptr;  // message of a transfer
    bool waits = false;          // it may, for other ranks
    std::vector<HandOver> hand_overs;
    std::vector<size_t> shards;              // divided parameters that it reads, gathers or frees
    const CopiedTensors* copies = nullptr;   // tensors of a copy
    const SharedOutputs* outputs = nullptr;  // outputs that go to all ranks
  };

  void begin_step(const Step& step);
  void execute(const Instruction& instruction, const Step& step, StepResults& results);
  comm::Communicator& pipeline() const { return *pool_->group(); }
  int rank() const { return pipeline().rank(); }
  void take_ports(int credit);
  void make_stages();
  void find_copies();
  Instruction resolve(const Action& action);
  void find_shards();
  void make_device_graphs();
  std::vector<size_t> shards_of(const std::vector<graph::ValueId>& parameters) const;
  std::vector<HandOver> hand_overs_of(const Action& action) const;
  void send(const Instruction& instruction);
  void receive(const Instruction& instruction);
  void hand_over();
  static void prepare(Stage& stage, int microbatch, const Step& step);
  void compute(const Instruction& instruction, const Step& step, StepResults& results);

  const Schedule schedule_;
  const PartitionedGraph& partitioned_;
  const Setup& setup_;
  const std::vector<StageEdge> stage_edges_;  // edges of `partitioned_`
  const std::shared_ptr<comm::ChannelPool> pool_;
  std::map<int, std::unique_ptr<Stage>> stages_;
  std::unique_ptr<StepDeviceGraphs> device_graphs_;      // null: operator by operator
  std::map<std::pair<int, bool>, Channel> channels_;     // channels by edge and direction
  std::map<std::pair<int, int>, CopiedTensors> copies_;  // copies by owner and reader
  std::vector<Instruction> program_;
  std::optional<Outgoing> outgoing_;
};

}  // namespace smp::pipeline
