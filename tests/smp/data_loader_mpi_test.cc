// SPDX-License-Identifier: Apache-2.0
// Runs on 4 ranks under mpirun, 2 stages x 2 replicas, which load their batches by threads of their
// own: the same batches, and the same bits, as one plain libtorch process that loads by itself.

#include <atomic>
#include <functional>
#include <thread>

#include "tests/smp/oracle.h"

namespace smp::testing {
namespace {

namespace samplers = torch::data::samplers;

constexpr int kReplicas = 2, kMicrobatches = 2, kEpochs = 2;
constexpr int64_t kBatch = 8;  // a batch of all replicas together
constexpr size_t kSamples = 37;
constexpr double kRate = 0.05;

/// Samples that the thread that loads them computes.
class Waves : public torch::data::datasets::Dataset<Waves> {
 public:
  explicit Waves(std::shared_ptr<std::atomic<int>> own) : own_(std::move(own)) {}

  torch::data::Example<> get(size_t index) override {
    if (std::this_thread::get_id() == thread_) ++*own_;
    const auto generator = at::detail::createCPUGenerator(index);
    const auto x = torch::sin(3 * torch::randn({MlpImpl::kWidth}, generator));
    return {x, x.sum().tanh().reshape({1})};
  }
  std::optional<size_t> size() const override { return kSamples; }

 private:
  const std::shared_ptr<std::atomic<int>> own_;  // number of samples of the thread that made this
  const std::thread::id thread_ = std::this_thread::get_id();
};

/// A sampler of the user's own: every `replicas`-th sample, the last one first.
class Backwards : public samplers::Sampler<> {
 public:
  Backwards(size_t size, size_t replicas, size_t replica)
      : size_(size), replicas_(replicas), replica_(replica) {}

  void reset(std::optional<size_t> size = std::nullopt) override {
    size_ = size.value_or(size_);
    taken_ = 0;
  }
  std::optional<std::vector<size_t>> next(size_t count) override {
    std::vector<size_t> indices;
    for (; indices.size() < count && replica_ + taken_ * replicas_ < size_; ++taken_) {
      indices.push_back(size_ - 1 - replica_ - taken_ * replicas_);
    }
    if (indices.empty()) return std::nullopt;
    return indices;
  }
  void save(torch::serialize::OutputArchive& /*archive*/) const override {}
  void load(torch::serialize::InputArchive& /*archive*/) override {}

 private:
  size_t size_, replicas_, replica_, taken_ = 0;
};

/// A sampler of libtorch for one of some replicas, in an epoch.
template <class Sampler>
Sampler of_libtorch(size_t replicas, size_t replica, int epoch) {
  Sampler sampler(kSamples, replicas, replica);
  sampler.set_epoch(epoch);
  return sampler;
}

using Batch = std::pair<torch::Tensor, torch::Tensor>;

/// Calls `use` with the batches of an epoch while so many threads load further ones.
template <class Sampler>
void load(const Sampler& sampler, int64_t size, int workers,
          const std::function<void(const Batch&)>& use) {
  const auto own = std::make_shared<std::atomic<int>>(0);
  const auto loader = torch::data::make_data_loader(
      Waves(own).map(torch::data::transforms::Stack<>()), sampler,
      torch::data::DataLoaderOptions().batch_size(size).workers(workers).drop_last(true));
  int loaded = 0;
  for (const auto& batch : *loader) {
    use({batch.data, batch.target});
    ++loaded;
  }
  EXPECT_GT(loaded, 1);
  EXPECT_EQ(*own > 0, workers == 0) << "who loads";
}

/// The loader of an epoch: every rank loads the batches of all replicas, or its replica's own.
using LoadEpoch = std::function<void(int replicas, int replica, int epoch, int workers,
                                     const std::function<void(const Batch&)>& use)>;

/// One process: the net's weights, and losses by step and global microbatch. `whole` says whether
/// ranks load the batches of all replicas.
std::pair<Named, std::vector<Tensors>> train_plain(Mlp net, const LoadEpoch& load_epoch,
                                                   bool whole) {
  std::vector<std::vector<Batch>> all(kReplicas);  // batches by replica and step
  for (int epoch = 0; epoch < kEpochs; ++epoch) {
    for (int r = 0; r < kReplicas; ++r) {
      load_epoch(whole ? 1 : kReplicas, whole ? 0 : r, epoch, 0, [&](const Batch& batch) {
        const auto own = [&](const torch::Tensor& tensor) {
          return whole ? part(tensor, kReplicas, r) : tensor;
        };
        all[r].emplace_back(own(batch.first), own(batch.second));
      });
    }
  }
  const Tensors parameters = unique_parameters(*net);
  torch::optim::SGD optimizer(parameters, kRate);
  std::vector<Tensors> losses;
  for (size_t i = 0; i < all[0].size(); ++i) {
    optimizer.zero_grad();
    losses.push_back(plain_backward(parameters, kReplicas, kMicrobatches, [&](int m) {
      const auto& [x, y] = all[m / kMicrobatches][i];
      const int within = m % kMicrobatches;
      return torch::mse_loss(net(part(x, kMicrobatches, within)), part(y, kMicrobatches, within));
    }));
    optimizer.step();
  }
  return {state_of(*net), losses};
}

/// The model, which all trainings begin anew: one is made before the first step.
class DataLoaderOfRanks {
 public:
  /// Trains both ways, by a function that makes the sampler of a replica in an epoch.
  template <class MakeSampler>
  void check(const MakeSampler& make) {
    const LoadEpoch load_epoch = [&](int replicas, int replica, int epoch, int workers,
                                     const auto& use) {
      load(make(replicas, replica, epoch), kBatch / replicas, workers, use);
    };
    for (const bool whole : {true, false}) check(load_epoch, whole);
  }

 private:
  void check(const LoadEpoch& load_epoch, bool whole) {
    SCOPED_TRACE(whole ? "batches of all replicas" : "batches of one");
    model_->load_state_dict(begin_);
    const auto plain = train_plain(make_mlp(), load_epoch, whole);
    size_t done = 0;
    for (int epoch = 0; epoch < kEpochs; ++epoch) {
      load_epoch(whole ? 1 : kReplicas, whole ? 0 : dp_rank(), epoch, 2, [&](const Batch& batch) {
        optimizer_.zero_grad();
        const auto got = whole ? train_(shard(batch.first), shard(batch.second))
                               : train_(batch.first, batch.second);
        optimizer_.step();
        ASSERT_LT(done, plain.second.size());
        const auto begin = plain.second[done].begin() + dp_rank() * kMicrobatches;
        expect_equal(got.outputs(), Tensors(begin, begin + kMicrobatches),
                     "loss of step " + std::to_string(done));
        ++done;
      });
    }
    EXPECT_EQ(done, plain.second.size());
    expect_equal(to_map(model_->state_dict()), plain.first, "weights");
  }

  DistributedModel<Mlp> model_{make_mlp()};
  DistributedOptimizer<torch::optim::SGD> optimizer_{model_->parameters(), kRate};
  decltype(make_training(model_)) train_ = make_training(model_);
  torch::OrderedDict<std::string, torch::Tensor> begin_ = model_->state_dict();
};

TEST(DataLoaders, OfThreadsOnRanks) {
  init(stages(2).microbatches(kMicrobatches).ddp(true));
  DataLoaderOfRanks ranks;
  ranks.check(of_libtorch<samplers::DistributedRandomSampler>);
  ranks.check(of_libtorch<samplers::DistributedSequentialSampler>);
  ranks.check([](size_t replicas, size_t replica, int epoch) {
    return Backwards(kSamples - epoch, replicas, replica);
  });
}

}  // namespace
}  // namespace smp::testing
