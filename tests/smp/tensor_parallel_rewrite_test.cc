// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <filesystem>
#include <functional>
#include <mutex>
#include <set>
#include <string>

#include "optim/state_dict.h"
#include "runtime/parameters/scope_notes.h"
#include "runtime/runtime.h"
#include "tests/smp/models.h"
#include "tests/smp/tensor_parallel_run.h"
#include "tests/smp/tensor_parallel_sharding.h"

// Models that know nothing of tensor parallelism, divided by rewriting their captured graphs.
namespace smp {
namespace {

using namespace testing;

/// The names of the parameters that are divided.
std::set<std::string> divided_names() {
  std::set<std::string> names;
  for (const auto* entry : runtime::Runtime::get().table().divided()) names.insert(entry->name);
  return names;
}

void mark(torch::nn::Module& net) { set_tensor_parallelism(net); }

/// The results are those of one process and, if `twice`, the same in a second run.
template <class Net>
void check(const TensorLayout& layout, bool twice) {
  SCOPED_TRACE(c10::str(layout));
  const auto expected = run_plain<Net>();
  for (const char* optimize : {"speed", "memory"}) {
    SCOPED_TRACE(optimize);
    const auto run = [&] {
      return run_on_ranks<Net>(
          layout, [](Net& net) { mark(net); },
          [&](Config config) { return config.optimize(optimize); });
    };
    const auto got = run();
    expect_close(got, expected);
    if (twice) expect_same(run(), got);
    // In parts go samples: neither they nor positions are a multiple of four.
    const bool in_parts = optimize == std::string("memory") && kSamples % layout.degree == 0;
    EXPECT_EQ(divided_streams(got.report) > 0, in_parts) << got.report;
  }
}

class TensorParallelRewrite : public ::testing::TestWithParam<TensorLayout> {};

TEST_P(TensorParallelRewrite, IsThatOfOneProcess) { check<PlainModel>(GetParam(), /*twice=*/true); }

INSTANTIATE_TEST_SUITE_P(Layouts, TensorParallelRewrite,
                         ::testing::Values(TensorLayout{2}, TensorLayout{4}, TensorLayout{2, 2},
                                           TensorLayout{4, 2}, TensorLayout{2, 1, 2},
                                           TensorLayout{2, 2, 2}, TensorLayout{2, 2, 2, true},
                                           TensorLayout{4, 1, 2, true}));

TEST(TensorParallelRewriteOfGpt, IsThatOfOneProcess) {
  check<UntiedGpt>({2, 2}, /*twice=*/false);
  check<TiedGpt>({2, 2}, /*twice=*/false);
  check<TiedGpt>({2, 1, 1, true}, /*twice=*/false);
}

/// Sums that are grouped by rank differ in their last digits.
TEST(TensorParallelRewriteOfGpt, IsCloseInSinglePrecision) {
  const auto in_float = [](TiedGpt& net) { net.to(torch::kFloat); };
  const auto marked = [](TiedGpt& net) {
    net.to(torch::kFloat);
    mark(net);
  };
  expect_close(run_on_ranks<TiedGpt>({2, 2}, marked), run_plain<TiedGpt>(in_float), 2e-5);
}

TEST(TensorParallelRewriteOfGpt, RunsAgainInTheBackwardPass) {
  const TensorLayout layout{2, 2};
  const auto kept = run_on_ranks<UntiedGpt>(layout, [](UntiedGpt& net) { mark(net); });
  const auto again = run_on_ranks<UntiedGpt>(layout, [](UntiedGpt& net) {
    mark(net);
    set_activation_checkpointing(*net.up[1]);
    set_activation_checkpointing(*net.down[1]);
  });
  expect_same(again, kept);
}

/// Schedules that split backward passes, visit ranks twice or change, and steps without guard.
TEST(TensorParallelRewriteOfGpt, IsTheSameHoweverItRuns) {
  const TensorLayout layout{2, 2};
  const auto run = [&](const std::function<Config(Config)>& more) {
    return run_on_ranks<UntiedGpt>(
        layout, [](UntiedGpt& net) { mark(net); }, more);
  };
  const auto expected = run([](Config config) { return config; });
  for (const char* pipeline : {"simple", "1f1b", "zb_h1", "interleaved_1f1b", "zbv", "auto"}) {
    SCOPED_TRACE(pipeline);
    expect_same(run([&](Config config) { return config.pipeline(pipeline); }), expected);
  }
  expect_same(run([](Config config) { return config.guard("first_step"); }), expected);
  const std::string plan = std::string(::testing::TempDir()) + "/tensor_parallel_plan.json";
  std::filesystem::remove(plan);
  for (const bool load : {false, true}) {
    expect_same(
        run([&](Config config) {
          return config.partition_file(plan).load_partition(load).graph_file(plan + ".graph");
        }),
        expected);
  }
  expect_close(run([](Config config) { return config.gradient_accumulation_fusion(true); }),
               expected);
  expect_close(run([](Config config) { return config.gradient_shards(1); }), expected);
}

/// Trains two steps; changes by `gathered` of the gathered module in between are not kept.
template <class Net>
Named train_around(const TensorLayout& layout, const std::function<Config(Config)>& change,
                   const std::function<void(ModelOf<Net>&, const Named& state)>& gathered) {
  Named result;
  std::mutex mutex;
  torch::set_num_threads(1);
  run_as_threads(layout.ranks(), change(config_of(layout)), [&] {
    const auto net = make_model<Net>(5);
    mark(*net);
    ModelOf<Net> model(net);
    DistributedOptimizer<torch::optim::AdamW> optimizer(model->parameters());
    auto train = step([&](torch::Tensor x, torch::Tensor y) {
      auto loss = net->loss(x, y);
      model->backward(loss);
      return loss;
    });
    const auto gather = [&] {
      if (!gathered) return;
      const auto state = to_map(model->state_dict());
      for (int time = 0; time < 2; ++time) {
        model->cpu();
        gathered(model, state);
      }
      // It may draw from the generator that ranks of one process share, which steps seed for a
      // while.
      barrier();
    };
    for (int i = 0; i < 2; ++i) {
      const auto batch = token_batch(i);
      optimizer.zero_grad();
      gather();
      train(own_batch(layout, batch[0]), own_batch(layout, batch[1]));
      gather();
      optimizer.step();
    }
    gather();
    const auto state = to_map(model->state_dict());
    const std::lock_guard lock(mutex);
    if (result.empty()) result = state;
    expect_equal(state, result, "value");
  });
  return result;
}

/// `model->cpu()`, before and after steps and updates.
template <class Net>
void check_gathered() {
  const auto use = [](ModelOf<Net>& model, const Named& state) {
    Net& net = *model.get_module();
    expect_equal(state_of(net), state, "value");
    const torch::NoGradGuard no_grad;
    const auto plain = make_model<PlainModel>(9);
    for (auto& item : plain->named_parameters()) item.value().copy_(state.at(item.key()));
    const bool trains = net.is_training();
    net.eval();
    plain->eval();
    const auto batch = token_batch(7);
    expect_equal(net.loss(batch[0], batch[1]), plain->loss(batch[0], batch[1]), "loss");
    expect_equal(model(batch[0]), plain->forward(batch[0]), "outputs");
    net.train(trains);
    for (auto& parameter : net.parameters()) {
      if (model->is_distributed_parameter(parameter)) parameter.zero_();
    }
  };
  const auto same = [](Config config) { return config; };
  const auto train = [](const TensorLayout& layout, const std::function<Config(Config)>& change,
                        const std::function<void(ModelOf<Net>&, const Named& state)>& gathered) {
    return train_around<Net>(layout, change, gathered);
  };
  expect_equal(train({2, 2}, same, use), train({2, 2}, same, nullptr), "value");
  const auto expected = train({2, 1, 2}, same, nullptr);
  expect_equal(train({2, 1, 2}, with_divided_states, use), expected, "value");
  expect_equal(train({2, 1, 2}, with_divided_parameters, use), expected, "value");
}

TEST(TensorParallelRewriteOfAModel, IsAPlainModuleWhenGathered) { check_gathered<PlainModel>(); }

TEST(DividedModules, ArePlainOnesWhenGathered) { check_gathered<DividedModel>(); }

/// Optimizers, code in the step and later graphs see the right sizes.
TEST(TensorParallelRewriteOfAModel, KeepsTensorsAndShowsWholeSizesInSteps) {
  const TensorLayout layout{2, 2};
  run_as_threads(4, config_of(layout), [&] {
    const auto net = make_model<PlainModel>(5);
    mark(*net);
    ModelOf<PlainModel> model(net);
    DistributedOptimizer<torch::optim::Adagrad> optimizer(model->parameters(), 0.1);
    const auto up = net->blocks[0]->up;
    auto train = step([&](torch::Tensor x, torch::Tensor y) {
      EXPECT_EQ(up.sizes(), (std::vector<int64_t>{32, 8}));
      auto loss = net->loss(x, y);
      model->backward(loss);
      return loss;
    });
    const auto batch = token_batch(0);
    EXPECT_FALSE(model->is_distributed_parameter(up));
    train(own_batch(layout, batch[0]), own_batch(layout, batch[1]));
    EXPECT_TRUE(up.is_same(net->blocks[0]->up));
    EXPECT_EQ(up.sizes(), (std::vector<int64_t>{16, 8}));
    EXPECT_TRUE(model->is_distributed_parameter(up));
    optimizer.step();
    EXPECT_EQ(optimizer.state_dict().params.at("block0.up").tensors.at("sum").sizes(),
              (std::vector<int64_t>{32, 8}));
    // A shorter sequence and a mode: other graphs.
    const auto shorter = [&](const torch::Tensor& ids) {
      return own_batch(layout, ids).narrow(1, 0, 3);
    };
    const auto losses = train(shorter(batch[0]), shorter(batch[1]));
    EXPECT_TRUE(std::isfinite(losses.reduce_mean().item<double>()));
    model->eval();
    train(own_batch(layout, batch[0]), own_batch(layout, batch[1]));
    EXPECT_EQ(up.sizes(), (std::vector<int64_t>{16, 8}));
  });
}

/// A module that is divided from the start, and layers that the first step divides.
struct MixedModel : torch::nn::Module {
  MixedModel() {
    block = register_module("block", std::make_shared<DividedBlock>(8, 16, 0.0));
    up = register_module("up", torch::nn::Linear(8, 16));
    down = register_module("down", torch::nn::Linear(16, 8));
  }
  std::shared_ptr<DividedBlock> block;
  torch::nn::Linear up{nullptr}, down{nullptr};
};

/// Adagrad makes its states in its constructor, where parameters are still whole.
TEST(TensorParallelRewriteOfAModel, DividesStatesThatWereReadBefore) {
  run_as_threads(2, config_of({2}), [&] {
    const auto net = make_model<MixedModel>(5);
    mark(*net->up);
    mark(*net->down);
    ModelOf<MixedModel> model(net);
    DistributedOptimizer<torch::optim::Adagrad> optimizer(model->parameters(), 0.1);
    const auto sizes = [](const OptimizerState& state) {
      return state.params.at("up.weight").tensors.at("sum").sizes().vec();
    };
    const std::vector<int64_t> whole{16, 8}, part{8, 8};
    EXPECT_EQ(sizes(optimizer.state_dict()), whole);
    auto train = step([&](torch::Tensor x) {
      auto loss = net->down(net->up(net->block->forward(x)).relu()).square().mean();
      model->backward(loss);
      return loss;
    });
    train(torch::ones({4, 8}, torch::kDouble));
    optimizer.step();
    EXPECT_EQ(sizes(optimizer.local_state_dict()), part);
    EXPECT_EQ(sizes(optimizer.state_dict()), whole);
  });
}

TEST(TensorParallelRewriteOfAModel, IsMadeLateAndThenDivided) {
  const TensorLayout layout{2, 2};
  const auto expected = state_of(*make_model<PlainModel>(5));
  run_as_threads(4, config_of(layout), [&] {
    std::shared_ptr<PlainModel> net;
    {
      static std::mutex mutex;
      const std::lock_guard lock(mutex);
      torch::manual_seed(5);
      const auto scope = model_creation(
          ModelCreationOptions().delayed(true).eager_bytes(0).tensor_parallelism(true));
      net = std::make_shared<PlainModel>();
      net->to(torch::kDouble);
    }
    ModelOf<PlainModel> model(net);
    auto evaluate = step([&](torch::Tensor x, torch::Tensor y) { return net->loss(x, y); });
    const auto batch = token_batch(0);
    evaluate(own_batch(layout, batch[0]), own_batch(layout, batch[1]));
    EXPECT_EQ(divided_names().count("block0.up"), 1u);
    expect_equal(to_map(model->state_dict()), expected, "value");
  });
}

/// A part is no place to read the whole from.
TEST(TensorParallelRewriteOfAModel, HasNoDataInSteps) {
  const auto text = error_of_run<c10::Error>(2, config_of({2}), [] {
    const auto net = make_model<PlainModel>(5, /*layers=*/1);
    mark(*net);
    ModelOf<PlainModel> model(net);
    bool reads = false;
    auto evaluate = step([&](torch::Tensor x, torch::Tensor y) {
      if (reads) net->blocks[0]->up.const_data_ptr<double>();
      return net->loss(x, y);
    });
    const auto batch = token_batch(0);
    evaluate(own_batch({2}, batch[0]), own_batch({2}, batch[1]));
    reads = true;
    evaluate(own_batch({2}, batch[0]), own_batch({2}, batch[1]));
  });
  expect_has(text, {"the data of a parameter was read or written in a step function, which runs on "
                    "tensors without data. Read it outside of the step"});
}

/// Saved by 4 x 1 and loaded by 1 x 2 and 2 x 2 ranks.
TEST(TensorParallelRewriteOfAModel, IsSavedWhole) {
  const std::string folder = std::string(::testing::TempDir()) + "/tensor_parallel_rewrite";
  std::filesystem::remove_all(folder);
  Named saved;
  std::mutex mutex;
  const auto run = [&](const TensorLayout& layout, uint64_t seed, bool steps_before, bool saves) {
    run_as_threads(layout.ranks(), config_of(layout), [&] {
      const auto net = make_model<PlainModel>(seed);
      mark(*net);
      ModelOf<PlainModel> model(net);
      DistributedOptimizer<torch::optim::AdamW> optimizer(model->parameters());
      auto train = step([&](torch::Tensor x, torch::Tensor y) {
        auto loss = net->loss(x, y);
        model->backward(loss);
        return loss;
      });
      auto evaluate = step([&](torch::Tensor x, torch::Tensor y) { return net->loss(x, y); });
      const auto batch = token_batch(0);
      const auto x = own_batch(layout, batch[0]), y = own_batch(layout, batch[1]);
      if (steps_before) {
        train(x, y);
        optimizer.step();
      }
      saves ? save(folder, model, optimizer) : void(load(folder, model, optimizer));
      evaluate(x, y);  // the first step divides, and takes the loaded tensors
      Named held = to_map(model->state_dict());
      for (const auto& [name, tensor] : optim::tensors_of(optimizer.state_dict())) {
        held[name] = tensor;
      }
      const std::lock_guard lock(mutex);
      if (saves && saved.empty()) saved = held;
      expect_equal(held, saved, "value");
    });
  };
  run({4}, 6, true, true);
  for (const TensorLayout& layout : {TensorLayout{1, 2}, TensorLayout{2, 2}}) {
    run(layout, 8, true, false);
    run(layout, 9, false, false);
  }
  std::filesystem::remove_all(folder);
}

/// The parameters divided after a step on a net that `prepare` has marked.
std::pair<std::set<std::string>, std::string> after_a_step(
    const std::function<void(PlainModel&)>& prepare, const Config& more = Config(),
    const TensorLayout& layout = {2}) {
  std::pair<std::set<std::string>, std::string> result;
  std::mutex mutex;
  auto config = config_of(layout).tensor_parallelism(more.tensor_parallelism());
  config.strict_tensor_parallelism(more.strict_tensor_parallelism());
  run_as_threads(layout.ranks(), config, [&] {
    const auto net = make_model<PlainModel>(5, /*layers=*/2);
    prepare(*net);
    ModelOf<PlainModel> model(net);
    auto evaluate = step([&](torch::Tensor x, torch::Tensor y) { return net->loss(x, y); });
    const auto batch = token_batch(0);
    evaluate(own_batch(layout, batch[0]), own_batch(layout, batch[1]));
    const std::lock_guard lock(mutex);
    result = {divided_names(), model->tensor_parallelism_report()};
  });
  return result;
}

TEST(TensorParallelMarks, DecideWhatIsDivided) {
  const auto [one, report] = after_a_step([](PlainModel& net) { mark(*net.blocks[1]); });
  EXPECT_EQ(one.count("block1.up"), 1u);
  EXPECT_EQ(one.count("block1.down"), 1u);
  for (const auto& name : one) EXPECT_EQ(name.rfind("block1.", 0), 0u) << name;
  expect_has(report,
             {"Tensor parallelism among 2 ranks.", "block1.up ", "along dimension 0 in 2 blocks",
              "whole: its module is not marked for tensor parallelism"});
  const auto [none, why] = after_a_step([](PlainModel&) {}, Config().tensor_parallelism("marked"));
  EXPECT_TRUE(none.empty());
  expect_has(why, {"Nothing is divided by rewriting what was captured: no module with a weight of "
                   "products or embeddings is marked for tensor parallelism"});
  const auto unmarked = after_a_step([](PlainModel& net) {
    mark(net);
    set_tensor_parallelism(*net.blocks[0], false);
  });
  EXPECT_EQ(unmarked.first.count("block0.up"), 0u);
  EXPECT_EQ(unmarked.first.count("block1.up"), 1u);
}

TEST(TensorParallelMarks, ComeFromScopes) {
  std::mutex mutex;
  run_as_threads(2, config_of({2}), [&] {
    std::shared_ptr<PlainModel> net;
    {
      const std::lock_guard lock(mutex);
      torch::manual_seed(5);
      const auto scope = tensor_parallelism();
      net = std::make_shared<PlainModel>(1);
      const auto off = tensor_parallelism(false);
      net->tokens = net->replace_module("tokens", torch::nn::Embedding(11, 8));
    }
    EXPECT_EQ(runtime::tensor_parallelism_marks().find(net->blocks[0]->down)->enabled, true);
    EXPECT_EQ(runtime::tensor_parallelism_marks().find(net->head->weight)->enabled, true);
    EXPECT_EQ(runtime::tensor_parallelism_marks().find(net->tokens->weight)->enabled, false);
    EXPECT_FALSE(runtime::tensor_parallelism_marks().find(torch::zeros({2})));
  });
}

/// Three ranks divide none of the sizes.
TEST(TensorParallelMarks, AreKeptUnderStrict) {
  const auto text = error_of<UsageError>([] {
    after_a_step([](PlainModel& net) { mark(*net.head); }, Config().strict_tensor_parallelism(true),
                 {3, 1, 1, true});
  });
  expect_has(text, {"with \"strict_tensor_parallelism\", parameters of marked modules cannot be "
                    "divided among 3 ranks:",
                    "head.weight: ", "set \"strict_tensor_parallelism\" to false"});
  const auto norm = error_of<UsageError>([] {
    after_a_step([](PlainModel& net) { mark(*net.blocks[0]->norm); },
                 Config().strict_tensor_parallelism(true));
  });
  expect_has(norm,
             {"cannot be divided among 2 ranks:\n  all: no module with a weight of products or "
              "embeddings is marked for tensor parallelism\nTake the mark"});
}

TEST(TensorParallelMarks, AreTheSameOnAllRanks) {
  const auto text = error_of<UsageError>(
      [] { after_a_step([](PlainModel& net) { mark(*net.blocks[rank()]); }); });
  expect_has(text, {"the ranks would divide layers differently. Mark the same modules for tensor "
                    "parallelism on every rank"});
}

}  // namespace
}  // namespace smp
