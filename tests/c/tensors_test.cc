// SPDX-License-Identifier: Apache-2.0
// Tensors that have no description in C.
#include "smp/c/tensors.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <tuple>
#include <vector>

#include "smp/c/session.h"
#include "smp/error.h"
#include "tests/error_of.h"

namespace smp::testing {
namespace {

/// Values of the model's types that C has no names for, and results of no tensors.
TEST(CTensors, WithoutDescription) {
  EXPECT_EQ(c::describe(torch::zeros({2, 3})).sizes[1], 3);
  expect_has(error_of<UsageError>([] { c::describe(torch::zeros({1}, torch::kComplexFloat)); }),
             {"has no description in C: smp_dtype lacks its type"});
  expect_has(error_of<UsageError>([] { c::loss_of("mse", {}, torch::zeros({1})); }),
             {"the model returns no tensor, of which there would be a loss"});
  const auto tensor = torch::zeros({1});
  expect_has(error_of<UsageError>([&] { c::need_gradients({tensor}); }),
             {"no output of the model needs a gradient, so that there is nothing"});
  EXPECT_EQ(c::tensors_of(c10::IValue(std::make_tuple(tensor, 3, std::vector{tensor}))).size(), 2U);
}

}  // namespace
}  // namespace smp::testing
