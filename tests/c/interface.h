// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>
#include <vector>

#include "smp/c.h"
#include "smp/exported.h"
#include "tests/error_of.h"

/// Helpers for tests of the C interface.
namespace smp::testing {

constexpr const char* kTrain = "tests/c/train.pt2";
constexpr const char* kEval = "tests/c/eval.pt2";
constexpr const char* kNamed = "tests/c/named.pt2";
constexpr const char* kTwoMicrobatches = R"({"microbatches": 2})";

/// A tensor of the interface on the memory of one of libtorch's.
inline smp_tensor view(const torch::Tensor& tensor, smp_layout layout = SMP_ROW_MAJOR) {
  smp_tensor result{};
  result.struct_size = sizeof result;
  result.dtype = tensor.scalar_type() == torch::kFloat64 ? SMP_FLOAT64 : SMP_FLOAT32;
  result.layout = layout;
  result.dims = tensor.dim();
  for (int64_t i = 0; i < tensor.dim(); ++i) {
    result.sizes[i] = tensor.size(i);
    result.strides[i] = layout == SMP_STRIDED ? tensor.stride(i) : 0;
  }
  result.data = tensor.mutable_data_ptr();
  return result;
}

inline void expect_ok(int code) { EXPECT_EQ(code, SMP_OK) << smp_last_error(); }

inline void expect_error(int code, smp_code expected, std::initializer_list<std::string> parts) {
  EXPECT_EQ(code, expected) << smp_last_error();
  expect_has(smp_last_error(), parts);
}

struct Batch {
  torch::Tensor x, y;
};

inline std::vector<Batch> batches(int count = 3) {
  torch::manual_seed(5);
  std::vector<Batch> result;
  for (int i = 0; i < count; ++i) result.push_back({torch::randn({8, 3}), torch::randn({8, 2})});
  return result;
}

/// Plain libtorch: the mean over two microbatches, and an update.
template <class Gradients>
void step_plainly(ExportedModule& model, torch::optim::Optimizer& optimizer, const Batch& batch,
                  const Gradients& differentiate) {
  std::vector<torch::Tensor> sums;
  for (int m = 0; m < 2; ++m) {
    optimizer.zero_grad();
    const auto y = model->forward(batch.x.narrow(0, 4 * m, 4).clone()).toTensor();
    differentiate(y, batch.y.narrow(0, 4 * m, 4).clone());
    size_t next = 0;
    for (const auto& parameter : model->parameters()) {
      if (m == 0) {
        sums.push_back(parameter.grad().clone());
      } else {
        sums[next++].add_(parameter.grad());
      }
    }
  }
  size_t next = 0;
  for (auto& parameter : model->parameters()) parameter.mutable_grad() = sums[next++].div_(2);
  optimizer.step();
}

/// The session's parameters are the module's, to the bit.
inline void expect_state(smp_session* session, const torch::nn::Module& module) {
  int64_t count = 0;
  expect_ok(smp_gather_state(session, &count));
  const auto parameters = module.named_parameters();
  ASSERT_EQ(count, static_cast<int64_t>(parameters.size()));
  for (int64_t i = 0; i < count; ++i) {
    smp_tensor tensor{};
    tensor.struct_size = sizeof tensor;
    expect_ok(smp_state(session, i, &tensor));
    const auto* wanted = parameters.find(tensor.name);
    ASSERT_NE(wanted, nullptr) << tensor.name;
    const std::vector<int64_t> sizes(tensor.sizes, tensor.sizes + tensor.dims);
    EXPECT_TRUE(torch::equal(torch::from_blob(tensor.data, sizes), *wanted)) << tensor.name;
  }
}

/// Begins a session with the model of tests/c and an optimizer.
inline smp_session* open_session(const char* config = kTwoMicrobatches,
                                 const char* optimizer = "adamw",
                                 const char* options = R"({"lr": 0.01, "betas": [0.9, 0.95]})") {
  smp_session* session = nullptr;
  expect_ok(smp_open(config, &session));
  expect_ok(smp_load(session, kTrain, kEval));
  expect_ok(smp_optimizer(session, optimizer, options));
  return session;
}

}  // namespace smp::testing
