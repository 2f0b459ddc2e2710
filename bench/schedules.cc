// SPDX-License-Identifier: Apache-2.0
// How long it takes to make, lower, verify and simulate each schedule, and the time and memory of
// its step: a table over all of them. F = I = W = 1 and one unit of memory for each stage.
//
// usage: schedules [RANKS STAGES_PER_RANK MICROBATCHES]   (default: 64 4 512)

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>

#include "pipeline/generators.h"
#include "pipeline/simulator.h"
#include "pipeline/verifier.h"

namespace {

using namespace smp::pipeline;

/// Seconds since the last call.
class Watch {
 public:
  double lap() {
    const auto now = std::chrono::steady_clock::now();
    const std::chrono::duration<double> taken = now - last_;
    last_ = now;
    return taken.count();
  }

 private:
  std::chrono::steady_clock::time_point last_ = std::chrono::steady_clock::now();
};

void measure(const ScheduleKind& kind, ScheduleOptions options) {
  auto costs = options.costs();
  costs.kept.assign(static_cast<size_t>(options.stages()), 1);
  options.costs(costs);
  Watch watch;
  const auto order = kind.generate(options);
  const double generated = watch.lap();
  const auto schedule = lower(order, options.edges());
  const double lowered = watch.lap();
  verify(schedule, options.edges(), VerifyOptions().credit(options.microbatches()));
  const double verified = watch.lap();
  const auto simulation = simulate(schedule, options.edges(), costs);
  const double simulated = watch.lap();
  size_t actions = 0;
  for (int rank = 0; rank < schedule.ranks(); ++rank) {
    actions += schedule.actions(rank).size();
  }
  std::printf("%-17s %7zu %9.3f %7.3f %7.3f %9.3f %7.3f %10.0f %7.2f %10.0f\n", kind.name.c_str(),
              actions, generated, lowered, verified, simulated,
              generated + lowered + verified + simulated, simulation.makespan,
              100 * simulation.bubble(),
              *std::max_element(simulation.peak_memory.begin(), simulation.peak_memory.end()));
}

}  // namespace

int main(int argc, char** argv) {
  const int ranks = argc > 3 ? std::atoi(argv[1]) : 64;
  const int per_rank = argc > 3 ? std::atoi(argv[2]) : 4;
  const int microbatches = argc > 3 ? std::atoi(argv[3]) : 512;
  std::printf("%d ranks, %d stages on each where the schedule takes several, %d microbatches; s\n",
              ranks, per_rank, microbatches);
  std::printf("%-17s %7s %9s %7s %7s %9s %7s %10s %7s %10s\n", "schedule", "actions", "generate",
              "lower", "verify", "simulate", "total", "makespan", "idle %", "most kept");
  for (const auto& kind : schedule_kinds()) {
    const bool takes_several =
        kind.placement == Placement::kAny || kind.placement == Placement::kLooped;
    measure(kind, kind.place(ranks, takes_several ? per_rank : 0, microbatches));
  }
}
