// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "examples/gpt/gpt_model.h"
#include "smp/smp.h"

namespace bench {

/// A GPT of 8 layers that two ranks train, as one of them sees it.
struct GptTraining {
  smp::DistributedModel<gpt::GPT>& model;
  smp::DistributedOptimizer<torch::optim::AdamW>& optimizer;
  std::function<void()> step;  ///< a step with the update
};

/// Calls `body` on two ranks, which are threads: `stages` of them times replicas. `config` has the
/// other settings.
inline void train_on_two_ranks(int stages, int64_t width, smp::Config config,
                               const std::function<void(const GptTraining&)>& body) {
  constexpr int64_t kMicrobatches = 8, kSequence = 64, kBatch = 16;
  const int replicas = 2 / stages;
  config.partitions(stages).microbatches(kMicrobatches / replicas).ddp(replicas > 1);
  std::vector<gpt::GPT> nets;
  for (int i = 0; i < 2; ++i) {
    nets.emplace_back(
        gpt::GPTOptions().layers(8).width(width).heads(4).sequence(kSequence).dropout(0.0));
  }
  const auto x = torch::randint(256, {kBatch / replicas, kSequence});
  const auto y = torch::randint(256, {kBatch / replicas, kSequence});
  smp::run_as_threads(2, config, [&] {
    smp::DistributedModel<gpt::GPT> model(nets[smp::rank()]);
    smp::DistributedOptimizer<torch::optim::AdamW> optimizer(model->parameters(), 1e-3);
    auto train = smp::step([&](torch::Tensor in, torch::Tensor out) {
      auto loss = torch::nn::functional::cross_entropy(model(in).flatten(0, 1), out.flatten());
      model->backward(loss);
      return loss;
    });
    body({model, optimizer, [&] {
            optimizer.zero_grad();
            train(x, y);
            optimizer.step();
          }});
  });
}

}  // namespace bench
