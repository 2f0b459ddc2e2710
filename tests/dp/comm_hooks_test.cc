// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <thread>

#include "tests/dp/models.h"
#include "tests/dp/replicas.h"

namespace smp::dp {
namespace {

using namespace testing;

constexpr int kReplicas = 3;

Training training() {
  Training training;
  training.replicas = kReplicas;
  return training;
}

/// The gradients that the ranks have on their own in the first step, by rank and parameter.
std::vector<std::vector<torch::Tensor>> own_gradients(Mlp module) {
  std::vector<std::vector<torch::Tensor>> result(kReplicas);
  for (int rank = 0; rank < kReplicas; ++rank) {
    module->zero_grad();
    kOnePass(module, make_batch(training(), rank, 0, 0));
    for (const auto& parameter : module->parameters()) {
      result[rank].push_back(parameter.grad().clone());
    }
  }
  module->zero_grad();
  return result;
}

Mlp copy_of(const Mlp& module) {
  Mlp copy;
  copy_all(module->parameters(), copy->parameters());
  return copy;
}

/// Runs `steps` passes over the same batch with a hook. Returns the gradients of each.
std::vector<std::vector<torch::Tensor>> reduce_with(const Mlp& module, const CommHook& hook,
                                                    int steps, const DDPOptions& options) {
  std::vector<Mlp> modules;
  for (int rank = 0; rank < kReplicas; ++rank) modules.push_back(copy_of(module));
  std::vector<std::vector<std::vector<torch::Tensor>>> of_rank(kReplicas);
  comm::run_ranks(kReplicas, [&](const comm::CommunicatorPtr& world) {
    DistributedDataParallel<Mlp> model(modules[world->rank()],
                                       DDPOptions(options).process_group(group_of(world)));
    model.register_comm_hook(hook);
    for (int step = 0; step < steps; ++step) {
      model->zero_grad();
      kOnePass(model, make_batch(training(), world->rank(), 0, 0));
      of_rank[world->rank()].push_back(state_of(model).gradients);
    }
  });
  for (int rank = 1; rank < kReplicas; ++rank) {
    for (int step = 0; step < steps; ++step) {
      for (size_t i = 0; i < of_rank[0][step].size(); ++i) {
        EXPECT_TRUE(torch::equal(of_rank[0][step][i], of_rank[rank][step][i])) << rank;
      }
    }
  }
  return of_rank[0];
}

TEST(CommHooks, CompressToHalfPrecision) {
  torch::manual_seed(3);
  const Mlp module;
  const auto own = own_gradients(module);
  for (const auto type : {torch::kHalf, torch::kBFloat16}) {
    const CommHook hook = type == torch::kHalf ? fp16_compress_hook : bf16_compress_hook;
    const auto got = reduce_with(module, hook, 1, small_buckets());
    for (size_t i = 0; i < own[0].size(); ++i) {
      torch::Tensor sum;
      for (int rank = 0; rank < kReplicas; ++rank) {
        const auto part = (own[rank][i].to(type) / kReplicas).to(torch::kFloat);
        sum = rank == 0 ? part : sum + part;
      }
      EXPECT_TRUE(torch::equal(got[0][i], sum.to(type).to(torch::kFloat))) << type << " " << i;
    }
  }
}

/// A hook sees every bucket with its parameters, in order, and decides the gradient.
TEST(CommHooks, AreGivenTheBuckets) {
  torch::manual_seed(3);
  const Mlp module;
  const auto own = own_gradients(module);
  std::atomic<int> calls{0};
  const auto hook = [&](const GradBucket& bucket) {
    EXPECT_EQ(bucket.divisor, kReplicas);
    EXPECT_EQ(bucket.parameters.size(), bucket.gradients.size());
    EXPECT_EQ(bucket.is_last(), bucket.index + 1 == bucket.count);
    for (size_t i = 0; i < bucket.gradients.size(); ++i) {
      EXPECT_EQ(bucket.gradients[i].sizes(), bucket.parameters[i].sizes());
      EXPECT_EQ(bucket.names[i].find("second") == 0, bucket.parameters[i].size(0) == 3);
    }
    ++calls;
    return then(bucket.group.async().all_reduce(bucket.buffer, ReduceOp::kMax),
                [buffer = bucket.buffer] { buffer.neg_(); });
  };
  const auto got = reduce_with(module, hook, 1, small_buckets());
  EXPECT_EQ(calls, kReplicas * 3);
  for (size_t i = 0; i < own[0].size(); ++i) {
    const auto largest = torch::maximum(torch::maximum(own[0][i], own[1][i]), own[2][i]);
    EXPECT_TRUE(torch::equal(got[0][i], -largest)) << i;
  }
}

TEST(CommHooks, OnlyOne) {
  const auto text = smp::testing::error_of<std::exception>([] {
    comm::run_ranks(1, [](const comm::CommunicatorPtr& world) {
      DistributedDataParallel<Mlp> model(Mlp(), DDPOptions().process_group(group_of(world)));
      model.register_comm_hook(fp16_compress_hook);
      model.register_comm_hook(fp16_compress_hook);
    });
  });
  EXPECT_NE(text.find("DistributedDataParallel: register_comm_hook was called twice"),
            std::string::npos)
      << text;
}

/// PowerSGD of one matrix, written down from the paper with plain loops and double precision.
class PlainPowerSGD {
 public:
  PlainPowerSGD(int rows, int columns, int rank, std::vector<double> q)
      : rows_(rows), columns_(columns), rank_(rank), q_(std::move(q)), errors_(kReplicas) {
    for (auto& error : errors_) error.assign(rows * columns, 0);
  }

  /// The gradients of all ranks in, the result of all out.
  std::vector<double> reduce(std::vector<std::vector<double>> gradients) {
    std::vector<double> p(rows_ * rank_, 0), q(columns_ * rank_, 0);
    orthonormalize(q_, columns_);
    for (int r = 0; r < kReplicas; ++r) {
      for (size_t i = 0; i < gradients[r].size(); ++i) gradients[r][i] += errors_[r][i];
      for (int i = 0; i < rows_; ++i) {
        for (int j = 0; j < columns_; ++j) {
          for (int k = 0; k < rank_; ++k) {
            p[i * rank_ + k] += gradients[r][i * columns_ + j] * q_[j * rank_ + k];
          }
        }
      }
    }
    orthonormalize(p, rows_);
    std::vector<double> result(rows_ * columns_, 0);
    for (int i = 0; i < rows_; ++i) {
      for (int j = 0; j < columns_; ++j) {
        for (int k = 0; k < rank_; ++k) {
          for (int r = 0; r < kReplicas; ++r) {
            q[j * rank_ + k] += gradients[r][i * columns_ + j] * p[i * rank_ + k] / kReplicas;
          }
        }
      }
    }
    for (int i = 0; i < rows_; ++i) {
      for (int j = 0; j < columns_; ++j) {
        for (int k = 0; k < rank_; ++k) {
          result[i * columns_ + j] += p[i * rank_ + k] * q[j * rank_ + k];
        }
      }
    }
    for (int r = 0; r < kReplicas; ++r) {
      for (size_t i = 0; i < result.size(); ++i) errors_[r][i] = gradients[r][i] - result[i];
    }
    q_ = q;
    return result;
  }

 private:
  void orthonormalize(std::vector<double>& matrix, int rows) const {
    for (int k = 0; k < rank_; ++k) {
      for (int before = 0; before < k; ++before) {
        double dot = 0;
        for (int i = 0; i < rows; ++i) dot += matrix[i * rank_ + k] * matrix[i * rank_ + before];
        for (int i = 0; i < rows; ++i) {
          matrix[i * rank_ + k] -= dot * matrix[i * rank_ + before];
        }
      }
      double norm = 0;
      for (int i = 0; i < rows; ++i) norm += matrix[i * rank_ + k] * matrix[i * rank_ + k];
      for (int i = 0; i < rows; ++i) matrix[i * rank_ + k] /= std::sqrt(norm);
    }
  }

  const int rows_, columns_, rank_;
  std::vector<double> q_;
  std::vector<std::vector<double>> errors_;
};

std::vector<double> numbers(const torch::Tensor& tensor) {
  const auto flat = tensor.to(torch::kDouble).contiguous();
  return {flat.const_data_ptr<double>(), flat.const_data_ptr<double>() + flat.numel()};
}

TEST(PowerSGD, IsThatOfThePaper) {
  torch::manual_seed(3);
  const Mlp module;
  const auto own = own_gradients(module);
  constexpr int kSteps = 5, kStart = 2;
  for (const int64_t rank : {1, 2}) {
    const auto hook_options = [&] {
      return PowerSGDOptions()
          .start_iter(kStart)
          .matrix_approximation_rank(rank)
          .min_compression_rate(1)
          .random_seed(9);
    };
    // Each replica has a state of its own, as processes have.
    std::vector<CommHook> hooks;
    for (int r = 0; r < kReplicas; ++r) hooks.push_back(power_sgd_hook(hook_options()));
    const CommHook hook = [&](const GradBucket& bucket) {
      return hooks[bucket.group.rank()](bucket);
    };
    const auto got = reduce_with(module, hook, kSteps, DDPOptions());
    // The one bucket's first matrix is the last parameter's: the seed's first numbers.
    auto generator = at::detail::createCPUGenerator(9);
    const auto q_second = torch::randn({8, rank}, generator, torch::kFloat);
    const auto q_first = torch::randn({6, rank}, generator, torch::kFloat);
    PlainPowerSGD first(8, 6, rank, numbers(q_first)), second(3, 8, rank, numbers(q_second));
    for (int step = 0; step < kSteps; ++step) {
      for (size_t i = 0; i < own[0].size(); ++i) {
        const std::vector<torch::Tensor> parts{own[0][i], own[1][i], own[2][i]};
        if (step < kStart || own[0][i].dim() == 1) {
          EXPECT_TRUE(torch::equal(got[step][i], mean(parts, kReplicas))) << step << " " << i;
          continue;
        }
        std::vector<std::vector<double>> gradients;
        for (const auto& part : parts) gradients.push_back(numbers(part));
        PlainPowerSGD& plain = i == 0 ? first : second;
        const auto expected = plain.reduce(gradients);
        const auto values = numbers(got[step][i]);
        for (size_t j = 0; j < expected.size(); ++j) {
          EXPECT_NEAR(values[j], expected[j], 2e-5) << "step " << step << " parameter " << i;
        }
      }
    }
  }
}

/// Error feedback returns lost parts later: the sum over iterations nears that of the mean.
TEST(PowerSGD, ErrorFeedbackLosesNothing) {
  torch::manual_seed(3);
  const Mlp module;
  const auto own = own_gradients(module);
  constexpr int kSteps = 60;
  const auto distance = [&](bool feedback) {
    std::vector<CommHook> hooks;
    for (int r = 0; r < kReplicas; ++r) {
      hooks.push_back(power_sgd_hook(
          PowerSGDOptions().start_iter(2).min_compression_rate(1).use_error_feedback(feedback)));
    }
    const auto got = reduce_with(
        module, [&](const GradBucket& bucket) { return hooks[bucket.group.rank()](bucket); },
        kSteps, DDPOptions());
    torch::Tensor sum;
    for (const auto& step : got) sum = sum.defined() ? sum + step[0] : step[0].clone();
    const auto expected = mean({own[0][0], own[1][0], own[2][0]}, kReplicas);
    return ((sum / kSteps - expected).norm() / expected.norm()).item<double>();
  };
  EXPECT_LT(distance(true), 0.1);
  EXPECT_GT(distance(false), 0.1);
}

TEST(PowerSGD, RefusesToStartBeforeBucketsAreRebuilt) {
  const auto text = smp::testing::error_of<std::exception>(
      [] { power_sgd_hook(PowerSGDOptions().start_iter(1)); });
  EXPECT_NE(text.find("start_iter of 2 or more, got 1 and 1"), std::string::npos) << text;
}

thread_local std::function<void()> at_gate;  // gate of this rank

/// Returns its argument; its backward calls `at_gate`.
struct Gate : torch::autograd::Function<Gate> {
  static torch::Tensor forward(torch::autograd::AutogradContext* /*context*/, torch::Tensor x) {
    return x * 1;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* /*context*/,
                                                 torch::autograd::variable_list gradients) {
    at_gate();
    return gradients;
  }
};

struct GatedMlpImpl : MlpImpl {
  torch::Tensor forward(torch::Tensor x) { return second(Gate::apply(torch::relu(first(x)))); }
};
TORCH_MODULE(GatedMlp);

/// The backward waits in its midst for the reduction that it has started.
TEST(CommHooks, ABucketIsReducedWhileTheBackwardGoesOn) {
  std::vector<GatedMlp> modules(kReplicas);
  comm::run_ranks(kReplicas, [&](const comm::CommunicatorPtr& world) {
    DistributedDataParallel<GatedMlp> model(modules[world->rank()],
                                            small_buckets().process_group(group_of(world)));
    std::vector<WorkPtr> started;
    model.register_comm_hook([&](const GradBucket& bucket) {
      started.push_back(bucket.group.async().all_reduce(bucket.buffer));
      return started.back();
    });
    int passes = 0;
    at_gate = [&] {
      ++passes;
      ASSERT_FALSE(started.empty());
      const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
      while (!started.front()->test() && std::chrono::steady_clock::now() < end) {
        std::this_thread::yield();
      }
      EXPECT_TRUE(started.front()->test());
    };
    for (int pass = 1; pass <= 2; ++pass) {
      started.clear();
      kOnePass(model, make_batch(training(), world->rank(), 0, 0));
      EXPECT_EQ(passes, pass);
      EXPECT_GT(started.size(), 1u);
    }
    at_gate = nullptr;
  });
}

}  // namespace
}  // namespace smp::dp
