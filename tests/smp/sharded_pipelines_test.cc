// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <atomic>
#include <functional>
#include <utility>
#include <vector>

#include "smp/autocast.h"
#include "smp/optim/lamb.h"
#include "smp/smp.h"
#include "tests/smp/sharded.h"
#include "tests/temp_folder.h"

// Parameters sharded under pipelines: the bits of one process, and the memory of a rank meanwhile.
namespace smp {
namespace {

using namespace testing;

/// Stages of a pipeline, each with shards of its own parameters; tied ones lie on one stage and are
/// read on another.
struct Divided {
  const char* pipeline;
  int partitions, replicas, degree, microbatches;
};

std::ostream& operator<<(std::ostream& out, const Divided& run) {
  return out << run.pipeline << ", " << run.partitions << " partitions, " << run.replicas
             << " replicas, degree " << run.degree;
}

class ShardedPipelines : public ::testing::TestWithParam<Divided> {
 protected:
  template <class Optimizer, class Options>
  static auto training(const Divided& run, bool tied, const Options& options,
                       int64_t max_live = 1000000000) {
    return sharded_pipelines<TinyGpt, Optimizer>(
        {run.partitions, run.replicas, run.microbatches, run.pipeline, 3},
        {run.replicas, run.degree, run.microbatches, 100, max_live},
        std::function<TinyGpt()>([tied] { return TinyGpt(tied); }), options);
  }
};

TEST_P(ShardedPipelines, AreAsInOneProcess) {
  for (const bool tied : {true, false}) {
    for (const int64_t max_live : {int64_t{1000000000}, int64_t{1}}) {
      SCOPED_TRACE(c10::str(tied ? "tied" : "untied", ", at most ", max_live));
      expect_as_plain(training<torch::optim::AdamW>(GetParam(), tied, kAdamW, max_live));
    }
  }
}

TEST_P(ShardedPipelines, TakeNormsOfWholes) {
  expect_as_plain(training<optim::Lamb>(GetParam(), /*tied=*/true,
                                        optim::LambOptions(0.02).max_grad_norm(0.05)));
}

TEST_P(ShardedPipelines, RunRegionsAgain) {
  auto tested = training<torch::optim::SGD>(GetParam(), /*tied=*/true, kSgd);
  tested.config.offload_activations(true);
  tested.prepare = [](TinyGpt& net) {
    for (auto& module : net->up) set_activation_checkpointing(module);
    for (auto& module : net->attention_in) set_activation_checkpointing(module);
  };
  expect_as_plain(tested);
}

/// Each rank has its parts of the model, and no more than one unit's parameters whole.
TEST_P(ShardedPipelines, HoldParts) {
  int64_t whole = 0, small = 0;
  for (const auto& parameter : unique_parameters(*gpt())) {
    (parameter.numel() < 100 ? small : whole) += parameter.numel();
  }
  const Divided run = GetParam();
  std::atomic<int64_t> held = 0;
  auto tested = training<torch::optim::SGD>(run, /*tied=*/false, kSgd, /*max_live=*/1);
  tested.after_step = [&](auto& own, int step) {
    const auto& divided = *runtime::Runtime::get().parameter_shards()->parameters();
    EXPECT_EQ(divided.live(), 0);
    EXPECT_LE(divided.peak_live(), 768);  // the largest alone
    if (step == 0) held += held_elements(*own.model.get_module());
  };
  tested.run_on_ranks();
  // Small ones are whole on each replica, and shards of the others once for each group.
  EXPECT_EQ(held, run.replicas * small + run.replicas / run.degree * whole);
}

/// Checkpoints are whole: into a plain module, without a pipeline, and back.
TEST_P(ShardedPipelines, SaveAndLoad) {
  const TempFolder folder;
  const std::string path = folder.file("checkpoint");
  const Divided run = GetParam();
  const auto in_layout = [&](const Divided& layout) {
    auto result = training<torch::optim::AdamW>(layout, /*tied=*/true, kAdamW);
    result.steps = 4;
    result.batch = batches_of<TinyGpt>(2 * result.microbatches, 4);
    result.evaluates = false;
    return result;
  };
  const Divided flat{"simple", 1, run.replicas, run.degree, run.microbatches};
  const auto expected = in_layout(run).run_on_ranks().weights;
  for (const auto& [before, after] : {std::pair(run, flat), std::pair(flat, run)}) {
    const auto saved = in_layout(before).run_on_ranks({0, 2, "", path}).weights;
    TinyGpt plain(true);
    load_into_module(path, *plain);
    expect_equal(state_of(*plain), saved, "value");
    auto then = in_layout(after);
    // Loads into a model that is divided already.
    if (after.partitions > 1) then.before_load = [](auto& rank) { rank.step(3); };
    expect_equal(then.run_on_ranks({2, 4, path, ""}).weights, expected, "value");
  }
}

/// The L2 norm of all gradients, each once, as libtorch's function does on whole parameters.
TEST_P(ShardedPipelines, ClipGradients) {
  const Divided run = GetParam();
  auto tested = parity::training<TinyGpt, torch::optim::SGD>(
      {run.partitions, run.replicas, run.microbatches, run.pipeline, 3},
      std::function<TinyGpt()>([] { return TinyGpt(true, 3, 0.0); }), kSgd);
  tested.evaluates = false;
  tested.max_norm = 0.2;
  const auto plain = tested.run_plain();
  tested.max_norm = 0;  // "sdp_gradient_clipping" does it
  tested.config = sharded_config(Sharded{run.replicas, run.degree, run.microbatches}, 0.2)
                      .partitions(run.partitions)
                      .pipeline(run.pipeline);
  expect_equal(tested.run_on_ranks().weights, plain.weights, "value");
}

/// On the CPU autocast leaves this overload of `_convolution` alone: its backward reads the weight.
struct UncastConvolutionImpl : torch::nn::Module {
  UncastConvolutionImpl() {
    weight = register_parameter("weight", torch::randn({8, 8, 3}) * 0.2);
    last = register_parameter("last", torch::randn({8, 8}) * 0.2);
  }
  torch::Tensor loss(torch::Tensor x, torch::Tensor y) {
    const amp::Autocast autocast(torch::kBFloat16);
    x = torch::mm(x, last).to(torch::kFloat).unsqueeze(2).expand({-1, -1, 3});
    x = torch::_convolution(x, weight, {}, {1}, {0}, {1}, false, {0}, 1, false, false, true, true);
    return (x.squeeze(2) - y).square().mean();
  }
  static std::vector<torch::Tensor> batch(int64_t size) {
    return {torch::randn({size, 8}), torch::randn({size, 8})};
  }

  torch::Tensor weight, last;
};
TORCH_MODULE(UncastConvolution);

TEST(ShardedPipeline, GathersWeightsThatAutocastDoesNotCast) {
  expect_as_plain(sharded_pipelines<UncastConvolution, torch::optim::SGD>(
      {2, 2, 2, "1f1b", 2}, {2, 2, 2, /*threshold=*/0},
      std::function<UncastConvolution()>([] { return UncastConvolution(); }), kSgd));
}

INSTANTIATE_TEST_SUITE_P(Schedules, ShardedPipelines,
                         ::testing::Values(Divided{"simple", 2, 2, 2, 2},
                                           Divided{"interleaved", 2, 2, 2, 2},
                                           Divided{"1f1b", 2, 2, 2, 4}, Divided{"1f1b", 3, 2, 2, 3},
                                           Divided{"interleaved_1f1b", 2, 2, 2, 4},
                                           Divided{"zb_h1", 2, 2, 2, 3}, Divided{"zbv", 2, 2, 2, 4},
                                           Divided{"list", 2, 2, 2, 3}, Divided{"auto", 2, 2, 2, 3},
                                           Divided{"1f1b", 2, 4, 2, 2}));

}  // namespace
}  // namespace smp
