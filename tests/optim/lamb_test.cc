// SPDX-License-Identifier: Apache-2.0
#include "smp/optim/lamb.h"

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

/// Arithmetic of one parameter, number by number, as apex's FusedLAMB documents it.
struct Reference {
  Numbers x, m = Numbers(x.size()), v = Numbers(x.size());
  int step = 0;

  /// `global_norm` is that of all gradients.
  void update(Numbers g, double global_norm, const LambOptions& options) {
    const auto [beta1, beta2] = options.betas();
    const double max_norm = options.max_grad_norm(), decay = options.weight_decay();
    const double clip = max_norm > 0 && global_norm > max_norm ? global_norm / max_norm : 1;
    ++step;
    Numbers u(x.size());
    for (size_t i = 0; i < x.size(); ++i) {
      g[i] = g[i] / clip + (options.adam_w_mode() ? 0 : decay * x[i]);
      m[i] = beta1 * m[i] + (options.grad_averaging() ? 1 - beta1 : 1) * g[i];
      v[i] = beta2 * v[i] + (1 - beta2) * g[i] * g[i];
      const bool corrects = options.bias_correction();
      const double m_hat = corrects ? m[i] / (1 - std::pow(beta1, step)) : m[i];
      const double v_hat = corrects ? v[i] / (1 - std::pow(beta2, step)) : v[i];
      u[i] =
          m_hat / (std::sqrt(v_hat) + options.eps()) + (options.adam_w_mode() ? decay * x[i] : 0);
    }
    double ratio = 1;
    if ((options.use_nvlamb() || decay != 0) && l2_norm(x) != 0 && l2_norm(u) != 0) {
      ratio = l2_norm(x) / l2_norm(u);
    }
    for (size_t i = 0; i < x.size(); ++i) x[i] -= options.lr() * ratio * u[i];
  }
};

double norm_of(const std::vector<Numbers>& gradients) {
  Numbers all;
  for (const auto& gradient : gradients) all.insert(all.end(), gradient.begin(), gradient.end());
  return l2_norm(all);
}

/// Steps with three parameters, one of which is zero at first.
void expect_follows_the_formula(const LambOptions& options, torch::Dtype dtype, double bound) {
  std::vector<Reference> references{{draw(7, 1)}, {draw(40, 2)}, {Numbers(5)}};
  std::vector<torch::Tensor> params;
  for (const auto& reference : references) {
    params.push_back(to_tensor(reference.x, dtype).requires_grad_());
  }
  Lamb optimizer(params, options);
  for (unsigned step = 0; step < 5; ++step) {
    std::vector<Numbers> gradients;
    for (size_t i = 0; i < params.size(); ++i) {
      gradients.push_back(draw(references[i].x.size(), 10 * step + static_cast<unsigned>(i)));
      params[i].mutable_grad() = to_tensor(gradients[i], dtype);
    }
    optimizer.step();
    for (size_t i = 0; i < params.size(); ++i) {
      references[i].update(gradients[i], norm_of(gradients), options);
      EXPECT_TRUE(
          torch::allclose(params[i].to(torch::kDouble), to_tensor(references[i].x), bound, bound))
          << "step " << step << ", parameter " << i;
    }
  }
}

TEST(Lamb, FollowsThePublishedFormula) {
  const auto base = LambOptions(0.1);
  for (const auto& options :
       {base, LambOptions(0.1).weight_decay(0), LambOptions(0.1).weight_decay(0).use_nvlamb(true),
        LambOptions(0.1).max_grad_norm(0), LambOptions(0.1).adam_w_mode(false).weight_decay(0.3),
        LambOptions(0.1).bias_correction(false), LambOptions(0.1).grad_averaging(false),
        LambOptions(0.1).betas(std::make_tuple(0.5, 0.7)).eps(1e-2)}) {
    expect_follows_the_formula(options, torch::kDouble, 1e-12);
    expect_follows_the_formula(options, torch::kFloat, 1e-5);
  }
}

/// Each group has options of its own; the norm is that of all groups.
TEST(Lamb, GroupsShareTheNorm) {
  const auto first = to_tensor(draw(6, 1)).requires_grad_();
  const auto second = to_tensor(draw(9, 2)).requires_grad_();
  Reference references[] = {{to_numbers(first)}, {to_numbers(second)}};
  const auto plain = LambOptions(0.1), slow = LambOptions(0.01).weight_decay(0).max_grad_norm(2);
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(std::vector<torch::Tensor>{first});
  groups.emplace_back(std::vector<torch::Tensor>{second}, std::make_unique<LambOptions>(slow));
  Lamb optimizer(groups, plain);
  for (unsigned step = 0; step < 3; ++step) {
    const std::vector<Numbers> gradients{draw(6, 20 + step), draw(9, 30 + step)};
    first.mutable_grad() = to_tensor(gradients[0]);
    second.mutable_grad() = to_tensor(gradients[1]);
    optimizer.step();
    references[0].update(gradients[0], norm_of(gradients), plain);
    references[1].update(gradients[1], norm_of(gradients), slow);
  }
  EXPECT_TRUE(torch::allclose(first, to_tensor(references[0].x), 1e-12, 1e-12));
  EXPECT_TRUE(torch::allclose(second, to_tensor(references[1].x), 1e-12, 1e-12));
}

/// Also of a group that is added later.
TEST(Lamb, GroupsKeepTheirOptions) {
  const auto given = LambOptions(0.01).weight_decay(0).use_nvlamb(true);
  const auto group = [&] {
    return torch::optim::OptimizerParamGroup({torch::ones(1)},
                                             std::make_unique<LambOptions>(given));
  };
  Lamb optimizer({group()}, LambOptions(0.1));
  optimizer.add_param_group(group());
  optimizer.add_param_group({{torch::ones(1)}});
  const auto options = [&](size_t i) -> const LambOptions& {
    return static_cast<const LambOptions&>(optimizer.param_groups()[i].options());
  };
  EXPECT_EQ(options(0), given);
  EXPECT_EQ(options(1), given);
  EXPECT_EQ(options(2), LambOptions(0.1));
}

/// Gradients stay as they are, parameters without one too, and a norm from elsewhere counts.
TEST(Lamb, TakesTheNormItIsGiven) {
  const auto param = to_tensor({1, 2}).requires_grad_();
  const auto unused = to_tensor({3}).requires_grad_();
  Lamb optimizer(std::vector<torch::Tensor>{param, unused}, LambOptions(0.1));
  size_t asked = 0;
  optimizer.set_grad_norm([&](const auto& params) {
    asked = params.size();
    return torch::full({}, 10.0);
  });
  Reference reference{{1, 2}};
  param.mutable_grad() = to_tensor({0.3, 0.4});
  optimizer.step();
  reference.update({0.3, 0.4}, 10, LambOptions(0.1));
  EXPECT_EQ(asked, 2u);
  EXPECT_TRUE(torch::allclose(param, to_tensor(reference.x), 1e-12, 1e-12));
  EXPECT_EQ(to_numbers(param.grad()), Numbers({0.3, 0.4}));
  EXPECT_EQ(to_numbers(unused), Numbers({3}));
}

TEST(Lamb, SavesAndLoads) {
  const auto param = to_tensor(draw(4, 1)).requires_grad_();
  const auto make = [&](double lr) {
    return Lamb(std::vector<torch::Tensor>{param}, LambOptions(lr));
  };
  Lamb one = make(0.1);
  param.mutable_grad() = to_tensor(draw(4, 2));
  const auto loss = one.step([] { return torch::full({}, 3.0); });
  EXPECT_EQ(loss.item<double>(), 3);
  std::stringstream stream;
  torch::save(one, stream);
  Lamb other = make(0.5);
  torch::load(other, stream);
  const auto state = [&](Lamb& optimizer) -> LambParamState& {
    return static_cast<LambParamState&>(*optimizer.state().at(param.unsafeGetTensorImpl()));
  };
  EXPECT_TRUE(state(one) == state(other));
  EXPECT_EQ(state(other).step(), 1);
  EXPECT_TRUE(static_cast<LambOptions&>(other.param_groups()[0].options()) == LambOptions(0.1));
  EXPECT_FALSE(LambOptions(0.1) == LambOptions(0.1).use_nvlamb(true));
}

TEST(Lamb, ErrorsForWrongOptionsAndSparseGradients) {
  const std::vector<torch::Tensor> params{torch::zeros({2, 2}).requires_grad_()};
  const auto error_of = [&](const LambOptions& options) -> std::string {
    try {
      Lamb optimizer(params, options);
    } catch (const ConfigError& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_THAT(error_of(LambOptions(-1)), HasSubstr("Lamb option lr: expected at least 0, got -1"));
  EXPECT_THAT(error_of(LambOptions().betas(std::make_tuple(1.0, 0.9))),
              HasSubstr("Lamb option betas: expected 0 to less than 1, got 1"));
  EXPECT_THAT(error_of(LambOptions().max_grad_norm(-2)), HasSubstr("max_grad_norm"));
  Lamb optimizer(params, LambOptions().max_grad_norm(0));
  params[0].mutable_grad() = torch::ones({2, 2}).to_sparse();
  try {
    optimizer.step();
    FAIL();
  } catch (const UsageError& error) {
    EXPECT_THAT(error.what(), HasSubstr("Lamb: expected dense gradients, got a sparse one"));
  }
}

}  // namespace
}  // namespace smp::optim
