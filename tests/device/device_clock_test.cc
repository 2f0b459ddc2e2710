// SPDX-License-Identifier: Apache-2.0
// Times of actions on a device, which does them long after the host has given them to it. The fake
// device has a clock of its own: each task of a stream takes a millisecond.

#include "pipeline/device_clock.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "pipeline/timeline.h"
#include "tests/device/fake_device.h"
#include "tests/smp/oracle.h"

namespace smp::testing {
namespace {

TEST(DeviceClock, TimesArePointsOfTheStream) {
  const torch::NoGradGuard no_grad;
  const torch::Tensor number = torch::zeros({4}).to(fake_device());
  const int64_t before = pipeline::TimelineRecorder::now();
  pipeline::DeviceClock clock(fake_device());
  clock.mark();
  for (int i = 0; i < 3; ++i) number.add_(1);
  clock.mark();
  clock.mark();
  for (int i = 0; i < 2; ++i) number.add_(1);
  clock.mark();
  std::vector<int64_t> times = clock.times();
  ASSERT_EQ(times.size(), 4u);
  EXPECT_GE(times[0], before);
  EXPECT_LE(times[0], pipeline::TimelineRecorder::now());
  const int64_t first = times[0];
  for (int64_t& time : times) time -= first;
  EXPECT_EQ(times, (std::vector<int64_t>{0, 3000000, 3000000, 5000000}));
}

/// Each computation has taken whole milliseconds, as no clock of the host says.
TEST(DeviceClock, TimelinesHaveTheDevicesTimes) {
  torch::set_num_threads(1);
  const auto path = std::filesystem::temp_directory_path() / "smp_device_timeline.json";
  std::filesystem::remove(path);
  run_as_threads(2, stages(2).timeline(path.string()), [&] {
    set_device(rank());
    DistributedModel<Mlp> model(Mlp(4));
    auto train = make_training(model);
    for (int i = 0; i < 6; ++i) {
      train(torch::ones({4, MlpImpl::kWidth}), torch::ones({4, 1}));
    }
  });
  std::ifstream file(path);
  const auto trace = nlohmann::json::parse(file);
  int computations = 0;
  for (const auto& event : trace.at("traceEvents")) {
    const bool measured = event.at("pid") == 0 && event.at("ph") == "X";
    if (!measured || (event.at("cat") != "forward" && event.at("cat") != "backward")) continue;
    ++computations;
    const auto ns = std::llround(event.at("dur").get<double>() * 1000);
    EXPECT_GT(ns, 0) << event.at("name");
    EXPECT_EQ(ns % 1000000, 0) << event.at("name");
  }
  EXPECT_EQ(computations, 3 * 2 * 2 * 2) << "steps, ranks, microbatches, forward and backward";
}

}  // namespace
}  // namespace smp::testing
