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

Executor::Executor(Schedule schedule, const graph::Graph& graph, std::vector<Edge> edges,
                   std::shared_ptr<comm::ChannelPool> channels, int ahead)
    : schedule_(std::move(schedule)),
      edges_(std::move(edges)),
      stage_edges_(stage_edges(edges_)),
      pool_(std::move(channels)),
      device_(graph.device()) {
  const int credit = least_credit(schedule_, ahead);
  verify(schedule_, stage_edges_, VerifyOptions().credit(credit));
  take_ports(graph, credit);
}

/// After an error a message may still be on its way, from memory that goes now.
Executor::~Executor() {
  try {
    if (outgoing_) outgoing_->copied.synchronize();
  } catch (const c10::Error&) {
    // The device has failed, and copies no more.
  }
}

void Executor::add_stage(std::unique_ptr<Stage> stage) {
  const int index = stage->index();
  SMP_INTERNAL_ASSERT(stage->program().has_backward == schedule_.has_backward(index), "stage ",
                      index, " and the schedule differ in whether it has a backward");
  stages_[index] = std::move(stage);
}

void Executor::take_ports(const graph::Graph& graph, int credit) {
  const int me = rank();
  std::vector<comm::ChannelSpec> outgoing, incoming;
  std::vector<Channel*> senders, receivers;
  for (size_t i = 0; i < edges_.size(); ++i) {
    for (const bool is_backward : {false, true}) {
      const Edge& edge = edges_[i];
      const int source = schedule_.rank_of(is_backward ? edge.to : edge.from);
      const int target = schedule_.rank_of(is_backward ? edge.from : edge.to);
      const int held = messages_held(schedule_, edge.from, edge.to, is_backward);
      if (held == 0 || source == target || (source != me && target != me)) continue;
      MessageLayout layout(metas(graph, is_backward ? edge.returning() : edge.values));
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

/// Looks up the needs of the actions.
void Executor::resolve() {
  for (const Action& action : schedule_.actions(rank())) {
    program_.push_back(resolve(action));
    if (action.is_recv()) ++program_.back().channel->messages;
  }
  if (parameters_) find_shards();
}

void Executor::use_shards(std::shared_ptr<dp::ShardedParameters> parameters,
                          std::vector<std::optional<size_t>> shard_of_value,
                          const std::vector<int>& regions) {
  parameters_ = std::move(parameters);
  shard_of_value_ = std::move(shard_of_value);
  for (const auto& [index, stage] : stages_) {
    const StageProgram& program = stage->program();
    shards_[index] = {shards_of(program.read_in_forward()),
                      shards_of(program.read_in_backward(regions))};
    stage->forget_casts_of_microbatches();
  }
}

std::vector<size_t> Executor::shards_of(const std::vector<graph::ValueId>& parameters) const {
  std::vector<size_t> result;
  for (graph::ValueId id : parameters) {
    if (shard_of_value_[id]) result.push_back(*shard_of_value_[id]);
  }
  return result;
}

void Executor::use_frame(const graph::Graph& graph, const std::vector<Frame::Copy>& copies,
                         const graph::TensorTable& table, std::map<int, SharedOutputs> outputs) {
  for (const Frame::Copy& copy : copies) {
    if (schedule_.rank_of(copy.from) != rank() && schedule_.rank_of(copy.to) != rank()) continue;
    copies_.try_emplace({copy.from, copy.to}, copy, graph, table, shard_of_value_);
  }
  outputs_ = std::move(outputs);
}

/// Actions that read parameters get those that are divided, and the actions around them those of
/// all between.
void Executor::find_shards() {
  std::map<int, Instruction*> unsharded;  // unshards by stage
  for (Instruction& instruction : program_) {
    const Action& action = instruction.action;
    if (action.kind == Action::Kind::kUnshard) unsharded[action.stage] = &instruction;
    if (action.kind == Action::Kind::kReshard) {
      instruction.shards = unsharded.at(action.stage)->shards;
    }
    if (!action.reads_parameters()) continue;
    instruction.shards = instruction.copies     ? instruction.copies->shards()
                         : action.is_backward() ? shards_.at(action.stage).backward
                                                : shards_.at(action.stage).forward;
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
    const int edge = known_edge(action);
    result.channel = &channels_.at({edge, action.is_backward()});
    result.message = &result.stage->message(action.microbatch, edge, action.is_backward());
  }
  if (action.is_compute()) result.hand_overs = hand_overs_of(action);
  if (action.is_copy()) result.copies = &copies_.at(stages_of(action));
  if (action.kind == Action::Kind::kOutputs) result.outputs = &outputs_.at(action.stage);
  result.waits = action.is_compute() ? result.stage->program().calls_foreign
                                     : !action.is_recv() && action.kind != Action::Kind::kRecall;
  return result;
}

/// Between stages of this rank there is no transfer: one's result has arrived at the other.
std::vector<Executor::HandOver> Executor::hand_overs_of(const Action& action) {
  const bool is_backward = action.is_backward();
  std::vector<HandOver> result;
  if (is_backward && !action.makes_input_gradients()) return result;
  for (size_t i = 0; i < edges_.size(); ++i) {
    const Edge& edge = edges_[i];
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

int Executor::known_edge(const Action& transfer) const {
  const size_t edge = edge_of(transfer, stage_edges_);
  SMP_INTERNAL_ASSERT(edge < edges_.size(), to_string(transfer), " has no edge in the plan");
  return static_cast<int>(edge);
}

std::vector<int64_t> Executor::message_bytes() const {
  std::vector<int64_t> bytes;
  for (const Action& action : schedule_.actions(rank())) bytes.push_back(message_bytes(action));
  return bytes;
}

int64_t Executor::message_bytes(const Action& action) const {
  if (action.is_copy()) return copies_.at(stages_of(action)).nbytes();
  if (action.kind == Action::Kind::kOutputs) return outputs_.at(action.stage).nbytes();
  if (!action.is_transfer()) return 0;
  return channels_.at({known_edge(action), action.is_backward()}).layout.nbytes();
}

std::string Executor::describe() const {
  std::ostringstream out;
  for (const auto& [index, stage] : stages_) out << stage->program().describe();
  out << "actions" << (device_graphs_ ? ", of which those that are captured run as graphs" : "")
      << "\n";
  const auto& actions = schedule_.actions(rank());
  const auto bytes = message_bytes();
  for (size_t i = 0; i < actions.size(); ++i) {
    out << "  " << to_string(actions[i]);
    if (bytes[i] > 0) out << ", " << bytes[i] << " bytes";
    out << "\n";
  }
  return out.str();
}

void Executor::use_device_graphs(bool required) {
  device_graphs_ = std::make_unique<StepDeviceGraphs>(device_, schedule_.actions(rank()),
                                                      schedule_.microbatches(), required);
  for (const auto& [index, stage] : stages_) device_graphs_->add_stage(*stage);
}

/// The reductions of the list are armed before the computations that complete them.
void Executor::begin_step(const Step& step) {
  SMP_INTERNAL_ASSERT(gradients_ != nullptr || !schedule_.has_backward(),
                      "a step with backwards has sums of gradients");
  if (program_.empty()) resolve();
  if (device_graphs_) device_graphs_->begin_step(step.why_no_device_graphs);
  for (const auto& [index, stage] : stages_) stage->begin_step();
  for (const auto& [key, channel] : channels_) channel.begin_step();
  for (const Instruction& instruction : program_) {
    if (instruction.action.kind != Action::Kind::kReduce) continue;
    gradients_->arm(instruction.stage->program().consumed);
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
  if (instruction.waits) hand_over();
  if (instruction.action.reads_parameters()) {
    for (const size_t shard : instruction.shards) parameters_->wait(shard);
  }
  switch (instruction.action.kind) {
    case Action::Kind::kForward:
      forward(instruction, step, results);
      break;
    case Action::Kind::kBackward:
    case Action::Kind::kBackwardInput:
    case Action::Kind::kBackwardWeight:
      backward(instruction, step);
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
      gradients_->complete(instruction.stage->program().consumed);
      break;
    case Action::Kind::kRecall:
      instruction.stage->state(instruction.action.microbatch).prefetch();
      break;
    case Action::Kind::kSendCopy:
      instruction.copies->send(*pool_->group(), schedule_.rank_of(instruction.action.peer),
                               step.unwritten);
      break;
    case Action::Kind::kRecvCopy:
      instruction.copies->receive(*pool_->group(), schedule_.rank_of(instruction.action.peer),
                                  step.unwritten);
      break;
    case Action::Kind::kOutputs:
      instruction.outputs->share(*pool_->group(), schedule_.rank_of(instruction.action.stage),
                                 results);
      break;
    case Action::Kind::kUnshard:
      for (const size_t shard : instruction.shards) parameters_->gather(shard);
      break;
    case Action::Kind::kReshard:
      for (const size_t shard : instruction.shards) parameters_->release(shard);
      break;
  }
  for (const HandOver& next : instruction.hand_overs) next.from->swap(*next.to);
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

void Executor::forward(const Instruction& instruction, const Step& step, StepResults& results) {
  Stage& stage = *instruction.stage;
  const int microbatch = instruction.action.microbatch;
  const auto& inputs = step.microbatches[microbatch].inputs;
  const graph::RandomKey& key = step.microbatches[microbatch].key;
  const bool is_launched =
      device_graphs_ && device_graphs_->forward(instruction.action, inputs, key, results);
  if (!is_launched) {
    prepare(stage, microbatch, step);
    stage.forward(microbatch, inputs, key, results);
  }
}

void Executor::backward(const Instruction& instruction, const Step& step) {
  const Action& action = instruction.action;
  const bool is_launched =
      device_graphs_ &&
      device_graphs_->backward(action, step.microbatches[action.microbatch].key, *gradients_);
  if (!is_launched) instruction.stage->backward(action, gradients_);
}

}  // namespace smp::pipeline
