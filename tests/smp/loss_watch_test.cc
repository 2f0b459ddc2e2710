// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "tests/smp/oracle.h"

// Losses that are not finite: one is enough for all weights of all replicas.
namespace smp {
namespace {

using namespace testing;

constexpr int kLossSteps = 12;

/// Trains on inputs that are `bad` in microbatch 1 of the chosen steps and replicas, with or
/// without returning the loss; returns the log.
template <class IsBad>
std::string log_of(int stage_count, int replicas, double bad, const IsBad& is_bad,
                   const Config& more = Config(), double scale = 1) {
  torch::set_num_threads(1);
  const int ranks = stage_count * replicas;
  std::vector<Mlp> nets;
  for (int i = 0; i < ranks; ++i) {
    torch::manual_seed(3);
    nets.emplace_back();
  }
  const auto config = stages(stage_count).ddp(replicas > 1).fp16(more.fp16());
  ::testing::internal::CaptureStderr();
  run_as_threads(ranks, config, [&] {
    DistributedModel<Mlp> model(nets[rank()]);
    DistributedOptimizer<torch::optim::SGD> optimizer(model->parameters(),
                                                      torch::optim::SGDOptions(0.1));
    if (scale != 1) optimizer.scale_loss(LossScaleOptions().static_loss_scale(scale));
    auto train = step(
        [&](torch::Tensor x) {
          model->backward(model(x).square().mean());
          return x.size(0);  // the loss is not returned
        },
        StepOptions().name("train"));
    for (int i = 0; i < kLossSteps; ++i) {
      auto x = torch::ones({4, MlpImpl::kWidth});
      if (is_bad(i, dp_rank())) x[3][2] = bad;
      optimizer.zero_grad();
      train(x);
    }
  });
  return ::testing::internal::GetCapturedStderr();
}

int count(const std::string& text, const std::string& part) {
  int found = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++found;
  return found;
}

const std::string kWarning = "the value that model->backward starts from is ";
const double kNan = std::numeric_limits<double>::quiet_NaN();

TEST(LossWatch, NamesStepMicrobatchAndRank) {
  const auto log = log_of(2, 1, kNan, [](int step, int) { return step == 2; });
  expect_has(log, {"warning: step function \"train\", call 3: " + kWarning +
                   "nan in microbatch 1 on world rank 1. Its gradients are added to those of all "
                   "microbatches and replicas"});
  EXPECT_EQ(count(log, kWarning), 1);
}

TEST(LossWatch, TellsWhetherOtherReplicasHaveIt) {
  const auto alone =
      log_of(1, 2, kNan, [](int step, int replica) { return step == 2 && replica == 1; });
  expect_has(alone, {"call 3: " + kWarning +
                     "nan in microbatch 1 on world rank 1 on this replica alone, of 2: look at its "
                     "batch"});
  EXPECT_EQ(count(alone, kWarning), 1);
  const auto both = log_of(1, 2, kNan, [](int step, int) { return step == 2; });
  expect_has(both, {"on world rank 0 on 2 of 2 replicas", "on world rank 1 on 2 of 2 replicas"});
}

/// The first and the tenth time.
TEST(LossWatch, SaysItRarely) {
  const auto log = log_of(1, 1, kNan, [](int, int) { return true; });
  EXPECT_EQ(count(log, kWarning), 2) << log;
  expect_has(log, {"call 1: ", "call 10: ", "So far 10 times"});
}

TEST(LossWatch, IsSilentWithoutAndUnderALossScale) {
  EXPECT_EQ(count(log_of(2, 1, 0.5, [](int, int) { return true; }), kWarning), 0);
  EXPECT_EQ(count(log_of(
                      2, 1, kNan, [](int, int) { return true; }, Config().fp16(true)),
                  kWarning),
            0);
  EXPECT_EQ(count(log_of(
                      2, 1, kNan, [](int, int) { return true; }, Config(), 8),
                  kWarning),
            0);
}

}  // namespace
}  // namespace smp
