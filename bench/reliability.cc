// SPDX-License-Identifier: Apache-2.0
// Costs of being ready for failures that do not come: training steps of a GPT on two ranks as
// threads with warnings of stalls, copies kept in memory, replay checks and all three, each in turn
// with none of them.
//
//     SMP_RECOVERY_DIR=$(mktemp -d -p /dev/shm) bazel run //bench:reliability

#include <torch/torch.h>

#include <cstdio>
#include <string>
#include <vector>

#include "bench/gpt_training.h"
#include "bench/measure.h"
#include "smp/smp.h"

namespace {

constexpr int kWarmSteps = 6, kSteps = 16, kRounds = 7;

struct Precaution {
  const char* name;
  bool stalls, copies, replays;
};

/// Seconds of a step.
double step_with(int stages, const Precaution& precaution) {
  // Plans do not depend on measurements, so that all run the same.
  const auto config = smp::Config()
                          .skip_tracing(true)
                          .stall_seconds(precaution.stalls ? 60 : 0)
                          .recovery(precaution.copies ? "restart" : "off")
                          .replay_check(precaution.replays ? kSteps / 2 : 0);
  double seconds = 0;
  bench::train_on_two_ranks(stages, 256, config, [&](const bench::GptTraining& training) {
    const auto steps = [&](int count) {
      for (int i = 0; i < count; ++i) {
        training.step();
        smp::keep_copy(training.model, training.optimizer);
      }
    };
    steps(kWarmSteps);
    const double taken = bench::seconds([&] { steps(kSteps); }) / kSteps;
    if (smp::rank() == 0) seconds = taken;
  });
  return seconds;
}

void measure(int stages) {
  const std::vector<Precaution> precautions{{"stalls", true, false, false},
                                            {"copies", false, true, false},
                                            {"replays", false, false, true},
                                            {"all", true, true, true}};
  for (const Precaution& precaution : precautions) {
    std::vector<double> without, extra;
    for (int round = 0; round < kRounds; ++round) {
      without.push_back(step_with(stages, {"none", false, false, false}));
      extra.push_back(step_with(stages, precaution) / without.back() - 1);
    }
    std::printf(
        "%d stages x %d replicas, a step of %.0f ms: %s %+.1f %% (quartiles %+.1f to %+.1f)\n",
        stages, 2 / stages, 1e3 * bench::median(without), precaution.name,
        100 * bench::median(extra), 100 * bench::quantile(extra, 0.25),
        100 * bench::quantile(extra, 0.75));
    std::fflush(stdout);
  }
}

}  // namespace

int main() {
  torch::set_num_threads(1);
  measure(2);
  measure(1);
  return 0;
}
