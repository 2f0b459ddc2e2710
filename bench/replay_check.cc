// SPDX-License-Identifier: Apache-2.0
// What a replay check costs: training steps of a GPT in turn with and without one, on two ranks as
// threads, and how often one may be made for a share of the time.
//
//     bazel run //bench:replay_check

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
constexpr int kWarmSteps = 4, kPairs = 32;  // every stage and microbatch, twice

void measure(int stages, const char* pipeline) {
  const int replicas = 2 / stages;
  const auto config = smp::Config()
                          .partitions(stages)
                          .microbatches(kMicrobatches / replicas)
                          .pipeline(pipeline)
                          .ddp(replicas > 1)
                          .replay_check(2);
  std::vector<gpt::GPT> nets;
  for (int i = 0; i < 2; ++i) {
    nets.emplace_back(
        gpt::GPTOptions().layers(8).width(256).heads(4).sequence(kSequence).dropout(0.0));
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
    const auto step = [&] {
      optimizer.zero_grad();
      train(x, y);
      optimizer.step();
    };
    for (int i = 0; i < kWarmSteps; ++i) step();
    std::vector<double> plain, checked, extra;
    for (int i = 0; i < kPairs; ++i) {
      plain.push_back(bench::seconds(step));
      checked.push_back(bench::seconds(step));
      extra.push_back(checked.back() / plain.back() - 1);
    }
    if (smp::rank() != 0) return;
    const double share = bench::median(extra);
    std::printf(
        "%d stages x %d replicas, %s: a step %.1f ms, with a check %.1f ms: %.1f %% more "
        "(quartiles "
        "%.1f to %.1f); 1 %% of the time with replay_check %.0f, 3 %% with %.0f\n",
        stages, replicas, pipeline, 1e3 * bench::median(plain), 1e3 * bench::median(checked),
        100 * share, 100 * bench::quantile(extra, 0.25), 100 * bench::quantile(extra, 0.75),
        std::ceil(share / 0.01), std::ceil(share / 0.03));
  });
}

}  // namespace

int main() {
  torch::set_num_threads(1);
  measure(2, "1f1b");
  measure(2, "interleaved");
  measure(1, "1f1b");
  return 0;
}
