// SPDX-License-Identifier: Apache-2.0
#include <ATen/Version.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>

#include "tests/smp/tensor_parallel.h"

// Settings that do not go together with tensor parallelism, and mistakes in its use: the texts.
namespace smp {
namespace {

using namespace testing;

void evaluate(DividedModel& net, const torch::Tensor& x, const torch::Tensor& y) {
  step([&](torch::Tensor x, torch::Tensor y) { return net.loss(x, y); })(x, y);
}

/// In the first step of a model of its own.
void evaluate(const torch::Tensor& x, const torch::Tensor& y) {
  const auto net = make_model<DividedModel>(5);
  ModelOf<DividedModel> model(net);
  evaluate(*net, x, y);
}

TEST(TensorParallelRefusal, BatchesOfOtherSizes) {
  const auto text = error_of_run<UsageError>(2, config_of({2}), [] {
    const auto ids = torch::zeros({4 * (1 + tp_rank()), 5}, torch::kLong);
    evaluate(ids, ids);
  });
  expect_has(text, {"step function \"step 0\" was given inputs of other shapes on the ranks of a "
                    "tensor-parallel group, which run the batches of all together: tp rank 0 has "
                    "Long[4, 5], Long[4, 5], tp rank 1 has Long[8, 5], Long[8, 5]. Give them "
                    "batches of one size and order in memory (contiguous()), or one batch and "
                    "\"prescaled_batch\": true"});
}

TEST(TensorParallelRefusal, BatchesInAnotherOrderInMemory) {
  const auto text = error_of_run<UsageError>(2, config_of({2}), [] {
    const auto ids = torch::zeros({4, 5}, torch::kLong);
    evaluate(ids, tp_rank() == 0 ? ids : torch::zeros({5, 4}, torch::kLong).t());
  });
  expect_has(text, {"tp rank 0 has Long[4, 5], Long[4, 5], tp rank 1 has Long[4, 5], "
                    "Long[4, 5] with strides [1, 4]. Give them"});
}

/// Whole layers are computed by all ranks, each for itself, and must not drift apart.
TEST(TensorParallelRefusal, OtherNumbersOfThreads) {
  const int before = at::get_num_threads();
  const auto text = error_of_run<UsageError>(2, config_of({2}), [] {
    at::get_num_threads();  // a thread's first call takes over the number set by any thread
    at::set_num_threads(1 + tp_rank());
    const auto ids = torch::zeros({4, 5}, torch::kLong);
    evaluate(ids, ids);
  });
  at::set_num_threads(before);
  const std::string capability = at::get_cpu_capability();
  expect_has(text, {"tp rank 0 computes with 1 threads and CPU capability " + capability +
                        ", tp rank 1 with 2 threads and CPU capability " + capability,
                    "set one number of threads (OMP_NUM_THREADS, at::set_num_threads)"});
}

TEST(TensorParallelRefusal, OtherBatchesOfOnePrescaledGroup) {
  const auto text = error_of_run<UsageError>(2, config_of({2, 1, 1, true}), [] {
    const auto ids = torch::full({8, 5}, tp_rank(), torch::kLong);
    evaluate(ids, ids);
  });
  expect_has(text, {"was given different batches on mp rank 0 and mp rank 1 of one pipeline",
                    "shard data by smp::rdp_rank() and smp::rdp_size(), not by smp::rank()"});
}

TEST(TensorParallelRefusal, OtherConstantsInAGroup) {
  const auto text = error_of_run<UsageError>(2, config_of({2}), [] {
    const auto net = make_model<DividedModel>(5);
    ModelOf<DividedModel> model(net);
    auto evaluate =
        step([&](torch::Tensor x, torch::Tensor y) { return net->loss(x, y) * (1.5 + tp_rank()); });
    const auto ids = torch::zeros({4, 5}, torch::kLong);
    evaluate(ids, ids);
  });
  expect_has(text, {"has other constants on mp rank 0 and mp rank 1 of one pipeline"});
}

struct Slice {
  torch::Tensor rows;
  Slice smp_slice(int64_t count, int64_t index, int64_t axis) const {
    const int64_t size = rows.size(axis) / count;
    return {rows.narrow(axis, index * size, size)};
  }
};

TEST(TensorParallelRefusal, ArgumentsThatSliceThemselves) {
  const auto text = error_of_run<UsageError>(2, config_of({2}), [] {
    const auto net = make_model<DividedModel>(5);
    ModelOf<DividedModel> model(net);
    auto evaluate = step([&](Slice slice, torch::Tensor y) { return net->loss(slice.rows, y); });
    const auto ids = torch::zeros({4, 5}, torch::kLong);
    evaluate(Slice{ids}, ids);
  });
  expect_has(text, {"an argument slices itself (smp_slice), so the ranks of a tensor-parallel "
                    "group cannot be given each other's. Give them one batch and set "
                    "\"prescaled_batch\": true"});
}

template <class Optimizer>
std::string refused() {
  return error_of_run<UsageError>(2, config_of({2}), [] {
    const auto net = make_model<DividedModel>(5);
    ModelOf<DividedModel> model(net);
    DistributedOptimizer<Optimizer> optimizer(model->parameters());
  });
}

TEST(TensorParallelRefusal, OptimizersThatNeedWholeParameters) {
  expect_has(refused<torch::optim::LBFGS>(),
             {"needs whole parameters, and with \"tensor_parallel_degree\" each rank updates its "
              "pieces of them. Use another optimizer, or set \"tensor_parallel_degree\" to 1"});
}

/// Shares a parameter with another that divides it along another dimension.
struct Tied : torch::nn::Module, nn::SplitModule {
  Tied(const torch::Tensor& weight, nn::ParameterSplit how) : split(std::move(how)) {
    register_parameter("weight", weight);
  }
  std::map<std::string, nn::ParameterSplit> split_parameters() const override {
    return {{"weight", split}};
  }
  nn::ParameterSplit split;
};

struct TiedPair : torch::nn::Module {
  TiedPair(const nn::ParameterSplit& first, const nn::ParameterSplit& second) {
    a = register_module("a", std::make_shared<Tied>(torch::zeros({4, 4}), first));
    b = register_module("b", std::make_shared<Tied>(a->named_parameters()["weight"], second));
  }
  torch::Tensor forward(torch::Tensor x) { return x; }
  std::shared_ptr<Tied> a, b;
};

std::string wrapping_error(const nn::ParameterSplit& first, const nn::ParameterSplit& second) {
  return error_of_run<UsageError>(2, config_of({2}), [&] {
    ModelOf<TiedPair> model(std::make_shared<TiedPair>(first, second));
  });
}

const nn::ParameterSplit kRowSplit{{8, 4}, 0, 1, 2};

TEST(TensorParallelRefusal, TiedParametersThatAreDividedDifferently) {
  expect_has(wrapping_error(kRowSplit, {{4, 8}, 1, 1, 2}),
             {"parameter \"b.weight\" is tied to \"a.weight\" and divided in another way: [4, 8] "
              "along dimension 1 over 2 ranks against [8, 4] along dimension 0 over 2 ranks. "
              "Modules that share a parameter must divide it alike"});
}

TEST(TensorParallelRefusal, PartsOfOtherSizes) {
  expect_has(wrapping_error({{4, 4}, 1, 1, 2}, kRowSplit),
             {"parameter \"a.weight\" of shape [4, 4] is said to be a part of [4, 4] along "
              "dimension 1 over 2 ranks, which would have shape [4, 2]"});
}

TEST(TensorParallelRefusal, AnotherNumberOfRanks) {
  expect_has(wrapping_error({{8, 4}, 0, 1, 4}, kRowSplit),
             {"is divided among 4 ranks, and \"tensor_parallel_degree\" is 2. Construct modules of "
              "smp::nn after smp::init"});
}

TEST(TensorParallelRefusal, MarkingAfterTheFirstStep) {
  const auto text = error_of_run<UsageError>(2, config_of({2}), [] {
    const auto net = make_model<DividedModel>(5);
    ModelOf<DividedModel> model(net);
    const auto ids = torch::zeros({4, 5}, torch::kLong);
    evaluate(*net, ids, ids);
    set_tensor_parallelism(*net);
  });
  expect_has(text, {"smp::set_tensor_parallelism was called after the first step"});
}

TEST(TensorParallelRefusal, MarkingWhatHasNoParameters) {
  expect_has(error_of<UsageError>([] { set_tensor_parallelism(torch::nn::Dropout(0.1)); }),
             {"smp::set_tensor_parallelism: module", "has no parameters that could be divided"});
}

}  // namespace
}  // namespace smp
