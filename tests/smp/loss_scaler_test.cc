// SPDX-License-Identifier: Apache-2.0
#include "runtime/update/loss_scaler.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "core/check.h"
#include "tests/smp/oracle.h"
#include "tests/smp/plain_scaler.h"

namespace smp::runtime {
namespace {

using namespace testing;

TEST(LossScaler, FollowsTheRule) {
  const auto generator = at::detail::createCPUGenerator(3);
  for (const bool consecutive : {false, true}) {
    for (int window = 1; window < 6; ++window) {
      for (int shift = 1; shift < 4; ++shift) {
        const auto options = dynamic(DynamicLossArgs()
                                         .init_scale(1 << 10)
                                         .scale_factor(4)
                                         .scale_window(window)
                                         .min_scale(2)
                                         .delayed_shift(shift)
                                         .consecutive_hysteresis(consecutive));
        LossScaler scaler(options);
        PlainScaler plain(options);
        for (int step = 0; step < 60; ++step) {
          const bool overflow = torch::rand({}, generator).item<double>() < 0.5;
          scaler.update(overflow);
          plain.update(overflow);
          // Half-way through another one goes on.
          if (step == 30) {
            const auto state = nlohmann::json::parse(scaler.state_dict().dump());
            scaler = LossScaler(LossScaleOptions());
            scaler.load_state_dict(state);
          }
          ASSERT_EQ(scaler.loss_scale(), plain.scale);
        }
      }
    }
  }
}

TEST(LossScaler, HasTheDocumentedDefaults) {
  EXPECT_EQ(LossScaler(LossScaleOptions()).loss_scale(), 1);
  LossScaler scaler(LossScaleOptions().dynamic_loss_scale(true));
  EXPECT_EQ(scaler.loss_scale(), 4294967296.0);
  scaler.update(true);
  EXPECT_EQ(scaler.loss_scale(), 2147483648.0);
  for (int step = 0; step < 999; ++step) scaler.update(false);
  EXPECT_EQ(scaler.loss_scale(), 2147483648.0);
  scaler.update(false);
  EXPECT_EQ(scaler.loss_scale(), 4294967296.0);
  for (int step = 0; step < 100; ++step) scaler.update(true);
  EXPECT_EQ(scaler.loss_scale(), 1);
}

/// It would never come back.
TEST(LossScaler, DoesNotGrowBeyondFloat32) {
  const double largest = std::ldexp(1, 127);
  LossScaler scaler(dynamic(DynamicLossArgs().init_scale(largest).scale_window(1)));
  scaler.update(false);
  EXPECT_EQ(scaler.loss_scale(), largest);
  scaler.update(true);
  EXPECT_EQ(scaler.loss_scale(), largest / 2);
}

TEST(LossScalerErrors, OptionsWithoutMeaning) {
  const auto text_of = [](const LossScaleOptions& options) {
    return error_of<UsageError>([&] { LossScaler scaler(options); });
  };
  expect_has(text_of(LossScaleOptions().static_loss_scale(0)),
             {"the options of a loss scale are wrong: static_loss_scale must be a positive number, "
              "got 0"});
  expect_has(
      text_of(dynamic(DynamicLossArgs().init_scale(HUGE_VAL))),
      {"the options of a loss scale are wrong: init_scale must be a positive number, got inf"});
  expect_has(text_of(dynamic(DynamicLossArgs().scale_factor(1))),
             {"the options of a loss scale are wrong: scale_factor must be above 1, got 1"});
  expect_has(
      text_of(dynamic(DynamicLossArgs().scale_window(0))),
      {"the options of a loss scale are wrong: scale_window must be a positive integer, got 0"});
  expect_has(text_of(dynamic(DynamicLossArgs().min_scale(-1))),
             {"the options of a loss scale are wrong: min_scale must be 0 or more, got -1"});
  expect_has(
      text_of(dynamic(DynamicLossArgs().delayed_shift(0))),
      {"the options of a loss scale are wrong: delayed_shift must be a positive integer, got 0"});
  expect_has(error_of<CheckpointError>([] {
               LossScaler(LossScaleOptions()).load_state_dict({{"loss_scale", 2}});
             }),
             {"the saved loss scale is malformed: expected what LossScaler::state_dict() gives"});
}

}  // namespace
}  // namespace smp::runtime
