// SPDX-License-Identifier: Apache-2.0
// The uses of the devices by the host in a training step of the GPT: each copy and each wait, with
// its reason.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <map>
#include <mutex>
#include <sstream>
#include <string>
#include <vector>

#include "examples/gpt/gpt_model.h"
#include "runtime/runtime.h"
#include "smp/smp.h"
#include "tests/action_hook.h"
#include "tests/chaos/chaos.h"
#include "tests/device/fake_device.h"

namespace smp::testing {
namespace {

constexpr int64_t kSequence = 8, kBatch = 4;  // sizes of a replica
constexpr int kMicrobatches = 2;
constexpr int kSteps = 3;  // steps, of which the first captures

/// One line of the list.
struct Use {
  std::string what;
  int times;
  std::string reason;
};

struct Case {
  std::string name;
  Config config;
  int ranks;
  bool clips;                              ///< its gradients
  bool is_on_device;                       ///< whether the step's input is
  std::vector<std::vector<Use>> expected;  // uses by rank
};

std::ostream& operator<<(std::ostream& out, const Case& tested) { return out << tested.name; }

/// The calls of the library on a stack, innermost first.
std::string calls_of_smp(const std::string& stack) {
  std::istringstream lines(stack);
  std::string result;
  for (std::string line; std::getline(lines, line);) {
    if (line.find("smp::") != std::string::npos) result += "\n    " + line;
  }
  return result;
}

/// Rank threads share the default generator.
gpt::GPT make_net() {
  static std::mutex mutex;
  const std::lock_guard<std::mutex> lock(mutex);
  torch::manual_seed(1);
  return gpt::GPT(gpt::GPTOptions().layers(2).width(16).heads(2).sequence(kSequence).dropout(0.1));
}

/// Trains as examples/gpt does: the library moves tensors made on the CPU. Returns the host's uses
/// in the last step.
std::vector<HostUse> train(const Case& tested, HostUses& uses) {
  set_device(rank());
  gpt::GPT net = make_net();
  // Pinned so that transfers do not depend on times.
  if (pp_size() > 1) {
    set_partition(*net->named_modules()["blocks.0"], 0);
    set_partition(*net->named_modules()["blocks.1"], 1);
  }
  if (tp_size() > 1) set_tensor_parallelism(*net);
  DistributedModel<gpt::GPT> model(net);
  DistributedOptimizer<torch::optim::AdamW> optimizer(model->parameters(),
                                                      torch::optim::AdamWOptions(0.01));
  auto train_step = smp::step([&](torch::Tensor x, torch::Tensor y) {
    auto loss = gpt::next_byte_loss(model(x), y);
    model->backward(loss);
    return loss;
  });
  const auto bytes = torch::arange(kBatch * (kSequence + 1)).view({kBatch, kSequence + 1});
  auto x = bytes.narrow(1, 0, kSequence).contiguous(),
       y = bytes.narrow(1, 1, kSequence).contiguous();
  if (tested.is_on_device) x = x.to(smp::device()), y = y.to(smp::device());
  for (int i = 0; i < kSteps; ++i) {
    smp::barrier();
    uses.take(rank());
    const int streams = fake_streams();
    optimizer.zero_grad();
    const auto losses = train_step(x, y);
    if (tested.clips) optimizer.clip_master_grads(1.0);
    optimizer.step();
    losses.reduce_mean(CommGroup::kDp).item<double>();
    if (i == kSteps - 1) {
      EXPECT_EQ(fake_streams(), streams) << "a step takes another stream";
    }
  }
  auto of_last_step = uses.take(rank());
  smp::barrier();  // the ends of others, which have streams of this device
  return of_last_step;
}

class HostUsesOfAStep : public ::testing::TestWithParam<Case> {};

TEST_P(HostUsesOfAStep, AreThoseListed) {
  torch::set_num_threads(1);
  const Case& tested = GetParam();
  HostUses uses;
  std::map<int, std::vector<HostUse>> of_rank;
  std::mutex mutex;
  run_as_threads(tested.ranks, tested.config, [&] {
    auto of_last_step = train(tested, uses);
    const std::lock_guard<std::mutex> lock(mutex);
    of_rank[rank()] = std::move(of_last_step);
  });
  for (int rank = 0; rank < tested.ranks; ++rank) {
    std::map<std::string, int> times;
    std::map<std::string, std::string> stacks;
    for (const HostUse& use : of_rank[rank]) {
      ++times[use.what];
      stacks[use.what] += "\n   " + calls_of_smp(use.stack);
    }
    for (const Use& use : tested.expected.at(rank)) {
      EXPECT_EQ(times[use.what], use.times)
          << "rank " << rank << " " << use.what << " (" << use.reason << ")" << stacks[use.what];
      times.erase(use.what);
    }
    for (const auto& [what, count] : times) {
      ADD_FAILURE() << "rank " << rank << " " << what << ", " << count
                    << " times a step, which is not listed. It came from" << stacks[what];
    }
  }
}

/// A message to host memory is handed over when the device has been given more to do. Here ranks
/// send as between hosts.
TEST(HostUses, ASendDoesNotWaitForWhatIsComputed) {
  torch::set_num_threads(1);
  constexpr int kForwards = 3;
  HostUses uses;
  std::map<int, int> waits;  // before each forward of the first rank
  std::vector<torch::nn::Sequential> nets;
  for (int i = 0; i < 2; ++i) {
    nets.emplace_back(torch::nn::Linear(3, 3), torch::nn::Linear(3, 3));
  }
  const auto config =
      Config().partitions(2).microbatches(kForwards).pipeline("simple").timeout_seconds(60);
  Chaos between_hosts;
  between_hosts.channels = ChannelKind::kMessages;
  between_hosts.delays = false;
  run_in_chaos(2, config, between_hosts, [&] {
    set_device(rank());
    torch::nn::Sequential net = nets[rank()];
    set_partition(*net[0], 0);
    set_partition(*net[1], 1);
    DistributedModel<torch::nn::Sequential> model(net);
    auto train_step = smp::step([&](torch::Tensor x) {
      auto loss = net->forward(x).sum();
      model->backward(loss);
      return loss;
    });
    const auto x = torch::ones({kForwards, 3});
    train_step(x);
    ActionHook hook([&](const pipeline::Action& action) {
      if (action.kind != pipeline::Action::Kind::kForward) return;
      for (const HostUse& use : uses.take(0)) {
        waits[action.microbatch] += use.what == "waits for an event" ? 1 : 0;
      }
    });
    if (rank() == 0) runtime::Runtime::get().execution.observers.push_back(&hook);
    train_step(x);
    runtime::Runtime::get().execution.observers.clear();
  });
  EXPECT_EQ(waits[1], 0) << "the message of forward 0 is on its way";
  EXPECT_EQ(waits[2], 1) << "forward 1 has been given to the device before";
}

Config config(int stages, int replicas) {
  return Config()
      .partitions(stages)
      .ddp(replicas > 1)
      .microbatches(kMicrobatches)
      .pipeline("1f1b")
      .timeout_seconds(60);
}

/// The uses of all programs.
const Use kInputs = {"copies Long [4, 8] to the device, waits", 2,
                     "the bytes and the next ones, from memory that is not pinned"};
const Use kInput = {"copies Long [4, 8] to the device, waits", 1,
                    "of bytes and next ones, what the rank's stage reads"};
const Use kCompared = {"copies Long [2] to the host, waits", 1,
                       "the ranks of a pipeline compare sums of what they are given"};
const Use kLossesBefore = {"copies Float [2] to the host, waits", 1,
                           "are the losses of the step before finite? beside what is computed"};
const Use kLoss = {"waits in aten::_local_scalar_dense of Float []", 1,
                   "the program reads its loss"};

Use probes(int numbers) {
  return {"copies Float [" + std::to_string(numbers) + "] to the host, waits", 1,
          "has the program scaled this stage's gradients? compared with the other's"};
}

/// Reductions and gathers, and messages between the stages, stay on the devices.
const std::vector<Use> kReplica = {kInputs, kLossesBefore, kLoss};
const std::vector<Use> kFirstStage = {kLoss, probes(112)};
const std::vector<Use> kLastStage = {kLossesBefore, kLoss, probes(120)};

/// Ranks that divide layers train on the batches of both.
const std::vector<Use> kDividingRank = {
    {"copies Long [4, 8] to the device, waits", 4, "the bytes and the next ones of both ranks"},
    {"copies Float [4] to the host, waits", 1, "are the losses of the step before finite?"},
    probes(120),
    kLoss};

std::vector<Use> operator+(std::vector<Use> uses, const Use& use) {
  uses.push_back(use);
  return uses;
}

INSTANTIATE_TEST_SUITE_P(
    All, HostUsesOfAStep,
    ::testing::Values(
        Case{"OneRank", config(1, 1), 1, false, false, {{kInputs, kLossesBefore, kLoss}}},
        Case{"OneRankGivenOnTheDevice", config(1, 1), 1, false, true, {{kLossesBefore, kLoss}}},
        Case{"OneRankAsGraphs",
             config(1, 1).cuda_graphs("on"),
             1,
             false,
             false,
             {{kInputs, kLossesBefore, kLoss}}},
        Case{"TwoStagesAsGraphs",
             config(2, 1).cuda_graphs("on"),
             2,
             false,
             false,
             {kFirstStage + kInput, kLastStage + kInput}},
        Case{"OneRankClips",
             config(1, 1),
             1,
             true,
             false,
             {{kInputs,
               kLossesBefore,
               kLoss,
               {"copies Float [29] to the host, waits", 1, "the norms of all gradients"}}}},
        Case{"Bf16", config(1, 1).bf16(true), 1, false, false, {{kInputs, kLossesBefore, kLoss}}},
        Case{"Fp16",
             config(1, 1).fp16(true),
             1,
             false,
             false,
             {{kInputs,
               kLoss,
               {"waits in aten::_local_scalar_dense of Bool []", 1,
                "are the gradients finite, or is the step left out?"}}}},
        Case{"TwoStages",
             config(2, 1),
             2,
             false,
             false,
             {kFirstStage + kInput, kLastStage + kInput}},
        Case{"TwoStagesGivenOnTheDevice",
             config(2, 1),
             2,
             false,
             true,
             {kFirstStage + kCompared, kLastStage + kCompared}},
        Case{"TwoReplicas", config(1, 2), 2, false, false, {kReplica, kReplica}},
        Case{"TwoReplicasShareStates",
             config(1, 2).shard_optimizer_state(true),
             2,
             false,
             false,
             {kReplica, kReplica}},
        Case{"TwoRanksDivideLayers",
             config(1, 1).ddp(true).tensor_parallel_degree(2),
             2,
             false,
             false,
             {kDividingRank, kDividingRank}}),
    [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace smp::testing
