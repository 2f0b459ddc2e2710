// SPDX-License-Identifier: Apache-2.0
// Costs of a replay check: training steps of a GPT in turn with and without one, on two ranks as
// threads, and how often one may be made for a share of the time.
//
//     bazel run //bench:replay_check

#include <torch/torch.h>

#include <cmath>
#include <cstdio>
#include <vector>

#include "bench/gpt_training.h"
#include "bench/measure.h"
#include "smp/smp.h"

namespace {

constexpr int kWarmSteps = 4, kPairs = 32;  // every stage and microbatch, twice

void measure(int stages, const char* pipeline) {
  const auto config = smp::Config().pipeline(pipeline).replay_check(2);
  bench::train_on_two_ranks(stages, /*width=*/256, config, [&](const bench::GptTraining& training) {
    const auto& step = training.step;
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
        stages, 2 / stages, pipeline, 1e3 * bench::median(plain), 1e3 * bench::median(checked),
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
