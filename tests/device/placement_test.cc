// SPDX-License-Identifier: Apache-2.0
// Models that are built in host memory, or without any, and that the first step brings to devices
// of which none could hold a whole one; against plain libtorch on the CPU.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <filesystem>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "core/check.h"
#include "graph/allocations.h"
#include "smp/smp.h"
#include "tests/device/fake_device.h"
#include "tests/device/text_net.h"
#include "tests/smp/oracle.h"

namespace smp::testing {
namespace {

constexpr int kUnits = 4, kMicrobatches = 4, kSteps = 3;
constexpr int64_t kWide = 128;
constexpr size_t kUnitBytes = kWide * kWide * sizeof(float);
/// Bytes of each index of the device.
constexpr size_t kDeviceBytes = kUnitBytes * 3 / 2;
const torch::optim::SGDOptions kSgd = torch::optim::SGDOptions(0.1).momentum(0.9);

/// A large weight, which is frozen, since a gradient takes as much memory again, and a small one.
/// Its operators give the same on the device and the CPU.
struct UnitImpl : torch::nn::Module {
  UnitImpl() {
    scale = register_parameter("scale", torch::ones({kWide}));
    large = register_module("large",
                            torch::nn::Linear(torch::nn::LinearOptions(kWide, kWide).bias(false)));
    large->weight.set_requires_grad(false);
  }

  torch::Tensor forward(torch::Tensor x) { return x + torch::tanh(large(x * scale)); }

  torch::Tensor scale;
  torch::nn::Linear large{nullptr};
};
TORCH_MODULE(Unit);

struct TallImpl : torch::nn::Module {
  TallImpl() {
    for (int i = 0; i < kUnits; ++i) {
      units.push_back(register_module("unit" + std::to_string(i), Unit()));
    }
    steps = register_buffer("steps", torch::zeros({1}));
  }

  torch::Tensor forward(torch::Tensor x) {
    steps += 1;
    for (Unit& unit : units) x = unit(x);
    return x;
  }

  std::vector<Unit> units;
  torch::Tensor steps;
};
TORCH_MODULE(Tall);

/// Rank threads share the default generator.
template <class Net>
Net make_net(bool delayed = false) {
  static std::mutex mutex;
  const std::lock_guard<std::mutex> lock(mutex);
  torch::manual_seed(5);
  const auto scope = model_creation(ModelCreationOptions().delayed(delayed).eager_bytes(1 << 10));
  return Net();
}

std::vector<Tensors> make_batches() {
  torch::manual_seed(7);
  std::vector<Tensors> batches;
  for (int i = 0; i < kSteps; ++i) {
    batches.push_back(
        {torch::randn({2 * kMicrobatches, kWide}), torch::randn({2 * kMicrobatches, kWide})});
  }
  return batches;
}

Tensors make_trained(const torch::nn::Module& net) {
  Tensors trained;
  for (const torch::Tensor& parameter : net.parameters()) {
    if (parameter.requires_grad()) trained.push_back(parameter);
  }
  return trained;
}

struct Trained {
  std::vector<Tensors> losses{kSteps};  // losses by microbatch
  Named weights;
};

Trained run_plain() {
  Tall net = make_net<Tall>();
  torch::optim::SGD optimizer(make_trained(*net), kSgd);
  Trained run;
  const auto batches = make_batches();
  for (int i = 0; i < kSteps; ++i) {
    optimizer.zero_grad();
    run.losses[i] = plain_backward(make_trained(*net), 1, kMicrobatches, [&](int m) {
      return torch::mse_loss(net(part(batches[i][0], kMicrobatches, m)),
                             part(batches[i][1], kMicrobatches, m));
    });
    optimizer.step();
  }
  run.weights = state_of(*net);
  return run;
}

/// How a run places its model.
struct Where {
  int ranks = kUnits;
  int devices = kUnits;  ///< 0: the CPU
  bool delayed = false;
  std::optional<Config> config = std::nullopt;  ///< else of stages
  bool frozen = true;                           ///< the large weights
};

Config config_of(const Where& where) {
  Config config = where.config.value_or(stages(where.ranks));
  return config.microbatches(kMicrobatches);
}

/// Trains steps [first, last) into `run`, from the checkpoint in `folder` on unless first is 0, and
/// leaves one there unless the last step is done.
void train_steps(const Where& where, int first, int last, const std::string& folder, Trained& run) {
  const auto batches = make_batches();
  std::mutex mutex;
  run_as_threads(where.ranks, config_of(where), [&] {
    if (where.devices > 0) set_device(rank() % where.devices);
    const at::Device device = where.devices > 0 ? fake_device(rank() % where.devices) : at::kCPU;
    EXPECT_EQ(smp::device(), device);
    Tall net = make_net<Tall>(where.delayed);
    for (Unit& unit : net->units) unit->large->weight.set_requires_grad(!where.frozen);
    const Tensors as_built = net->parameters();
    DistributedModel<Tall> model(net);
    DistributedOptimizer<torch::optim::SGD> optimizer(make_trained(*net), kSgd);
    auto train = make_training(model);
    if (first > 0) load(folder, model, optimizer);
    for (int i = first; i < last; ++i) {
      optimizer.zero_grad();
      const auto losses = train(batches[i][0], batches[i][1]);
      optimizer.step();
      const std::lock_guard<std::mutex> lock(mutex);
      for (int m = 0; m < kMicrobatches; ++m) {
        EXPECT_EQ(losses.outputs()[m].device(), device);
        if (rank() == 0) run.losses[i].push_back(losses.outputs()[m].cpu());
      }
    }
    if (last < kSteps) save(folder, model, optimizer);
    for (size_t i = 0; i < as_built.size(); ++i) {
      EXPECT_TRUE(as_built[i].is_same(net->parameters()[i]));
      EXPECT_EQ(as_built[i].device(), device);
    }
    EXPECT_EQ(net->steps.device(), device);
    for (const torch::Tensor& parameter : model->local_parameters()) {
      // Replicas that divide them say no more than that there is one.
      const bool is_whole = parameter.requires_grad() && dp_size() == 1;
      if (is_whole) {
        EXPECT_EQ(parameter.grad().device(), device);
      }
    }
    const auto state = to_map(model->state_dict());
    const std::lock_guard<std::mutex> lock(mutex);
    if (rank() == 0) run.weights = state;
  });
}

void expect_as_plain(const Trained& run) {
  const Trained plain = run_plain();
  for (int i = 0; i < kSteps; ++i) {
    expect_equal(run.losses[i], plain.losses[i], "losses of step " + std::to_string(i));
  }
  expect_equal(run.weights, plain.weights, "values");
}

class Placement : public ::testing::Test {
 protected:
  Placement() {
    torch::set_num_threads(1);
    const auto* info = ::testing::UnitTest::GetInstance()->current_test_info();
    folder_ = ::testing::TempDir() + "smp_placement_" + info->name();
    std::filesystem::remove_all(folder_);
  }
  ~Placement() override { std::filesystem::remove_all(folder_); }

  std::string folder_;
};

TEST_F(Placement, TheLimitBinds) {
  const FakeMemoryLimit limit(kDeviceBytes);
  Tall net = make_net<Tall>();
  const auto text =
      error_of<c10::OutOfMemoryError>([&] { move_to_fake(net->parameters(), fake_device()); });
  expect_has(text, {"Tried to allocate 65536 bytes", "has 98304, of which 66560 are allocated"});
}

TEST_F(Placement, AModelLargerThanEachDeviceTrains) {
  const FakeMemoryLimit limit(kDeviceBytes);
  Trained run;
  train_steps({}, 0, kSteps, folder_, run);
  expect_as_plain(run);
  for (int i = 0; i < kUnits; ++i) EXPECT_GE(limit.peak(i), kUnitBytes);
}

TEST_F(Placement, SoDoesOneThatIsMadeLater) {
  const FakeMemoryLimit limit(kDeviceBytes);
  Trained run;
  train_steps({kUnits, kUnits, /*delayed=*/true}, 0, kSteps, folder_, run);
  expect_as_plain(run);
}

TEST_F(Placement, ItIsSavedAndResumedElsewhere) {
  const FakeMemoryLimit limit(kDeviceBytes);
  Trained run;
  train_steps({}, 0, 1, folder_, run);
  train_steps({2, 0}, 1, 2, folder_, run);
  train_steps({kUnits, kUnits, /*delayed=*/true}, 2, kSteps, folder_, run);
  expect_as_plain(run);
}

TEST_F(Placement, RanksMayShareADevice) {
  const FakeMemoryLimit limit(2 * kDeviceBytes);
  Trained run;
  train_steps({kUnits, 2}, 0, kSteps, folder_, run);
  expect_as_plain(run);
}

/// More settings that decide the memory of a device, on devices that hold no more than that: the
/// same as on the CPU, across a checkpoint.
struct Limited {
  std::string name;
  Where where;
  double units;  ///< that each device holds
};

std::ostream& operator<<(std::ostream& out, const Limited& tested) { return out << tested.name; }

class LimitedPlacement : public Placement, public ::testing::WithParamInterface<Limited> {};

TEST_P(LimitedPlacement, IsAsOnTheCpu) {
  const Limited& tested = GetParam();
  Where on_cpu = tested.where;
  on_cpu.devices = 0;
  Trained expected, run;
  train_steps(on_cpu, 0, kSteps, folder_, expected);
  const FakeMemoryLimit limit(static_cast<size_t>(tested.units * kUnitBytes));
  train_steps(tested.where, 0, 1, folder_, run);
  train_steps(tested.where, 1, kSteps, folder_, run);
  for (int i = 0; i < kSteps; ++i) {
    expect_equal(run.losses[i], expected.losses[i], "losses of step " + std::to_string(i));
  }
  expect_equal(run.weights, expected.weights, "values");
}

INSTANTIATE_TEST_SUITE_P(
    All, LimitedPlacement,
    ::testing::Values(
        Limited{"Bf16", {kUnits, kUnits, false, stages(kUnits).bf16(true)}, 0.8},
        Limited{"TensorParallel",
                {kUnits, kUnits, false, stages(2).ddp(true).tensor_parallel_degree(2)},
                1.5},
        Limited{"ShardedStates",
                {kUnits, kUnits, false, stages(2).ddp(true).shard_optimizer_state(true), false},
                7.2},
        Limited{"ShardedParameters",
                {kUnits, kUnits, false,
                 stages(1)
                     .ddp(true)
                     .sharded_data_parallel_degree(4)
                     .sdp_param_persistence_threshold(1)
                     .sdp_reduce_bucket_size(1 << 14)
                     .sdp_max_live_parameters(1 << 15),
                 false},
                10}),
    [](const auto& info) { return info.param.name; });

/// A device would have to hold more if it had the optimizer's whole state.
TEST_F(Placement, WithoutShardingTheSameDevicesDoNotDo) {
  const FakeMemoryLimit limit(static_cast<size_t>(7.2 * kUnitBytes));
  Trained run;
  const Where where = {kUnits, kUnits, false, stages(2).ddp(true), /*frozen=*/false};
  const auto text = error_of<c10::Error>([&] { train_steps(where, 0, kSteps, folder_, run); });
  expect_has(text, {"fake out of memory. Tried to allocate"});
}

/// A rank that runs out of memory says where, and ends the others.
TEST_F(Placement, RunningOutInAStepIsAnErrorOfAllRanks) {
  std::mutex mutex;
  std::vector<std::string> texts;
  const auto config = stages(2).microbatches(1).timeout_seconds(60);
  const FakeMemoryLimit limit(kUnitBytes * 9 / 2);
  const auto thrown = error_of<c10::Error>([&] {
    run_as_threads(2, config, [&] {
      set_device(rank());
      Tall net = make_net<Tall>();
      DistributedModel<Tall> model(net);
      auto train = make_training(model);
      const auto x = torch::ones({256, kWide});
      const auto text = error_of<c10::Error>([&] { train(x, x); });
      const std::lock_guard<std::mutex> lock(mutex);
      texts.push_back(text);
      core::fail<UsageError>("the end");
    });
  });
  ASSERT_EQ(texts.size(), 2u);
  const bool first_fails = texts[0].find("fake out of memory") != std::string::npos;
  expect_has(texts[first_fails ? 0 : 1],
             {"fake out of memory. Tried to allocate 131072 bytes", "operator "});
}

/// Not even all of a rank's tensors are in host memory at once, nor are the batches of steps more.
TEST_F(Placement, OneParameterAtATimeIsMadeInHostMemory) {
  run_as_threads(2, stages(2).trace_execution_times(false), [] {
    set_device(rank());
    Tall net = make_net<Tall>(/*delayed=*/true);
    DistributedModel<Tall> model(net);
    const graph::Allocations allocations;
    int64_t peak = 0;
    model->register_post_partition_hook([&] { peak = allocations.peak(); });
    make_training(model)(torch::ones({4, kWide}), torch::ones({4, kWide}));
    EXPECT_EQ(model->local_parameters().size(), 4u);
    EXPECT_GE(peak, static_cast<int64_t>(kUnitBytes));
    EXPECT_LT(peak, static_cast<int64_t>(kUnitBytes * 3 / 2));
    const graph::Allocations in_steps;
    auto train = make_training(model);
    const auto x = torch::ones({4, kWide});
    for (int i = 0; i < 2; ++i) train(x, x);
    EXPECT_LT(in_steps.peak(), static_cast<int64_t>(4 * x.nbytes())) << "messages and the batch";
  });
}

/// Two parameters on one storage.
struct HalvesImpl : torch::nn::Module {
  HalvesImpl() {
    const auto both = torch::arange(2.0F * kWide) / kWide;
    first = register_parameter("first", both.narrow(0, 0, kWide));
    second = register_parameter("second", both.narrow(0, kWide, kWide));
  }
  torch::Tensor forward(torch::Tensor x) { return torch::tanh(x * first) * second; }

  torch::Tensor first, second;
};
TORCH_MODULE(Halves);

TEST_F(Placement, TensorsThatShareMemoryShareItThere) {
  run_as_threads(1, stages(1), [] {
    Halves plain, net;
    set_device(1);
    DistributedModel<Halves> model(net);
    DistributedOptimizer<torch::optim::SGD> optimizer(net->parameters(), kSgd);
    torch::optim::SGD plain_optimizer(plain->parameters(), kSgd);
    const auto x = torch::ones({4, kWide}), y = torch::zeros({4, kWide});
    make_training(model)(x, y);
    plain_backward(plain->parameters(), 1, 2,
                   [&](int m) { return torch::mse_loss(plain(part(x, 2, m)), part(y, 2, m)); });
    optimizer.step();
    plain_optimizer.step();
    EXPECT_EQ(net->first.device(), fake_device(1));
    EXPECT_TRUE(net->first.storage().is_alias_of(net->second.storage()));
    EXPECT_EQ(net->second.storage_offset(), kWide);
    expect_equal(to_map(model->state_dict()), state_of(*plain), "values");
  });
}

TEST_F(Placement, InputsMoveOnceToTheRanksThatReadThem) {
  constexpr int64_t kLarge = 1 << 19;
  constexpr size_t kBytes = kLarge * sizeof(float);
  const FakeMemoryLimit limit(2 * kBytes);
  run_as_threads(2, stages(2), [] {
    set_device(rank());
    Tall net = make_net<Tall>();
    DistributedModel<Tall> model(net);
    auto train = step(
        [&](torch::Tensor x, torch::Tensor large) {
          auto loss = model(x + large.mean()).square().mean();
          model->backward(loss);
          return loss;
        },
        StepOptions().non_split_inputs({1}));
    train(torch::ones({4, kWide}), torch::ones({kLarge}));
  });
  EXPECT_GE(limit.peak(0), kBytes);
  EXPECT_LT(limit.peak(0), kBytes * 3 / 2);
  EXPECT_LT(limit.peak(1), kBytes);
}

/// One of measured costs, from a run on a device that held the whole model.
TEST_F(Placement, TakesAPlanFromAFile) {
  std::mutex mutex;
  std::map<int, std::vector<std::string>> local[2];  // moved, placed; by rank
  for (const bool placed : {false, true}) {
    run_as_threads(2, stages(2).partition_file(folder_).load_partition(placed), [&] {
      set_device(rank());
      Tall net = make_net<Tall>();
      if (!placed) {
        move_to_fake(net->parameters(), fake_device(rank()));
        move_to_fake(net->buffers(), fake_device(rank()));
      }
      DistributedModel<Tall> model(net);
      make_training(model)(torch::ones({4, kWide}), torch::ones({4, kWide}));
      const std::lock_guard<std::mutex> lock(mutex);
      local[placed][rank()] = model->local_named_parameters().keys();
    });
  }
  EXPECT_EQ(local[0], local[1]);
}

/// Parameters of a Tall model on each rank; its first ranks keep most activations. Predicted is an
/// optimizer that takes much more than it does.
std::vector<std::vector<std::string>> divided(int devices, const Config& config) {
  constexpr int kRanks = 2;
  std::mutex mutex;
  std::vector<std::vector<std::string>> local(kRanks);
  const auto all = Config(config).partitions(kRanks).microbatches(8).memory_weight(0);
  run_as_threads(kRanks, Config(all).optimizer_state_factor(1000), [&] {
    set_device(rank() % devices);
    DistributedModel<Tall> model(make_net<Tall>());
    const auto x = torch::ones({8 * kWide, kWide});
    make_training(model)(x, x);
    const std::lock_guard<std::mutex> lock(mutex);
    local[rank()] = model->local_named_parameters().keys();
  });
  return local;
}

/// Nine tenths of the device, divided among the ranks that share it.
TEST_F(Placement, TheDevicesMemoryLimitsThePlan) {
  constexpr double kMiB = 1 << 20;
  constexpr size_t kLittle = 43 * kUnitBytes;
  const auto unlimited = divided(2, Config());
  const auto expected = divided(2, Config().memory_limit_mb(0.9 * kLittle / kMiB));
  EXPECT_NE(expected, unlimited);
  {
    const FakeMemoryLimit limit(kLittle);
    EXPECT_EQ(divided(2, Config()), expected);
    EXPECT_EQ(divided(2, Config().memory_limit_mb(1000)), unlimited) << "the user's own";
  }
  const FakeMemoryLimit limit(2 * kLittle);
  EXPECT_EQ(divided(1, Config()), expected);
}

/// A prediction may be wrong, for one because the optimizer keeps less than Adam.
TEST_F(Placement, TriesAModelThatIsPredictedNotToFit) {
  const FakeMemoryLimit limit(32 * kUnitBytes);
  ::testing::internal::CaptureStderr();
  const auto local = divided(2, Config());
  const std::string log = ::testing::internal::GetCapturedStderr();
  EXPECT_EQ(local[0].size() + local[1].size(), 2u * kUnits);
  expect_has(log, {"the model may not fit into the memory of the devices, and is tried all the "
                   "same: ",
                   "no division into 2 partitions keeps the memory limit of 1.8 MiB",
                   "Raise \"memory_limit_mb\", use more partitions"});
}

TEST_F(Placement, RefusesAModelThatCannotFitWithTheNumbers) {
  const FakeMemoryLimit limit(kDeviceBytes);
  Trained run;
  const auto text = error_of<PartitionError>([&] { train_steps({2, 2}, 0, kSteps, folder_, run); });
  expect_has(text, {"the model does not fit: of ", " of parameters and buffers that rank ",
                    "are on fake:", ".large.weight\" of 64.0 KiB found no room",
                    "Tried to allocate 65536 bytes", "Use more partitions"});
}

/// The further uses of parameters: the same program with its model moved before it is wrapped, and
/// by the library.
struct Case {
  std::string name;
  int ranks;
  Config config;
};

std::ostream& operator<<(std::ostream& out, const Case& tested) { return out << tested.name; }

struct Result {
  std::map<int, Tensors> losses;  // losses by rank
  std::vector<double> norms;
  Named weights;
};

constexpr int kBatch = 8;

/// Trains two steps, with clipped gradients; from `folder` on if `resumes`, and saves there if not.
Result run_case(const Case& tested, bool placed, bool resumes, const std::string& folder) {
  Result result;
  std::mutex mutex;
  torch::manual_seed(9);
  const auto sizes = {int64_t{kBatch} * tested.ranks, TextNetImpl::kLength};
  const auto x = torch::randint(TextNetImpl::kVocabulary, sizes);
  const auto y = torch::randint(TextNetImpl::kVocabulary, sizes);
  run_as_threads(tested.ranks, tested.config, [&] {
    const at::Device device = fake_device(rank());
    TextNet net = make_net<TextNet>();
    if (placed) {
      set_device(rank());
    } else {
      move_to_fake(net->parameters(), device);
      move_to_fake(net->buffers(), device);
    }
    const auto given = [&](const torch::Tensor& batch) {
      return part(batch, dp_size(), dp_rank()).to(placed ? at::kCPU : device);
    };
    DistributedModel<TextNet> model(net);
    DistributedOptimizer<torch::optim::AdamW> optimizer(model->parameters(),
                                                        torch::optim::AdamWOptions(0.01));
    auto train = step([&](torch::Tensor ids, torch::Tensor targets) {
      auto loss = net->loss(ids, targets);
      model->backward(loss);
      return loss;
    });
    if (resumes) load(folder, model, optimizer);
    for (int i = 0; i < 2; ++i) {
      optimizer.zero_grad();
      const auto losses = train(given(x), given(y)).outputs();
      const double norm = optimizer.clip_master_grads(0.5);
      optimizer.step();
      const std::lock_guard<std::mutex> lock(mutex);
      for (const auto& loss : losses) result.losses[rank()].push_back(loss.cpu());
      if (rank() == 0) result.norms.push_back(norm);
    }
    if (!resumes) save(folder, model, optimizer);
    for (const auto& parameter : model->local_parameters()) {
      EXPECT_EQ(parameter.device(), device);
    }
    const auto state = to_map(model->state_dict());
    const std::lock_guard<std::mutex> lock(mutex);
    if (rank() == 0) result.weights = state;
  });
  return result;
}

void expect_same(const Result& got, const Result& expected) {
  for (const auto& [rank, losses] : expected.losses) {
    expect_equal(got.losses.at(rank), losses, "losses of rank " + std::to_string(rank));
  }
  EXPECT_EQ(got.norms, expected.norms);
  expect_equal(got.weights, expected.weights, "values");
}

class PlacedCase : public ::testing::TestWithParam<Case> {};

TEST_P(PlacedCase, HasTheBitsOfAMovedModel) {
  torch::set_num_threads(1);
  const std::string folder = ::testing::TempDir() + "smp_placed_" + GetParam().name;
  for (const char* which : {"_moved", "_placed"}) std::filesystem::remove_all(folder + which);
  expect_same(run_case(GetParam(), true, false, folder + "_placed"),
              run_case(GetParam(), false, false, folder + "_moved"));
  // Each goes on where the other was saved.
  expect_same(run_case(GetParam(), true, true, folder + "_moved"),
              run_case(GetParam(), false, true, folder + "_placed"));
  for (const char* which : {"_moved", "_placed"}) std::filesystem::remove_all(folder + which);
}

INSTANTIATE_TEST_SUITE_P(
    All, PlacedCase,
    ::testing::Values(
        Case{"Stages", 2, stages(2)}, Case{"Bf16", 2, stages(2).bf16(true)},
        Case{"Fp16", 2, stages(2).fp16(true)},
        Case{"ShardedStates", 2, stages(1).ddp(true).shard_optimizer_state(true)},
        Case{"ShardedStatesOfBf16", 4, stages(2).ddp(true).shard_optimizer_state(true).bf16(true)},
        Case{
            "ShardedParameters", 2,
            stages(1).ddp(true).sharded_data_parallel_degree(2).sdp_param_persistence_threshold(1)},
        Case{"TensorParallel", 2, stages(1).ddp(true).tensor_parallel_degree(2)},
        Case{"TensorParallelOfStages", 4, stages(2).ddp(true).tensor_parallel_degree(2)},
        Case{"TensorParallelShardedStates", 4,
             stages(1).ddp(true).tensor_parallel_degree(2).shard_optimizer_state(true)}),
    [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace smp::testing
