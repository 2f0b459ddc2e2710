// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <cstdlib>
#include <functional>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "smp/smp.h"
#include "tests/checkpoint/content.h"
#include "tests/failure/patience.h"
#include "tests/smp/models.h"
#include "tests/smp/recovery_in_memory.h"
#include "tests/smp/sharded.h"
#include "tests/temp_folder.h"

// Programs whose parameters are sharded under pipelines: several models and step functions,
// gradients that add up, states, copies in memory, failures. Two stages of two replicas.
namespace smp {
namespace {

using namespace testing;

constexpr int kReplicasOfTwo = 2, kMicrobatchesOfTwo = 2, kRanksOfTwo = 4;

/// Holds few whole parameters.
Config two_by_two() {
  return sharded_config({kReplicasOfTwo, 2, kMicrobatchesOfTwo, /*threshold=*/0, /*max_live=*/1})
      .partitions(2)
      .pipeline("1f1b");
}

/// The batch of a call, of both replicas together.
Tensors batch_of_call(int number, int64_t size = 2 * kReplicasOfTwo * kMicrobatchesOfTwo) {
  const auto generator = at::detail::createCPUGenerator(40 + number);
  return {torch::randint(TinyGptImpl::kVocabulary, {size, TinyGptImpl::kLength}, generator),
          torch::randint(TinyGptImpl::kVocabulary, {size, TinyGptImpl::kLength}, generator)};
}

torch::Tensor of_replica(const torch::Tensor& whole) { return part(whole, dp_size(), dp_rank()); }

template <class Net>
Net net_of_seed(int seed, const std::function<Net()>& make) {
  static std::mutex mutex;  // ranks that are threads share the generator
  const std::lock_guard lock(mutex);
  torch::manual_seed(seed);
  return make();
}

using Loss = std::function<torch::Tensor(torch::Tensor x, torch::Tensor y)>;

/// Plain libtorch: the gradients of a call of a step function, which the program had called before.
void plain_call(const Tensors& parameters, const std::string& function, int calls,
                const Tensors& batch, const Loss& loss) {
  constexpr int kAll = kReplicasOfTwo * kMicrobatchesOfTwo;
  plain_backward(parameters, kReplicasOfTwo, kMicrobatchesOfTwo, [&](int m) {
    const KeyedRandom random(kSeed, function, calls, m);
    return loss(part(batch[0], kAll, m), part(batch[1], kAll, m));
  });
}

/// Its trunk is read by two heads; the second multiplies by the first's weight, too.
struct TwoHeadsImpl : torch::nn::Module {
  TwoHeadsImpl() {
    trunk = register_module("trunk", TinyGpt(/*tied=*/true, 2));
    for (const char* name : {"a", "b"}) {
      heads.push_back(register_module(
          name, torch::nn::Linear(TinyGptImpl::kVocabulary, TinyGptImpl::kVocabulary)));
    }
  }
  torch::Tensor forward(torch::Tensor ids, const std::string& kind) {
    const auto scores = trunk(ids);
    if (kind == "first") return heads[0](scores);
    return heads[1](torch::tanh(scores)) + torch::matmul(scores, heads[0]->weight);
  }
  TinyGpt trunk{nullptr};
  std::vector<torch::nn::Linear> heads;
};
TORCH_MODULE(TwoHeads);

/// Each trains parameters of its own beside common ones, and reads some where another owns them.
TEST(ShardedPipelinePrograms, CallSeveralStepFunctions) {
  torch::set_num_threads(1);
  const std::vector<std::string> calls = {"first", "second", "first", "first", "second", "second"};
  const auto make = std::function<TwoHeads()>([] { return TwoHeads(); });
  TwoHeads plain = net_of_seed(5, make);
  const auto parameters = unique_parameters(*plain);
  torch::optim::SGD plain_optimizer(parameters, kSgd);
  std::map<std::string, int> counts;
  Tensors evaluations;
  for (size_t i = 0; i < calls.size(); ++i) {
    plain_optimizer.zero_grad();
    const auto batch = batch_of_call(static_cast<int>(i));
    plain_call(parameters, calls[i], counts[calls[i]]++, batch,
               [&](auto x, auto y) { return TinyGptImpl::criterion(plain(x, calls[i]), y); });
    plain_optimizer.step();
    const torch::NoGradGuard no_grad;
    plain->eval();
    evaluations.push_back(plain->trunk(part(batch[0], 4, 0)));
    plain->train();
  }
  run_as_threads(kRanksOfTwo, two_by_two(), [&] {
    TwoHeads net = net_of_seed(5, make);
    DistributedModel<TwoHeads> model(net);
    DistributedOptimizer<torch::optim::SGD> optimizer(model->parameters(), kSgd);
    std::map<std::string, Step<Loss>> functions;
    for (const std::string kind : {"first", "second"}) {
      functions.emplace(kind, step(Loss([&, kind](torch::Tensor x, torch::Tensor y) {
                                     auto loss = TinyGptImpl::criterion(model(x, kind), y);
                                     model->backward(loss);
                                     return loss;
                                   }),
                                   StepOptions().name(kind)));
    }
    auto evaluate = step([&](torch::Tensor x) { return net->trunk(x); });
    for (size_t i = 0; i < calls.size(); ++i) {
      const auto batch = batch_of_call(static_cast<int>(i));
      optimizer.zero_grad();
      functions.at(calls[i])(of_replica(batch[0]), of_replica(batch[1]));
      optimizer.step();
      model->eval();
      const auto got = evaluate(of_replica(batch[0])).outputs();
      if (dp_rank() == 0) expect_equal(got[0], evaluations[i], "evaluation");
      model->train();
    }
    expect_equal(to_map(model->state_dict()), state_of(*plain), "value");
  });
}

/// Two models, which one step function trains together, and another the second alone.
TEST(ShardedPipelinePrograms, TrainSeveralModels) {
  torch::set_num_threads(1);
  const auto make_first = std::function<TinyGpt()>(tied_gpt);
  const auto make_second = std::function<TinyGpt()>([] { return TinyGpt(false, 2); });
  TinyGpt plain_first = net_of_seed(5, make_first), plain_second = net_of_seed(6, make_second);
  const auto first_parameters = unique_parameters(*plain_first);
  const auto second_parameters = unique_parameters(*plain_second);
  Tensors all = first_parameters;
  all.insert(all.end(), second_parameters.begin(), second_parameters.end());
  torch::optim::AdamW plain_first_optimizer(first_parameters, kAdamW);
  torch::optim::SGD plain_second_optimizer(second_parameters, kSgd);
  constexpr int kCalls = 5;
  for (int i = 0; i < kCalls; ++i) {
    plain_first_optimizer.zero_grad();
    plain_second_optimizer.zero_grad();
    plain_call(all, i % 2 == 0 ? "both" : "one", i / 2, batch_of_call(i), [&](auto x, auto y) {
      const auto scores = i % 2 == 0 ? plain_first(x) + plain_second(x) : plain_second(x);
      return TinyGptImpl::criterion(scores, y);
    });
    if (i % 2 == 0) plain_first_optimizer.step();
    plain_second_optimizer.step();
  }
  run_as_threads(kRanksOfTwo, two_by_two(), [&] {
    DistributedModel<TinyGpt> first(net_of_seed(5, make_first), ModelOptions().name("first"));
    DistributedModel<TinyGpt> second(net_of_seed(6, make_second), ModelOptions().name("second"));
    DistributedOptimizer<torch::optim::AdamW> first_optimizer(first->parameters(), kAdamW);
    DistributedOptimizer<torch::optim::SGD> second_optimizer(second->parameters(), kSgd);
    auto both = step(
        [&](torch::Tensor x, torch::Tensor y) {
          first->backward(TinyGptImpl::criterion(first(x) + second(x), y));
        },
        StepOptions().name("both"));
    auto one =
        step([&](torch::Tensor x,
                 torch::Tensor y) { second->backward(TinyGptImpl::criterion(second(x), y)); },
             StepOptions().name("one"));
    for (int i = 0; i < kCalls; ++i) {
      const auto batch = batch_of_call(i);
      first_optimizer.zero_grad();
      second_optimizer.zero_grad();
      const auto x = of_replica(batch[0]), y = of_replica(batch[1]);
      if (i % 2 == 0) {
        both(x, y);
        first_optimizer.step();
      } else {
        one(x, y);
      }
      second_optimizer.step();
    }
    expect_equal(to_map(first->state_dict()), state_of(*plain_first), "value");
    expect_equal(to_map(second->state_dict()), state_of(*plain_second), "value");
  });
}

/// Replicas add up the gradients of two calls, then the sums of replicas are added.
TEST(ShardedPipelinePrograms, AddUpTheGradientsOfTwoCalls) {
  torch::set_num_threads(1);
  constexpr int kUpdates = 3, kPasses = 2;
  const auto make = std::function<TinyGpt()>(tied_gpt);
  TinyGpt plain = net_of_seed(5, make);
  const auto parameters = unique_parameters(*plain);
  torch::optim::AdamW plain_optimizer(parameters, kAdamW);
  for (int i = 0; i < kUpdates; ++i) {
    const auto means =
        mean_gradients(parameters, kReplicasOfTwo, kPasses * kMicrobatchesOfTwo, [&](int number) {
          const int replica = number / (kPasses * kMicrobatchesOfTwo);
          const int in_replica = number % (kPasses * kMicrobatchesOfTwo);
          const int call = kPasses * i + in_replica / kMicrobatchesOfTwo;
          const int m = replica * kMicrobatchesOfTwo + in_replica % kMicrobatchesOfTwo;
          const auto batch = batch_of_call(call);
          const KeyedRandom random(kSeed, "step 0", call, m);
          plain->loss(part(batch[0], 4, m), part(batch[1], 4, m)).backward();
        });
    for (size_t p = 0; p < parameters.size(); ++p) {
      parameters[p].mutable_grad() = means[p] * kPasses;  // which is exact
    }
    plain_optimizer.step();
  }
  for (const char* pipeline : {"1f1b", "zb_h1"}) {
    SCOPED_TRACE(pipeline);
    run_as_threads(kRanksOfTwo, two_by_two().pipeline(pipeline), [&] {
      DistributedModel<TinyGpt> model(net_of_seed(5, make),
                                      ModelOptions().backward_passes_per_step(kPasses));
      DistributedOptimizer<torch::optim::AdamW> optimizer(model->parameters(), kAdamW);
      auto train = step([&](torch::Tensor x, torch::Tensor y) {
        model->backward(TinyGptImpl::criterion(model(x), y));
      });
      for (int call = 0; call < kUpdates * kPasses; ++call) {
        const auto batch = batch_of_call(call);
        train(of_replica(batch[0]), of_replica(batch[1]));
        if ((call + 1) % kPasses != 0) continue;
        optimizer.step();
        optimizer.zero_grad();
      }
      expect_equal(to_map(model->state_dict()), state_of(*plain), "value");
    });
  }
}

/// Gathered by hand, written, and given back; then a step goes on with them.
TEST(ShardedPipelinePrograms, ReadAndWriteModels) {
  torch::set_num_threads(1);
  const auto make = std::function<TinyGpt()>([] { return TinyGpt(true, 2, 0.0); });
  TinyGpt plain = net_of_seed(5, make);
  const auto initial = state_of(*plain);
  torch::OrderedDict<std::string, torch::Tensor> halved;
  for (const auto& [name, tensor] : initial) halved.insert(name, tensor / 2);
  const auto batch = batch_of_call(0);
  const auto scores = [&] {
    const torch::NoGradGuard no_grad;
    return plain(part(batch[0], 4, 0));
  };
  const auto before = scores();
  {
    const torch::NoGradGuard no_grad;
    for (auto& parameter : unique_parameters(*plain)) parameter.div_(2);
  }
  const auto after = scores();
  std::mutex mutex;
  std::map<std::string, int64_t> held;
  run_as_threads(kRanksOfTwo, two_by_two(), [&] {
    TinyGpt net = net_of_seed(5, make);
    DistributedModel<TinyGpt> model(net);
    auto train = step([&](torch::Tensor x, torch::Tensor y) {
      model->backward(TinyGptImpl::criterion(model(x), y));
    });
    auto evaluate = step([&](torch::Tensor x) { return model(x); });
    const auto expect_scores = [&](const torch::Tensor& expected) {
      const auto got = evaluate(of_replica(batch[0])).outputs();
      if (dp_rank() == 0) expect_equal(got[0], expected, "scores");
    };
    expect_scores(before);
    train(of_replica(batch[0]), of_replica(batch[1]));
    for (const auto& parameter : model->local_parameters()) {
      EXPECT_EQ(parameter.storage().nbytes(), 0u);
    }
    expect_equal(to_map(model->state_dict()), initial, "state");
    const auto local = model->local_state_dict();
    {
      const std::lock_guard lock(mutex);
      for (const auto& item : local) held[item.key()] += item.value().numel();
    }
    model->cpu();
    expect_equal(state_of(*net), initial, "module");
    expect_scores(before);
    model->load_state_dict(halved);
    expect_equal(to_map(model->state_dict()), to_map(halved), "loaded");
    expect_scores(after);
    model->cpu();  // anew
    expect_equal(state_of(*net), to_map(halved), "module");
    model->load_state_dict(local, /*strict=*/true, /*same_partition_load=*/true);
    expect_equal(to_map(model->state_dict()), initial, "loaded shards");
    train(of_replica(batch[0]), of_replica(batch[1]));
    expect_scores(before);
    model->zero_grad();
    for (const auto& item : model->virtual_named_parameters()) {
      EXPECT_FALSE(item.value().grad().defined()) << item.key();
    }
  });
  // A tied one has two names.
  for (const auto& [name, tensor] : initial) EXPECT_EQ(held[name], tensor.numel()) << name;
}

/// Results that are parameters, or views of them, have memory of their own.
TEST(ShardedPipelinePrograms, ReturnParameters) {
  torch::set_num_threads(1);
  const auto make = std::function<TinyGpt()>([] { return TinyGpt(true, 3, 0.0); });
  TinyGpt plain = net_of_seed(5, make);
  const auto batch = batch_of_call(0);
  run_as_threads(kRanksOfTwo, two_by_two(), [&] {
    TinyGpt net = net_of_seed(5, make);
    DistributedModel<TinyGpt> model(net);
    auto give = step([&](torch::Tensor x) {
      return Tensors{model(x).sum(), net->head, net->up[2]->weight.t(), net->down[0]->bias,
                     net->attention_in[1]->weight.narrow(0, 3, 2)};
    });
    for (int i = 0; i < 2; ++i) {
      const auto results = give(of_replica(batch[0]));
      expect_equal(results[1].outputs()[1], plain->head.detach(), "head");
      expect_equal(results[2].outputs()[0], plain->up[2]->weight.t().detach(), "transposed");
      expect_equal(results[3].outputs()[0], plain->down[0]->bias.detach(), "bias");
      expect_equal(results[4].outputs()[1], plain->attention_in[1]->weight.narrow(0, 3, 2).detach(),
                   "narrowed");
    }
  });
}

/// Numbers of microbatches and samples that change from step to step.
TEST(ShardedPipelinePrograms, ChangeTheirBatches) {
  torch::set_num_threads(1);
  const auto make = std::function<TinyGpt()>([] { return TinyGpt(false, 2, 0.0); });
  TinyGpt plain = net_of_seed(5, make);
  const auto parameters = unique_parameters(*plain);
  torch::optim::SGD plain_optimizer(parameters, kSgd);
  const std::vector<int64_t> sizes = {8, 16, 8, 4, 16};
  for (size_t i = 0; i < sizes.size(); ++i) {
    plain_optimizer.zero_grad();
    plain_call(parameters, "step 0", 0, batch_of_call(static_cast<int>(i), sizes[i]),
               [&](auto x, auto y) { return plain->loss(x, y); });
    plain_optimizer.step();
  }
  run_as_threads(kRanksOfTwo, two_by_two(), [&] {
    DistributedModel<TinyGpt> model(net_of_seed(5, make));
    DistributedOptimizer<torch::optim::SGD> optimizer(model->parameters(), kSgd);
    auto train = step([&](torch::Tensor x, torch::Tensor y) {
      model->backward(TinyGptImpl::criterion(model(x), y));
    });
    for (size_t i = 0; i < sizes.size(); ++i) {
      const auto batch = batch_of_call(static_cast<int>(i), sizes[i]);
      optimizer.zero_grad();
      train(of_replica(batch[0]), of_replica(batch[1]));
      optimizer.step();
    }
    expect_equal(to_map(model->state_dict()), state_of(*plain), "value");
  });
}

/// Averages of shards, which evaluate in place of the weights.
TEST(ShardedPipelinePrograms, AverageTheirWeights) {
  auto tested = sharded_pipelines<TinyGpt, torch::optim::SGD>(
      {2, 2, 2, "1f1b", 3}, {2, 2, 2, 0, 1},
      std::function<TinyGpt()>([] { return TinyGpt(true, 2, 0.0); }), kSgd);
  TinyGpt plain = net_of_seed(5, tested.make);
  const auto parameters = unique_parameters(*plain);
  torch::optim::SGD plain_optimizer(parameters, kSgd);
  Named averages;
  for (int i = 0; i < 3; ++i) {
    plain_optimizer.zero_grad();
    plain_call(parameters, "step 0", i, tested.batch(i),
               [&](auto x, auto y) { return plain->loss(x, y); });
    plain_optimizer.step();
    for (const auto& [name, value] : state_of(*plain)) {
      if (i == 0) averages[name] = value;
      averages[name].lerp_(value, 0.5);
    }
  }
  const auto weights = state_of(*plain);
  TinyGpt averaged_net = net_of_seed(5, tested.make);
  torch::Tensor expected;
  {
    const torch::NoGradGuard no_grad;
    for (auto& item : averaged_net->named_parameters()) {
      item.value().copy_(averages.at(item.key()));
    }
    const auto batch = tested.batch(0);
    expected = averaged_net->loss(part(batch[0], 4, 0), part(batch[1], 4, 0));
  }
  tested.on_ranks([&](auto& rank) {
    Ema ema(rank.model, *rank.optimizer, EmaOptions().decay(0.5));
    for (int i = 0; i < 3; ++i) {
      rank.step(i);
      ema.update();
    }
    {
      const auto averaged = ema.averaged();
      expect_equal(to_map(rank.model->state_dict()), averages, "average");
      const auto loss = rank.evaluate(0).outputs()[0];
      if (dp_rank() == 0) expect_equal(loss, expected, "evaluation");
    }
    expect_equal(to_map(rank.model->state_dict()), weights, "value");
  });
}

/// A start goes on from the copy in memory, in this layout and without a pipeline.
TEST(ShardedPipelinePrograms, GoOnFromACopyInMemory) {
  const RecoveryInMemory memory;
  const TempFolder folder;
  const auto in_layout = [&](int stages) {
    auto result = sharded_pipelines<TinyGpt, torch::optim::AdamW>(
        {stages, 2, 2, "1f1b", 4}, {2, 2, 2, 0, 1},
        std::function<TinyGpt()>([] { return TinyGpt(true, 1); }), kAdamW);
    result.config.recovery("restart").recovery_interval(1);
    result.seed = [] { return 5; };
    return result;
  };
  const auto expected = in_layout(2).run_plain().weights;
  for (const auto& [before, after] : {std::pair(2, 2), std::pair(2, 1)}) {
    SCOPED_TRACE(c10::str(before, " stages, then ", after));
    unsetenv("TORCHELASTIC_RESTART_COUNT");
    in_layout(before).on_ranks([&](auto& rank) {
      for (int i = 0; i < 2; ++i) {
        rank.step(i);
        keep_copy(rank.model, *rank.optimizer);
      }
      smp::save(folder.file("saved"), rank.model, *rank.optimizer);
      rank.step(3);  // is lost
    });
    EXPECT_EQ(content_of(kept_copy()), content_of(folder.file("saved")));
    setenv("TORCHELASTIC_RESTART_COUNT", "1", 1);
    const auto again = in_layout(after);
    again.on_ranks(
        [&](auto& rank) {
          const auto resumed = resume_after_restart(rank.model, *rank.optimizer);
          ASSERT_TRUE(resumed);
          EXPECT_EQ(resumed->step, 2);
          for (int i = 2; i < 4; ++i) rank.step(i);
          expect_equal(to_map(rank.model->state_dict()), expected, "value");
        },
        /*more_seed=*/7);
  }
  unsetenv("TORCHELASTIC_RESTART_COUNT");
}

/// The next step begins while a checkpoint is written.
TEST(ShardedPipelinePrograms, SaveBesideTraining) {
  const TempFolder folder;
  auto tested = sharded_pipelines<TinyGpt, torch::optim::AdamW>(
      {2, 2, 2, "1f1b", 3}, {2, 2, 2, 0, 1}, std::function<TinyGpt()>(tied_gpt), kAdamW);
  const auto last = tested.run_plain().weights;
  tested.on_ranks([&](auto& rank) {
    for (int i = 0; i < 2; ++i) rank.step(i);
    auto saving = save_async(folder.file("two steps"), rank.model, *rank.optimizer);
    rank.step(2);
    saving.wait();
    expect_equal(to_map(rank.model->state_dict()), last, "value");
  });
  tested.steps = 2;
  TinyGpt loaded(true);
  load_into_module(folder.file("two steps"), *loaded);
  expect_equal(state_of(*loaded), tested.run_plain().weights, "saved value");
}

TEST(ShardedPipelinePrograms, DoNotJoin) {
  const auto text = error_of_run<UsageError>(kRanksOfTwo, two_by_two(), [] {
    DistributedModel<TinyGpt> model(tied_gpt());
    const auto guard = model->join();
  });
  expect_has(text,
             {"DistributedModel::join: with \"shard_optimizer_state\" and "
              "\"sharded_data_parallel_degree\" each replica updates a part of the parameters"});
}

/// A module that throws where and when the test says.
struct FailingImpl : torch::nn::Module {
  explicit FailingImpl(std::function<void()> act) : act(std::move(act)) {
    weight = register_parameter("weight", torch::ones({TinyGptImpl::kVocabulary}));
  }
  torch::Tensor forward(torch::Tensor x) {
    act();
    return x * weight;
  }
  std::function<void()> act;
  torch::Tensor weight;
};
TORCH_MODULE(Failing);

struct FailingNetImpl : torch::nn::Module {
  explicit FailingNetImpl(const std::function<void()>& act) {
    gpt = register_module("gpt", TinyGpt(true, 2, 0.0));
    failing = register_module("failing", Failing(act));
  }
  torch::Tensor forward(torch::Tensor ids) { return leaf(failing)(gpt(ids)); }
  TinyGpt gpt{nullptr};
  Failing failing{nullptr};
};
TORCH_MODULE(FailingNet);

/// How a rank's second step ended, and its third.
struct Ends {
  std::string failed, next;
};

enum class Place { kFunction, kLeaf, kLabel };

/// The ends of ranks of which one fails in the second step: the step function or a leaf throws, or
/// a replica, then, has a label out of range.
std::vector<Ends> ends_of(Place place, int who) {
  std::vector<Ends> ends(kRanksOfTwo);
  run_as_threads(kRanksOfTwo, two_by_two(), [&] {
    int number = 0;
    const auto fail_at = [&](Place here) {
      if (here == place && number == 1 && rank() == who) throw std::runtime_error("out of luck");
    };
    DistributedModel<FailingNet> model(FailingNet([&] { fail_at(Place::kLeaf); }));
    DistributedOptimizer<torch::optim::SGD> optimizer(model->parameters(), kSgd);
    auto train = step([&](torch::Tensor x, torch::Tensor y) {
      fail_at(Place::kFunction);
      model->backward(TinyGptImpl::criterion(model(x), y));
    });
    const auto batch = batch_of_call(0);
    const auto run_step = [&] {
      auto labels = of_replica(batch[1]);
      if (place == Place::kLabel && number == 1 && dp_rank() == who) labels[3][0] = 1000;
      optimizer.zero_grad();
      train(of_replica(batch[0]), labels);
      optimizer.step();
    };
    run_step();
    number = 1;
    ends[rank()].failed = error_of<std::exception>(run_step);
    number = 2;
    ends[rank()].next = error_of<CommError>(run_step);
  });
  return ends;
}

/// All ranks of all replicas end with the cause, in that step and in the next.
TEST(ShardedPipelineFailures, EndAllRanksWithTheCause) {
  torch::set_num_threads(1);
  // A leaf, and the loss, are on the second stage.
  const std::tuple<Place, int, int, const char*> cases[] = {
      {Place::kFunction, 0, 0, "out of luck"},
      {Place::kFunction, 3, 3, "out of luck"},
      {Place::kLeaf, 1, 1, "out of luck"},
      {Place::kLeaf, 3, 3, "out of luck"},
      {Place::kLabel, 0, 1, "Target 1000 is out of bounds. (operator "},
      {Place::kLabel, 1, 3, "Target 1000 is out of bounds. (operator "}};
  for (const auto& [place, who, failed, text] : cases) {
    SCOPED_TRACE(c10::str("place ", static_cast<int>(place), ", ", who));
    const auto ends = ends_of(place, who);
    const std::string by_rank = c10::str("rank ", failed, " failed: ", text);
    for (int rank = 0; rank < kRanksOfTwo; ++rank) {
      expect_has(ends[rank].failed, rank == failed ? text : by_rank);
      expect_has(ends[rank].next, by_rank);
    }
  }
}

/// A rank that ends between steps is named within the time-out.
TEST(ShardedPipelineFailures, NameARankThatHasEnded) {
  torch::set_num_threads(1);
  const auto text = error_of_run<CommError>(kRanksOfTwo, two_by_two(), [] {
    DistributedModel<TinyGpt> model(tied_gpt());
    auto train = step([&](torch::Tensor x, torch::Tensor y) {
      model->backward(TinyGptImpl::criterion(model(x), y));
    });
    const auto batch = batch_of_call(0);
    const auto x = of_replica(batch[0]), y = of_replica(batch[1]);
    train(x, y);
    wait_at_most(std::chrono::seconds(2));
    if (rank() != 3) train(x, y);
  });
  expect_has(text, {"rank 3", "has ended"});
}

}  // namespace
}  // namespace smp
