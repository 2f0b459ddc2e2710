// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <ostream>
#include <string>

#include "tests/smp/training_case.h"
#include "tests/temp_folder.h"

/// Parity in a layout: training on ranks has the bits of one plain libtorch process.
namespace smp::testing::parity {

struct Layout {
  int stages;
  int replicas;
  int microbatches;  // microbatches of one replica
  std::string pipeline;
  int steps = 3;
  std::string placement = "cluster";

  Layout with_steps(int count) const {
    Layout result = *this;
    result.steps = count;
    return result;
  }
};

inline std::ostream& operator<<(std::ostream& out, const Layout& layout) {
  return out << layout.stages << " stages x " << layout.replicas << " replicas, "
             << layout.microbatches << " microbatches, " << layout.pipeline
             << (layout.placement == "cluster" ? "" : ", " + layout.placement);
}

inline Config config_of(const Layout& layout) {
  return Config()
      .partitions(layout.stages)
      .microbatches(layout.microbatches)
      .pipeline(layout.pipeline)
      .ddp(layout.replicas > 1)
      .placement_strategy(layout.placement)
      .seed(kSeed)
      .timeout_seconds(60);
}

/// The training of a net, which draws its own batches, in a layout.
template <class Net, class Optimizer, class Options>
TrainingCase<Net, Recipe<Optimizer, Options>> training(const Layout& layout,
                                                       const std::function<Net()>& make,
                                                       const Options& options) {
  TrainingCase<Net, Recipe<Optimizer, Options>> result(make, {options});
  result.config = config_of(layout);
  result.ranks = layout.stages * layout.replicas;
  result.microbatches = layout.replicas * layout.microbatches;
  result.shards = layout.replicas;
  result.steps = layout.steps;
  result.batch = batches_of<Net>(2 * result.microbatches, layout.steps);
  return result;
}

/// Trains both ways and compares losses, gradients, evaluations and the final models.
template <class Net, class Optimizer, class Options>
void check(const Layout& layout, const std::function<Net()>& make, const Options& options,
           const RunRanks& run_ranks = run_as_threads) {
  auto tested = training<Net, Optimizer>(layout, make, options);
  tested.run_ranks = run_ranks;
  expect_same(tested.run_on_ranks(), tested.run_plain());
}

/// Trains on two stages, saves halfway and goes on with one: parameters and buffers are those of
/// plain libtorch, which it returns.
template <class Net, class Optimizer, class Options>
Named check_resumed(const Options& options) {
  const auto on_stages = [&](int count) {
    auto result = training<Net, Optimizer>(Layout{count, 1, 2, "interleaved"}.with_steps(4),
                                           std::function<Net()>([] { return Net(); }), options);
    result.config = stages(count);
    result.evaluates = false;
    return result;
  };
  const TempFolder folder;
  const auto first = on_stages(2), second = on_stages(1);
  const Named plain = second.run_plain().weights;
  expect_equal(save_and_resume(first, second, 2, folder.file("checkpoint")).weights, plain,
               "value");
  return plain;
}

}  // namespace smp::testing::parity
