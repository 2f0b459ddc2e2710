// SPDX-License-Identifier: Apache-2.0
// Batches that the number of microbatches does not divide: into how many they are cut, against
// plain libtorch on the same parts.

#include <algorithm>
#include <array>
#include <mutex>
#include <ostream>
#include <utility>

#include "tests/smp/api.h"

namespace smp::testing {
namespace {

const torch::optim::SGDOptions kCountSgd = torch::optim::SGDOptions(0.2).momentum(0.9);

/// The most parts of one size, up to `most`.
int expected_count(int64_t size, int most) {
  int count = 1;
  for (int i = 2; i <= most; ++i) {
    if (size % i == 0) count = i;
  }
  return count;
}

struct CountLayout {
  int stages;
  int replicas;
  int64_t batch = 0;  // batch of a replica, in evaluation

  int ranks() const { return stages * replicas; }
};

std::ostream& operator<<(std::ostream& out, const CountLayout& layout) {
  out << layout.stages << " stages x " << layout.replicas << " replicas";
  return layout.batch == 0 ? out : out << ", batches of " << layout.batch;
}

/// A net with dropout and the same values whenever it is made.
Mlp make_dropout_net(double dropout = 0.25) {
  static std::mutex mutex;  // rank threads share the default generator
  const std::lock_guard<std::mutex> lock(mutex);
  torch::manual_seed(5);
  return Mlp(4, dropout);
}

struct CountTraining {
  Config config;
  int replicas = 1;
  std::vector<int64_t> sizes;  // batch sizes of all replicas, by step
  std::vector<int> counts;     // microbatch counts of all replicas, by step
  double dropout = 0.25;

  struct Trace {
    std::vector<Tensors> losses;  // losses by step and global microbatch
    Named weights;
  };

  std::vector<Tensors> batches() const {
    torch::manual_seed(23);
    std::vector<Tensors> result;
    for (int64_t size : sizes) {
      result.push_back({torch::randn({size, MlpImpl::kWidth}), torch::randn({size, 1})});
    }
    return result;
  }

  Trace plain() const {
    const auto all = batches();
    Trace trace;
    Mlp net = make_dropout_net(dropout);
    torch::optim::SGD optimizer(net->parameters(), kCountSgd);
    for (size_t i = 0; i < sizes.size(); ++i) {
      optimizer.zero_grad();
      trace.losses.push_back(
          plain_backward(net->parameters(), replicas, counts[i] / replicas, [&](int m) {
            const KeyedRandom random(kSeed, "train", i, m);
            return torch::mse_loss(net(part(all[i][0], counts[i], m)),
                                   part(all[i][1], counts[i], m));
          }));
      optimizer.step();
    }
    trace.weights = state_of(*net);
    return trace;
  }

  Trace on_ranks(int stages_of_each) const {
    const auto all = batches();
    Trace trace;
    for (int count : counts) trace.losses.emplace_back(count);
    std::mutex mutex;
    run_as_threads(stages_of_each * replicas, config, [&] {
      DistributedModel<Mlp> model(make_dropout_net(dropout));
      DistributedOptimizer<torch::optim::SGD> optimizer(model->parameters(), kCountSgd);
      auto train = make_training(model, StepOptions().name("train"));
      for (size_t i = 0; i < sizes.size(); ++i) {
        optimizer.zero_grad();
        const Tensors losses = train(shard(all[i][0]), shard(all[i][1])).outputs();
        optimizer.step();
        const int count = counts[i] / replicas;
        ASSERT_EQ(losses.size(), static_cast<size_t>(count)) << "step " << i;
        const std::lock_guard<std::mutex> lock(mutex);
        for (int m = 0; m < count; ++m) trace.losses[i][dp_rank() * count + m] = losses[m];
      }
      const Named weights = to_map(model->state_dict());
      const std::lock_guard<std::mutex> lock(mutex);
      if (rank() == 0) trace.weights = weights;
    });
    return trace;
  }
};

void expect_same_trace(const CountTraining::Trace& got, const CountTraining::Trace& expected) {
  ASSERT_EQ(got.losses.size(), expected.losses.size());
  for (size_t i = 0; i < got.losses.size(); ++i) {
    expect_equal(got.losses[i], expected.losses[i], "losses of step " + std::to_string(i));
  }
  expect_equal(got.weights, expected.weights, "value");
}

class MicrobatchCount : public ApiTest {
 protected:
  /// The plain net's outputs for parts of `x`.
  Tensors plain_outputs(const torch::Tensor& x, int count) const {
    const torch::NoGradGuard no_grad;
    Mlp net = prototype_;
    Tensors outputs;
    for (int m = 0; m < count; ++m) outputs.push_back(net(part(x, count, m)));
    return outputs;
  }
};

void expect_near(const torch::Tensor& got, const torch::Tensor& expected) {
  ASSERT_EQ(got.sizes(), expected.sizes());
  EXPECT_TRUE(torch::allclose(got, expected, 1e-4, 1e-5)) << got - expected;
}

void expect_near(const CountTraining::Trace& got, const CountTraining::Trace& expected) {
  ASSERT_EQ(got.losses.size(), expected.losses.size());
  for (size_t i = 0; i < got.losses.size(); ++i) {
    ASSERT_EQ(got.losses[i].size(), expected.losses[i].size());
    for (size_t m = 0; m < got.losses[i].size(); ++m) {
      expect_near(got.losses[i][m], expected.losses[i][m]);
    }
  }
  ASSERT_EQ(got.weights.size(), expected.weights.size());
  for (const auto& [name, tensor] : expected.weights) expect_near(got.weights.at(name), tensor);
}

class MicrobatchCountOfLayout : public MicrobatchCount,
                                public ::testing::WithParamInterface<CountLayout> {};

/// The last batches of an epoch, one of which has fewer samples than microbatches.
TEST_P(MicrobatchCountOfLayout, Training) {
  const CountLayout layout = GetParam();
  CountTraining training;
  training.config = stages(layout.stages).microbatches(4).ddp(layout.replicas > 1);
  training.replicas = layout.replicas;
  const std::vector<std::pair<int64_t, int>> of_replica = {{12, 4}, {10, 2}, {7, 1}, {3, 3}};
  for (const auto& [size, count] : of_replica) {
    training.sizes.push_back(size * layout.replicas);
    training.counts.push_back(count * layout.replicas);
  }
  expect_same_trace(training.on_ranks(layout.stages), training.plain());
}

INSTANTIATE_TEST_SUITE_P(Training, MicrobatchCountOfLayout,
                         ::testing::Values(CountLayout{1, 1}, CountLayout{2, 1}, CountLayout{4, 1},
                                           CountLayout{2, 2}));

class MicrobatchCountOfEvaluation : public MicrobatchCount,
                                    public ::testing::WithParamInterface<CountLayout> {};

TEST_P(MicrobatchCountOfEvaluation, OfTenThousandSamples) {
  const CountLayout layout = GetParam();
  constexpr int kMost = 8;
  constexpr int64_t kSamples = 10000;
  const auto x = torch::randn({kSamples, MlpImpl::kWidth});
  const auto y = torch::randn({kSamples, 1});
  const int64_t share = kSamples / layout.replicas;

  const auto size_at = [&](int64_t begin) { return std::min(layout.batch, share - begin); };
  Tensors expected;
  for (int replica = 0; replica < layout.replicas; ++replica) {
    for (int64_t begin = 0; begin < share; begin += layout.batch) {
      const auto batch = x.narrow(0, replica * share + begin, size_at(begin));
      for (auto& out : plain_outputs(batch, expected_count(batch.size(0), kMost))) {
        expected.push_back(std::move(out));
      }
    }
  }
  const auto is_right = [](const torch::Tensor& out, const torch::Tensor& target) {
    return out.gt(0).eq(target.gt(0)).sum();
  };
  Tensors got(layout.replicas);
  int64_t right = 0;
  const auto config = stages(layout.stages).microbatches(kMost).ddp(layout.replicas > 1);
  run_as_threads(layout.ranks(), config, [&] {
    DistributedModel<Mlp> model(make_net());
    auto evaluate = step([&](torch::Tensor inputs, torch::Tensor targets) {
      const auto out = model(inputs);
      return std::make_pair(out, is_right(out, targets));
    });
    model->eval();
    const auto own_x = shard(x), own_y = shard(y);
    Tensors outs;
    int64_t own_right = 0;
    for (int64_t begin = 0; begin < share; begin += layout.batch) {
      const int64_t size = size_at(begin);
      const auto [out, count] =
          evaluate(own_x.narrow(0, begin, size), own_y.narrow(0, begin, size));
      outs.push_back(out.concat());
      own_right += count.reduce_sum().item<int64_t>();
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    if (pp_rank() != 0) return;
    got[dp_rank()] = torch::cat(outs);
    right += own_right;
  });
  const auto whole = torch::cat(expected);
  expect_equal(torch::cat(got), whole, "outputs");
  EXPECT_EQ(right, is_right(whole, y).item<int64_t>());
}

INSTANTIATE_TEST_SUITE_P(Layouts, MicrobatchCountOfEvaluation,
                         ::testing::Values(CountLayout{1, 1, 96}, CountLayout{2, 1, 96},
                                           CountLayout{4, 1, 96}, CountLayout{2, 2, 96},
                                           CountLayout{1, 1, 100}, CountLayout{2, 1, 100},
                                           CountLayout{2, 2, 97}));

/// Replicas cut their batches as one process does that sums as they do.
TEST_F(MicrobatchCount, GradientShardsAreCutAsReplicasCut) {
  CountTraining alone;
  alone.config = stages(1).microbatches(4).gradient_shards(2);
  alone.sizes = {12, 10, 6};
  alone.counts = {4, 2, 2};
  CountTraining together = alone;
  together.config = stages(1).microbatches(2).ddp(true);
  together.replicas = 2;
  const auto expected = together.plain();
  expect_same_trace(together.on_ranks(1), expected);
  expect_same_trace(alone.on_ranks(1), expected);

  const auto text = error_of_run<UsageError>(1, alone.config, [&] {
    DistributedModel<Mlp> model(make_net());
    auto train = make_training(model, StepOptions().name("train"));
    train(x_.narrow(0, 0, 5), y_.narrow(0, 0, 5));
  });
  expect_has(text, {"step function \"train\": input tensor 0 of shape [5, 6] cannot be cut into "
                    "microbatches: the batch (5 on axis 0) is not divisible by 2, the number of "
                    "gradient shards that a replica sums (\"gradient_shards\"). Choose a divisible "
                    "batch size, or drop the last incomplete batch (drop_last)"});
}

/// An evaluation adds up no gradients.
TEST_F(MicrobatchCount, GradientShardsDoNotCountInEvaluation) {
  const auto x = torch::randn({97, MlpImpl::kWidth});
  run_as_threads(1, stages(1).microbatches(4).gradient_shards(4), [&] {
    DistributedModel<Mlp> model(make_net());
    auto forward = step([&](torch::Tensor inputs) { return model(inputs); });
    for (const int64_t size : {97, 6, 8}) {
      const auto batch = x.narrow(0, 0, size);
      const auto expected = plain_outputs(batch, expected_count(size, 4));
      expect_equal(forward(batch).outputs(), expected, "outputs");
    }
  });
}

/// The error of replicas that cut into 4 microbatches and, the second, into `second`.
std::string uneven(int second, const std::string& reason) {
  return "step function \"train\" cut its batch into 4 microbatches on replica 0 and into " +
         std::to_string(second) +
         " on replica 1: as many as divide the batch, up to \"microbatches\". " + reason +
         ", so give all replicas batches of one size, or drop the last incomplete batch "
         "(drop_last)";
}

/// The error of two replicas that are given batches of these sizes, one after the other; they
/// train, or only evaluate.
std::string error_of_replicas(int ranks, const Config& config,
                              const std::vector<std::array<int64_t, 2>>& sizes,
                              bool trains = true) {
  torch::manual_seed(23);
  const auto x = torch::randn({8, MlpImpl::kWidth});
  return error_of_run<UsageError>(ranks, config, [&] {
    DistributedModel<Mlp> model(make_dropout_net());
    auto train = step(
        [&](torch::Tensor inputs) {
          const auto loss = model(inputs).square().mean();
          if (trains) model->backward(loss);
          return loss;
        },
        StepOptions().name("train"));
    for (const auto& of_replica : sizes) train(x.narrow(0, 0, of_replica[rdp_rank()]));
  });
}

/// They would divide one sum by two numbers.
TEST_F(MicrobatchCount, ReplicasThatTrainHaveOneNumber) {
  const auto config = stages(1).microbatches(4).ddp(true);
  const auto expected = uneven(3, "Gradients are divided by one number");
  expect_has(error_of_replicas(2, config, {{8, 8}, {8, 6}}), {expected});
  // A rank that runs the batches of its group names those of one.
  expect_has(error_of_replicas(4, Config(config).tensor_parallel_degree(2), {{8, 8}, {8, 6}}),
             {expected});
}

/// They gather parameters together in each microbatch.
TEST_F(MicrobatchCount, ReplicasThatShareParametersHaveOneNumber) {
  const auto config = stages(1).microbatches(4).ddp(true).sharded_data_parallel_degree(2);
  const auto expected = uneven(3,
                               "With \"sharded_data_parallel_degree\" above 1 replicas gather "
                               "parameters together in each microbatch");
  for (const bool trains : {true, false}) {
    expect_has(error_of_replicas(2, config, {{8, 8}, {8, 6}}, trains), {expected});
  }
}

/// They share one plan, which follows the number of microbatches, also of one graph.
TEST_F(MicrobatchCount, ReplicasBeginWithOneNumber) {
  const std::string reason = "Replicas share one plan, which the first step makes";
  const auto config = stages(1).microbatches(4).ddp(true);
  for (const std::string numerics : {"exact", "fast"}) {
    for (const bool trains : {true, false}) {
      SCOPED_TRACE(numerics + (trains ? ", trains" : ", evaluates"));
      const auto text = error_of_replicas(2, Config(config).numerics(numerics), {{4, 1}}, trains);
      expect_has(text, {uneven(1, reason)});
    }
  }
  expect_has(error_of_replicas(4, stages(2).microbatches(4).ddp(true), {{8, 6}}),
             {uneven(3, reason)});
}

/// Replicas evaluate any batches, and then train alike: how many microbatches run as one does not
/// follow from a replica's evaluations.
TEST_F(MicrobatchCount, ReplicasMayEvaluateOtherNumbers) {
  ::testing::internal::CaptureStderr();
  run_as_threads(2, stages(1).microbatches(8).ddp(true).numerics("fast"), [&] {
    DistributedModel<Mlp> model(make_net());
    auto forward = step([&](torch::Tensor inputs) { return model(inputs); });
    auto train = make_training(model, StepOptions().name("train"));
    EXPECT_EQ(forward(x_.narrow(0, 0, 1)).outputs().size(), 1u);
    const auto own = x_.narrow(0, 0, dp_rank() == 0 ? 4 : 5);
    const StepOutput out = forward(own);
    EXPECT_EQ(out.outputs().size(), static_cast<size_t>(own.size(0)));
    expect_near(out.concat(), plain_outputs(own, 1)[0]);
    EXPECT_EQ(train(torch::cat({x_, x_}), torch::cat({y_, y_})).outputs().size(), 8u);
  });
  expect_has(::testing::internal::GetCapturedStderr(),
             {"step function \"train\": 8 microbatches run as 2 of 4"});
}

/// The pipeline would wait for microbatches that do not come if numbers differed.
TEST_F(MicrobatchCount, RanksOfAPipelineHaveOneNumber) {
  const auto text = error_of_run<UsageError>(2, stages(2), [&] {
    DistributedModel<Mlp> model(make_net());
    auto forward = step([&](torch::Tensor inputs) { return model(inputs); },
                        StepOptions().name("forward").microbatches(pp_rank() == 0 ? 4 : 2));
    forward(smp::whole(x_));
  });
  expect_has(text, {"step function \"forward\" runs other numbers of microbatches on pp rank 0 and "
                    "pp rank 1 of one pipeline: 4 and 2. All ranks of a pipeline must pass the "
                    "same inputs and give the step function the same StepOptions().microbatches"});
}

/// Buckets of replicas have memory all the time, so other numbers take the same ones.
TEST_F(MicrobatchCount, AllNumbersSumGradientsInOneMemory) {
  for (const std::string numerics : {"exact", "fast"}) {
    run_as_threads(2, stages(1).microbatches(4).ddp(true).numerics(numerics), [&] {
      DistributedModel<Mlp> model(make_net(), ModelOptions().gradient_as_bucket_view(true));
      auto train = make_training(model);
      std::vector<const void*> memory;
      for (const int64_t size : {8, 6, 7, 8}) {
        model->zero_grad();
        train(x_.narrow(0, 0, size), y_.narrow(0, 0, size));
        memory.push_back(model->parameters().front().grad().const_data_ptr());
      }
      EXPECT_EQ(memory, std::vector<const void*>(4, memory.front()));
    });
  }
}

/// Two graphs of one number have one line in the log.
TEST_F(MicrobatchCount, IsToldOnce) {
  ::testing::internal::CaptureStderr();
  run_as_threads(1, stages(1).microbatches(4), [&] {
    DistributedModel<Mlp> model(make_net());
    auto forward =
        step([&](torch::Tensor inputs) { return model(inputs); }, StepOptions().name("forward"));
    for (const int64_t size : {8, 6, 3}) forward(x_.narrow(0, 0, size));
  });
  const std::string log = ::testing::internal::GetCapturedStderr();
  const std::string line =
      "step function \"forward\" cuts a batch into 3 microbatches: 4 do not divide it";
  const size_t first = log.find(line);
  ASSERT_NE(first, std::string::npos) << log;
  EXPECT_EQ(log.find(line, first + 1), std::string::npos) << log;
}

/// It has no size on an axis along which it is ragged.
TEST_F(MicrobatchCount, OfANestedTensorIsNotAsked) {
  const auto text = error_of_run<UsageError>(1, stages(1), [&] {
    DistributedModel<Mlp> model(make_net());
    auto forward = step([&](torch::Tensor inputs) { return model(inputs); },
                        StepOptions().name("forward").input_split_axes({{0, 1}}));
    const Tensors parts = {torch::ones({2, MlpImpl::kWidth}), torch::ones({3, MlpImpl::kWidth})};
    forward(torch::nested::nested_tensor(at::TensorList(parts)));
  });
  expect_has(text, {"step function \"forward\": input tensor 0 has the layout Jagged"});
}

/// A replica without a batch takes part in a step of another number.
TEST_F(MicrobatchCount, OfAReplicaThatTrainsAloneInAJoin) {
  Mlp net = make_net();
  const auto parameters = net->parameters();
  const auto loss_of = [](const torch::Tensor& out) { return out.square().mean(); };
  torch::optim::SGD plain(parameters, torch::optim::SGDOptions(0.1));
  plain_backward(parameters, 2, 4, [&](int m) { return loss_of(net(part(x_, 4, m % 4))); });
  plain.step();
  plain.zero_grad();
  const auto last = x_.narrow(0, 0, 6);
  plain_backward(parameters, 1, 3, [&](int m) { return loss_of(net(part(last, 3, m))); });
  plain.step();
  run_as_threads(2, stages(1).microbatches(4).ddp(true), [&] {
    DistributedModel<Mlp> model(make_net());
    DistributedOptimizer<torch::optim::SGD> optimizer(model->parameters(),
                                                      torch::optim::SGDOptions(0.1));
    auto train = step([&](torch::Tensor x) { model->backward(loss_of(model(x))); });
    const auto update = [&](const torch::Tensor& x) {
      optimizer.zero_grad();
      train(x);
      optimizer.step();
    };
    {
      const auto guard = model->join(JoinOptions().divide_by_initial_world_size(false));
      update(x_);
      if (dp_rank() == 0) update(last);
    }
    expect_equal(to_map(model->state_dict()), state_of(*net), "value");
  });
}

struct CutWeights {
  std::vector<float> values;

  CutWeights smp_slice(int64_t count, int64_t microbatch, int64_t /*axis*/) const {
    const auto size = static_cast<int64_t>(values.size()) / count;
    const auto begin = values.begin() + microbatch * size;
    return {{begin, begin + size}};
  }
};

/// The numbers of objects cut with the batch: a common divisor, and the number that they are told.
TEST_F(MicrobatchCount, OfAllThatIsCut) {
  run_as_threads(1, stages(1).microbatches(4), [&] {
    DistributedModel<Mlp> model(make_net());
    const auto x = x_.narrow(0, 0, 6);
    const Tensors plain = plain_outputs(x, 3);
    const std::vector<float> values = {1, 2, 3, 4, 5, 6};
    auto weighted = step([&](torch::Tensor inputs, CutWeights weights) {
      return (model(inputs).sum(1) * torch::tensor(weights.values)).sum();
    });
    const Tensors sums = weighted(x, CutWeights{values}).outputs();
    EXPECT_EQ(weighted.microbatches(), 4);
    ASSERT_EQ(sums.size(), 3u);
    for (int m = 0; m < 3; ++m) {
      const auto expected = plain[m].sum(1) * part(torch::tensor(values), 3, m);
      expect_equal(sums[m], expected.sum(), "weighted sum");
    }
    const auto flat = torch::randn({9});
    auto shifted =
        step([&](torch::Tensor inputs, torch::Tensor more) { return model(inputs) + more.sum(); },
             StepOptions().input_split_axes({{1, 0}}));
    const Tensors outs = shifted(x, flat).outputs();
    ASSERT_EQ(outs.size(), 3u);
    for (int m = 0; m < 3; ++m) {
      expect_equal(outs[m], plain[m] + part(flat, 3, m).sum(), "shifted");
    }
  });
}

/// Microbatches of one shape have one graph, whatever their number.
TEST_F(MicrobatchCount, OfCallsWithoutGuard) {
  run_as_threads(1, stages(1).microbatches(4).guard("first_step"), [&] {
    DistributedModel<Mlp> model(make_net());
    int runs = 0;
    auto forward = step([&](torch::Tensor inputs) {
      ++runs;
      return std::make_pair(model(inputs), inputs.size(0));
    });
    for (const int count : {4, 3, 4}) {
      const auto x = x_.narrow(0, 0, 2 * count);
      const auto [outs, sizes] = forward(x);
      expect_equal(outs.outputs(), plain_outputs(x, count), "outputs");
      EXPECT_EQ(sizes, std::vector<int64_t>(count, 2));
      EXPECT_EQ(runs, 1);
    }
  });
}

/// A captured tensor may be the batch of several microbatches, though it was not that of one.
TEST_F(MicrobatchCount, OfMoreMicrobatchesThanTheGuardSaw) {
  const auto captured = torch::ones({28});
  const auto x = torch::randn({28, MlpImpl::kWidth});
  const auto text =
      error_of_run<CaptureError>(1, stages(1).microbatches(4).guard("first_step"), [&] {
        DistributedModel<Mlp> model(make_net());
        auto forward =
            step([&](torch::Tensor inputs) { return model(inputs).sum() + captured.sum(); });
        EXPECT_EQ(forward(x.narrow(0, 0, 7)).outputs().size(), 1u);
        forward(x);
      });
  expect_has(text, {"is none of its arguments, and has the size of the batch (28) on axis 0: each "
                    "of the 4 microbatches would get the whole of it"});
}

TEST_F(MicrobatchCount, OfTrainingWhoseMicrobatchesRunTogether) {
  CountTraining training;
  training.config = stages(1).microbatches(8).numerics("fast").skip_tracing(true);
  training.sizes = {16, 12, 7, 11};
  training.counts = {8, 6, 7, 1};
  training.dropout = 0;  // random numbers are drawn for several microbatches at once
  expect_near(training.on_ranks(1), training.plain());
}

TEST_F(MicrobatchCount, OfTrainingInATensorParallelGroup) {
  CountTraining training;
  training.config = stages(1).microbatches(4).tensor_parallel_degree(2).ddp(true);
  training.replicas = 2;
  training.sizes = {16, 12, 14};
  training.counts = {8, 6, 2};
  expect_near(training.on_ranks(1), training.plain());
}

TEST_F(MicrobatchCount, OfMicrobatchesThatRunTogether) {
  run_as_threads(1, stages(1).microbatches(4).numerics("fast"), [&] {
    DistributedModel<Mlp> model(make_net());
    auto forward = step([&](torch::Tensor inputs) { return model(inputs); });
    for (const int64_t size : {8, 6, 7}) {
      const auto x = x_.narrow(0, 0, size);
      const StepOutput out = forward(x);
      EXPECT_EQ(out.outputs().size(), static_cast<size_t>(expected_count(size, 4)));
      expect_near(out.concat(), plain_outputs(x, 1)[0]);
    }
  });
}

/// Each rank runs the batches of its group, and returns its own outputs.
TEST_F(MicrobatchCount, OfATensorParallelGroup) {
  const auto config =
      Config().tensor_parallel_degree(2).ddp(true).microbatches(4).timeout_seconds(60);
  run_as_threads(2, config, [&] {
    DistributedModel<Mlp> model(make_net());
    auto forward = step([&](torch::Tensor inputs) { return model(inputs); });
    const auto x = x_.narrow(0, rank(), 6);
    const StepOutput out = forward(x);
    EXPECT_EQ(out.outputs().size(), 3u);
    expect_near(out.concat(), plain_outputs(x, 1)[0]);
  });
}

}  // namespace
}  // namespace smp::testing
