// SPDX-License-Identifier: Apache-2.0
// Plans follow measured times, which no two runs have in common: whatever is measured, training has
// the bits of one plain libtorch process, and a checkpoint of one plan is loaded under another.

#include <ATen/record_function.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>

#include "tests/smp/models.h"
#include "tests/smp/parity.h"

namespace smp::testing {
namespace {

/// While it lives, operators take 1 to 100 us longer on rank 0, a thread, until its first step is
/// over: in that it measures costs. Times go up and down at random, with stretches that are slow,
/// so that they do not even out within a stage.
class RandomCosts {
 public:
  explicit RandomCosts(uint64_t seed) {
    seed_ = seed;
    handle_ = at::addGlobalCallback(
        at::RecordFunctionCallback(&delay).scopes({at::RecordScope::FUNCTION}));
  }
  ~RandomCosts() { at::removeCallback(handle_); }
  RandomCosts(const RandomCosts&) = delete;
  RandomCosts& operator=(const RandomCosts&) = delete;

  /// Before each step of a thread.
  static void begin_step() { ++of_thread().steps; }

 private:
  struct OfThread {
    int steps = 0;
    std::mt19937_64 random{seed_};
    double exponent = 0;
  };

  static OfThread& of_thread() {
    thread_local OfThread own;
    return own;
  }
  static std::unique_ptr<at::ObserverContext> delay(const at::RecordFunction& /*function*/) {
    OfThread& own = of_thread();
    if (own.steps != 1 || rank() != 0) return nullptr;
    own.exponent += std::normal_distribution(0., 0.3)(own.random);
    own.exponent = std::clamp(own.exponent, 0., std::log(100.));
    const auto end = std::chrono::steady_clock::now() +
                     std::chrono::duration<double, std::micro>(std::exp(own.exponent));
    while (std::chrono::steady_clock::now() < end) {
    }
    return nullptr;
  }

  static inline uint64_t seed_ = 0;
  at::CallbackHandle handle_;
};

/// The case in a layout, which notes in `owners` the parameters of each rank.
template <class Optimizer, class Net, class Options>
auto measured(const parity::Layout& layout, const std::function<Net()>& make,
              const Options& options, std::map<int, std::string>& owners) {
  auto result = parity::training<Net, Optimizer>(layout.with_steps(4), make, options);
  result.evaluates = false;
  result.before_step = [](Net&, int) { RandomCosts::begin_step(); };
  result.after_step = [&owners](auto& rank, int) {
    owners[smp::rank()] = c10::Join(" ", rank.model->local_named_parameters().keys());
  };
  return result;
}

/// Trains in two halves, of which each measures other costs, several times.
template <class Optimizer, class Net, class Options>
void expect_plain_bits(const parity::Layout& layout, const std::function<Net()>& make,
                       const Options& options) {
  SCOPED_TRACE(::testing::Message() << layout);
  torch::set_num_threads(1);
  constexpr int kRuns = 6;
  std::map<int, std::string> owners;
  std::set<std::map<int, std::string>> plans;
  const auto tested = measured<Optimizer>(layout, make, options, owners);
  const Trace plain = tested.run_plain();
  const TempFolder folder;
  for (int run = 0; run < kRuns; ++run) {
    SCOPED_TRACE(run);
    const std::string path = folder.file(std::to_string(run / 2));
    const bool begins = run % 2 == 0;
    const int half = tested.steps / 2;
    const RandomCosts costs(run + 1);
    const Trace trace =
        tested.run_on_ranks(begins ? Span{0, half, "", path} : Span{half, tested.steps, path, ""});
    plans.insert(owners);
    for (int i = begins ? 0 : half; i < (begins ? half : tested.steps); ++i) {
      const std::string step = "of step " + std::to_string(i);
      expect_equal(trace.losses[i], plain.losses[i], "loss " + step);
      expect_equal(trace.gradients[i], plain.gradients[i], "gradient " + step);
    }
    if (!begins) expect_equal(trace.weights, plain.weights, "weights");
  }
  EXPECT_GT(plans.size(), 1u) << "the measured costs have not changed the plan";
}

const auto kMomentum = torch::optim::SGDOptions(0.1).momentum(0.9);

TEST(MeasuredPlans, OfATiedGpt) {
  const std::function<TinyGpt()> gpt = [] { return TinyGpt(/*tied=*/true); };
  expect_plain_bits<torch::optim::Adam>({2, 1, 4, "interleaved"}, gpt,
                                        torch::optim::AdamOptions(1e-2));
  expect_plain_bits<torch::optim::SGD>({4, 1, 4, "1f1b"}, gpt, kMomentum);
  expect_plain_bits<torch::optim::SGD>({2, 2, 2, "zb_h1"}, gpt, kMomentum);
}

TEST(MeasuredPlans, OfAConvNet) {
  const std::function<TinyConvNet()> net = [] { return TinyConvNet(); };
  expect_plain_bits<torch::optim::SGD>({2, 1, 4, "simple"}, net, kMomentum);
  expect_plain_bits<torch::optim::Adam>({3, 2, 2, "1f1b"}, net, torch::optim::AdamOptions(1e-2));
}

}  // namespace
}  // namespace smp::testing
