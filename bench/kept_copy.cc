// SPDX-License-Identifier: Apache-2.0
// Costs of smp::keep_copy: blocks of training steps of a GPT in turn with a copy after each step
// and without, on two ranks as threads, and how often one may be kept for a share of the time.
//
//     SMP_RECOVERY_DIR=$(mktemp -d -p /dev/shm) bazel run //bench:kept_copy

#include <torch/torch.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <vector>

#include "bench/gpt_training.h"
#include "bench/measure.h"
#include "smp/smp.h"

namespace {

constexpr int kWarmSteps = 4, kBlocks = 8, kSteps = 4;

void measure(int stages, int64_t width) {
  const auto config = smp::Config().recovery("restart").recovery_interval(1);
  bench::train_on_two_ranks(stages, width, config, [&](const bench::GptTraining& training) {
    int64_t elements = 0;
    for (const auto& parameter : training.model->parameters()) elements += parameter.numel();
    const auto steps = [&](int count, bool keeps) {
      for (int i = 0; i < count; ++i) {
        training.step();
        if (keeps) smp::keep_copy(training.model, training.optimizer);
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
        stages, 2 / stages, 1e-6 * static_cast<double>(elements), 1e3 * bench::median(plain),
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
