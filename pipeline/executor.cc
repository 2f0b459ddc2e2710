#include "pipeline/executor.h"

#include <tuple>
#include <utility>

#include "smp/core/error.h"

namespace smp::pipeline {
namespace {

/// How many receives of a channel are posted ahead of the one that is waited for. Two let a
/// message arrive while the one before it is used; more only cost memory.
constexpr int kPostedAhead = 2;

std::vector<graph::TensorMeta> metas(const graph::Graph& graph,
                                     const std::vector<graph::ValueId>& values) {
  std::vector<graph::TensorMeta> result;
  for (graph::ValueId id : values) result.push_back(graph.values[id].meta);
  return result;
}

}  // namespace

Executor::Executor(Schedule schedule, const graph::Graph& graph, std::vector<Edge> edges,
                   comm::CommunicatorPtr pipeline)
    : schedule_(std::move(schedule)), edges_(std::move(edges)), pipeline_(std::move(pipeline)) {
  open_channels(graph);
}

void Executor::add_stage(std::unique_ptr<Stage> stage) {
  const int index = stage->index();
  stages_[index] = std::move(stage);
}

void Executor::open_channels(const graph::Graph& graph) {
  const int me = pipeline_->rank();
  for (size_t i = 0; i < edges_.size(); ++i) {
    const Edge& edge = edges_[i];
    const int from = schedule_.rank_of(edge.from);
    const int to = schedule_.rank_of(edge.to);
    if (from == to || (from != me && to != me)) continue;
    std::vector<graph::ValueId> returning = edge.gradients;
    returning.insert(returning.end(), edge.replicas.begin(), edge.replicas.end());
    const int index = static_cast<int>(i);
    channels_.insert({{index, false},
                      Channel{MessageLayout(metas(graph, edge.values)),
                              index,
                              false,
                              from == me ? to : from,
                              to == me,
                              {},
                              0}});
    channels_.insert({{index, true},
                      Channel{MessageLayout(metas(graph, returning)),
                              index,
                              true,
                              from == me ? to : from,
                              from == me,
                              {},
                              0}});
  }
}

Executor::Channel& Executor::channel(const Action& action) {
  const bool is_backward = action.is_backward();
  // Forward messages go from the lower stage of the edge to the higher, gradients back.
  const int from = std::min(action.stage, action.peer);
  const int to = std::max(action.stage, action.peer);
  for (size_t i = 0; i < edges_.size(); ++i) {
    if (edges_[i].from == from && edges_[i].to == to) {
      return channels_.at({static_cast<int>(i), is_backward});
    }
  }
  SMP_INTERNAL_ASSERT(false, to_string(action), " has no edge in the plan");
}

comm::Tag Executor::tag(const Channel& channel) const {
  return 2 * channel.edge + (channel.is_backward ? 1 : 0);
}

void Executor::post_receives(Channel& channel) {
  while (channel.next_posted < schedule_.microbatches() &&
         static_cast<int>(channel.posted.size()) < kPostedAhead) {
    at::Tensor message = channel.layout.make_buffer();
    auto work = pipeline_->irecv(message, channel.peer, tag(channel));
    channel.posted.emplace_back(std::move(work), std::move(message));
    ++channel.next_posted;
  }
}

std::vector<at::Tensor> Executor::receive(Channel& channel) {
  post_receives(channel);
  auto [work, message] = std::move(channel.posted.front());
  channel.posted.pop_front();
  post_receives(channel);
  work->wait();
  return channel.layout.unpack(message);
}

void Executor::send(Channel& channel, const std::vector<at::Tensor>& tensors) {
  drop_completed_sends();
  at::Tensor message = channel.layout.pack(tensors);
  auto work = pipeline_->isend(message, channel.peer, tag(channel));
  sends_.emplace_back(std::move(work), std::move(message));
}

void Executor::drop_completed_sends() {
  while (!sends_.empty() && sends_.front().first->test()) sends_.pop_front();
}

void Executor::finish_sends() {
  for (auto& [work, message] : sends_) work->wait();
  sends_.clear();
}

void Executor::run(const Step& step) {
  const bool trains = schedule_.has_backward();
  for (auto& [key, channel] : channels_) {
    channel.next_posted = 0;
    if (channel.incoming && (trains || !channel.is_backward) && channel.layout.nbytes() > 0) {
      post_receives(channel);
    }
  }
  for (const Action& action : schedule_.actions(pipeline_->rank())) {
    const auto key = std::make_tuple(action.stage, action.microbatch, action.is_backward());
    switch (action.kind) {
      case Action::Kind::kForward:
        forward(action, step);
        break;
      case Action::Kind::kBackward:
        backward(action, step);
        break;
      case Action::Kind::kBackwardInput:
      case Action::Kind::kBackwardWeight:
        SMP_INTERNAL_ASSERT(false, "the executor runs whole backwards only, got ",
                            to_string(action));
      case Action::Kind::kSendForward: {
        Channel& out = channel(action);
        send(out, stage(action.stage).take_values(action.microbatch, out.edge));
        break;
      }
      case Action::Kind::kSendBackward: {
        Channel& out = channel(action);
        send(out, stage(action.stage).take_gradients(action.microbatch, out.edge));
        break;
      }
      case Action::Kind::kRecvForward:
      case Action::Kind::kRecvBackward: {
        Channel& in = channel(action);
        arrived_[key][in.edge] = receive(in);
        break;
      }
      case Action::Kind::kReduce:
        step.reduce(action.stage);
        break;
    }
  }
  finish_sends();
}

void Executor::forward(const Action& action, const Step& step) {
  Stage& stage = this->stage(action.stage);
  if (step.before_forward) step.before_forward(stage, action.microbatch);
  const auto received = arrived_.extract({action.stage, action.microbatch, false});
  static const std::map<int, std::vector<at::Tensor>> kNothing;
  stage.forward(action.microbatch, step.inputs[action.microbatch],
                received.empty() ? kNothing : received.mapped(), step.keys[action.microbatch]);
  for (auto& [position, output] : stage.take_outputs(action.microbatch)) {
    step.output(position, action.microbatch, output);
  }
  hand_over(action.stage, action.microbatch, false);
}

void Executor::backward(const Action& action, const Step& step) {
  const auto received = arrived_.extract({action.stage, action.microbatch, true});
  static const std::map<int, std::vector<at::Tensor>> kNothing;
  stage(action.stage)
      .backward(action.microbatch, received.empty() ? kNothing : received.mapped(), step.consume);
  hand_over(action.stage, action.microbatch, true);
}

/// Between stages of this rank there is no transfer: what one made has arrived at the other.
void Executor::hand_over(int stage, int microbatch, bool is_backward) {
  for (size_t i = 0; i < edges_.size(); ++i) {
    const Edge& edge = edges_[i];
    const int source = is_backward ? edge.to : edge.from;
    const int target = is_backward ? edge.from : edge.to;
    const bool nothing = is_backward && edge.gradients.empty() && edge.replicas.empty();
    if (source != stage || !has_stage(target) || nothing) continue;
    const int index = static_cast<int>(i);
    arrived_[{target, microbatch, is_backward}][index] =
        is_backward ? this->stage(source).take_gradients(microbatch, index)
                    : this->stage(source).take_values(microbatch, index);
  }
}

}  // namespace smp::pipeline
