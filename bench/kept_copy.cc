// SPDX-License-Identifier: Apache-2.0
// What smp::keep_copy costs: blocks of training steps of a GPT in turn with a copy after each step
// and without, on two ranks as threads, and how often one may be kept for a share of the time.
//
//     SMP_RECOVERY_DIR=$(mktemp -d -p /dev/shm) bazel run //bench:kept_copy

#include <torch/torch.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <vector>

#include "bench/measure.h"
#include "examples/gpt/gpt_model.h"
#include "smp/smp.h"

namespace {

constexpr int64_t kMicrobatches = 8, kSequence = 64, kBatch = 16;
constexpr int kWarmSteps = 4, kBlocks = 8, kSteps = 4;

void measure(int stages, int64_t width) {
  const int replicas = 2 / stages;
  const auto config = smp::Config()
                          .partitions(stages)
                          .microbatches(kMicrobatches / replicas)
                          .ddp(replicas > 1)
                          .recovery("restart");
  std::vector<gpt::GPT> nets;
  for (int i = 0; i < 2; ++i) {
    nets.emplace_back(
        gpt::GPTOptions().layers(8).width(width).heads(4).sequence(kSequence).dropout(0.0));
  }
  int64_t elements = 0;
  for (const auto& parameter : nets[0]->parameters()) elements += parameter.numel();
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
    const auto steps = [&](int count, bool keeps) {
      for (int i = 0; i < count; ++i) {
        optimizer.zero_grad();
        train(x, y);
        optimizer.step();
        if (keeps) smp::keep_copy(model, optimizer);
      }
    };
    steps(kWarmSteps, true);
    std::vector<double> plain, keeping, extra;
    for (int i = 0; i < kBlocks; ++i) {
      steps(2, false);  // until the last copy is written
      plain.push_back(bench::seconds([&] { steps(kSteps, false); }) / kSteps);
      steps(1, true);
      keeping.push_back(bench::seconds([&] { steps(kSteps, true); }) / kSteps);
      extra.push_back(keeping.back() / plain.back() - 1);
    }
    if (smp::rank() != 0) return;
    const double share = bench::median(extra);
    std::printf(
        "%d stages x %d replicas, %.1f M parameters: a step %.1f ms, with a copy %.1f ms: %.1f %% "
        "more (quartiles %.1f to %.1f); 3 %% of the time with recovery_interval %.0f\n",
        stages, replicas, 1e-6 * static_cast<double>(elements), 1e3 * bench::median(plain),
        1e3 * bench::median(keeping), 100 * share, 100 * bench::quantile(extra, 0.25),
        100 * bench::quantile(extra, 0.75), std::ceil(share / 0.03));
  });
}

}  // namespace

int main() {
  torch::set_num_threads(1);
  measure(2, 256);
  measure(1, 256);
  return 0;
}
