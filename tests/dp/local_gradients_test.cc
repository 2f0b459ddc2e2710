// SPDX-License-Identifier: Apache-2.0
#include "dp/local_gradients.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>

#include <functional>
#include <utility>

#include "comm/threads/run_ranks.h"
#include "dp/gradient_buckets.h"
#include "tests/dp/summed_gradients.h"
#include "tests/error_of.h"

namespace smp::dp {
namespace {

/// Runs on a rank alone.
void alone(const std::function<void(const comm::CommunicatorPtr&)>& run) {
  comm::run_ranks(1, run);
}

class LocalGradientsTest : public ::testing::TestWithParam<int> {};

TEST_P(LocalGradientsTest, SumShardsInOrder) {
  alone([shards = GetParam()](const comm::CommunicatorPtr& group) {
    const auto parameters = make_parameters();
    StepGradientOptions options;
    options.microbatches = 8;
    options.gradient_shards = shards;
    options.divisor = 8;
    LocalGradients gradients(parameters, kNames, group, options);
    for (int step = 1; step <= 2; ++step) {
      for (int m = 0; m < 8; ++m) {
        for (size_t p = 0; p < 4; ++p) gradients.add(p, m, gradient(p, m));
      }
      gradients.reduce();
      gradients.finish();
      for (size_t p = 0; p < 4; ++p) {
        const auto sum = expected(p, shards, 8);
        // The second step adds to `.grad`, as backward does.
        const auto want = step == 1 ? sum : sum + sum;
        EXPECT_TRUE(at::equal(parameters[p].grad(), want)) << kNames[p] << " step " << step;
      }
      EXPECT_FALSE(parameters[4].grad().defined());
    }
  });
}

/// Microbatches that ran as graphs give theirs so, in memory that the next one writes.
TEST_P(LocalGradientsTest, SumListsOfGradientsAlike) {
  alone([shards = GetParam()](const comm::CommunicatorPtr& group) {
    const auto parameters = make_parameters();
    StepGradientOptions options;
    options.microbatches = 8;
    options.gradient_shards = shards;
    options.divisor = 8;
    LocalGradients gradients(parameters, kNames, group, options);
    std::vector<StepGradients::Given> given;
    for (size_t p = 0; p < 4; ++p) given.push_back({p, at::empty_like(gradient(p, 0))});
    for (int m = 0; m < 8; ++m) {
      for (auto& each : given) each.gradient.copy_(gradient(each.index, m));
      gradients.add(m, given);
    }
    gradients.reduce();
    gradients.finish();
    for (size_t p = 0; p < 4; ++p) {
      EXPECT_TRUE(at::equal(parameters[p].grad(), expected(p, shards, 8))) << kNames[p];
      EXPECT_FALSE(parameters[p].grad().is_alias_of(given[p].gradient));
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Shards, LocalGradientsTest, ::testing::Values(1, 2, 8));

/// One step of one microbatch, in which a parameter of 4 x 3 gets `gradient`.
class TakenGradients : public ::testing::Test {
 protected:
  const at::Tensor& grad_after(at::Tensor gradient) {
    alone([&](const comm::CommunicatorPtr& group) {
      StepGradientOptions options;
      options.divisor = 2;
      LocalGradients gradients({parameter_}, {"weight"}, group, options);
      gradients.add(0, 0, std::move(gradient));
      gradients.reduce();
      gradients.finish();
    });
    return parameter_.grad();
  }

  const at::Tensor parameter_ = at::zeros({4, 3}).requires_grad_();
};

TEST_F(TakenGradients, BecomeGrad) {
  at::Tensor gradient = at::ones({4, 3});
  const void* memory = gradient.data_ptr();
  const auto& grad = grad_after(std::move(gradient));
  EXPECT_EQ(grad.data_ptr(), memory);
  EXPECT_TRUE(at::equal(grad, at::full({4, 3}, 0.5)));
}

/// The gradient is like that of a product that is computed transposed.
TEST_F(TakenGradients, MayHaveBeenMadeAsAView) {
  const at::NoGradGuard no_grad;
  at::Tensor gradient = at::ones({3, 4}).t().t().view({4, 3});
  ASSERT_TRUE(gradient.is_view());
  const void* memory = gradient.data_ptr();
  const auto& grad = grad_after(std::move(gradient));
  EXPECT_EQ(grad.data_ptr(), memory);
  EXPECT_FALSE(grad.is_view()) << "zero_grad calls detach_()";
}

/// The program or autograd has the gradient, or its memory, too.
TEST_F(TakenGradients, LeaveWhatOthersHave) {
  const at::Tensor kept = at::ones({4, 3});
  for (const at::Tensor& gradient : {kept, kept.alias(), kept.view({12}).view({4, 3})}) {
    parameter_.mutable_grad().reset();
    const auto& grad = grad_after(gradient);
    EXPECT_FALSE(grad.is_alias_of(kept));
    EXPECT_TRUE(at::equal(grad, at::full({4, 3}, 0.5)));
    EXPECT_TRUE(at::equal(kept, at::ones({4, 3})));
  }
}

/// The tensor is given twice, like an addition's to both of its terms.
TEST_F(TakenGradients, OfOneTensorForTwoParametersOnlyOneIs) {
  const at::Tensor other = at::zeros({4, 3}).requires_grad_();
  alone([&](const comm::CommunicatorPtr& group) {
    LocalGradients gradients({parameter_, other}, {"weight", "other"}, group, {});
    at::Tensor gradient = at::ones({4, 3});
    const void* memory = gradient.data_ptr();
    gradients.add(0, 0, gradient);
    gradients.add(1, 0, std::move(gradient));
    gradients.reduce();
    gradients.finish();
    EXPECT_NE(parameter_.grad().data_ptr(), memory);
    EXPECT_EQ(other.grad().data_ptr(), memory);
  });
}

/// No other object has it, but it does not lie as a sum does.
TEST_F(TakenGradients, AreCopiedWhereTheyLieOtherwise) {
  float foreign[12] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
  const auto of_inference = [] {
    const c10::InferenceMode inference;
    return at::ones({4, 3});
  };
  const std::vector<std::pair<const char*, std::function<at::Tensor()>>> cases{
      {"memory for more than itself",
       [] {
         return at::ones({8, 3}).narrow(0, 0, 4);
       }},
      {"other strides",
       [] {
         return at::ones({3, 4}).t();
       }},
      {"no memory for each element",
       [] {
         return at::ones({1, 3}).expand({4, 3});
       }},
      {"not libtorch's memory",
       [&] {
         return at::from_blob(foreign, {4, 3});
       }},
      {"another dtype",
       [] {
         return at::ones({4, 3}, at::kDouble);
       }},
      {"negative",
       [] {
         return at::_neg_view(at::full({4, 3}, -1.));
       }},
      {"of inference", of_inference},
  };
  for (const auto& [what, make] : cases) {
    parameter_.mutable_grad().reset();
    at::Tensor gradient = make();
    const void* memory = gradient.storage().data();
    const auto& grad = grad_after(std::move(gradient));
    EXPECT_NE(grad.storage().data(), memory) << what;
    EXPECT_TRUE(at::equal(grad, at::full({4, 3}, 0.5))) << what;
    EXPECT_EQ(grad.strides(), parameter_.strides()) << what;
    EXPECT_EQ(grad.storage().nbytes(), 12 * sizeof(float)) << what;
  }
}

/// Kernels could choose another way by strides.
TEST_F(TakenGradients, HaveTheParametersStridesWhereASizeIsOne) {
  const at::Tensor row = at::zeros({1, 6}).requires_grad_();
  alone([&](const comm::CommunicatorPtr& group) {
    LocalGradients gradients({row}, {"row"}, group, {});
    at::Tensor gradient = at::ones({6, 1}).t();
    ASSERT_NE(gradient.strides(), row.strides());
    const void* memory = gradient.data_ptr();
    gradients.add(0, 0, std::move(gradient));
    gradients.reduce();
    gradients.finish();
    EXPECT_EQ(row.grad().data_ptr(), memory);
    EXPECT_EQ(row.grad().strides(), row.strides());
  });
}

TEST(LocalGradients, ShardsWithoutAGradientCountAsZeros) {
  alone([](const comm::CommunicatorPtr& group) {
    BucketOptions options;
    options.microbatches = options.gradient_shards = 2;
    const auto grad_of = [&](auto make, int microbatch) {
      const std::vector<at::Tensor> parameters{at::zeros({2}).requires_grad_()};
      const auto gradients = make(parameters);
      gradients->add(0, microbatch, at::full({2}, -0.0));
      gradients->reduce();
      gradients->finish();
      return parameters[0].grad();
    };
    for (int microbatch : {0, 1}) {
      const auto local = grad_of(
          [&](const auto& parameters) {
            return std::make_unique<LocalGradients>(parameters, std::vector<std::string>{"w"},
                                                    group, options);
          },
          microbatch);
      const auto in_buckets = grad_of(
          [&](const auto& parameters) {
            return std::make_unique<GradientBuckets>(parameters, std::vector<std::string>{"w"},
                                                     group, options);
          },
          microbatch);
      EXPECT_FALSE(local.signbit().any().item<bool>()) << "0 + -0 is 0";
      EXPECT_TRUE(at::equal(local.signbit(), in_buckets.signbit()));
    }
  });
}

TEST(LocalGradients, AddUpOverSteps) {
  alone([](const comm::CommunicatorPtr& group) {
    const auto parameters = make_parameters();
    StepGradientOptions options;
    options.backward_passes = 3;
    LocalGradients gradients(parameters, kNames, group, options);
    for (int step = 0; step < 6; ++step) {
      EXPECT_EQ(gradients.is_adding_up(), step % 3 > 0);
      gradients.add(0, 0, at::full({5, 3}, static_cast<float>(step)));
      gradients.reduce();
      gradients.finish();
      EXPECT_EQ(parameters[0].grad().defined(), step >= 2);
    }
    EXPECT_TRUE(at::equal(parameters[0].grad(), at::full({5, 3}, 15.)));
  });
}

/// A shard has microbatches of all steps that add up.
TEST(LocalGradients, AddUpShardsOverSteps) {
  alone([](const comm::CommunicatorPtr& group) {
    const auto parameters = make_parameters();
    StepGradientOptions options;
    options.microbatches = options.gradient_shards = 2;
    options.backward_passes = 2;
    LocalGradients gradients(parameters, kNames, group, options);
    std::vector<at::Tensor> sums(2);
    for (int m = 0; m < 4; ++m) {
      const at::Tensor gradient = dp::gradient(0, m);
      gradients.add(0, m % 2, gradient);
      sums[m % 2] = m < 2 ? gradient : sums[m % 2] + gradient;
      if (m % 2 == 0) continue;
      gradients.reduce();
      gradients.finish();
    }
    EXPECT_TRUE(at::equal(parameters[0].grad(), sums[0] + sums[1]));
  });
}

TEST(LocalGradients, SumHalfPrecisionInFloat32) {
  for (bool as_summed : {false, true}) {
    alone([&](const comm::CommunicatorPtr& group) {
      const at::Tensor parameter = at::zeros({1}, at::kBFloat16).requires_grad_();
      StepGradientOptions options;
      options.microbatches = 3;
      options.gradients_as_summed = as_summed;
      LocalGradients gradients({parameter}, {"weight"}, group, options);
      // bfloat16 has no 257, so that sums of it would stay at 256.
      for (int m = 0; m < 3; ++m) {
        gradients.add(0, m, at::full({1}, m == 0 ? 256. : 1., at::kBFloat16));
      }
      gradients.reduce();
      gradients.finish();
      EXPECT_EQ(parameter.grad().scalar_type(), as_summed ? at::kFloat : at::kBFloat16);
      EXPECT_EQ(parameter.grad().item<float>(), 258);
    });
  }
}

TEST(LocalGradients, ProductsAddToTheSumThemselves) {
  alone([](const comm::CommunicatorPtr& group) {
    const auto parameters = make_parameters();
    StepGradientOptions options;
    options.microbatches = 2;
    options.divisor = 2;
    LocalGradients gradients(parameters, kNames, group, options);
    gradients.buffer(2, 0).add_(1);
    gradients.add(2, 0, at::full({6, 4}, 2.));
    gradients.buffer(2, 1).add_(5);
    gradients.reduce();
    gradients.finish();
    EXPECT_TRUE(at::equal(parameters[2].grad(), at::full({6, 4}, 4.)));
    EXPECT_EQ(parameters[2].grad().strides(), parameters[2].strides());
  });
}

TEST(LocalGradients, RefuseSparseGradients) {
  alone([](const comm::CommunicatorPtr& group) {
    LocalGradients gradients(make_parameters(), kNames, group, {});
    const auto text = smp::testing::error_of<std::exception>([&] {
      gradients.add(0, 0, at::zeros({5, 3}).to_sparse());
    });
    EXPECT_NE(text.find("parameter \"a\" has a sparse gradient, which cannot be reduced"),
              std::string::npos)
        << text;
  });
}

}  // namespace
}  // namespace smp::dp
