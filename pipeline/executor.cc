// SPDX-License-Identifier: Apache-2.0
#include "pipeline/executor.h"

#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <sstream>
#include <utility>

#include "core/check.h"
#include "pipeline/verifier.h"
#include "pipeline/walk.h"

namespace smp::pipeline {
namespace {

std::vector<graph::TensorMeta> metas(const graph::Graph& graph,
                                     const std::vector<graph::ValueId>& values) {
  std::vector<graph::TensorMeta> result;
  for (graph::ValueId id : values) result.push_back(graph.values[id].meta);
  return result;
}

/// "1B0", "receive 0F3", "send 1F3", "reduce 1", "unshard 1", "send what 0 owns", "outputs of 1".
core::Label label_of(const Action& action) {
  const auto made = [&](int stage) {
    return to_string(action.is_backward() ? backward_of(stage, action.microbatch)
                                          : forward_of(stage, action.microbatch));
  };
  if (action.is_recv()) return core::Label("receive " + made(action.peer));
  if (action.is_send()) return core::Label("send " + made(action.stage));
  if (action.is_compute()) return core::Label(to_string(action));
  if (action.is_copy()) {
    const char* what = action.kind == Action::Kind::kSendCopy ? "send" : "receive";
    return core::Label(c10::str(what, " what ", stages_of(action).first, " owns"));
  }
  if (action.kind == Action::Kind::kOutputs)
    return core::Label(c10::str("outputs of ", action.stage));
  return core::Label(std::string(group_of(action)) + " " + std::to_string(action.stage));
}

}  // namespace

int messages_held(const Schedule& schedule, int from, int to, bool is_backward) {
  const int receiver = is_backward ? from : to;
  const int sender = is_backward ? to : from;
  const auto& actions = schedule.actions(schedule.rank_of(receiver));
  std::vector<const Action*> last_use(schedule.microbatches());
  for (const Action& action : actions) {
    if (action.is_compute() && action.stage == receiver) last_use[action.microbatch] = &action;
  }
  int held = 0, most = 0;
  for (const Action& action : actions) {
    if (action.stage != receiver) continue;
    if (action.is_recv() && action.peer == sender && action.is_backward() == is_backward) {
      most = std::max(most, ++held);
    } else if (action.is_compute() && last_use[action.microbatch] == &action) {
      --held;
    }
  }
  return most;
}

Executor::Executor(Schedule schedule, const PartitionedGraph& partitioned, const Setup& setup,
                   std::shared_ptr<comm::ChannelPool> channels, int ahead)
    : schedule_(std::move(schedule)),
      partitioned_(partitioned),
      setup_(setup),
      stage_edges_(stage_edges(partitioned.edges)),
      pool_(std::move(channels)) {
  const int credit = least_credit(schedule_, ahead);
  verify(schedule_, stage_edges_, VerifyOptions().credit(credit));
  SMP_INTERNAL_ASSERT(setup.gradients != nullptr || !schedule_.has_backward(),
                      "a step with backwards has sums of gradients");
  take_ports(credit);
  make_stages();
  find_copies();
  for (const Action& action : schedule_.actions(rank())) {
    program_.push_back(resolve(action));
    if (action.is_recv()) ++program_.back().channel->messages;
  }
  if (setup.sharded) find_shards();
  if (setup.uses_device_graphs) make_device_graphs();
}

/// After an error a message may still be on its way, from memory that goes now.
Executor::~Executor() {
  try {
    if (outgoing_) outgoing_->copied.synchronize();
  } catch (const c10::Error&) {
    // The device has failed, and copies no more.
  }
}

void Executor::make_stages() {
  for (int index = 0; index < schedule_.stages(); ++index) {
    if (schedule_.rank_of(index) != rank()) continue;
    SMP_INTERNAL_ASSERT(partitioned_.has_backward[index] == schedule_.has_backward(index), "stage ",
                        index, " and the schedule differ in whether it has a backward");
    stages_[index] = std::make_unique<Stage>(partitioned_, index, schedule_.microbatches(),
                                             setup_.table, setup_.regions, setup_.store);
  }
}

void Executor::make_device_graphs() {
  device_graphs_ = std::make_unique<StepDeviceGraphs>(
      partitioned_.facts.graph.device(), schedule_.actions(rank()), schedule_.microbatches(),
      setup_.requires_device_graphs);
  for (const auto& [index, stage] : stages_) device_graphs_->add_stage(*stage);
}

void Executor::find_copies() {
  for (const Frame::Copy& copy : setup_.copies) {
    if (schedule_.rank_of(copy.from) != rank() && schedule_.rank_of(copy.to) != rank()) continue;
    copies_.try_emplace({copy.from, copy.to}, copy, partitioned_.facts.graph, setup_.table,
                        setup_.sharded, setup_.shard_of_value);
  }
}

void Executor::take_ports(int credit) {
  const int me = rank();
  std::vector<comm::ChannelSpec> outgoing, incoming;
  std::vector<Channel*> senders, receivers;
  for (size_t i = 0; i < partitioned_.edges.size(); ++i) {
    for (const bool is_backward : {false, true}) {
      const Edge& edge = partitioned_.edges[i];
      const int source = schedule_.rank_of(is_backward ? edge.to : edge.from);
      const int target = schedule_.rank_of(is_backward ? edge.from : edge.to);
      const int held = messages_held(schedule_, edge.from, edge.to, is_backward);
      if (held == 0 || source == target || (source != me && target != me)) continue;
      MessageLayout layout(
          metas(partitioned_.facts.graph, is_backward ? edge.returning() : edge.values));
      Channel& channel = channels_
                             .try_emplace(std::make_pair(static_cast<int>(i), is_backward),
                                          Channel{std::move(layout)})
                             .first->second;
      const bool sends = source == me;
      const at::Device device = channel.layout.device();
      (sends ? senders : receivers).push_back(&channel);
      // Tensors of a device are copied out of a message, which is free when that is done.
      (sends ? outgoing : incoming)
          .push_back({sends ? target : source, /*tag=*/0, channel.layout.nbytes(),
                      device.is_cpu() ? held : 1, credit, device, channel.layout.header_bytes()});
    }
  }
  const auto ports = pool_->open(outgoing, incoming);
  for (size_t i = 0; i < senders.size(); ++i) senders[i]->port = ports.outgoing[i];
  for (size_t i = 0; i < receivers.size(); ++i) receivers[i]->port = ports.incoming[i];
}

void Executor::Channel::begin_step() const {
  const comm::MessageSize size = {layout.nbytes(), layout.header_bytes()};
  if (port->sender) {
    port->sender->set_size(size);
  } else {
    port->receiver->set_size(size);
    port->receiver->expect(messages);
  }
}

std::vector<size_t> Executor::shards_of(const std::vector<graph::ValueId>& parameters) const {
  std::vector<size_t> result;
  for (graph::ValueId id : parameters) {
    if (setup_.shard_of_value[id]) result.push_back(*setup_.shard_of_value[id]);
  }
  return result;
}

/// Computes get the divided parameters that they read, and the actions around them those of all
/// between.
void Executor::find_shards() {
  std::map<std::pair<int, bool>, std::vector<size_t>> read;  // shards by stage and direction
  for (const auto& [index, stage] : stages_) {
    read[{index, false}] = shards_of(stage->program().read_in_forward());
    read[{index, true}] = shards_of(stage->program().read_in_backward(setup_.regions));
    stage->forget_casts_of_microbatches();
  }
  std::map<int, Instruction*> unsharded;  // unshards by stage
  for (Instruction& instruction : program_) {
    const Action& action = instruction.action;
    if (action.kind == Action::Kind::kUnshard) unsharded[action.stage] = &instruction;
    if (action.kind == Action::Kind::kReshard) {
      instruction.shards = unsharded.at(action.stage)->shards;
    }
    if (!action.is_compute()) continue;
    instruction.shards = read.at({action.stage, action.is_backward()});
    instruction.waits = instruction.waits || !instruction.shards.empty();
    if (instruction.shards.empty()) continue;
    auto& gathered = unsharded.at(action.stage)->shards;
    for (const size_t shard : instruction.shards) {
      if (std::count(gathered.begin(), gathered.end(), shard) == 0) gathered.push_back(shard);
    }
  }
}

Executor::Instruction Executor::resolve(const Action& action) {
  Instruction result;
  result.action = action;
  result.label = label_of(action);
  const auto stage = stages_.find(action.stage);
  if (stage != stages_.end()) result.stage = stage->second.get();
  if (action.is_transfer()) {
    const auto edge = static_cast<int>(edge_of(action, stage_edges_));
    SMP_INTERNAL_ASSERT(edge < static_cast<int>(stage_edges_.size()), to_string(action),
                        " has no edge in the plan");
    result.channel = &channels_.at({edge, action.is_backward()});
    result.message = &result.stage->message(action.microbatch, edge, action.is_backward());
  }
  if (action.is_compute()) result.hand_overs = hand_overs_of(action);
  if (action.is_copy()) result.copies = &copies_.at(stages_of(action));
  if (action.kind == Action::Kind::kOutputs) result.outputs = &setup_.outputs.at(action.stage);
  result.waits = action.is_compute() ? result.stage->program().calls_foreign
                                     : !action.is_recv() && action.kind != Action::Kind::kRecall;
  return result;
}

/// Between stages of this rank there is no transfer: one's result has arrived at the other.
std::vector<Executor::HandOver> Executor::hand_overs_of(const Action& action) const {
  const bool is_backward = action.is_backward();
  std::vector<HandOver> result;
  if (is_backward && !action.makes_input_gradients()) return result;
  for (size_t i = 0; i < partitioned_.edges.size(); ++i) {
    const Edge& edge = partitioned_.edges[i];
    const int source = is_backward ? edge.to : edge.from;
    const int target = is_backward ? edge.from : edge.to;
    const bool nothing = is_backward && !edge.needs_gradient();
    if (source != action.stage || stages_.count(target) == 0 || nothing) continue;
    const auto message = [&](int stage) {
      return &stages_.at(stage)->message(action.microbatch, static_cast<int>(i), is_backward);
    };
    result.push_back({message(source), message(target)});
  }
  return result;
}

std::vector<int64_t> Executor::message_bytes(const CopiedTensors::Unwritten& unwritten) const {
  std::vector<int64_t> bytes;
  for (const Instruction& action : program_) {
    bytes.push_back(action.copies    ? action.copies->nbytes(unwritten)
                    : action.outputs ? action.outputs->nbytes()
                    : action.channel ? action.channel->layout.nbytes()
                                     : 0);
  }
  return bytes;
}

std::string Executor::describe(const CopiedTensors::Unwritten& unwritten) const {
  std::ostringstream out;
  for (const auto& [index, stage] : stages_) out << stage->program().describe();
  out << "actions" << (device_graphs_ ? ", of which those that are captured run as graphs" : "")
      << "\n";
  const auto& actions = schedule_.actions(rank());
  const auto bytes = message_bytes(unwritten);
  for (size_t i = 0; i < actions.size(); ++i) {
    out << "  " << to_string(actions[i]);
    if (bytes[i] > 0) out << ", " << bytes[i] << " bytes";
    out << "\n";
  }
  return out.str();
}

/// The reductions of the list are armed before the computations that complete them.
void Executor::begin_step(const Step& step) {
  if (device_graphs_) device_graphs_->begin_step(step.why_no_device_graphs);
  for (const auto& [index, stage] : stages_) stage->begin_step();
  for (const auto& [key, channel] : channels_) channel.begin_step();
  for (const Instruction& instruction : program_) {
    if (instruction.action.kind != Action::Kind::kReduce) continue;
    setup_.gradients->arm(instruction.stage->program().consumed);
  }
  for (Observer* observer : step.observers) observer->on_step_begin();
}

StepResults Executor::run(const Step& step) {
  const auto end = c10::make_scope_exit([this] {
    for (const auto& [index, stage] : stages_) stage->end_step();
  });
  begin_step(step);
  StepResults results{step.keeps_history, step.keeps_losses, {}, {}};
  core::ActionScope status;
  for (size_t i = 0; i < program_.size(); ++i) {
    const Instruction& instruction = program_[i];
    status.set(instruction.label);
    for (Observer* observer : step.observers) observer->on_begin(i, instruction.action);
    execute(instruction, step, results);
    for (Observer* observer : step.observers) observer->on_end(i, instruction.action);
  }
  for (Observer* observer : step.observers) observer->on_step_end();
  hand_over();
  for (const auto& [key, channel] : channels_) {
    if (channel.port->sender) channel.port->sender->flush();
  }
  for (const auto& [index, stage] : stages_) stage->check_done();
  return results;
}

void Executor::execute(const Instruction& instruction, const Step& step, StepResults& results) {
  const Action& action = instruction.action;
  if (instruction.waits) hand_over();
  if (action.is_compute() && !instruction.shards.empty()) {
    for (const size_t shard : instruction.shards) setup_.sharded->wait(shard);
    for (Observer* observer : step.observers) observer->on_gathered();
  }
  switch (action.kind) {
    case Action::Kind::kForward:
    case Action::Kind::kBackward:
    case Action::Kind::kBackwardInput:
    case Action::Kind::kBackwardWeight:
      compute(instruction, step, results);
      break;
    case Action::Kind::kSendForward:
    case Action::Kind::kSendBackward:
      send(instruction);
      break;
    case Action::Kind::kRecvForward:
    case Action::Kind::kRecvBackward:
      receive(instruction);
      break;
    case Action::Kind::kReduce:
      setup_.gradients->complete(instruction.stage->program().consumed);
      break;
    case Action::Kind::kRecall:
      instruction.stage->state(action.microbatch).prefetch();
      break;
    case Action::Kind::kSendCopy:
      instruction.copies->send(pipeline(), schedule_.rank_of(action.peer), step.unwritten);
      break;
    case Action::Kind::kRecvCopy:
      instruction.copies->receive(pipeline(), schedule_.rank_of(action.peer), step.unwritten);
      break;
    case Action::Kind::kOutputs:
      instruction.outputs->share(pipeline(), schedule_.rank_of(action.stage), results);
      break;
    case Action::Kind::kUnshard:
      for (const size_t shard : instruction.shards) setup_.sharded->gather(shard);
      break;
    case Action::Kind::kReshard:
      for (const size_t shard : instruction.shards) setup_.sharded->release(shard);
      break;
  }
}

/// Waits for the copy of a message that is on its way, and sends it.
void Executor::hand_over() {
  if (!outgoing_) return;
  outgoing_->copied.synchronize();
  outgoing_->sender->send();
  outgoing_.reset();
}

/// A message from a device is handed over with the next one, or before this rank waits for others:
/// meanwhile the device is given further work.
void Executor::send(const Instruction& instruction) {
  const MessageLayout& layout = instruction.channel->layout;
  comm::Sender& sender = *instruction.channel->port->sender;
  const at::Tensor& message = sender.prepare();
  auto copied = layout.begin_pack(*instruction.message, message, sender.device_part());
  if (copied) {
    outgoing_.emplace(Outgoing{*std::move(copied), std::move(*instruction.message), &sender});
  } else {
    sender.send();
  }
  instruction.message->clear();
}

void Executor::receive(const Instruction& instruction) {
  const MessageLayout& layout = instruction.channel->layout;
  comm::Receiver& receiver = *instruction.channel->port->receiver;
  if (!receiver.has_arrived()) hand_over();
  const at::Tensor message = receiver.receive();
  layout.unpack(message, *instruction.message, receiver.device_part());
}

/// Gives the stage the constants and the record of a microbatch.
void Executor::prepare(Stage& stage, int microbatch, const Step& step) {
  const Microbatch& operands = step.microbatches[microbatch];
  if (!operands.constants.empty() || !operands.contents.empty()) {
    stage.apply(operands.constants, operands.contents);
  }
  if (step.records == nullptr) return;
  const auto record = step.records->find({stage.index(), microbatch});
  if (record != step.records->end()) stage.state(microbatch).record = &record->second;
}

void Executor::compute(const Instruction& instruction, const Step& step, StepResults& results) {
  const Action& action = instruction.action;
  Stage& stage = *instruction.stage;
  const Microbatch& operands = step.microbatches[action.microbatch];
  if (action.is_backward()) {
    const bool is_launched =
        device_graphs_ && device_graphs_->backward(action, operands.key, *setup_.gradients);
    if (!is_launched) stage.backward(action, setup_.gradients);
  } else {
    const bool is_launched =
        device_graphs_ && device_graphs_->forward(action, operands.inputs, operands.key, results);
    if (!is_launched) {
      prepare(stage, action.microbatch, step);
      stage.forward(action.microbatch, operands.inputs, operands.key, results);
    }
  }
  for (const HandOver& next : instruction.hand_overs) next.from->swap(*next.to);
}

}  // namespace smp::pipeline
