// SPDX-License-Identifier: Apache-2.0
#include "smp/optim/novograd.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <sstream>
#include <tuple>
#include <vector>

#include "core/check.h"
#include "tests/optim/reference.h"

namespace smp::optim {
namespace {

using namespace testing;
using ::testing::HasSubstr;

/// Arithmetic of one parameter, number by number, as apex's FusedNovoGrad documents it.
struct NovoGradReference {
  Numbers x, m = Numbers(x.size());
  double n = 0;
  int step = 0;

  void update(const Numbers& g, const NovoGradOptions& options) {
    const auto [beta1, beta2] = options.betas();
    const bool is_l2 = options.norm_type() == 2;
    const double norm = is_l2 ? l2_norm(g) : largest(g);
    if (step == 0) n = options.init_zero() ? 0 : norm;
    n = is_l2 ? std::sqrt(beta2 * n * n + (1 - beta2) * norm * norm)
              : beta2 * n + (1 - beta2) * norm;
    ++step;
    const bool corrects = options.bias_correction();
    const double n_hat = corrects ? n / std::sqrt(1 - std::pow(beta2, step)) : n;
    const double correction = corrects ? 1 - std::pow(beta1, step) : 1;
    const double weight = options.grad_averaging() ? 1 - beta1 : 1;
    for (size_t i = 0; i < x.size(); ++i) {
      const double decay = options.weight_decay() * x[i];
      if (options.reg_inside_moment()) {
        m[i] = beta1 * m[i] + weight * (g[i] / (n_hat + options.eps()) + decay);
        x[i] -= options.lr() * m[i] / correction;
      } else {
        m[i] = beta1 * m[i] + weight * g[i];
        x[i] -= options.lr() * (m[i] / correction / (n_hat + options.eps()) + decay);
      }
    }
  }
};

void expect_follows_the_formula(const NovoGradOptions& options, torch::Dtype dtype, double bound) {
  std::vector<NovoGradReference> references{{draw(7, 1)}, {draw(40, 2)}};
  std::vector<torch::Tensor> params;
  for (const auto& reference : references) {
    params.push_back(to_tensor(reference.x, dtype).requires_grad_());
  }
  NovoGrad optimizer(params, options);
  for (unsigned step = 0; step < 5; ++step) {
    for (size_t i = 0; i < params.size(); ++i) {
      const auto g = draw(references[i].x.size(), 10 * step + static_cast<unsigned>(i), 1 + step);
      params[i].mutable_grad() = to_tensor(g, dtype);
      references[i].update(g, options);
    }
    optimizer.step();
    for (size_t i = 0; i < params.size(); ++i) {
      EXPECT_TRUE(
          torch::allclose(params[i].to(torch::kDouble), to_tensor(references[i].x), bound, bound))
          << "step " << step << ", parameter " << i;
    }
  }
}

TEST(NovoGrad, FollowsThePublishedFormula) {
  for (const auto& options :
       {NovoGradOptions(0.1), NovoGradOptions(0.1).weight_decay(0.1),
        NovoGradOptions(0.1).weight_decay(0.1).reg_inside_moment(true),
        NovoGradOptions(0.1).bias_correction(false), NovoGradOptions(0.1).grad_averaging(false),
        NovoGradOptions(0.1).norm_type(0), NovoGradOptions(0.1).init_zero(true),
        NovoGradOptions(0.1).norm_type(0).init_zero(true),
        NovoGradOptions(0.1).betas(std::make_tuple(0.5, 0.7)).eps(1e-2)}) {
    expect_follows_the_formula(options, torch::kDouble, 1e-12);
    expect_follows_the_formula(options, torch::kFloat, 1e-5);
  }
}

TEST(NovoGrad, SavesAndLoads) {
  const auto param = to_tensor(draw(4, 1)).requires_grad_();
  const auto unused = to_tensor(draw(4, 1)).requires_grad_();
  const auto make = [&](double lr) {
    return NovoGrad(std::vector<torch::Tensor>{param, unused}, NovoGradOptions(lr));
  };
  NovoGrad one = make(0.1);
  param.mutable_grad() = to_tensor(draw(4, 2));
  EXPECT_EQ(one.step([] { return torch::full({}, 3.0); }).item<double>(), 3);
  EXPECT_EQ(to_numbers(unused), draw(4, 1));
  std::stringstream stream;
  torch::save(one, stream);
  NovoGrad other = make(0.5);
  torch::load(other, stream);
  const auto state = [&](NovoGrad& optimizer) -> NovoGradParamState& {
    return static_cast<NovoGradParamState&>(*optimizer.state().at(param.unsafeGetTensorImpl()));
  };
  EXPECT_TRUE(state(one) == state(other));
  EXPECT_EQ(state(other).step(), 1);
  EXPECT_NEAR(state(other).grad_norm(), l2_norm(draw(4, 2)), 1e-12);
  EXPECT_TRUE(static_cast<NovoGradOptions&>(other.param_groups()[0].options()) ==
              NovoGradOptions(0.1));
  EXPECT_FALSE(NovoGradOptions(0.1) == NovoGradOptions(0.1).init_zero(true));
}

TEST(NovoGrad, ErrorsForWrongOptions) {
  const auto error_of = [&](const NovoGradOptions& options) -> std::string {
    try {
      NovoGrad optimizer(std::vector<torch::Tensor>{torch::zeros({2})}, options);
    } catch (const ConfigError& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_THAT(error_of(NovoGradOptions().norm_type(1)),
              HasSubstr("NovoGrad option norm_type: expected 2 or 0, got 1"));
  EXPECT_THAT(error_of(NovoGradOptions().eps(-1)), HasSubstr("NovoGrad option eps"));
}

}  // namespace
}  // namespace smp::optim
