// SPDX-License-Identifier: Apache-2.0
// The results of every schedule are those of one process, bit for bit, however long each action and
// each transfer takes, and with no more room for messages than the schedule needs. Every schedule
// is tried with seeds from SMP_CHAOS_SEED on (default 1), SMP_CHAOS_COUNT of them (default 1). With
// an odd one the GPT sends through shared memory and the other net over messages, with an even one
// the other way round. tools/soak goes on for as long as it is told.

#include "tests/chaos/chaos.h"

#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "pipeline/generators.h"
#include "tests/smp/models.h"
#include "tests/smp/parity.h"

namespace smp::testing {
namespace {

using parity::Layout;

/// Trains under chaos and compares with one process. Seeds with this remainder of two send over
/// messages.
template <class Net>
void check(const Layout& layout, int64_t over_messages, const std::function<Net()>& make) {
  at::set_num_threads(1);
  const int64_t first = number_in("SMP_CHAOS_SEED", 1), count = number_in("SMP_CHAOS_COUNT", 1);
  const auto options = torch::optim::SGDOptions(0.1).momentum(0.9);
  for (int64_t seed = first; seed < first + count && !::testing::Test::HasFailure(); ++seed) {
    SCOPED_TRACE("SMP_CHAOS_SEED=" + std::to_string(seed));
    Chaos chaos;
    chaos.seed = static_cast<uint64_t>(seed);
    if (seed % 2 == over_messages) chaos.channels = ChannelKind::kMessages;
    parity::check<Net, torch::optim::SGD>(
        layout, make, options,
        [&](int ranks, const Config& config, const std::function<void()>& program) {
          run_in_chaos(ranks, config, chaos, program);
        });
  }
}

void check_gpt(const Layout& layout) {
  check<TinyGpt>(layout, 0, [] { return TinyGpt(true); });
}

void check_conv_net(const Layout& layout) {
  check<TinyConvNet>(layout, 1, [] { return TinyConvNet(); });
}

using ChaosTest = ::testing::TestWithParam<Layout>;

TEST_P(ChaosTest, TiedGpt) { check_gpt(GetParam()); }
TEST_P(ChaosTest, ConvNet) { check_conv_net(GetParam()); }

std::vector<Layout> layouts() {
  constexpr int kSteps = 2;
  std::vector<Layout> result;
  for (const auto& kind : pipeline::schedule_kinds()) {
    if (!kind.trains) continue;
    for (const int ranks : {2, 3}) {
      result.push_back(Layout{ranks, 1, 4, kind.name}.with_steps(kSteps));
    }
  }
  for (const char* pipeline : {"interleaved", "zbv"}) {
    result.push_back(Layout{2, 2, 2, pipeline}.with_steps(kSteps));
  }
  return result;
}

INSTANTIATE_TEST_SUITE_P(Schedules, ChaosTest, ::testing::ValuesIn(layouts()),
                         [](const auto& info) {
                           const Layout& layout = info.param;
                           return layout.pipeline + "_" + std::to_string(layout.stages) + "x" +
                                  std::to_string(layout.replicas);
                         });

// The trial of "auto" changes channels and stages between steps.
constexpr int kTrialAndMore = 14;

TEST(ChaosTrial, OfOnePipeline) { check_gpt(Layout{2, 1, 4, "auto"}.with_steps(kTrialAndMore)); }

TEST(ChaosTrial, OfTwoReplicas) {
  check_conv_net(Layout{2, 2, 2, "auto"}.with_steps(kTrialAndMore));
}

}  // namespace
}  // namespace smp::testing
