// SPDX-License-Identifier: Apache-2.0
#include "tests/smp/training_case.h"

#include "graph/absent.h"
#include "runtime/parameters/whole.h"
#include "runtime/runtime.h"

namespace smp::testing {
namespace {

/// Calls `compare(got, expected, name)` for all tensors of two runs.
template <class Compare>
void compare_tensors(const Trace& got, const Trace& expected, const Compare& compare) {
  ASSERT_EQ(got.losses.size(), expected.losses.size());
  ASSERT_EQ(got.gradients.size(), expected.gradients.size());
  ASSERT_EQ(got.evaluations.size(), expected.evaluations.size());
  for (size_t i = 0; i < expected.losses.size(); ++i) {
    const std::string in_step = " in step " + std::to_string(i);
    compare(got.losses[i], expected.losses[i], "loss" + in_step);
    compare(got.gradients[i], expected.gradients[i], "gradient" + in_step);
    if (i >= expected.evaluations.size()) continue;
    compare(got.evaluations[i], expected.evaluations[i], "evaluation" + in_step);
  }
  compare(got.weights, expected.weights, std::string("value"));
}

void expect_close(const std::vector<double>& got, const std::vector<double>& expected,
                  double tolerance) {
  ASSERT_EQ(got.size(), expected.size());
  for (size_t i = 0; i < got.size(); ++i) {
    EXPECT_NEAR(got[i], expected[i], tolerance * expected[i]) << "norm of step " << i;
  }
}

}  // namespace

void expect_same(const Trace& got, const Trace& expected) {
  compare_tensors(got, expected, [](const auto& one, const auto& other, const std::string& name) {
    expect_equal(one, other, name);
  });
  EXPECT_EQ(got.norms, expected.norms);
  EXPECT_EQ(got.largest, expected.largest);
}

void expect_close(const Trace& got, const Trace& expected, double tolerance) {
  compare_tensors(got, expected, [&](const auto& one, const auto& other, const std::string& name) {
    testing::expect_close(one, other, name, tolerance);
  });
  expect_close(got.norms, expected.norms, tolerance);
  expect_close(got.largest, expected.largest, tolerance);
}

Named whole_gradients(const ModelCore& model) {
  Named result;
  for (const auto& item : model.local_named_parameters()) {
    const auto gradient = item.value().grad();
    if (!gradient.defined() || graph::is_absent(gradient)) continue;
    auto& runtime = runtime::Runtime::get();
    const auto& entry = runtime.table().at(item.value());
    result[item.key()] = entry.is_divided()
                             ? runtime::join(runtime, entry.part(), gradient, gradient.options())
                             : gradient.clone();
  }
  return result;
}

ReplicaBuffers::ReplicaBuffers(torch::nn::Module& net, int replicas)
    : net_(net), values_(replicas) {
  for (auto& own : values_) {
    for (const auto& buffer : net.buffers()) own.push_back(buffer.clone());
  }
}

void ReplicaBuffers::use(int replica) {
  if (replica == current_) return;
  torch::NoGradGuard no_grad;
  auto buffers = net_.buffers();
  for (size_t i = 0; i < buffers.size(); ++i) {
    values_[current_][i] = buffers[i].clone();
    buffers[i].copy_(values_[replica][i]);
  }
  current_ = replica;
}

}  // namespace smp::testing
