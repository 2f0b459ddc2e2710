// SPDX-License-Identifier: Apache-2.0
#include "tests/smp/api.h"

#include <mutex>
#include <set>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <type_traits>

#include "comm/threads/run_ranks.h"
#include "core/check.h"
#include "core/failure.h"
#include "runtime/runtime.h"
#include "runtime/session/session.h"
#include "tests/smp/models.h"
#include "tests/temp_folder.h"

namespace smp::testing {
namespace {

using Init = ApiTest;
using Optimizer = ApiTest;
using ProcessGroups = ApiTest;

/// Its second argument was a number once, of which 0 would make a null string.
template <class Random, class = void>
struct TakesZeroAsAName : std::false_type {};
template <class Random>
struct TakesZeroAsAName<Random, std::void_t<decltype(Random(7, 0, 1, 2))>> : std::true_type {};
static_assert(!TakesZeroAsAName<KeyedRandom>::value);
static_assert(!std::is_constructible_v<KeyedRandom, uint64_t, std::nullptr_t, uint64_t, uint64_t>);
static_assert(!std::is_constructible_v<KeyedRandom, uint64_t, uint64_t, uint64_t, uint64_t>);
static_assert(std::is_constructible_v<KeyedRandom, uint64_t, const char*, uint64_t, uint64_t>);
static_assert(std::is_constructible_v<KeyedRandom, uint64_t, std::string, uint64_t, uint64_t>);

TEST_F(Init, QueriesBeforeInitSayWhatToCall) {
  EXPECT_FALSE(is_initialized());
  EXPECT_FALSE(is_tracing());
  for (const auto& query : std::vector<std::function<void()>>{
           [] { rank(); }, [] { size(); }, [] { local_rank(); }, [] { pp_rank(); },
           [] { dp_size(); }, [] { group(CommGroup::kMp).ranks(); }, [] { barrier(); },
           [] { group(CommGroup::kDp).process_group(); },
           [] { DistributedModel<Mlp> model{Mlp(1)}; },
           [] { step([](torch::Tensor x) { return x; }); }}) {
    expect_has(error_of<UsageError>(query), {"not initialised", "smp::init"});
  }
}

TEST_F(Init, AloneIsAWorldOfOneThatTrains) {
  init(stages(1));
  EXPECT_TRUE(is_initialized());
  for (int got : {rank(), local_rank(), pp_rank(), tp_rank(), rdp_rank(), mp_rank(), dp_rank()}) {
    EXPECT_EQ(got, 0);
  }
  for (int got : {size(), local_size(), pp_size(), tp_size(), rdp_size(), mp_size(), dp_size()}) {
    EXPECT_EQ(got, 1);
  }
  EXPECT_EQ(group(CommGroup::kWorld).ranks(), std::vector<int>{0});
  set_device(local_rank());
  barrier();
  expect_has(error_of<UsageError>([] { init(); }), {"smp::init", "twice", "once"});
  {
    DistributedModel<Mlp> model(make_net());
    auto train = make_training(model);
    expect_equal(train(x_, y_).outputs(), plain_losses(prototype_), "loss");
  }
  shutdown();
  EXPECT_FALSE(is_initialized());
  expect_has(error_of<UsageError>([] { rank(); }), {"smp::init"});
}

/// Sessions beside the world of `init` have objects of devices of their own.
TEST_F(Init, AWorldLetsGoOfItsDevicesOnly) {
  std::vector<std::string> gone;
  init(stages(1));
  const auto world = runtime::Runtime::get().world();
  const auto note = [&](const std::string& name) {
    return [&gone, name] { gone.push_back(name); };
  };
  const comm::AtWorldEnd first(*world, note("first")),
      last(*world->split({0}, "part"), note("last"));
  runtime::Session session([] { return Config(); }, std::nullopt);
  const comm::AtWorldEnd other(*session.runtime()->world(), note("session's"));
  { const comm::AtWorldEnd ended(*world, note("ended before")); }
  session.end();
  EXPECT_EQ(gone, std::vector<std::string>{"session's"});
  shutdown();
  EXPECT_EQ(gone, (std::vector<std::string>{"session's", "last", "first"}));
}

TEST_F(Init, AnErrorOfTheWorldsEndIsLeftForTheLauncher) {
  const TempFolder folder;
  setenv(core::kFailureDirVariable, folder.file("").c_str(), 1);
  init(stages(1));
  const comm::AtWorldEnd failing(*runtime::Runtime::get().world(),
                                 [] { core::fail<CommError>("the device has failed"); });
  expect_has(error_of<CommError>([] { shutdown(); }), {"the device has failed"});
  unsetenv(core::kFailureDirVariable);
  const auto failures = core::read_failures(folder.file(""));
  ASSERT_EQ(failures.size(), 1u);
  expect_has(failures[0].message, {"the device has failed"});
}

TEST_F(Init, RanksAndGroupsOfTwoByTwo) {
  for (const std::string placement : {"cluster", "spread"}) {
    const bool cluster = placement == "cluster";
    std::set<int> seen;
    run_as_threads(4, stages(2).ddp(true).placement_strategy(placement), [&] {
      const int r = rank();
      // Cluster: neighbours form a pipeline. Spread: neighbours are replicas.
      const int pp = cluster ? r % 2 : r / 2;
      const int dp = cluster ? r / 2 : r % 2;
      const int stride = cluster ? 1 : 2;
      const std::vector<int> pipeline = {r - pp * stride, r - pp * stride + stride};
      const std::vector<int> replicas = {r - dp * (3 - stride), r - dp * (3 - stride) + 3 - stride};
      EXPECT_TRUE(is_initialized());
      EXPECT_EQ(size(), 4);
      EXPECT_EQ(local_rank(), r);
      EXPECT_EQ(local_size(), 4);
      EXPECT_EQ(pp_rank(), pp);
      EXPECT_EQ(pp_size(), 2);
      EXPECT_EQ(mp_rank(), pp);
      EXPECT_EQ(mp_size(), 2);
      EXPECT_EQ(dp_rank(), dp);
      EXPECT_EQ(dp_size(), 2);
      EXPECT_EQ(rdp_rank(), dp);
      EXPECT_EQ(rdp_size(), 2);
      EXPECT_EQ(tp_rank(), 0);
      EXPECT_EQ(tp_size(), 1);
      EXPECT_EQ(group(CommGroup::kPp).ranks(), pipeline);
      EXPECT_EQ(group(CommGroup::kMp).ranks(), pipeline);
      EXPECT_EQ(group(CommGroup::kDp).ranks(), replicas);
      EXPECT_EQ(group(CommGroup::kRdp).ranks(), replicas);
      EXPECT_EQ(group(CommGroup::kTp).ranks(), std::vector<int>{r});
      EXPECT_EQ(group(CommGroup::kWorld).ranks(), (std::vector<int>{0, 1, 2, 3}));
      EXPECT_EQ(group(CommGroup::kPp).ranks(), pipeline);
      barrier();
      barrier(CommGroup::kPp);
      barrier(CommGroup::kDp);
      const std::lock_guard<std::mutex> lock(mutex_);
      seen.insert(r);
    });
    EXPECT_EQ(seen.size(), 4u);
  }
  EXPECT_FALSE(is_initialized());
}

TEST_F(Init, PartitionsThatDoNotDivideTheWorldAreRefused) {
  expect_has(error_of_run<ConfigError>(3, stages(2).ddp(true), [] {}), {"partitions", "2", "3"});
  expect_has(error_of_run<ConfigError>(4, stages(2), [] {}), {"ddp", "4", "2"});
}

TEST_F(Init, ConfigurationThatDiffersBetweenRanksIsRefused) {
  const auto text = error_of<ConfigError>([] {
    comm::run_ranks(2, [](const comm::CommunicatorPtr& world) {
      const runtime::Runtime runtime(stages(2).microbatches(world->rank() == 0 ? 2 : 4), world,
                                     {"host", "host"});
    });
  });
  expect_has(text, {"the configuration differs between ranks. Rank 0 has {", "\"microbatches\":2",
                    ", rank 1 has {", "\"microbatches\":4",
                    "Start all ranks with the same configuration"});
}

TEST_F(Optimizer, MayBeBuiltBeforeTheModelIsWrapped) {
  Mlp plain = make_net();
  torch::optim::SGD plain_optimizer(plain->parameters(),
                                    torch::optim::SGDOptions(0.1).momentum(0.9));
  for (int i = 0; i < 3; ++i) {
    plain_optimizer.zero_grad();
    plain_backward(plain->parameters(), 1, 2,
                   [&](int m) { return torch::mse_loss(plain(part(x_, 2, m)), part(y_, 2, m)); });
    plain_optimizer.step();
  }
  const auto train_three_steps = [&](auto& optimizer, Mlp net) {
    DistributedModel<Mlp> model(net);
    auto train = make_training(model);
    for (int i = 0; i < 3; ++i) {
      optimizer.zero_grad();
      train(x_, y_);
      optimizer.step();
    }
    expect_equal(to_map(model->state_dict()), state_of(*plain), "weight");
  };
  run_as_threads(2, stages(2), [&] {
    Mlp net = make_net();
    torch::optim::SGD existing(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    auto optimizer = distributed(existing);
    EXPECT_EQ(&optimizer.optimizer(), &existing);
    train_three_steps(optimizer, net);
  });
  run_as_threads(2, stages(2), [&] {
    Mlp net = make_net();
    DistributedOptimizer<torch::optim::SGD> optimizer(net->parameters(),
                                                      torch::optim::SGDOptions(0.1).momentum(0.9));
    train_three_steps(optimizer, net);
  });
}

TEST_F(Optimizer, WorksWithALearningRateScheduler) {
  Mlp plain = make_net();
  const auto run = [&](torch::optim::SGD& optimizer, const std::function<void()>& gradients,
                       const std::function<void()>& update) {
    torch::optim::StepLR scheduler(optimizer, 1, 0.5);
    for (int i = 0; i < 3; ++i) {
      gradients();
      update();
      scheduler.step();
    }
  };
  torch::optim::SGD plain_optimizer(plain->parameters(), torch::optim::SGDOptions(0.1));
  run(
      plain_optimizer,
      [&] {
        plain->zero_grad();
        plain_backward(plain->parameters(), 1, 2, [&](int m) {
          return torch::mse_loss(plain(part(x_, 2, m)), part(y_, 2, m));
        });
      },
      [&] { plain_optimizer.step(); });
  run_as_threads(2, stages(2), [&] {
    DistributedModel<Mlp> model(make_net());
    DistributedOptimizer<torch::optim::SGD> optimizer(model->parameters(),
                                                      torch::optim::SGDOptions(0.1));
    auto train = make_training(model);
    run(
        optimizer,
        [&] {
          optimizer.zero_grad();
          train(x_, y_);
        },
        [&] { optimizer.step(); });
    expect_equal(to_map(model->state_dict()), state_of(*plain), "weight");
  });
}

TEST_F(ProcessGroups, SynchroniseBatchNormBuffersOverReplicas) {
  torch::manual_seed(7);
  TinyConvNet prototype;
  const auto batch = TinyConvNetImpl::batch(16);
  std::map<int, Named> before, after;
  run_as_threads(4, stages(2).ddp(true), [&] {
    TinyConvNet net;
    copy_values(*prototype, *net);
    DistributedModel<TinyConvNet> model(net);
    auto train = step([&](torch::Tensor x, torch::Tensor y) {
      auto loss = torch::nll_loss(model(x), y);
      model->backward(loss);
      return loss;
    });
    train(batch[0].narrow(0, 8 * dp_rank(), 8), batch[1].narrow(0, 8 * dp_rank(), 8));
    const auto own = to_map(model->state_dict());
    const Group replicas = group(CommGroup::kDp);
    EXPECT_EQ(replicas.process_group()->getSize(), 2);
    EXPECT_EQ(replicas.process_group()->getRank(), dp_rank());
    for (const auto& item : model->local_named_buffers()) {
      if (!item.value().is_floating_point()) continue;
      torch::NoGradGuard no_grad;
      item.value().detach().copy_(replicas.all_reduce(item.value()) / replicas.size());
    }
    const auto synchronised = to_map(model->state_dict());
    const std::lock_guard<std::mutex> lock(mutex_);
    if (pp_rank() == 0) before[dp_rank()] = own;
    if (pp_rank() == 0) after[dp_rank()] = synchronised;
  });
  for (const std::string name :
       {"norm1.running_mean", "norm1.running_var", "norm2.running_mean", "norm2.running_var"}) {
    EXPECT_FALSE(torch::equal(before[0].at(name), before[1].at(name))) << name;
    const auto mean = (before[0].at(name) + before[1].at(name)) / 2;
    expect_equal(after[0].at(name), mean, name);
    expect_equal(after[1].at(name), mean, name);
  }
}

TEST_F(ProcessGroups, HaveTheRanksOfTheGroups) {
  run_as_threads(4, stages(2).ddp(true), [&] {
    for (const CommGroup kind : {CommGroup::kWorld, CommGroup::kPp, CommGroup::kTp, CommGroup::kRdp,
                                 CommGroup::kMp, CommGroup::kDp}) {
      const auto group = smp::group(kind).process_group();
      const std::vector<int> members = smp::group(kind).ranks();
      EXPECT_EQ(group->getSize(), static_cast<int>(members.size()));
      std::vector<at::Tensor> tensors = {torch::full({2}, rank(), torch::kLong)};
      group->allreduce(tensors)->wait();
      int64_t sum = 0;
      for (int member : members) sum += member;
      expect_equal(tensors[0], torch::full({2}, sum, torch::kLong), "sum of ranks");
    }
  });
}

}  // namespace
}  // namespace smp::testing
