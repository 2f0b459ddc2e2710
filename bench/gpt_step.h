// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "examples/gpt/gpt_model.h"
#include "graph/tracer.h"

namespace bench {

/// A step function that trains a GPT of small layers, captured by hand.
class GptStep {
 public:
  explicit GptStep(int64_t layers)
      : net_(gpt::GPTOptions().layers(layers).width(16).heads(2).sequence(kSequence)) {
    for (const auto& item : net_->named_parameters()) {
      table_.add(smp::graph::ValueKind::kParameter, item.key(), item.value());
    }
  }

  const smp::graph::TensorTable& table() const { return table_; }

  smp::graph::TraceResult trace(bool execute,
                                std::vector<const smp::graph::Graph*> candidates) const {
    smp::graph::TraceOptions options;
    options.step_name = "bench";
    options.table = &table_;
    options.execute = execute;
    options.candidates = std::move(candidates);
    smp::graph::Tracer tracer(std::move(options));
    return tracer.run(inputs_, [&](const std::vector<torch::Tensor>& in) {
      auto loss = loss_of(in);
      tracer.backward({loss}, {});
      return std::vector<torch::Tensor>{loss};
    });
  }

  /// Plain eager libtorch, forward only: a capture adds to it.
  void run() const { loss_of(inputs_); }

 private:
  static constexpr int64_t kSequence = 16;

  torch::Tensor loss_of(const std::vector<torch::Tensor>& in) const {
    gpt::GPT net = net_;
    return torch::nn::functional::cross_entropy(net(in[0]).flatten(0, 1), in[1].flatten());
  }

  gpt::GPT net_;
  smp::graph::TensorTable table_;
  std::vector<torch::Tensor> inputs_{torch::randint(256, {1, kSequence}),
                                     torch::randint(256, {1, kSequence})};
};

}  // namespace bench
