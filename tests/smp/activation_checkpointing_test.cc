// SPDX-License-Identifier: Apache-2.0
// Activation checkpointing and offloading: the bits of plain libtorch, in less memory.

#include <ATen/record_function.h>
#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <map>
#include <mutex>
#include <string>

#include "graph/allocations.h"
#include "graph/offload_store.h"
#include "runtime/runtime.h"
#include "tests/smp/models.h"
#include "tests/smp/operator_count.h"
#include "tests/smp/oracle.h"

namespace smp::testing {
namespace {

constexpr int kSteps = 2;
constexpr int kSmallBlocks = 6;

/// Norm, two layers and dropout around a skip connection.
struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(int64_t width) {
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})));
    up = register_module("up", torch::nn::Linear(width, 4 * width));
    down = register_module("down", torch::nn::Linear(4 * width, width));
    drop = register_module("drop", torch::nn::Dropout(0.2));
  }
  torch::Tensor forward(torch::Tensor x) { return x + drop(down(torch::gelu(up(norm(x))))); }
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Linear up{nullptr}, down{nullptr};
  torch::nn::Dropout drop{nullptr};
};
TORCH_MODULE(Block);

/// Blocks in a Sequential.
struct BlockNetImpl : torch::nn::Module {
  explicit BlockNetImpl(int count = kSmallBlocks, int64_t width = 8) : width(width) {
    for (int i = 0; i < count; ++i) blocks->push_back(Block(width));
    register_module("blocks", blocks);
    head = register_module("head", torch::nn::Linear(width, 1));
  }
  torch::Tensor forward(torch::Tensor x) { return head(blocks->forward(x)); }
  torch::Tensor loss(torch::Tensor x, torch::Tensor y) { return torch::mse_loss(forward(x), y); }
  Tensors batch(int64_t size) { return {torch::randn({size, width}), torch::randn({size, 1})}; }

  const int64_t width;
  torch::nn::Sequential blocks;
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(BlockNet);

/// The results of some training steps.
struct Trained {
  std::vector<Tensors> losses;   // losses by step, by global microbatch
  std::vector<Named> gradients;  // gradients by step
  Named state;
};

struct CheckpointingLayout {
  int stages = 1;
  int replicas = 1;
  int microbatches = 4;  // microbatches of one replica
  std::string pipeline = "interleaved";
};

template <class Net>
using Maker = std::function<Net()>;
/// Asks for checkpointing of modules.
template <class Net>
using Mark = std::function<void(Net&)>;

Named gradients_of(const torch::OrderedDict<std::string, torch::Tensor>& parameters) {
  Named result;
  for (const auto& item : parameters) {
    if (item.value().grad().defined()) result[item.key()] = item.value().grad().clone();
  }
  return result;
}

template <class Net>
Trained run_plain(const Maker<Net>& make, const CheckpointingLayout& layout, const Tensors& batch) {
  torch::manual_seed(5);
  Net net = make();
  const Tensors parameters = unique_parameters(*net);
  torch::optim::SGD optimizer(parameters, torch::optim::SGDOptions(0.1));
  Trained run;
  const int count = layout.replicas * layout.microbatches;
  for (int i = 0; i < kSteps; ++i) {
    optimizer.zero_grad();
    run.losses.push_back(
        plain_backward(parameters, layout.replicas, layout.microbatches, [&](int m) {
          const KeyedRandom random(kSeed, "step 0", i, m);
          return net->loss(part(batch[0], count, m), part(batch[1], count, m));
        }));
    run.gradients.push_back(gradients_of(net->named_parameters()));
    optimizer.step();
  }
  run.state = state_of(*net);
  return run;
}

template <class Net>
Trained run_checkpointed(const Maker<Net>& make, const CheckpointingLayout& layout,
                         const Tensors& batch, const Mark<Net>& mark, Config config = {}) {
  config.partitions(layout.stages)
      .microbatches(layout.microbatches)
      .pipeline(layout.pipeline)
      .ddp(layout.replicas > 1)
      .seed(kSeed)
      .timeout_seconds(120);
  const int ranks = layout.stages * layout.replicas;
  torch::manual_seed(5);
  std::vector<Net> nets;
  for (int i = 0; i < ranks; ++i) nets.push_back(make());
  Trained run;
  run.losses.assign(kSteps, Tensors(layout.replicas * layout.microbatches));
  run.gradients.resize(kSteps);
  std::mutex mutex;
  run_as_threads(ranks, config, [&] {
    Net net = nets[rank()];
    if (mark) mark(net);
    DistributedModel<Net> model(net);
    torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1));
    auto train = step([&](torch::Tensor x, torch::Tensor y) {
      auto loss = net->loss(x, y);
      model->backward(loss);
      return loss;
    });
    for (int i = 0; i < kSteps; ++i) {
      optimizer.zero_grad();
      const auto losses = train(part(batch[0], layout.replicas, dp_rank()),
                                part(batch[1], layout.replicas, dp_rank()));
      {
        const std::lock_guard<std::mutex> lock(mutex);
        for (int m = 0; m < layout.microbatches; ++m) {
          auto& place = run.losses[i][dp_rank() * layout.microbatches + m];
          if (place.defined()) expect_equal(losses.outputs()[m], place, "loss on another rank");
          place = losses.outputs()[m];
        }
        for (const auto& [name, gradient] : gradients_of(model->local_named_parameters())) {
          auto& known = run.gradients[i][name];
          if (known.defined()) expect_equal(gradient, known, "gradient on another rank");
          known = gradient;
        }
      }
      optimizer.step();
    }
    const auto state = model->state_dict();
    const std::lock_guard<std::mutex> lock(mutex);
    if (dp_rank() == 0) run.state = to_map(state);
  });
  return run;
}

void expect_same(const Trained& got, const Trained& expected) {
  for (int i = 0; i < kSteps; ++i) {
    const auto in_step = " of step " + std::to_string(i);
    expect_equal(got.losses[i], expected.losses[i], "loss" + in_step);
    expect_equal(got.gradients[i], expected.gradients[i], "gradient" + in_step);
  }
  expect_equal(got.state, expected.state, "value");
}

Tensors block_batch(int64_t size, int64_t width = 8) {
  torch::manual_seed(23);
  return {torch::randn({size, width}), torch::randn({size, 1})};
}

Config offloading() { return Config().offload_activations(true).activation_loading_horizon(1); }

// ---- Parity ----

struct Case {
  CheckpointingLayout layout;
  std::string strategy;
  bool offload;
};

std::ostream& operator<<(std::ostream& out, const Case& of) {
  return out << of.layout.stages << " stages x " << of.layout.replicas << " replicas, "
             << of.layout.pipeline << ", " << of.strategy << (of.offload ? ", offloaded" : "");
}

class Checkpointing : public ::testing::TestWithParam<Case> {
 protected:
  void SetUp() override { torch::set_num_threads(1); }
};

TEST_P(Checkpointing, BlocksHaveTheBitsOfPlainLibtorch) {
  const auto& [layout, strategy, offload] = GetParam();
  const Maker<BlockNet> make = [] { return BlockNet(); };
  const Tensors batch = block_batch(2 * layout.replicas * layout.microbatches);
  // Times are not measured, so that operators run as often in all runs.
  Config config = (offload ? offloading() : Config()).trace_execution_times(false);
  const Trained plain = run_plain(make, layout, batch);
  const OperatorCount gelu("aten::gelu");
  expect_same(run_checkpointed<BlockNet>(make, layout, batch, {}, config), plain);
  const int without = gelu.value();
  const Mark<BlockNet> mark = [&strategy = strategy](BlockNet& net) {
    set_activation_checkpointing(net->blocks, CheckpointOptions().strategy(strategy));
  };
  expect_same(run_checkpointed<BlockNet>(make, layout, batch, mark, config), plain);
  const int with = gelu.value() - without;
  EXPECT_EQ(with - without, kSteps * kSmallBlocks * layout.replicas * layout.microbatches)
      << "each block runs again once in each microbatch";
}

/// Tests of modules that are in no container.
class ModuleCheckpointing : public Checkpointing {};

TEST_P(ModuleCheckpointing, GptHasTheBitsOfPlainLibtorch) {
  const auto& [layout, strategy, offload] = GetParam();
  const Maker<TinyGpt> make = [] { return TinyGpt(/*tied=*/true); };
  torch::manual_seed(23);
  const Tensors batch = TinyGptImpl::batch(2 * layout.replicas * layout.microbatches);
  const Trained plain = run_plain(make, layout, batch);
  const Trained run = run_checkpointed<TinyGpt>(
      make, layout, batch,
      [](TinyGpt& net) {
        for (size_t i = 0; i < net->up.size(); ++i) {
          set_activation_checkpointing(net->attention_in[i]);
          set_activation_checkpointing(net->up[i]);
          set_activation_checkpointing(net->down[i]);
        }
        set_activation_checkpointing(net->tokens);
      },
      offload ? offloading() : Config());
  expect_same(run, plain);
}

std::vector<Case> cases(const std::vector<std::string>& strategies) {
  std::vector<Case> result;
  for (const auto& strategy : strategies) {
    for (int stages : {1, 2, 3}) {
      result.push_back({{stages, 1, 4, "interleaved"}, strategy, stages == 2});
    }
    result.push_back({{2, 2, 3, "1f1b"}, strategy, false});
    result.push_back({{3, 1, 6, "zb_h1"}, strategy, true});
    result.push_back({{2, 1, 4, "zbv"}, strategy, false});
    result.push_back({{2, 1, 4, "simple"}, strategy, true});
  }
  return result;
}

INSTANTIATE_TEST_SUITE_P(Layouts, Checkpointing,
                         ::testing::ValuesIn(cases({"each", "contiguous", "group_2"})));
INSTANTIATE_TEST_SUITE_P(Layouts, ModuleCheckpointing, ::testing::ValuesIn(cases({"each"})));

TEST(ActivationCheckpointing, BatchStatisticsAndWritesInPlaceHaveTheBitsOfPlainLibtorch) {
  torch::set_num_threads(1);
  torch::manual_seed(23);
  const Tensors batch = TinyConvNetImpl::batch(16);
  for (const char* pipeline : {"interleaved", "zb_h1"}) {
    for (int stages : {1, 2, 3}) {
      const CheckpointingLayout layout{stages, 1, 4, pipeline};
      const Maker<TinyConvNet> make = [] { return TinyConvNet(); };
      const Trained plain = run_plain(make, layout, batch);
      for (const bool offload : {false, true}) {
        SCOPED_TRACE(c10::str(pipeline, ", ", stages, " stages", offload ? ", offloaded" : ""));
        const Trained run = run_checkpointed<TinyConvNet>(
            make, layout, batch,
            [](TinyConvNet& net) {
              set_activation_checkpointing(net->conv1);
              set_activation_checkpointing(net->norm1);
              set_activation_checkpointing(net->norm2);
              set_activation_checkpointing(net->fc1);
            },
            offload ? offloading() : Config());
        expect_same(run, plain);
      }
      SCOPED_TRACE(c10::str(pipeline, ", ", stages, " stages, the whole model"));
      expect_same(
          run_checkpointed<TinyConvNet>(
              make, layout, batch, [](TinyConvNet& net) { set_activation_checkpointing(net); }),
          plain);
    }
  }
}

// ---- Memory ----

constexpr int64_t kNetWidth = 32;
constexpr int kBlocks = 8;
constexpr int kMany = 8;  // microbatches

/// The most bytes that the second step of one rank needs.
int64_t peak_of(const Mark<BlockNet>& mark, Config config = {}) {
  int64_t peak = 0;
  config.microbatches(kMany).pipeline("simple").seed(kSeed);
  const Tensors batch = block_batch(64 * kMany, kNetWidth);
  torch::manual_seed(5);
  BlockNet net(kBlocks, kNetWidth);
  run_as_threads(1, config, [&] {
    if (mark) mark(net);
    DistributedModel<BlockNet> model(net);
    auto train = step([&](torch::Tensor x, torch::Tensor y) {
      auto loss = net->loss(x, y);
      model->backward(loss);
      return loss;
    });
    train(batch[0], batch[1]);
    const graph::Allocations allocations;
    train(batch[0], batch[1]);
    peak = allocations.peak();
  });
  return peak;
}

TEST(ActivationCheckpointing, NeedsLessMemory) {
  torch::set_num_threads(1);
  const auto with = [](const std::string& strategy) -> Mark<BlockNet> {
    return [strategy](BlockNet& net) {
      set_activation_checkpointing(net->blocks, CheckpointOptions().strategy(strategy));
    };
  };
  const int64_t plain = peak_of({});
  const int64_t each = peak_of(with("each"));
  const int64_t group = peak_of(with("group_4"));
  const int64_t contiguous = peak_of(with("contiguous"));
  const int64_t width = 64 * kNetWidth * 4;  // bytes of a block's input for one microbatch
  // A block saves 11 widths: its input, the normalised one, both sides of gelu, a mask.
  EXPECT_GE(plain, int64_t{kMany} * kBlocks * 11 * width);
  EXPECT_LE(each, plain - int64_t{kMany} * (kBlocks - 1) * 10 * width);
  EXPECT_LT(group, each);
  EXPECT_LT(contiguous, plain / 3);
  std::cout << "peak of a step in KiB: plain " << plain / 1024 << ", each " << each / 1024
            << ", group_4 " << group / 1024 << ", contiguous " << contiguous / 1024 << std::endl;
}

// ---- Automatic ----

Config limited(double mib) { return Config().memory_limit_mb(mib).optimizer_state_factor(0); }

TEST(ActivationCheckpointing, AutoChoosesAsManyModulesAsTheLimitNeeds) {
  torch::set_num_threads(1);
  const Maker<BlockNet> make = [] { return BlockNet(kBlocks, kNetWidth); };
  const CheckpointingLayout layout{2, 1, kMany, "simple"};
  const Tensors batch = block_batch(64 * kMany, kNetWidth);
  const Trained plain = run_plain(make, layout, batch);
  const std::string without = error_of<PartitionError>(
      [&] { run_checkpointed<BlockNet>(make, layout, batch, {}, limited(2)); });
  expect_has(without, {"keeps the memory limit of 2"});
  int counts[2];
  for (const double mib : {1000.0, 2.0}) {
    const OperatorCount gelu("aten::gelu");
    const Trained run = run_checkpointed<BlockNet>(make, layout, batch, {},
                                                   limited(mib).activation_checkpointing("auto"));
    expect_same(run, plain);
    counts[mib == 2.0] = gelu.value();
  }
  const int once = kSteps * kBlocks * kMany;
  EXPECT_GT(counts[1], counts[0] + once / 4) << "some run again";
  EXPECT_LT(counts[1], counts[0] + once - once / 8) << "not all do";
  const std::string too_small = error_of<PartitionError>([&] {
    run_checkpointed<BlockNet>(make, layout, batch, {},
                               limited(0.25).activation_checkpointing("auto"));
  });
  expect_has(too_small, {"keeps the memory limit of 256 KiB", "a region that runs again",
                         "Raise \"memory_limit_mb\""});
}

TEST(ActivationCheckpointing, AutoCannotChangeAPartitionThatWasLoaded) {
  torch::set_num_threads(1);
  const auto path = ::testing::TempDir() + "/activation_checkpointing_partition.json";
  const Maker<BlockNet> make = [] { return BlockNet(kBlocks, kNetWidth); };
  const CheckpointingLayout layout{2, 1, kMany, "simple"};
  const Tensors batch = block_batch(64 * kMany, kNetWidth);
  run_checkpointed<BlockNet>(make, layout, batch, {}, Config().partition_file(path));
  const auto error = error_of<PartitionError>([&] {
    run_checkpointed<BlockNet>(
        make, layout, batch, {},
        limited(0.25).activation_checkpointing("auto").partition_file(path).set("load_partition",
                                                                                true));
  });
  expect_has(error, {"\"auto\": no choice of modules keeps the memory limit of 256 KiB",
                     "with all of them partition"});
}

// ---- Offloading ----

TEST(ActivationCheckpointing, OffloadsWhatIsNotNeededSoon) {
  torch::set_num_threads(1);
  const Tensors batch = block_batch(64 * kMany, kNetWidth);
  const auto puts_with = [&](int horizon) {
    int64_t puts = 0;
    torch::manual_seed(5);
    BlockNet net(kBlocks, kNetWidth);
    const auto config = Config()
                            .microbatches(kMany)
                            .pipeline("simple")
                            .offload_activations(true)
                            .activation_loading_horizon(horizon);
    run_as_threads(1, config, [&] {
      set_activation_checkpointing(net->blocks);
      DistributedModel<BlockNet> model(net);
      auto train = step([&](torch::Tensor x, torch::Tensor y) {
        auto loss = net->loss(x, y);
        model->backward(loss);
        return loss;
      });
      train(batch[0], batch[1]);
      puts = dynamic_cast<graph::OffloadStore&>(*runtime::Runtime::get().activation_store()).puts();
    });
    return puts;
  };
  // The first block reads the step's input, which is there anyway. Microbatch m runs forward as
  // computation m, and backward as computation m + 8.
  EXPECT_EQ(puts_with(1), kMany * (kBlocks - 1));
  EXPECT_EQ(puts_with(kMany - 1), kMany * (kBlocks - 1));
  EXPECT_EQ(puts_with(kMany), 0);
}

// ---- Errors ----

/// The error of a step of a small model after `prepare`.
template <class E>
std::string error_of_step(const std::function<void(BlockNet&)>& prepare, Config config = {}) {
  return error_of_run<E>(1, config.microbatches(2), [&] {
    torch::manual_seed(5);
    BlockNet net;
    DistributedModel<BlockNet> model(net);
    prepare(net);
    auto train = make_training(model);
    train(torch::randn({4, 8}), torch::randn({4, 1}));
    set_activation_checkpointing(net->head);
  });
}

TEST(ActivationCheckpointing, ErrorsSayWhatToDo) {
  torch::set_num_threads(1);
  expect_has(error_of_step<UsageError>([](BlockNet& net) {
               set_activation_checkpointing(net->blocks, CheckpointOptions().strategy("group_0"));
             }),
             {"unknown strategy \"group_0\". Use \"each\", \"contiguous\" or \"group_N\""});
  expect_has(error_of_step<UsageError>([](BlockNet& net) {
               set_activation_checkpointing(net->head, CheckpointOptions().strategy("contiguous"));
             }),
             {"the strategy \"contiguous\" is for a Sequential or a ModuleList", "is neither"});
  torch::nn::Linear other(2, 2);
  expect_has(error_of_step<UsageError>([&](BlockNet&) { set_activation_checkpointing(other); }),
             {"is not inside a module that a DistributedModel wraps"});
  expect_has(error_of_step<UsageError>([](BlockNet&) {}),
             {"set_activation_checkpointing was called after the first step"});
  expect_has(
      error_of_step<ConfigError>([](BlockNet&) {}, Config().activation_checkpointing("auto")),
      {"\"activation_checkpointing\": 'auto' needs \"memory_limit_mb\""});
  const std::string missing = ::testing::TempDir() + "no_offloading";
  expect_has(
      error_of_step<ConfigError>([](BlockNet& net) { set_activation_checkpointing(net->blocks); },
                                 Config()
                                     .offload_activations(true)
                                     .pipeline("simple")
                                     .activation_loading_horizon(1)
                                     .offload_directory(missing)),
      {"cannot make a file in " + missing, "Set \"offload_directory\" to a directory on a local"});
}

}  // namespace
}  // namespace smp::testing
