// SPDX-License-Identifier: Apache-2.0
#include "graph/absent.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "smp/error.h"
#include "tests/error_of.h"

namespace smp::graph {
namespace {

using testing::error_of;
using testing::expect_has;

AbsencePtr absence(bool ignores_writes = true) {
  return std::make_shared<Absence>(
      Absence{"weight \"w\" of rank 1", "Ask rank 1.", ignores_writes});
}

at::Tensor absent(at::IntArrayRef sizes, bool ignores_writes = true) {
  return make_absent_like(torch::zeros(sizes), absence(ignores_writes));
}

at::Tensor absent_parameter(at::IntArrayRef sizes) { return absent(sizes).requires_grad_(); }

TEST(Absent, HasTheShapeAndNoNumbers) {
  const auto like = torch::zeros({3, 5}, torch::kDouble).t();
  const auto tensor = make_absent_like(like, absence());
  EXPECT_TRUE(is_absent(tensor));
  EXPECT_FALSE(is_absent(like));
  EXPECT_FALSE(is_absent(at::Tensor()));
  EXPECT_EQ(tensor.sizes(), like.sizes());
  EXPECT_EQ(tensor.strides(), like.strides());
  EXPECT_EQ(tensor.scalar_type(), torch::kDouble);
  EXPECT_EQ(tensor.device(), like.device());
  EXPECT_EQ(make_absent_like(like, absence(), torch::kFloat).scalar_type(), torch::kFloat);
  EXPECT_EQ(tensor.storage().nbytes(), 0u);
}

/// Computed values have the shape, type and strides that they have elsewhere.
TEST(Absent, ResultsAreAbsent) {
  using Function = std::function<at::Tensor(const at::Tensor&)>;
  const auto scale = torch::tensor(2.0, torch::kDouble), other = torch::ones({4, 6});
  const std::vector<Function> functions = {
      [](const auto& t) { return t * 0.5; },
      [](const auto& t) { return t + t; },
      [&](const auto& t) { return t * scale; },
      [&](const auto& t) { return t + other; },
      [](const auto& t) { return t.square().sum(); },
      [](const auto& t) { return t.norm(2); },
      [](const auto& t) { return t.detach(); },
      [](const auto& t) { return t.clone(); },
      [](const auto& t) { return t.data(); },
      [](const auto& t) { return t.t(); },
      [](const auto& t) { return t[1]; },
      [](const auto& t) { return t.narrow(0, 1, 2); },
      [](const auto& t) { return t.flatten(); },
      [](const auto& t) { return t.split(2)[1]; },
      [](const auto& t) { return t.to(torch::kDouble); },
      [](const auto& t) { return torch::zeros_like(t); },
      [](const auto& t) {
        return torch::stack({t, t});
      },
      [](const auto& t) { return torch::matmul(t, t.t()); },
      [](const auto& t) { return t > 0; },
      [](const auto& t) { return torch::randn_like(t); },
      [](const auto& t) { return torch::dropout(t, 0.5, true); }};
  for (size_t i = 0; i < functions.size(); ++i) {
    SCOPED_TRACE(i);
    const auto got = functions[i](absent({4, 6}));
    const auto expected = functions[i](torch::ones({4, 6}));
    EXPECT_TRUE(is_absent(got));
    EXPECT_EQ(got.sizes(), expected.sizes());
    EXPECT_EQ(got.strides(), expected.strides());
    EXPECT_EQ(got.scalar_type(), expected.scalar_type());
  }
}

TEST(Absent, WritesAreAnotherRanksBusiness) {
  const auto tensor = absent({4, 6});
  const auto rows = torch::tensor({0, 2});
  const std::vector<std::function<at::Tensor()>> writes = {
      [&] { return tensor.mul_(0.5); },
      [&] { return tensor.zero_(); },
      [&] { return tensor.clamp_(-1, 1); },
      [&] {
        return tensor.add_(torch::ones({4, 6}), 0.1);
      },
      [&] { return tensor.add_(absent({6})); },
      [&] {
        return tensor.copy_(torch::ones({4, 6}));
      },
      [&] { return tensor.index_fill_(0, rows, 0); },
      [&] {
        return tensor.masked_fill_(torch::ones({4, 6}, torch::kBool), 0);
      },
      [&] { return tensor.uniform_(-1, 1); }};
  for (const auto& write : writes) EXPECT_TRUE(write().is_same(tensor));
  tensor[1].zero_();
  at::Tensor(tensor).index_put_({rows}, 0);
  EXPECT_TRUE(is_absent(tensor));
}

void expect_refused(const std::string& op, const std::function<void()>& action) {
  expect_has(error_of<UsageError>(action),
             {"operator aten::" + op + " needs ", "weight \"w\" of rank 1",
              ": this rank does not have these numbers. Ask rank 1."});
}

TEST(Absent, NumbersThatAreNeededAreRefused) {
  const auto tensor = absent({2, 3});
  const auto own = torch::ones({2, 3});
  expect_refused("_local_scalar_dense", [&] { tensor[0][0].item<float>(); });
  expect_refused("equal", [&] { torch::equal(tensor, own); });
  expect_refused("nonzero", [&] { tensor.nonzero(); });
  expect_refused("masked_select", [&] { tensor.masked_select(own > 0); });
  expect_refused("copy_", [&] { own.clone().copy_(tensor); });
  expect_refused("add_", [&] { own.clone().add_(tensor, 0.1); });
  expect_refused("mul_", [&] { own.clone().mul_(tensor.norm()); });
  expect_refused("stack", [&] { torch::stack({own.norm(), tensor.norm()}); });
  expect_refused("addmm", [&] { torch::linear(torch::ones({5, 3}), tensor, torch::ones({2})); });
  expect_refused("embedding", [&] { torch::embedding(tensor, torch::tensor({0, 1})); });
  expect_refused("set_", [&] { tensor.set_(own); });
}

/// A result names its sources.
TEST(Absent, ResultsSayWhereTheyComeFrom) {
  const auto sum = absent({2}).square().sum().sqrt();
  expect_has(error_of<UsageError>([&] { sum.item<float>(); }),
             {"needs what was computed from weight \"w\" of rank 1"});
}

TEST(Absent, DataIsRefused) {
  const auto tensor = absent({2, 3});
  for (const auto& each : {tensor, tensor.t(), tensor.clone()}) {
    expect_has(error_of<c10::Error>([&] { each.data_ptr<float>(); }),
               {"weight \"w\" of rank 1, which this rank does not have, was read or written. Ask"});
  }
  expect_has(
      error_of<c10::Error>([&] { tensor.accessor<float, 2>(); }),
      {"the data of weight \"w\" of rank 1, which this rank does not have, was read or written"});
  expect_has(error_of<c10::Error>([&] { std::ostringstream() << tensor; }), {"weight \"w\""});
  expect_has(error_of<c10::Error>([&] {
               std::ostringstream out;
               torch::save(tensor, out);
             }),
             {"weight \"w\""});
}

/// Generators advance as they do where the numbers are.
TEST(Absent, RandomNumbersAreDrawn) {
  const auto draws = [](const at::Tensor& tensor) {
    torch::manual_seed(4);
    tensor.normal_();
    torch::nn::init::kaiming_uniform_(tensor);
    torch::randn_like(tensor);
    torch::dropout(tensor, 0.3, true);
    return torch::rand({3});
  };
  const auto expected = draws(torch::ones({7, 9}));
  EXPECT_TRUE(torch::equal(draws(absent({7, 9})), expected));
}

/// A tensor that must not be changed, such as one that stands for pieces.
TEST(Absent, WritesMayBeRefused) {
  const auto tensor = absent({2, 3}, /*ignores_writes=*/false);
  expect_refused("mul_", [&] { tensor.mul_(0.5); });
  expect_refused("zero_", [&] { tensor.data().zero_(); });
  expect_refused("zero_", [&] { tensor.detach().zero_(); });
  expect_refused("zero_", [&] { tensor[1].zero_(); });
  expect_refused("zero_", [&] { tensor.chunk(2)[0].zero_(); });
  expect_refused("zero_", [&] { tensor.t().narrow(0, 0, 1).zero_(); });
  EXPECT_TRUE(is_absent(tensor.clone().zero_()));  // the program's own
  EXPECT_TRUE(is_absent(tensor * 2));
}

TEST(Absent, OptimizersStepOverIt) {
  const auto parameter = absent_parameter({4, 6});
  const auto own = torch::ones({3}).requires_grad_();
  const std::vector<at::Tensor> parameters{parameter, own};
  torch::optim::Adam adam(parameters);
  torch::optim::SGD sgd(parameters, torch::optim::SGDOptions(0.1).momentum(0.9).weight_decay(0.1));
  torch::optim::RMSprop rmsprop(parameters);
  for (int i = 0; i < 2; ++i) {
    parameter.mutable_grad() = absent({4, 6});
    own.mutable_grad() = torch::ones({3});
    adam.step();
    sgd.step();
    rmsprop.step();
    sgd.zero_grad(/*set_to_none=*/false);
  }
  EXPECT_TRUE(is_absent(parameter));
  EXPECT_LT(own.max().item<float>(), 1);
}

TEST(Absent, GradientsGoThroughIt) {
  const auto parameter = absent_parameter({4, 6});
  (parameter * 2).sum().backward();
  EXPECT_TRUE(is_absent(parameter.grad()));
  EXPECT_EQ(parameter.grad().sizes(), parameter.sizes());
}

/// A tensor keeps its identity and memory when it becomes absent, and its views stay the same.
TEST(Absent, TensorsBecomeAbsentAndPresent) {
  const auto tensor = torch::arange(6).to(torch::kFloat).view({2, 3}).requires_grad_();
  const auto before = tensor.detach();
  become_absent(tensor, absence());
  EXPECT_TRUE(is_absent(tensor));
  EXPECT_TRUE(is_absent(tensor.detach()));
  expect_refused("copy_", [&] { torch::zeros({}).copy_(tensor.detach()[0][0]); });
  {
    const torch::NoGradGuard no_grad;
    tensor.mul_(3);
  }
  EXPECT_TRUE(torch::equal(before, torch::arange(6).to(torch::kFloat).view({2, 3})));
  become_present(tensor);
  become_present(tensor);  // does nothing
  EXPECT_FALSE(is_absent(tensor));
  EXPECT_TRUE(torch::equal(tensor, before));
  EXPECT_EQ(tensor.sum().item<float>(), 15);
}

TEST(Absent, InPlaceViewsFollow) {
  const auto tensor = absent({2, 3});
  tensor.t_();
  EXPECT_EQ(tensor.sizes(), (std::vector<int64_t>{3, 2}));
  EXPECT_TRUE(is_absent(tensor.unsqueeze_(0)));
  EXPECT_EQ(tensor.dim(), 3);
}

}  // namespace
}  // namespace smp::graph
