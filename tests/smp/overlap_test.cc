// SPDX-License-Identifier: Apache-2.0
// Gradients are reduced while the backward goes on: reductions are held up until it has gone on,
// and it until one has begun, so the result of a test does not depend on time.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <filesystem>
#include <fstream>
#include <limits>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "graph/allocations.h"
#include "runtime/runtime.h"
#include "tests/smp/oracle.h"

namespace smp::testing {
namespace {

constexpr int kSteps = 5, kFirstWatched = 2;  // those that a timeline records
constexpr int64_t kWide = 8;

/// The watch of a rank: holds the last backward of a step at the gate until a reduction has begun,
/// and reductions until that backward is past the gate.
class Watch {
 public:
  explicit Watch(std::chrono::milliseconds patience) : patience_(patience) {}

  void begin_step(bool armed) {
    const std::lock_guard lock(mutex_);
    armed_ = armed;
    began_ = went_on_ = false;
    passes_of_step_ = std::exchange(passes_, 0);
  }

  void pass_gate() {
    std::unique_lock lock(mutex_);
    if (++passes_ < passes_of_step_ || !armed_) return;
    const bool began = changed_.wait_for(lock, patience_, [&] { return began_; });
    if (!began) problem_ = "no reduction began before the last layer's backward";
    went_on_ = true;
    changed_.notify_all();
  }

  void on_reduction(const dp::ReductionEvent& event) {
    std::unique_lock lock(mutex_);
    if (!armed_ || event.has_ended) return;
    ++reductions_;
    began_ = true;
    changed_.notify_all();
    const bool went_on = changed_.wait_for(lock, patience_, [&] { return went_on_; });
    if (!went_on) problem_ = "the backward waited for a reduction";
  }

  int reductions() const { return reductions_; }
  const std::string& problem() const { return problem_; }

 private:
  const std::chrono::milliseconds patience_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool armed_ = false, began_ = false, went_on_ = false;
  int passes_ = 0, passes_of_step_ = 0;  // passes of this step so far, and of a whole one
  int reductions_ = 0;
  std::string problem_;
};

thread_local Watch* watch_of_rank = nullptr;

/// Returns its argument; its backward passes the gate.
struct GateFunction : torch::autograd::Function<GateFunction> {
  static torch::Tensor forward(torch::autograd::AutogradContext* /*context*/, torch::Tensor x) {
    return x * 1;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* /*context*/,
                                                 torch::autograd::variable_list gradients) {
    if (watch_of_rank != nullptr) watch_of_rank->pass_gate();
    return gradients;
  }
};

struct OverlapGateImpl : torch::nn::Module {
  torch::Tensor forward(torch::Tensor x) { return GateFunction::apply(x); }
};
TORCH_MODULE(OverlapGate);

/// Its first layer gets its gradient last, when the backward is past the gate.
struct GatedLayersImpl : torch::nn::Module {
  GatedLayersImpl() {
    in = register_module("in", torch::nn::Linear(kWide, kWide));
    gate = register_module("gate", OverlapGate());
    for (int i = 0; i < 2; ++i) {
      layers.push_back(
          register_module("layer" + std::to_string(i), torch::nn::Linear(kWide, kWide)));
    }
    head = register_module("head", torch::nn::Linear(kWide, 1));
  }
  torch::Tensor forward(torch::Tensor x) {
    x = leaf(gate)(in(x));
    for (auto& layer : layers) x = torch::tanh(layer(x));
    return head(x);
  }
  torch::nn::Linear in{nullptr}, head{nullptr};
  OverlapGate gate{nullptr};
  std::vector<torch::nn::Linear> layers;
};
TORCH_MODULE(GatedLayers);

/// How a net is trained.
struct Trained {
  Config config;
  int ranks = 2;
  bool overlapping = true;
  bool watched = true;
  std::chrono::milliseconds patience = std::chrono::seconds(60);
  bool tensor_parallel = false;
};

/// The results of a run.
struct Result {
  Named weights;
  std::vector<std::string> problems;  // problems by rank
  std::vector<int> reductions;        // in watched steps, by rank
};

Result train(const Trained& run) {
  torch::set_num_threads(1);
  torch::manual_seed(3);
  std::vector<GatedLayers> nets;
  for (int i = 0; i < run.ranks; ++i) nets.emplace_back();
  const auto data = torch::randn({kSteps, run.ranks, 8, kWide});
  Result result;
  result.problems.resize(run.ranks);
  result.reductions.resize(run.ranks);
  std::mutex mutex;
  run_as_threads(run.ranks, run.config, [&] {
    Watch watch(run.patience);
    watch_of_rank = &watch;
    runtime::Runtime::get().execution.on_reduction = [&](const dp::ReductionEvent& event) {
      watch.on_reduction(event);
    };
    GatedLayers net = nets[rank()];
    if (run.tensor_parallel) set_tensor_parallelism(*net->layers[0]);
    DistributedModel<GatedLayers> model(net, ModelOptions().overlapping_allreduce(run.overlapping));
    DistributedOptimizer<torch::optim::SGD> optimizer(model->parameters(), 0.1);
    auto run_step = step([&](torch::Tensor x) {
      auto loss = model(x).square().mean();
      model->backward(loss);
      return loss;
    });
    for (int i = 0; i < kSteps; ++i) {
      watch.begin_step(run.watched && i >= kFirstWatched);
      optimizer.zero_grad();
      run_step(data[i][dp_rank()].clone());
      optimizer.step();
    }
    const auto weights = to_map(model->state_dict());
    const std::lock_guard lock(mutex);
    result.weights = weights;
    result.problems[rank()] = watch.problem();
    result.reductions[rank()] = watch.reductions();
    watch_of_rank = nullptr;
  });
  return result;
}

/// Buckets of one parameter.
Config replicas_config() {
  return Config().microbatches(2).ddp(true).seed(kSeed).bucket_cap_mb(1e-4).timeout_seconds(120);
}

struct Case {
  const char* name;
  Trained run;
};

std::vector<Case> cases() {
  Trained tensor_parallel{replicas_config().tensor_parallel_degree(2), /*ranks=*/4};
  tensor_parallel.tensor_parallel = true;
  return {
      {"whole", {replicas_config()}},
      {"shards", {replicas_config().gradient_shards(4)}},
      {"sharded_state", {replicas_config().shard_optimizer_state(true)}},
      {"sharded_state_shards", {replicas_config().shard_optimizer_state(true).gradient_shards(4)}},
      {"tensor_parallel", tensor_parallel},
      {"split_backward", {replicas_config().pipeline("zb_h1")}},
  };
}

class Overlap : public ::testing::TestWithParam<Case> {};

TEST_P(Overlap, ReductionsRunBesideTheBackwardAndChangeNoBit) {
  const Trained run = GetParam().run;
  Trained after = run;
  after.overlapping = after.watched = false;
  const Result overlapped = train(run);
  for (int rank = 0; rank < run.ranks; ++rank) {
    EXPECT_EQ(overlapped.problems[rank], "") << "rank " << rank;
    EXPECT_GE(overlapped.reductions[rank], 8 * (kSteps - kFirstWatched)) << "rank " << rank;
  }
  expect_equal(overlapped.weights, train(after).weights, "weight");
}

INSTANTIATE_TEST_SUITE_P(Cases, Overlap, ::testing::ValuesIn(cases()),
                         [](const auto& info) { return info.param.name; });

/// That the test above can fail.
TEST(OverlapWatch, SeesReductionsThatWaitForTheBackward) {
  Trained run{replicas_config()};
  run.overlapping = false;
  run.patience = std::chrono::milliseconds(50);
  for (const std::string& problem : train(run).problems) {
    EXPECT_EQ(problem, "no reduction began before the last layer's backward");
  }
}

/// The recorded steps of each rank, by (replica, rank, step): when its first reduction began and
/// its last backward ended.
std::map<std::tuple<int, int, std::string>, std::pair<double, double>> read_trace(
    const std::filesystem::path& path) {
  std::ifstream file(path);
  const auto events = nlohmann::json::parse(file).at("traceEvents");
  std::map<std::pair<int, int>, std::pair<int, bool>> threads;  // rank, and whether it reduces
  for (const auto& event : events) {
    if (event.at("name") != "thread_name") continue;
    const std::string name = event.at("args").at("name");
    threads[{event.at("pid"), event.at("tid")}] = {std::stoi(name.substr(5)),
                                                   name.find("reduces") != std::string::npos};
  }
  std::map<std::tuple<int, int, std::string>, std::pair<double, double>> result;
  for (const auto& event : events) {
    if (event.at("ph") != "X" || event.at("args").at("step") == "predicted") continue;
    const int replica = event.at("pid");
    const auto [rank, reduces] = threads.at({replica, event.at("tid")});
    auto& [first, last] = result
                              .try_emplace({replica, rank, event.at("args").at("step")},
                                           std::numeric_limits<double>::infinity(), 0.0)
                              .first->second;
    const double start = event.at("ts"), end = start + event.at("dur").get<double>();
    if (reduces) first = std::min(first, start);
    if (event.at("cat") == "backward") last = std::max(last, end);
  }
  return result;
}

class OverlapTimeline : public ::testing::TestWithParam<Case> {};

TEST_P(OverlapTimeline, TheFirstReductionBeginsBeforeTheLastBackwardEnds) {
  const auto path = std::filesystem::temp_directory_path() / "smp_overlap.json";
  std::filesystem::remove(path);
  Trained run = GetParam().run;
  run.config.timeline(path.string());
  const Result result = train(run);
  EXPECT_EQ(result.problems, (std::vector<std::string>{"", ""}));
  const auto times = read_trace(path);
  EXPECT_EQ(times.size(), 2u * (kSteps - kFirstWatched));
  for (const auto& [key, extremes] : times) {
    EXPECT_LT(extremes.first, extremes.second)
        << "replica " << std::get<0>(key) << ", " << std::get<2>(key);
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, OverlapTimeline,
                         ::testing::Values(Case{"whole", {replicas_config()}},
                                           Case{"shards", {replicas_config().gradient_shards(4)}},
                                           Case{"sharded_state",
                                                {replicas_config().shard_optimizer_state(true)}}),
                         [](const auto& info) { return info.param.name; });

/// 2 MiB of weights, in buckets of two.
constexpr int kReplicas = 4, kWeights = 32;
constexpr int64_t kWeightBytes = 64 << 10, kBytes = kWeights * kWeightBytes;

struct Bytes {
  int64_t between = 0;  // bytes of sums and gradients, after a step
  int64_t peak = 0;     // in a step that begins without gradients
};

Bytes bytes_of(bool sharded, int microbatches) {
  torch::set_num_threads(1);
  std::vector<torch::nn::Sequential> nets(kReplicas);
  for (auto& net : nets) {
    for (int i = 0; i < kWeights; ++i) {
      net->push_back(torch::nn::Linear(torch::nn::LinearOptions(128, 128).bias(false)));
    }
  }
  const auto config = Config().microbatches(microbatches).ddp(true).shard_optimizer_state(sharded);
  std::vector<Bytes> result(kReplicas);
  run_as_threads(kReplicas, Config(config).bucket_cap_mb(0.125).seed(kSeed), [&] {
    DistributedModel<torch::nn::Sequential> model(nets[rank()],
                                                  ModelOptions().gradient_as_bucket_view(true));
    auto train = step([&](torch::Tensor x) {
      auto loss = model(x).square().mean();
      model->backward(loss);
      return loss;
    });
    const auto x = torch::ones({2 * microbatches, 128});
    {
      const graph::Allocations allocations;
      train(x);
      result[rank()].between = allocations.now();
    }
    model->zero_grad();
    const graph::Allocations allocations;
    train(x);
    result[rank()].peak = allocations.peak();
  });
  for (const Bytes& of_rank : result) {
    EXPECT_NEAR(of_rank.between, result[0].between, kWeightBytes) << "all replicas have as much";
  }
  return result[0];
}

/// A replica keeps the sums of its own part.
TEST(ShardedSums, TakeTheMemoryOfAPart) {
  EXPECT_GE(bytes_of(/*sharded=*/false, 1).between, kBytes);
  constexpr int64_t kPart = kBytes / kReplicas;
  for (const int microbatches : {1, 2}) {
    const Bytes sharded = bytes_of(/*sharded=*/true, microbatches);
    EXPECT_GE(sharded.between, kPart) << microbatches;
    EXPECT_LT(sharded.between, kPart + 2 * kWeightBytes) << microbatches;
    // One bucket is reduced while the next fills, beside the gradient that goes there; with several
    // microbatches all buckets fill before the first is reduced.
    const int64_t buckets = microbatches == 1 ? 4 * kWeightBytes : kBytes;
    EXPECT_LT(sharded.peak, kPart + buckets + 4 * kWeightBytes) << microbatches;
  }
}

/// Each replica uses the one model or the other, so that buckets of both wait for gradients that
/// come on one replica only.
TEST(Overlap, OfReplicasThatTakeDifferentWays) {
  torch::set_num_threads(1);
  constexpr int kReplicas = 2, kMicrobatches = 2;
  const auto data = torch::randn({kSteps, kReplicas, 8, MlpImpl::kWidth});
  const auto loss_of = [](Mlp& a, Mlp& b, const torch::Tensor& x, int step, int replica) {
    // All begin with one graph.
    const bool both = step == 0, first = (step + replica) % 2 == 0;
    auto loss = torch::zeros({});
    if (both || first) loss = loss + a(x).square().mean();
    if (both || !first) loss = loss + (b(x) - 1).abs().mean();
    return loss;
  };
  const auto both_of = [](const auto& a, const auto& b) {
    Tensors all = a->parameters();
    for (const auto& parameter : b->parameters()) all.push_back(parameter);
    return all;
  };
  Mlp plain_a = make_mlp(3), plain_b = make_mlp(5);
  const Tensors all = both_of(plain_a, plain_b);
  torch::optim::Adam plain(all, 0.01);
  for (int i = 0; i < kSteps; ++i) {
    plain.zero_grad();
    plain_microbatches(all, kReplicas, kMicrobatches, [&](int m) {
      const int replica = m / kMicrobatches;
      const auto x = part(data[i][replica], kMicrobatches, m % kMicrobatches);
      loss_of(plain_a, plain_b, x, i, replica).backward();
    });
    plain.step();
  }
  for (const int count : {1, 2}) {
    for (const bool sharded : {false, true}) {
      SCOPED_TRACE(::testing::Message() << count << " stages" << (sharded ? ", sharded" : ""));
      const int ranks = count * kReplicas;
      std::vector<Mlp> as, bs;
      for (int rank = 0; rank < ranks; ++rank) {
        as.push_back(make_mlp(3));
        bs.push_back(make_mlp(5));
      }
      const auto config =
          stages(count).ddp(true).bucket_cap_mb(1e-4).shard_optimizer_state(sharded);
      run_as_threads(ranks, config, [&] {
        Mlp a = as[rank()], b = bs[rank()];
        DistributedModel<Mlp> first(a);
        DistributedModel<Mlp> second(b, ModelOptions().name("second"));
        DistributedOptimizer<torch::optim::Adam> optimizer(both_of(first, second), 0.01);
        int number = 0;
        auto train =
            step([&](torch::Tensor x) { first->backward(loss_of(a, b, x, number, rdp_rank())); });
        for (; number < kSteps; ++number) {
          optimizer.zero_grad();
          train(data[number][rdp_rank()].clone());
          optimizer.step();
        }
        expect_equal(to_map(first->state_dict()), state_of(*plain_a), "value");
        expect_equal(to_map(second->state_dict()), state_of(*plain_b), "value");
      });
    }
  }
}

}  // namespace
}  // namespace smp::testing
