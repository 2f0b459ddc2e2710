// SPDX-License-Identifier: Apache-2.0
// `numerics: "fast"`: microbatches that run as one, against plain libtorch that runs them one by
// one, in float64; and refused cases, which run exactly.

#include <ATen/Parallel.h>

#include <mutex>

#include "tests/smp/models.h"
#include "tests/smp/oracle.h"

namespace smp::testing {
namespace {

constexpr int kCoalescingSteps = 4;
constexpr double kTolerance = 1e-10;

struct CoalescedLayout {
  int stages;
  int replicas;
  int microbatches;  ///< microbatches of one replica
  std::string pipeline;
  std::string expected;  ///< the log's text about the training function
};

std::ostream& operator<<(std::ostream& out, const CoalescedLayout& layout) {
  return out << layout.stages << " stages x " << layout.replicas << " replicas, "
             << layout.microbatches << " microbatches, " << layout.pipeline;
}

/// A `TinyConvNet` with group norm in place of batch norm and without dropout.
struct GroupNormNetImpl : torch::nn::Module {
  GroupNormNetImpl() {
    conv1 = register_module("conv1", torch::nn::Conv2d(torch::nn::Conv2dOptions(1, 4, 3)));
    norm = register_module("norm", torch::nn::GroupNorm(torch::nn::GroupNormOptions(2, 4)));
    conv2 =
        register_module("conv2", torch::nn::Conv2d(torch::nn::Conv2dOptions(4, 4, 3).padding(1)));
    fc1 = register_module("fc1", torch::nn::Linear(4 * 9, 12));
    fc2 = register_module("fc2", torch::nn::Linear(12, 5));
  }

  torch::Tensor forward(torch::Tensor x) {
    x = norm(conv1(x)).relu_();
    x = conv2(x).relu_() + x;
    x = torch::max_pool2d(x, 2).flatten(1);
    return torch::log_softmax(fc2(torch::relu(fc1(x))), 1);
  }

  torch::Tensor loss(torch::Tensor x, torch::Tensor y) { return torch::nll_loss(forward(x), y); }

  static Tensors batch(int64_t size) {
    return {torch::randn({size, 1, 8, 8}), torch::randint(5, {size})};
  }

  torch::nn::Conv2d conv1{nullptr}, conv2{nullptr};
  torch::nn::GroupNorm norm{nullptr};
  torch::nn::Linear fc1{nullptr}, fc2{nullptr};
};
TORCH_MODULE(GroupNormNet);

/// Its loss divides by a number that depends on the batch's size, and is no mean over samples.
struct RegressionImpl : MlpImpl {
  torch::Tensor loss(torch::Tensor x, torch::Tensor y) {
    const auto difference = forward(x) - y;
    return (difference.square().sum() / static_cast<double>(x.size(0)) + 1).log();
  }

  static Tensors batch(int64_t size) {
    return {torch::randn({size, kWidth}), torch::randn({size, 1})};
  }
};
TORCH_MODULE(Regression);

struct Trace {
  std::vector<Tensors> losses;  // losses by step; by global microbatch
  Tensors evaluations;          // evaluations by step; of replica 0
  Named weights;
  std::string log;
};

/// The third batch is larger, which makes another graph.
template <class Net>
std::vector<Tensors> make_batches(int64_t microbatches) {
  torch::manual_seed(23);
  std::vector<Tensors> batches;
  for (int i = 0; i < kCoalescingSteps; ++i) {
    batches.push_back(Net::ContainedType::batch((i == 2 ? 3 : 2) * microbatches));
    for (auto& tensor : batches.back()) {
      if (tensor.is_floating_point()) tensor = tensor.to(torch::kDouble);
    }
  }
  return batches;
}

/// A number that the guard patches.
double loss_weight(int step) { return 1.0 + 0.5 * step; }

template <class Net>
Net make_net(const std::function<Net()>& make) {
  torch::manual_seed(5);
  Net net = make();
  net->to(torch::kDouble);
  return net;
}

const torch::optim::SGDOptions kSgd = torch::optim::SGDOptions(0.1).momentum(0.9);

template <class Net>
Trace run_plain(const std::function<Net()>& make, const CoalescedLayout& layout) {
  Net net = make_net(make);
  torch::optim::SGD optimizer(unique_parameters(*net), kSgd);
  const int count = layout.replicas * layout.microbatches;
  const auto batches = make_batches<Net>(count);
  Trace run;
  for (int i = 0; i < kCoalescingSteps; ++i) {
    const auto& batch = batches[i];
    optimizer.zero_grad();
    run.losses.push_back(
        plain_backward(unique_parameters(*net), layout.replicas, layout.microbatches, [&](int m) {
          return net->loss(part(batch[0], count, m), part(batch[1], count, m)) * loss_weight(i);
        }));
    optimizer.step();
    const torch::NoGradGuard no_grad;
    Tensors parts;
    for (int m = 0; m < layout.microbatches; ++m) parts.push_back(net(part(batch[0], count, m)));
    run.evaluations.push_back(torch::cat(parts));
  }
  run.weights = state_of(*net);
  return run;
}

/// Costs are estimated, so that the number of microbatches at once does not depend on the machine.
Config config_of(const CoalescedLayout& layout, const std::string& numerics) {
  return stages(layout.stages)
      .microbatches(layout.microbatches)
      .pipeline(layout.pipeline)
      .ddp(layout.replicas > 1)
      .numerics(numerics)
      .skip_tracing(true);
}

template <class Net>
Trace run_smp(const std::function<Net()>& make, const CoalescedLayout& layout,
              const Config& config) {
  Trace run;
  run.losses.assign(kCoalescingSteps, Tensors(layout.replicas * layout.microbatches));
  run.evaluations.resize(kCoalescingSteps);
  const auto batches = make_batches<Net>(layout.replicas * layout.microbatches);
  std::vector<Net> nets;
  for (int i = 0; i < layout.stages * layout.replicas; ++i) nets.push_back(make_net(make));
  std::mutex mutex;
  ::testing::internal::CaptureStderr();
  run_as_threads(layout.stages * layout.replicas, config, [&] {
    DistributedModel<Net> model(nets[rank()]);
    DistributedOptimizer<torch::optim::SGD> optimizer(model->parameters(), kSgd);
    auto net = model.get_module();
    auto train = step(
        [&](torch::Tensor x, torch::Tensor y, double weight) {
          auto loss = net->loss(x, y) * weight;
          model->backward(loss);
          return loss;
        },
        StepOptions().name("train"));
    auto evaluate = step([&](torch::Tensor x) { return net(x); }, StepOptions().name("evaluate"));
    for (int i = 0; i < kCoalescingSteps; ++i) {
      const auto x = part(batches[i][0], layout.replicas, dp_rank());
      const auto y = part(batches[i][1], layout.replicas, dp_rank());
      optimizer.zero_grad();
      const auto losses = train(x, y, loss_weight(i)).outputs();
      optimizer.step();
      const auto evaluation = evaluate(x).concat();
      const std::lock_guard<std::mutex> lock(mutex);
      for (int m = 0; m < layout.microbatches; ++m) {
        run.losses[i][dp_rank() * layout.microbatches + m] = losses[m];
      }
      if (dp_rank() == 0) run.evaluations[i] = evaluation;
    }
    const auto state = model->state_dict();
    const std::lock_guard<std::mutex> lock(mutex);
    if (dp_rank() == 0) run.weights = to_map(state);
  });
  run.log = ::testing::internal::GetCapturedStderr();
  return run;
}

void expect_close(const torch::Tensor& got, const torch::Tensor& expected,
                  const std::string& what) {
  ASSERT_TRUE(got.defined()) << what;
  ASSERT_EQ(got.sizes(), expected.sizes()) << what;
  EXPECT_TRUE(torch::allclose(got, expected, kTolerance, kTolerance))
      << what << ": largest difference " << (got - expected).abs().max().item<double>();
}

void expect_close(const Trace& got, const Trace& expected) {
  for (int i = 0; i < kCoalescingSteps; ++i) {
    for (size_t m = 0; m < expected.losses[i].size(); ++m) {
      expect_close(got.losses[i][m], expected.losses[i][m],
                   "loss of step " + std::to_string(i) + ", microbatch " + std::to_string(m));
    }
    expect_close(got.evaluations[i], expected.evaluations[i],
                 "evaluation after step " + std::to_string(i));
  }
  ASSERT_EQ(got.weights.size(), expected.weights.size());
  for (const auto& [name, tensor] : expected.weights) {
    expect_close(got.weights.at(name), tensor, "weight " + name);
  }
}

class Coalescing : public ::testing::TestWithParam<CoalescedLayout> {
 protected:
  void SetUp() override { at::set_num_threads(1); }

  template <class Net>
  void check(const std::function<Net()>& make) {
    const CoalescedLayout& layout = GetParam();
    const Trace fast = run_smp<Net>(make, layout, config_of(layout, "fast"));
    expect_has(fast.log, {"step function \"train\": " + layout.expected});
    expect_close(fast, run_plain<Net>(make, layout));
  }
};

TEST_P(Coalescing, Gpt) {
  check<TinyGpt>([] { return TinyGpt(false, 3, 0.0); });
}

TEST_P(Coalescing, TiedGpt) {
  check<TinyGpt>([] { return TinyGpt(true, 3, 0.0); });
}

TEST_P(Coalescing, Regression) {
  check<Regression>([] { return Regression(); });
}

TEST_P(Coalescing, ConvNet) {
  check<GroupNormNet>([] { return GroupNormNet(); });
}

std::vector<CoalescedLayout> layouts() {
  const std::string four = "16 microbatches run as 4 of 4 (\"numerics\": \"fast\"); ";
  const std::string two = "8 microbatches run as 4 of 2 (\"numerics\": \"fast\"); ";
  std::vector<CoalescedLayout> result = {
      {1, 1, 16, "interleaved", "16 microbatches run as 2 of 8 (\"numerics\": \"fast\"); "},
      {1, 2, 8, "simple", "8 microbatches run as 2 of 4 (\"numerics\": \"fast\"); "},
      {2, 1, 16, "simple", four},
      {2, 2, 8, "interleaved", two},
      {3, 1, 12, "interleaved", "12 microbatches run as 6 of 2 (\"numerics\": \"fast\"); "},
      {3, 1, 4, "1f1b", "4 microbatches run one by one, though \"numerics\" is \"fast\": "},
  };
  for (const char* pipeline : {"1f1b", "interleaved_1f1b", "zb_h1", "zbv", "list", "auto"}) {
    result.push_back({2, 1, 8, pipeline, two});
  }
  return result;
}

INSTANTIATE_TEST_SUITE_P(Layouts, Coalescing, ::testing::ValuesIn(layouts()));

/// Costs are measured: whatever is chosen, the log has the predictions and the numbers are right.
TEST(CoalescingChoice, ComparesPredictedSteps) {
  at::set_num_threads(1);
  const CoalescedLayout layout{2, 1, 8, "1f1b", ""};
  const std::function<TinyGpt()> make = [] { return TinyGpt(false, 3, 0.0); };
  const Trace fast = run_smp<TinyGpt>(make, layout, config_of(layout, "fast").skip_tracing(false));
  expect_has(fast.log, {"step function \"train\": 8 microbatches run ",
                        "Predicted steps: 8 of 1: ", ", 4 of 2: ", ", 2 of 4: "});
  expect_close(fast, run_plain<TinyGpt>(make, layout));
}

/// Sums of gradients keep their shards, so fewer microbatches can be joined.
TEST(CoalescingChoice, KeepsGradientShards) {
  at::set_num_threads(1);
  const CoalescedLayout layout{1, 1, 8, "simple", ""};
  const std::function<Regression()> make = [] { return Regression(); };
  const Trace fast =
      run_smp<Regression>(make, layout, config_of(layout, "fast").gradient_shards(4));
  expect_has(fast.log, {"8 microbatches run as 4 of 2"});
  expect_close(fast, run_plain<Regression>(make, layout));
}

/// Batch norm works across samples and writes its averages.
TEST(CoalescingChoice, BatchNormRunsExactly) {
  at::set_num_threads(1);
  const CoalescedLayout layout{2, 1, 4, "interleaved", ""};
  const std::function<TinyConvNet()> make = [] { return TinyConvNet(); };
  const Trace fast = run_smp<TinyConvNet>(make, layout, config_of(layout, "fast"));
  const Trace exact = run_smp<TinyConvNet>(make, layout, config_of(layout, "exact"));
  expect_has(fast.log,
             {"step function \"train\": 4 microbatches run one by one, though "
              "\"numerics\" is \"fast\": operator ",
              "writes buffer \"norm1.num_batches_tracked\", which the next microbatch would see."});
  EXPECT_EQ(exact.log.find("one by one"), std::string::npos);
  for (int i = 0; i < kCoalescingSteps; ++i)
    expect_equal(fast.losses[i], exact.losses[i], "losses");
  expect_equal(fast.weights, exact.weights, "weights");
}

/// A function that fails on other sizes, or slices its arguments itself.
TEST(CoalescingChoice, SaysWhatTheFunctionForbids) {
  at::set_num_threads(1);
  ::testing::internal::CaptureStderr();
  run_as_threads(1, stages(1).microbatches(4).numerics("fast"), [] {
    Mlp net;
    DistributedModel<Mlp> model(net);
    auto fixed = step(
        [&](torch::Tensor x) {
          return model(x.view({2, MlpImpl::kWidth})).sum();
        },
        StepOptions().name("fixed"));
    fixed(torch::randn({8, MlpImpl::kWidth}));
  });
  expect_has(::testing::internal::GetCapturedStderr(),
             {"step function \"fixed\": 4 microbatches run one by one, though \"numerics\" is "
              "\"fast\": the function fails on 2 times the samples: "});
}

}  // namespace
}  // namespace smp::testing
