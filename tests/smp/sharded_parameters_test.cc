// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <mutex>
#include <optional>
#include <ostream>
#include <set>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "graph/absent.h"
#include "pipeline/observer.h"
#include "runtime/parameters/parameter_shards.h"
#include "smp/optim/lamb.h"
#include "smp/optim/novograd.h"
#include "smp/smp.h"
#include "tests/smp/models.h"
#include "tests/smp/parity.h"
#include "tests/smp/sharded.h"
#include "tests/temp_folder.h"

// Sharded data parallelism: the bits of one process, and the memory of a rank meanwhile.
namespace smp {
namespace {

using namespace testing;

/// How the test looks at a rank after each step.
template <class Net>
using Watch = std::function<void(DistributedModel<Net>& model, int step)>;
/// Prepares the module before the first step.
template <class Net>
using Prepare = std::function<void(Net& net)>;

/// Trains on ranks that share parameters, and in one process.
template <class Net, class Optimizer, class Options>
void check(
    const std::function<Net()>& make, const Options& options, const Sharded& run,
    const Watch<Net>& watch = [](auto&, int) {}, const Prepare<Net>& prepare = [](Net&) {}) {
  SCOPED_TRACE(c10::str(run));
  auto tested = parity::training<Net, Optimizer>(layout_of(run), make, options);
  tested.config = sharded_config(run);
  tested.after_step = [&](auto& rank, int step) { watch(rank.model, step); };
  tested.prepare = prepare;
  expect_as_plain(tested);
}

class ShardedTraining : public ::testing::TestWithParam<std::pair<int, int>> {};

/// Tied embedding, dropout.
TEST_P(ShardedTraining, IsAsInOneProcess) {
  const auto [replicas, degree] = GetParam();
  check<TinyGpt, torch::optim::AdamW>(tied_gpt, kAdamW, {replicas, degree});
  check<TinyGpt, torch::optim::SGD>(gpt, kSgd, {replicas, degree, 2});
}

/// All that can be divided is, and less fits than the window would gather.
TEST_P(ShardedTraining, NeedsLittleMemory) {
  const auto [replicas, degree] = GetParam();
  check<TinyGpt, torch::optim::AdamW>(tied_gpt, kAdamW, {replicas, degree, 1, 0, 1000, 1});
}

/// Norms of parameters, gradients and updates are those of whole ones.
TEST_P(ShardedTraining, TakesNormsOfWholes) {
  const auto [replicas, degree] = GetParam();
  check<TinyGpt, optim::Lamb>(tied_gpt, optim::LambOptions(0.02).max_grad_norm(0.05),
                              {replicas, degree});
  check<TinyGpt, optim::NovoGrad>(gpt, optim::NovoGradOptions(0.02).weight_decay(0.01),
                                  {replicas, degree, 2});
}

INSTANTIATE_TEST_SUITE_P(ReplicasAndDegree, ShardedTraining,
                         ::testing::Values(std::pair(2, 2), std::pair(3, 3), std::pair(4, 2),
                                           std::pair(4, 4)));

TEST(ShardedParameters, AreReadThroughViews) {
  const auto make = [] { return ViewNet(); };
  for (const int64_t max_live : {1000000, 1}) {
    check<ViewNet, torch::optim::AdamW>(make, kAdamW, {4, 2, 2, 0, max_live});
    check<ViewNet, torch::optim::SGD>(make, kSgd, {3, 3, 1, 0, max_live});
  }
}

TEST(ShardedParameters, AreThereWhenARegionRunsAgain) {
  const auto prepare = [](TinyGpt& net) {
    for (auto& module : net->up) set_activation_checkpointing(module);
    for (auto& module : net->attention_in) set_activation_checkpointing(module);
    set_activation_checkpointing(net->tokens);
  };
  check<TinyGpt, torch::optim::SGD>(
      tied_gpt, kSgd, {2, 2, 2, 0, 1000}, [](auto&, int) {}, prepare);
  check<TinyGpt, torch::optim::AdamW>(
      gpt, kAdamW, {3, 3}, [](auto&, int) {}, prepare);
}

/// A leaf module in the middle of others.
struct LeafNetImpl : torch::nn::Module {
  LeafNetImpl() {
    first = register_module("first", torch::nn::Linear(8, 16));
    inner =
        register_module("inner", torch::nn::Sequential(torch::nn::Linear(16, 16), torch::nn::ReLU(),
                                                       torch::nn::Linear(16, 8)));
    last = register_module("last", torch::nn::Linear(8, 8));
  }
  torch::Tensor loss(torch::Tensor x, torch::Tensor y) {
    return torch::mse_loss(last(leaf(inner)(torch::tanh(first(x)))), y);
  }
  static Tensors batch(int64_t size) { return {torch::randn({size, 8}), torch::randn({size, 8})}; }

  torch::nn::Linear first{nullptr}, last{nullptr};
  torch::nn::Sequential inner{nullptr};
};
TORCH_MODULE(LeafNet);

TEST(ShardedParameters, AreReadByLeafModules) {
  check<LeafNet, torch::optim::SGD>([] { return LeafNet(); }, kSgd, {2, 2, 2, 0, 100});
}

/// Between steps a rank has its shards and undivided parameters, and no gradient of a whole
/// parameter.
TEST(ShardedParameters, AreHeldInParts) {
  int64_t whole = 0, small = 0;
  for (const auto& parameter : unique_parameters(*tied_gpt())) {
    (parameter.numel() < 100 ? small : whole) += parameter.numel();
  }
  for (const auto& [replicas, degree] : {std::pair(2, 2), std::pair(4, 2), std::pair(4, 4)}) {
    std::vector<int64_t> of_rank(replicas);
    check<TinyGpt, torch::optim::AdamW>(tied_gpt, kAdamW, {replicas, degree},
                                        [&](DistributedModel<TinyGpt>& model, int) {
                                          of_rank[rank()] = held_elements(*model.get_module());
                                          for (const auto& parameter : model->parameters()) {
                                            if (parameter.numel() >= 100) {
                                              EXPECT_TRUE(graph::is_absent(parameter.grad()));
                                            }
                                          }
                                        });
    for (int group = 0; group < replicas; group += degree) {
      int64_t sum = 0;
      for (int r = group; r < group + degree; ++r) {
        sum += of_rank[r] - small;
        // 15 parameters, in shards of multiples of 64 elements.
        EXPECT_NEAR(of_rank[r] - small, whole / degree, 15 * 64);
      }
      EXPECT_EQ(sum, whole);
    }
  }
}

/// At no time more than the limit, or than a unit needs.
TEST(ShardedParameters, AreLiveWithinTheLimit) {
  for (const int64_t limit : {768, 1300, 2000}) {
    check<TinyGpt, torch::optim::SGD>(
        tied_gpt, kSgd, {2, 2, 2, 100, limit}, [&](DistributedModel<TinyGpt>&, int) {
          const auto& divided = *runtime::Runtime::get().parameter_shards()->parameters();
          EXPECT_EQ(divided.live(), 0);
          EXPECT_LE(divided.peak_live(), limit);
          EXPECT_GT(divided.peak_live(), 700);
        });
  }
  check<TinyGpt, torch::optim::SGD>(
      tied_gpt, kSgd, {2, 2, 1, 100, 1}, [&](DistributedModel<TinyGpt>&, int) {
        EXPECT_EQ(runtime::Runtime::get().parameter_shards()->parameters()->peak_live(),
                  768);  // the largest alone
      });
}

/// The actions of a rank's steps, as they begin.
struct Actions final : pipeline::Observer {
  void on_begin(size_t, const pipeline::Action& action) override {
    actions.push_back(action);
    if (then) then(action);
  }
  std::vector<pipeline::Action> actions;
  std::function<void(const pipeline::Action&)> then;
};

/// Every gather but the first starts before another stage computes, and each stage is freed.
TEST(ShardedParameters, AreGatheredAhead) {
  torch::set_num_threads(1);
  Actions seen;
  torch::manual_seed(5);
  std::vector<Mlp> nets{Mlp(5), Mlp(5)};
  run_as_threads(2, sharded_config({2, 2, 1, 36}), [&] {
    DistributedModel<Mlp> model(nets[rank()]);
    auto train = make_training(model);
    const auto x = torch::ones({4, MlpImpl::kWidth}), y = torch::ones({4, 1});
    train(x, y);
    if (rank() == 0) runtime::Runtime::get().execution.observers.push_back(&seen);
    train(x, y);
    runtime::Runtime::get().execution.observers.clear();
  });
  std::set<int> unsharded;
  std::optional<int> waiting;  // unsharded, and no other stage has computed since
  int gathers = 0;
  for (const auto& action : seen.actions) {
    if (action.kind == pipeline::Action::Kind::kUnshard) {
      EXPECT_TRUE(unsharded.insert(action.stage).second) << action.stage;
      waiting = ++gathers > 1 ? std::optional(action.stage) : std::nullopt;
    } else if (action.kind == pipeline::Action::Kind::kReshard) {
      EXPECT_EQ(unsharded.erase(action.stage), 1U) << action.stage;
    } else if (action.is_compute()) {
      EXPECT_NE(action.stage, waiting) << to_string(action);
      waiting.reset();
    }
  }
  EXPECT_GE(gathers, 5);  // six weights, two a unit, there and back
  EXPECT_TRUE(unsharded.empty());
}

/// The L2 norm of all gradients, each once, as libtorch's function does on whole parameters.
TEST(ShardedParameters, GradientsAreClipped) {
  torch::set_num_threads(1);
  for (const Sharded& run : {Sharded{2, 2}, Sharded{4, 2}, Sharded{4, 4}}) {
    auto tested = parity::training<TinyGpt, torch::optim::SGD>(
        layout_of(run), std::function<TinyGpt()>([] { return TinyGpt(true, 3, 0.0); }), kSgd);
    tested.evaluates = false;
    tested.max_norm = 0.2;
    const auto plain = tested.run_plain();
    tested.max_norm = 0;  // "sdp_gradient_clipping" does it
    tested.config = sharded_config(run, 0.2);
    expect_equal(tested.run_on_ranks().weights, plain.weights, "value");
  }
}

/// The one default by which results are not those of the plain program: a norm of 1.
TEST(ShardedParameters, ClippingIsToldOnce) {
  const auto log_with = [](Config config) {
    ::testing::internal::CaptureStderr();
    run_as_threads(2, config.microbatches(2), [] {
      DistributedModel<torch::nn::Linear> model(torch::nn::Linear(4, 4));
      auto train = step([&](torch::Tensor x) { model->backward(model(x).sum()); });
      auto evaluate = step([&](torch::Tensor x) { return model(x); });
      for (int i = 0; i < 2; ++i) {
        train(torch::ones({4, 4}));
        evaluate(torch::ones({4, 4}));
      }
    });
    return ::testing::internal::GetCapturedStderr();
  };
  const auto sharded = Config().ddp(true).sharded_data_parallel_degree(2);
  const auto line = [](const std::string& norm) {
    return "[smp rank 0 dp 0/2] sharded data parallelism: optimizer.step() clips gradients to a "
           "norm of " +
           norm +
           " over all of them (\"sdp_gradient_clipping\"); a value that no norm reaches, such as "
           "1e9, leaves them as they are\n";
  };
  for (const auto& [config, norm] :
       {std::pair(sharded, "1"), std::pair(Config(sharded).sdp_gradient_clipping(0.25), "0.25")}) {
    const std::string log = log_with(config);
    expect_has(log, {line(norm)});
    EXPECT_EQ(log.find("clips gradients"), log.rfind("clips gradients")) << log;
  }
  EXPECT_EQ(log_with(Config().ddp(true)).find("clips gradients"), std::string::npos);
}

/// Checkpoints are whole: into a plain module, another degree, and no sharding at all, and back.
TEST(ShardedParameters, SaveAndLoad) {
  const TempFolder folder;
  const std::string path = folder.file("checkpoint");
  const auto of_degree = [](int degree, int64_t threshold) {
    auto result = parity::training<TinyGpt, torch::optim::AdamW>(
        {1, 4, 1, "simple", 4}, std::function<TinyGpt()>(tied_gpt), kAdamW);
    result.config = sharded_config({4, degree, 1, threshold});
    result.evaluates = false;
    return result;
  };
  const auto expected = of_degree(1, 100).run_on_ranks().weights;
  // The last one divides no parameter: all are smaller.
  for (const auto& [before, after, threshold] :
       {std::tuple(4, 2, 100), std::tuple(2, 1, 100), std::tuple(1, 4, 100),
        std::tuple(2, 4, 1000000)}) {
    SCOPED_TRACE(c10::str("degree ", before, ", then ", after, ", from ", threshold, " elements"));
    const auto saved = of_degree(before, threshold).run_on_ranks({0, 2, "", path}).weights;
    TinyGpt plain(true);
    load_into_module(path, *plain);
    expect_equal(state_of(*plain), saved, "value");
    auto then = of_degree(after, threshold);
    // Loads into a model that is divided already.
    if (after == 2) then.before_load = [](auto& rank) { rank.step(3); };
    expect_equal(then.run_on_ranks({2, 4, path, ""}).weights, expected, "value");
  }
}

TEST(ShardedParameters, ModelsAreReadAndWritten) {
  torch::set_num_threads(1);
  torch::manual_seed(5);
  std::vector<Mlp> nets{Mlp(), Mlp()};
  const auto initial = state_of(*nets[0]);
  run_as_threads(2, sharded_config({2, 2, 1, 36}), [&] {
    DistributedModel<Mlp> model(nets[rank()]);
    auto train = make_training(model);
    const auto x = torch::ones({4, MlpImpl::kWidth}), y = torch::ones({4, 1});
    train(x, y);
    Mlp net = model.get_module();
    EXPECT_EQ(net->hidden[0]->weight.storage().nbytes(), 0u);
    expect_equal(to_map(model->state_dict()), initial, "state");
    const auto local = model->local_state_dict();
    EXPECT_EQ(local["hidden0.weight"].sizes(), std::vector<int64_t>({rank() == 0 ? 36 : 0}));
    EXPECT_EQ(local["hidden0.bias"].sizes(), std::vector<int64_t>({6}));
    EXPECT_EQ(model->local_parameters().size(), 12u);
    EXPECT_EQ(model->virtual_named_parameters().contains("hidden0.weight"), rank() == 0);
    model->cpu();
    expect_equal(state_of(*net), initial, "module");
    torch::OrderedDict<std::string, torch::Tensor> doubled;
    for (const auto& [name, tensor] : initial) doubled.insert(name, tensor * 2);
    model->load_state_dict(doubled);
    expect_equal(to_map(model->state_dict()), to_map(doubled), "loaded");
    model->cpu();  // anew
    expect_equal(state_of(*net), to_map(doubled), "module");
    model->load_state_dict(local, /*strict=*/true, /*same_partition_load=*/true);
    expect_equal(to_map(model->state_dict()), initial, "loaded shards");
    train(x, y);
    EXPECT_EQ(net->hidden[0]->weight.storage().nbytes(), 0u);
    // Gradients are dropped with those of the parameters.
    EXPECT_TRUE(runtime::Runtime::get().parameter_shards()->parameters()->has_gradient(0));
    model->zero_grad();
    EXPECT_FALSE(
        runtime::Runtime::get().parameter_shards()->parameters()->shard(0).grad().defined());
  });
}

/// Delayed parameters are made one by one, and divided at once.
TEST(ShardedParameters, AreMadeLater) {
  torch::set_num_threads(1);
  torch::manual_seed(5);
  const auto expected = state_of(*Mlp());
  std::vector<Mlp> nets(2, nullptr);
  Config config = sharded_config({2, 2, 1, 36});
  config.delayed_parameter_initialization(true);
  std::mutex mutex;
  run_as_threads(2, config, [&] {
    Mlp net{nullptr};
    {
      const std::lock_guard<std::mutex> lock(mutex);
      torch::manual_seed(5);
      const auto scope = model_creation(ModelCreationOptions().eager_bytes(16));
      net = Mlp();
    }
    DistributedModel<Mlp> model(net);
    make_training(model)(torch::ones({4, MlpImpl::kWidth}), torch::ones({4, 1}));
    EXPECT_EQ(net->hidden[0]->weight.storage().nbytes(), 0u);
    expect_equal(to_map(model->state_dict()), expected, "value");
  });
}

TEST(ShardedParameters, ReplicasRunTheSameOperators) {
  const auto text = error_of_run<UsageError>(2, sharded_config({2, 2, 1, 36}), [] {
    torch::manual_seed(5);
    Mlp net;
    DistributedModel<Mlp> model(net);
    auto train = make_training(model);
    const auto x = torch::ones({4, MlpImpl::kWidth}), y = torch::ones({4, 1});
    train(x, y);
    if (rank() == 1) net->depth = 3;
    train(x, y);
  });
  expect_has(text, {"step function \"step 0\" calls other operators on replica 0 and replica 1",
                    "With \"sharded_data_parallel_degree\" above 1 replicas gather parameters "
                    "together, so all take the same way through the function"});
}

TEST(ShardedParameters, NumbersInGradientsAreRefused) {
  const auto text = error_of_run<UsageError>(2, sharded_config({2, 2, 1, 36}), [] {
    Mlp net;
    DistributedModel<Mlp> model(net);
    DistributedOptimizer<torch::optim::SGD> optimizer(model->parameters(), kSgd);
    make_training(model)(torch::ones({4, MlpImpl::kWidth}), torch::ones({4, 1}));
    net->in->weight.mutable_grad() = torch::zeros_like(net->in->bias);
    optimizer.step();
  });
  expect_has(text, {"the program has changed .grad of parameter \"in.weight\""});
}

TEST(ShardedParameters, OptimizersAreElementwise) {
  const auto text = error_of_run<UsageError>(2, sharded_config({2, 2}), [] {
    Mlp net;
    DistributedModel<Mlp> model(net);
    DistributedOptimizer<torch::optim::LBFGS> optimizer(model->parameters());
  });
  expect_has(text, {"needs whole parameters, and with \"sharded_data_parallel_degree\" each rank "
                    "updates its pieces of them. Use another optimizer, or set "
                    "\"sharded_data_parallel_degree\" to 1"});
}

/// A rank that fails while the other gathers.
TEST(ShardedParameters, AFailureNamesTheParameter) {
  std::string text;
  std::atomic<int> arrived = 0;
  // One parameter at a time: each use waits for a gather of its own.
  const auto config = sharded_config({2, 2, 1, 36}).sdp_max_live_parameters(1);
  error_of_run<std::exception>(2, config, [&] {
    Mlp net;
    DistributedModel<Mlp> model(net);
    auto train = make_training(model);
    const auto x = torch::ones({4, MlpImpl::kWidth}), y = torch::ones({4, 1});
    train(x, y);
    Actions watch;
    watch.then = [&](const pipeline::Action& action) {
      if (!(action == pipeline::forward_of(1, 0))) return;
      ++arrived;
      // Only when the other rank is there, too, does it wait for the next parameter afterwards.
      while (arrived < 2) std::this_thread::yield();
      if (rank() == 1) throw Error("out of luck");
    };
    runtime::Runtime::get().execution.observers.push_back(&watch);
    if (rank() == 1) {
      train(x, y);
    } else {
      text = error_of<CommError>([&] { train(x, y); });
    }
  });
  expect_has(text, {"rank 1", "out of luck", "while sharded data parallelism gathered parameter"});
}

}  // namespace
}  // namespace smp
