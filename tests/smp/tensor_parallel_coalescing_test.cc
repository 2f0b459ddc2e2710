// SPDX-License-Identifier: Apache-2.0
// `numerics: "fast"` on ranks that divide layers: microbatches that run as one, against plain
// libtorch that runs them one by one, and against ranks without divided layers, in float64.

#include <atomic>
#include <filesystem>

#include "nn/rewrite/rule.h"
#include "smp/nn.h"
#include "tests/smp/models.h"
#include "tests/smp/tensor_parallel_run.h"

namespace smp {
namespace {

using namespace testing;

/// A tied GPT without dropout, whose loss has a number that the guard patches.
struct CalmGpt : TinyGptImpl {
  CalmGpt() : TinyGptImpl(/*tied=*/true, /*layers=*/3, /*dropout=*/0.0) {}

  torch::Tensor loss(torch::Tensor ids, torch::Tensor targets) {
    return TinyGptImpl::loss(ids, targets) * loss_weight;
  }

  double loss_weight = 1;
};

/// Layers that are divided from construction.
struct CalmDividedModel : DividedModel {
  CalmDividedModel() : DividedModel(/*layers=*/3, /*dropout=*/0.0) {}
};
struct CalmPlainModel : PlainModel {
  CalmPlainModel() : PlainModel(/*layers=*/3, /*dropout=*/0.0) {}
};

struct FastRun {
  Outcome outcome;
  std::string log;
};

/// Costs are estimated, so that the number of microbatches at once does not depend on the machine.
Config fast_config(Config config) { return config.numerics("fast").skip_tracing(true); }

Config fast_in_four_sums(Config config) { return fast_config(config).gradient_shards(4); }

template <class Net>
void mark_whole(Net& net) {
  set_tensor_parallelism(net);
}

template <class Net>
void set_loss_weight(std::shared_ptr<Net>&, int) {}
void set_loss_weight(std::shared_ptr<CalmGpt>& net, int step) { net->loss_weight = 1 + 0.5 * step; }

template <class Net>
auto fast_case(const TensorLayout& layout,
               const std::function<void(Net&)>& prepare = mark_whole<Net>,
               const std::function<Config(Config)>& more = fast_config) {
  auto training = tensor_parallel_case<Net>(layout, prepare, kSgd);
  training.config = more(training.config);
  training.before_step = [](std::shared_ptr<Net>& net, int step) { set_loss_weight(net, step); };
  return training;
}

template <class Net>
FastRun run_fast(const TensorLayout& layout,
                 const std::function<void(Net&)>& prepare = mark_whole<Net>,
                 const std::function<Config(Config)>& more = fast_config) {
  auto training = fast_case<Net>(layout, prepare, more);
  FastRun run;
  std::mutex mutex;
  training.at_end = [&](auto& own) {
    const std::lock_guard lock(mutex);
    for (const auto* entry : runtime::Runtime::get().table().divided()) {
      run.outcome.divided.insert(entry->name);
    }
    run.outcome.report = own.model->tensor_parallelism_report();
  };
  ::testing::internal::CaptureStderr();
  static_cast<Trace&>(run.outcome) = training.run_on_ranks();
  run.log = ::testing::internal::GetCapturedStderr();
  return run;
}

/// How often rules are asked about the operator `sinc` of two divided layers in the first step.
int divisions_asked(const char* numerics) {
  std::atomic<int> asked{0};
  nn::rewrite::register_rule("aten::sinc", [&](const nn::rewrite::Call& call) {
    ++asked;
    return nn::rewrite::elementwise(call);
  });
  const auto config =
      Config().ddp(true).tensor_parallel_degree(2).microbatches(2).skip_tracing(true);
  run_as_threads(2, Config(config).numerics(numerics), [] {
    torch::manual_seed(1);
    torch::nn::Sequential net(torch::nn::Linear(8, 64),
                              torch::nn::Functional([](torch::Tensor x) { return x.sinc(); }),
                              torch::nn::Linear(64, 8));
    set_tensor_parallelism(net);
    DistributedModel<torch::nn::Sequential> model(net);
    auto train = step([&](torch::Tensor x) {
      auto loss = model(x).square().mean();
      model->backward(loss);
      return loss;
    });
    train(torch::ones({2, 8}));
  });
  nn::rewrite::register_rule("aten::sinc", nn::rewrite::elementwise);
  return asked;
}

/// The graph whose step was predicted is not divided a second time to be run.
TEST(FastDivision, IsMadeOncePerGraph) {
  const int of_one_graph = divisions_asked("exact");
  EXPECT_GT(of_one_graph, 0);
  EXPECT_EQ(divisions_asked("fast"), of_one_graph);
}

struct FastLayout {
  TensorLayout layout;
  std::string expected;  ///< the log's text about the first step function
};

std::ostream& operator<<(std::ostream& out, const FastLayout& fast) { return out << fast.layout; }

class FastTensorParallel : public ::testing::TestWithParam<FastLayout> {};

/// Activations between divided layers are whole, or divided.
TEST_P(FastTensorParallel, IsThatOfOneProcess) {
  const auto expected = fast_case<CalmGpt>({1}, [](CalmGpt&) {}).run_plain();
  for (const std::string optimize : {"speed", "memory"}) {
    SCOPED_TRACE(optimize);
    const auto got = run_fast<CalmGpt>(GetParam().layout, mark_whole<CalmGpt>, [&](Config config) {
      return fast_config(config).optimize(optimize);
    });
    expect_has(got.log, {"step function \"step 0\": " + GetParam().expected});
    expect_close(got.outcome, expected);
    EXPECT_EQ(got.outcome.divided.count("up1.weight"), 1u) << got.outcome.report;
    EXPECT_EQ(divided_streams(got.outcome.report) > 0, optimize == "memory") << got.outcome.report;
  }
}

INSTANTIATE_TEST_SUITE_P(
    Layouts, FastTensorParallel,
    ::testing::Values(FastLayout{{2, 1, 1, true}, "8 microbatches run as 2 of 4 ("},
                      FastLayout{{2}, "8 microbatches run as 2 of 4 ("},
                      FastLayout{{4, 1, 1, true}, "8 microbatches run as 2 of 4 ("},
                      FastLayout{{2, 2, 1, true}, "8 microbatches run as 4 of 2 ("},
                      FastLayout{{2, 2}, "8 microbatches run as 4 of 2 ("},
                      FastLayout{{2, 1, 2, true}, "4 microbatches run as 2 of 2 ("},
                      FastLayout{{2, 1, 2}, "4 microbatches run as 2 of 2 ("},
                      FastLayout{{2, 2, 2, true}, "4 microbatches run one by one, though "}));

/// Random operators draw what they draw on ranks without divided layers. Runs that divide layers
/// have the same bits, whatever stages, schedule and activations that run again.
template <class Net>
void check_draws() {
  const auto divided = run_fast<Net>({2, 1, 1, true}, mark_whole<Net>, fast_in_four_sums);
  const auto whole = run_fast<Net>(
      {1}, [](Net&) {}, fast_in_four_sums);
  for (const auto& run : {divided, whole}) {
    expect_has(run.log, {"step function \"step 0\": 8 microbatches run as 4 of 2 ("});
  }
  EXPECT_FALSE(divided.outcome.divided.empty());
  expect_close(divided.outcome, whole.outcome);
  for (const char* pipeline : {"simple", "1f1b", "zb_h1", "interleaved_1f1b"}) {
    SCOPED_TRACE(pipeline);
    const auto staged = run_fast<Net>({2, 2, 1, true}, mark_whole<Net>, [&](Config config) {
      return fast_in_four_sums(config).pipeline(pipeline);
    });
    expect_same(staged.outcome, divided.outcome);
  }
  const auto again = run_fast<Net>(
      {2, 2},
      [](Net& net) {
        mark_whole(net);
        set_activation_checkpointing(*net.up[1]);
        set_activation_checkpointing(*net.down[1]);
      },
      fast_in_four_sums);
  expect_has(again.log, {"8 microbatches run as 4 of 2 ("});
  expect_same(again.outcome, divided.outcome);
}

TEST(FastTensorParallelGpt, DrawsAsRanksThatDivideNothing) { check_draws<UntiedGpt>(); }
TEST(FastTensorParallelGpt, DrawsAsRanksThatDivideNothingWithATiedWeight) {
  check_draws<TiedGpt>();
}

/// Costs are measured: whatever is chosen, the log has the predictions and the numbers are right.
TEST(FastTensorParallelGpt, ComparesPredictedSteps) {
  const auto got = run_fast<CalmGpt>({2, 2}, mark_whole<CalmGpt>,
                                     [](Config config) { return config.numerics("fast"); });
  expect_has(got.log, {"step function \"step 0\": 8 microbatches run ",
                       "Predicted steps: 8 of 1: ", ", 4 of 2: ", ", 2 of 4: "});
  expect_close(got.outcome, fast_case<CalmGpt>({1}, [](CalmGpt&) {}).run_plain());
}

/// Saved after a step, and gone on with on fewer ranks, whose sums are the same.
TEST(FastTensorParallelGpt, GoesOnFromACheckpoint) {
  const std::string folder = std::string(::testing::TempDir()) + "/tensor_parallel_coalescing";
  std::filesystem::remove_all(folder);
  const auto stages = fast_case<TiedGpt>({2, 2, 1, true}, mark_whole<TiedGpt>, fast_in_four_sums);
  const auto alone = fast_case<TiedGpt>({2, 1, 1, true}, mark_whole<TiedGpt>, fast_in_four_sums);
  const auto through = alone.run_on_ranks();
  const auto resumed = save_and_resume(stages, alone, 1, folder);
  expect_equal(resumed.losses[1], through.losses[1], "losses");
  expect_equal(resumed.gradients[1], through.gradients[1], "gradient");
  expect_equal(resumed.weights, through.weights, "value");
  std::filesystem::remove_all(folder);
}

/// The parts keep a limit that the whole exceeds.
TEST(FastTensorParallelGpt, PredictsTheMemoryOfParts) {
  constexpr double kLimitMb = 0.2;
  const auto limited = [&](Config config) { return fast_config(config).memory_limit_mb(kLimitMb); };
  const auto whole = fast_case<CalmGpt>(
      {1}, [](CalmGpt&) {}, limited);
  const auto text = error_of<PartitionError>([&] { whole.run_on_ranks(); });
  expect_has(text, {"no division into 1 partitions keeps the memory limit of 205 KiB"});
  const auto parts = run_fast<CalmGpt>({4, 1, 1, true}, mark_whole<CalmGpt>, limited);
  expect_has(parts.log, {"step function \"step 0\": 8 microbatches run as 2 of 4 ("});
}

/// Operators of `smp::nn` treat samples apart, too; the loss is a mean over each microbatch.
TEST(FastTensorParallelModules, RunOnce) {
  const auto expected = run_plain<CalmPlainModel>();
  for (const TensorLayout& layout : {TensorLayout{2, 1, 1, true}, TensorLayout{2, 2}}) {
    SCOPED_TRACE(c10::str(layout));
    const auto got = run_fast<CalmDividedModel>(layout, [](CalmDividedModel&) {});
    const std::string of = layout.stages == 1 ? "2 of 4" : "4 of 2";
    const std::string each = layout.stages == 1 ? "4" : "2";
    expect_has(got.log, {"step function \"step 0\": 8 microbatches run as " + of +
                         " (\"numerics\": \"fast\"); 45 of 49 operators run once for all " + each});
    expect_close(got.outcome, expected);
  }
}

}  // namespace
}  // namespace smp
