// SPDX-License-Identifier: Apache-2.0
#include "smp/optim/fused.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <sstream>
#include <vector>

#include "optim/state_dict.h"
#include "tests/optim/set_state.h"

namespace smp::optim {
namespace {

namespace to = torch::optim;
using Tensors = std::vector<torch::Tensor>;

/// One of each layout: with a rest beside the vectors, transposed, empty of rest, a scalar, frozen.
Tensors make_params(torch::Dtype dtype) {
  torch::manual_seed(1);
  Tensors params{torch::randn({37, 11}), torch::randn({9, 30}).t(), torch::randn({64}),
                 torch::randn({}), torch::randn({5})};
  for (auto& param : params) param = param.to(dtype).detach().requires_grad_();
  return params;
}

/// The last has none, and one appears later.
void set_gradients(const Tensors& params, int step) {
  torch::manual_seed(100 + step);
  for (size_t i = 0; i + 1 < params.size(); ++i) {
    const auto gradient = torch::randn(params[i].sizes()).to(params[i].scalar_type());
    if (i == 2 && step == 0) continue;
    params[i].mutable_grad() = gradient;  // contiguous, where the second parameter is not
  }
}

template <class Optimizer, class Options>
Tensors train(const Options& options, torch::Dtype dtype, int steps = 6) {
  const auto params = make_params(dtype);
  Optimizer optimizer(params, options);
  for (int step = 0; step < steps; ++step) {
    set_gradients(params, step);
    optimizer.step();
  }
  return params;
}

void expect_near(const Tensors& got, const Tensors& expected, double bound) {
  ASSERT_EQ(got.size(), expected.size());
  for (size_t i = 0; i < got.size(); ++i) {
    EXPECT_TRUE(
        torch::allclose(got[i].to(torch::kDouble), expected[i].to(torch::kDouble), bound, bound))
        << "parameter " << i << ": largest difference "
        << (got[i] - expected[i]).abs().max().item<double>();
  }
}

/// The plain class in double precision is the reference of both.
template <class Fused, class Plain, class Options>
void expect_as_plain(const std::vector<Options>& variants) {
  torch::set_num_threads(1);
  for (const auto& options : variants) {
    const auto expected = train<Plain>(options, torch::kDouble);
    expect_near(train<Fused>(options, torch::kDouble), expected, 1e-12);
    expect_near(train<Fused>(options, torch::kFloat), train<Plain>(options, torch::kFloat), 2e-6);
    EXPECT_FALSE(torch::allclose(expected[0], make_params(torch::kDouble)[0], 1e-3));
  }
}

TEST(Fused, Sgd) {
  expect_as_plain<FusedSGD, to::SGD, to::SGDOptions>(
      {to::SGDOptions(0.1), to::SGDOptions(0.1).weight_decay(0.1),
       to::SGDOptions(0.1).momentum(0.9),
       to::SGDOptions(0.1).momentum(0.9).dampening(0.3).weight_decay(0.1),
       to::SGDOptions(0.1).momentum(0.9).nesterov(true)});
}

TEST(Fused, Adam) {
  expect_as_plain<FusedAdam, to::Adam, to::AdamOptions>(
      {to::AdamOptions(0.01), to::AdamOptions(0.01).weight_decay(0.1),
       to::AdamOptions(0.01).amsgrad(true), to::AdamOptions(0.01).betas({0.5, 0.7}).eps(1e-3)});
}

TEST(Fused, AdamW) {
  expect_as_plain<FusedAdamW, to::AdamW, to::AdamWOptions>(
      {to::AdamWOptions(0.01), to::AdamWOptions(0.01).weight_decay(0.5),
       to::AdamWOptions(0.01).amsgrad(true), to::AdamWOptions(0.01).betas({0.5, 0.7}).eps(1e-3)});
}

TEST(Fused, Adagrad) {
  expect_as_plain<FusedAdagrad, to::Adagrad, to::AdagradOptions>(
      {to::AdagradOptions(0.1),
       to::AdagradOptions(0.1).lr_decay(0.1).weight_decay(0.1).initial_accumulator_value(0.5)});
}

/// The state of one goes on in the other, by name and as libtorch saves it.
TEST(Fused, StateFitsThePlainClass) {
  torch::set_num_threads(1);
  const auto options = to::AdamWOptions(0.01).amsgrad(true);
  const auto names_of = [](const Tensors& params) {
    ParameterNames names;
    for (size_t i = 0; i < params.size(); ++i) {
      names.emplace(params[i].unsafeGetTensorImpl(), "p" + std::to_string(i));
    }
    return names;
  };
  const auto params = make_params(torch::kDouble);
  FusedAdamW fused(params, options);
  to::AdamW by_name(params, to::AdamWOptions(1)), by_archive(params, to::AdamWOptions(1));
  for (int step = 0; step < 3; ++step) {
    set_gradients(params, step);
    fused.step();
  }
  set_state(by_name, get_state(fused, names_of(params)), names_of(params));
  std::stringstream stream;
  torch::save(fused, stream);
  torch::load(by_archive, stream);
  const auto before = torch::cat({params[0].flatten(), params[1].flatten()}).clone();
  std::vector<torch::Tensor> after;
  for (to::Optimizer* optimizer : std::vector<to::Optimizer*>{&by_name, &by_archive, &fused}) {
    torch::NoGradGuard no_grad;
    params[0].copy_(before.narrow(0, 0, params[0].numel()).view_as(params[0]));
    params[1].copy_(before.narrow(0, params[0].numel(), params[1].numel()).view_as(params[1]));
    set_gradients(params, 3);
    optimizer->step();
    after.push_back(torch::cat({params[0].flatten(), params[1].flatten()}).clone());
  }
  EXPECT_TRUE(torch::equal(after[0], after[1]));
  EXPECT_TRUE(torch::allclose(after[2], after[0], 1e-12, 1e-12));
  EXPECT_FALSE(torch::allclose(after[0], before));
}

/// Parameters that the kernels do not take go the plain way, to the bit.
TEST(Fused, OtherParametersGoThePlainWay) {
  torch::set_num_threads(1);
  const auto train = [](auto&& optimizer, const torch::Tensor& param) {
    for (int step = 0; step < 2; ++step) {
      torch::manual_seed(step);
      param.mutable_grad() = torch::randn(param.sizes());
      optimizer.step();
    }
    return param;
  };
  const auto make = [] {
    torch::manual_seed(1);
    return torch::randn({4, 6}).slice(1, 0, 6, 2).detach().requires_grad_();  // has gaps
  };
  const auto one = make(), other = make();
  EXPECT_TRUE(torch::equal(train(FusedAdam(Tensors{one}, to::AdamOptions(0.1)), one),
                           train(to::Adam(Tensors{other}, to::AdamOptions(0.1)), other)));
  EXPECT_FALSE(torch::equal(one, make()));
  // Sparse gradients, too.
  const auto row = torch::zeros({3, 2}).requires_grad_();
  row.mutable_grad() = torch::eye(3, 2).to_sparse();
  FusedSGD sgd(Tensors{row}, to::SGDOptions(0.5));
  sgd.step();
  EXPECT_TRUE(torch::equal(row, -0.5 * torch::eye(3, 2)));
}

TEST(Fused, AdagradTakesGroupsThatAreAddedLater) {
  const auto param = torch::ones({3}).requires_grad_();
  FusedAdagrad optimizer(Tensors{torch::ones({1}).requires_grad_()}, to::AdagradOptions(0.1));
  optimizer.add_param_group(to::OptimizerParamGroup(Tensors{param}));
  param.mutable_grad() = torch::full({3}, 2.0);
  EXPECT_EQ(optimizer.step([] { return torch::full({}, 4.0); }).item<double>(), 4);
  EXPECT_TRUE(torch::allclose(param, torch::full({3}, 0.9)));  // 1 - 0.1 * 2 / sqrt(4)
}

}  // namespace
}  // namespace smp::optim
