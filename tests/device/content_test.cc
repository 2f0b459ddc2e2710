// SPDX-License-Identifier: Apache-2.0
// Hashes of tensors that a device makes.

#include "graph/content.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstring>
#include <set>
#include <vector>

#include "smp/smp.h"
#include "tests/device/fake_device.h"
#include "tests/error_of.h"

namespace smp::testing {
namespace {

/// Hashes of tensors by a device, of which the host sees the sums only.
std::vector<uint64_t> on_device(const std::vector<torch::Tensor>& tensors) {
  std::vector<torch::Tensor> there;
  for (const auto& tensor : tensors) there.push_back(tensor.to(fake_device()));
  HostUses uses;
  auto hashes = graph::hashes_in_place(there);
  const auto copies = uses.take(0);
  EXPECT_EQ(copies.size(), 1u);
  return hashes;
}

uint64_t on_device(const torch::Tensor& tensor) {
  return on_device(std::vector<torch::Tensor>{tensor})[0];
}

/// The formula, with numbers of the host.
uint64_t by_hand(const std::vector<int32_t>& bits) {
  uint64_t sum = 0;
  for (uint64_t i = 0; i < bits.size(); ++i) {
    auto weight = static_cast<int64_t>(i * 0x9e3779b97f4a7c15ull);
    weight = static_cast<int64_t>(static_cast<uint64_t>(weight ^ (weight >> 32)) *
                                  0xbf58476d1ce4e5b9ull);
    weight = (weight ^ (weight >> 29)) | 1;
    sum += static_cast<uint64_t>(int64_t{bits[i]}) * static_cast<uint64_t>(weight);
  }
  return sum;
}

TEST(HashesInPlace, AreTheFormula) {
  torch::manual_seed(1);
  const auto x = torch::randn({7, 11});
  std::vector<int32_t> bits(x.numel());
  std::memcpy(bits.data(), x.const_data_ptr(), x.nbytes());
  EXPECT_EQ(on_device(x), by_hand(bits));
  EXPECT_EQ(on_device(x.t().contiguous().t()), by_hand(bits)) << "strides do not count";
  EXPECT_EQ(on_device(torch::empty({0})), 0u);
}

TEST(HashesInPlace, OnTheCpuAreThoseOfTheContent) {
  const auto x = torch::arange(5);
  EXPECT_EQ(graph::hashes_in_place({x}), std::vector<uint64_t>{graph::hash_content(x)});
}

TEST(HashesInPlace, DifferWhereverAnElementDoes) {
  for (const auto type :
       {torch::kFloat, torch::kDouble, torch::kHalf, torch::kBFloat16, torch::kLong, torch::kShort,
        torch::kByte, torch::kBool, torch::kComplexFloat, torch::kComplexDouble}) {
    const auto x = torch::zeros({12}, type);
    std::vector<torch::Tensor> all = {x};
    for (int i = 0; i < 12; ++i) {
      all.push_back(x.clone());
      all.back()[i] = 1;
    }
    const auto hashes = on_device(all);
    EXPECT_EQ(std::set<uint64_t>(hashes.begin(), hashes.end()).size(), all.size()) << type;
  }
}

/// More than are summed at once.
TEST(HashesInPlace, CountTheOrderOfParts) {
  const int64_t part = 1 << 22;
  auto x = torch::zeros({2 * part + 1}, torch::kByte), y = x.clone();
  x[0] = 1;
  y[part] = 1;
  EXPECT_NE(on_device(x), on_device(y));
  auto z = x.clone();
  z[2 * part] = 1;
  EXPECT_NE(on_device(z), on_device(x));
}

/// Trains on two ranks that are given `x` as it is, and as `changed` makes it.
void train(const std::function<torch::Tensor(torch::Tensor)>& changed) {
  torch::set_num_threads(1);
  torch::manual_seed(2);
  std::vector<torch::nn::Sequential> nets;
  for (int i = 0; i < 2; ++i) {
    nets.emplace_back(torch::nn::Linear(3, 3), torch::nn::Linear(3, 3));
  }
  run_as_threads(2, Config().partitions(2).timeout_seconds(60), [&] {
    set_device(rank());
    DistributedModel<torch::nn::Sequential> model(nets[rank()]);
    auto step_function = step([&](torch::Tensor x) {
      auto loss = nets[rank()]->forward(x).sum();
      model->backward(loss);
      return loss;
    });
    const auto x = torch::ones({4, 3});
    for (int i = 0; i < 2; ++i) step_function(rank() == 0 ? x.to(device()) : changed(x));
  });
}

TEST(HashesInPlace, CompareInputsOnBothSidesOfTheBus) {
  train([](const torch::Tensor& x) { return x.to(device()); });
  train([](const torch::Tensor& x) { return x; });
  for (const bool on_host : {false, true}) {
    const auto text = error_of<UsageError>([&] {
      train([&](const torch::Tensor& x) { return on_host ? x * 2 : (x * 2).to(device()); });
    });
    expect_has(text, {"was given different batches on pp rank 0 and pp rank 1"});
  }
}

}  // namespace
}  // namespace smp::testing
