#pragma once

#include <ATen/core/Tensor.h>

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "comm/communicator.h"
#include "pipeline/message.h"
#include "pipeline/schedule.h"
#include "pipeline/stage.h"

namespace smp::pipeline {

/// Runs this rank's part of a schedule: its actions, one after the other. The schedule is a fixed
/// program; nothing is negotiated. Receives are posted ahead, sends wait for nobody.
///
/// An executor belongs to one thread.
class Executor {
 public:
  /// `stages` are this rank's, by stage index. Ranks of the schedule are ranks of `pipeline`.
  Executor(Schedule schedule, const graph::Graph& graph, std::vector<Edge> edges,
           comm::CommunicatorPtr pipeline);

  /// The edges, which the stages refer to.
  const std::vector<Edge>& edges() const { return edges_; }
  const Schedule& schedule() const { return schedule_; }
  void add_stage(std::unique_ptr<Stage> stage);
  Stage& stage(int index) { return *stages_.at(index); }
  bool has_stage(int index) const { return stages_.count(index) > 0; }

  /// What a step gives the executor.
  struct Step {
    /// Inputs by graph input, per microbatch.
    std::vector<std::vector<at::Tensor>> inputs;
    /// Stream of each microbatch.
    std::vector<graph::RandomKey> keys;
    /// Takes gradients of owned parameters.
    GradientConsumer consume;
    /// Called after the last backward of a stage.
    std::function<void(int stage)> reduce;
    /// Called before each microbatch's forward on a stage, to use its constants.
    std::function<void(Stage& stage, int microbatch)> before_forward;
    /// Takes a returned tensor: output position and microbatch.
    std::function<void(int position, int microbatch, const at::Tensor& output)> output;
  };

  /// Runs all actions. Throws what communication and operators throw; the executor is not usable
  /// after that.
  void run(const Step& step);

 private:
  /// One directed channel: messages of one kind over one edge.
  struct Channel {
    MessageLayout layout;
    int edge;
    bool is_backward;
    int peer;  // rank
    bool incoming;
    std::deque<std::pair<comm::WorkPtr, at::Tensor>> posted;  // receives, in order
    int next_posted = 0;                                      // microbatches posted so far
  };

  void open_channels(const graph::Graph& graph);
  Channel& channel(const Action& action);
  comm::Tag tag(const Channel& channel) const;
  void post_receives(Channel& channel);
  std::vector<at::Tensor> receive(Channel& channel);
  void send(Channel& channel, const std::vector<at::Tensor>& tensors);
  void forward(const Action& action, const Step& step);
  void backward(const Action& action, const Step& step);
  void hand_over(int stage, int microbatch, bool is_backward);
  void drop_completed_sends();
  void finish_sends();

  Schedule schedule_;
  std::vector<Edge> edges_;
  comm::CommunicatorPtr pipeline_;
  std::map<int, std::unique_ptr<Stage>> stages_;
  std::map<std::pair<int, bool>, Channel> channels_;  // by edge and direction
  std::deque<std::pair<comm::WorkPtr, at::Tensor>> sends_;
  // What has arrived for a microbatch of a stage: by stage, microbatch, direction; then by edge.
  std::map<std::tuple<int, int, bool>, std::map<int, std::vector<at::Tensor>>> arrived_;
};

}  // namespace smp::pipeline
