// SPDX-License-Identifier: Apache-2.0
// Work of a device that is captured and launched, on the fake device.

#include "graph/device_graph.h"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/ScopeExit.h>
#include <gtest/gtest.h>
#include <torch/library.h>

#include <vector>

#include "core/check.h"
#include "graph/weight_casts.h"
#include "tests/device/fake_device.h"
#include "tests/error_of.h"

namespace smp::testing {
namespace {

using graph::CapturedWork;
using graph::DeviceGraphCapture;
using graph::RandomKey;

at::Tensor ones(int64_t count) { return at::ones({count}, fake_device()); }

void expect_all(const at::Tensor& tensor, float value) {
  EXPECT_TRUE(at::equal(tensor.cpu(), at::full(tensor.sizes(), value))) << tensor.cpu();
}

RandomKey key_of(uint64_t call) { return {7, 1, call, 0}; }

/// A random operator of `op`, the `ordinal`-th of its program, on half ones.
at::Tensor draw(int ordinal, const RandomKey& key, const char* op = "aten::bernoulli") {
  torch::jit::Stack stack = {at::full({64}, 0.5, fake_device())};
  const auto handle = c10::Dispatcher::singleton().findSchemaOrThrow(op, "");
  if (handle.schema().arguments().size() > 1) stack.emplace_back();
  graph::call_keyed(handle, stack, key, ordinal);
  return stack[0].toTensor();
}

TEST(DeviceGraph, WorkIsDoneEachTimeItIsLaunched) {
  const at::Tensor x = ones(4), y = ones(4);
  DeviceGraphCapture capture(fake_device());
  const CapturedWork work = capture.capture({}, [&] { y.add_(x * 2); });
  expect_all(y, 1);
  work.launch({});
  expect_all(y, 3);
  x.fill_(5);
  work.launch({});
  expect_all(y, 13);
}

TEST(DeviceGraph, IsNotLaunchedWhereNothingWasCaptured) {
  at::Tensor memory;
  DeviceGraphCapture capture(fake_device());
  const CapturedWork nothing = capture.capture({}, [&] { memory = at::empty({4}, fake_device()); });
  const CapturedWork work = capture.capture({}, [&] { memory.fill_(2); });
  take_fake_launches();
  nothing.launch({});
  EXPECT_EQ(take_fake_launches(), 0);
  work.launch({});
  EXPECT_EQ(take_fake_launches(), 1);
  expect_all(memory, 2);
}

TEST(DeviceGraph, RandomOperatorsDrawUnderTheKeyOfTheLaunch) {
  at::Tensor first, second, again;
  DeviceGraphCapture capture(fake_device());
  const at::Tensor before = at::rand({4}, fake_device());
  const CapturedWork work = capture.capture({3, 8}, [&] {
    first = draw(8, {});
    second = draw(3, {});
    again = draw(8, {});  // a recomputation
  });
  for (const uint64_t call : {0, 1, 0}) {
    work.launch(key_of(call));
    EXPECT_TRUE(at::equal(first.cpu(), draw(8, key_of(call)).cpu()));
    EXPECT_TRUE(at::equal(second.cpu(), draw(3, key_of(call)).cpu()));
    EXPECT_TRUE(at::equal(again.cpu(), first.cpu()));
  }
  EXPECT_FALSE(at::equal(first.cpu(), second.cpu()));
}

TEST(DeviceGraph, GraphsThatAreCapturedLaterHaveTheMemoryThatIsFree) {
  const at::Tensor x = ones(1000);
  DeviceGraphCapture capture(fake_device());
  at::Tensor sum;
  const CapturedWork first = capture.capture({}, [&] { sum = (x + 1).sum() + (x + 2).sum(); });
  const FakeMemoryLimit limit(1 << 20);
  const size_t before = limit.peak(0);
  const CapturedWork second = capture.capture({}, [&] { sum += (x * 3).sum(); });
  EXPECT_LT(limit.peak(0), before + 4000) << "a new block for x * 3";
  for (int i = 0; i < 2; ++i) {
    first.launch({});
    second.launch({});
    expect_all(sum, 2000 + 3000 + 3000);
  }
}

/// An argument of an operator as autocast casts it.
at::Tensor autocast(graph::WeightCasts& casts, const at::Tensor& weight) {
  const auto type = fake_device().type();
  at::autocast::set_autocast_enabled(type, true);
  const auto off = c10::make_scope_exit([=] { at::autocast::set_autocast_enabled(type, false); });
  const graph::WeightCasts::Scope scope(casts, {{weight.unsafeGetTensorImpl(), /*memory=*/0}});
  const c10::impl::ExcludeDispatchKeyGuard own(c10::DispatchKey::AutocastPrivateUse1);
  return weight.to(at::kBFloat16);
}

/// A step writes them before its first graph, whose work must leave them alone.
TEST(DeviceGraph, CastsOfWeightsLieBesideTheMemoryOfGraphs) {
  const at::Tensor weight = ones(64), result = ones(64);
  const at::Tensor x = at::ones({64}, weight.options().dtype(at::kBFloat16));
  graph::WeightCasts casts;
  casts.begin_step();
  autocast(casts, weight);
  casts.end_step();
  casts.reserve();
  DeviceGraphCapture capture(fake_device());
  std::vector<CapturedWork> graphs;
  for (int i = 0; i < 2; ++i) {
    graphs.push_back(capture.capture({}, [&] {
      result.copy_(x * 3);  // leaves memory of a cast's size
      result.add_(autocast(casts, weight));
    }));
  }
  for (const float value : {1.f, 2.f}) {
    weight.fill_(value);
    casts.begin_step();
    for (const CapturedWork& work : graphs) {
      work.launch({});
      expect_all(result, 3 + value);
    }
    casts.end_step();
  }
}

TEST(DeviceGraph, MemoryGoesBackWithTheLastGraph) {
  const at::Tensor x = ones(1000);
  const FakeMemoryLimit limit(x.nbytes() + 8000);
  for (int i = 0; i < 3; ++i) {
    DeviceGraphCapture capture(fake_device());
    const CapturedWork work = capture.capture({}, [&] { x.copy_(x + 1); });
    work.launch({});
  }
  expect_all(x, 4);
}

TEST(DeviceGraph, WhatHasToBeWaitedForCannotBeCaptured) {
  const at::Tensor x = ones(4);
  DeviceGraphCapture capture(fake_device());
  const auto text = error_of<c10::Error>([&] { capture.capture({}, [&] { x.add_(1).cpu(); }); });
  expect_has(text, {"operation not permitted when stream is capturing"});
  const CapturedWork work = capture.capture({}, [&] { x.add_(1); });
  work.launch({});
  expect_all(x, 2);
}

TEST(DeviceGraph, AnotherIsCapturedWhenAllAreGone) {
  const at::Tensor x = ones(4);
  DeviceGraphCapture capture(fake_device());
  for (int i = 0; i < 3; ++i) {
    at::Tensor drawn;
    const CapturedWork work = capture.capture({0}, [&] {
      drawn = draw(0, {});
      x.add_(1);
    });
    work.launch(key_of(5));
    EXPECT_TRUE(at::equal(drawn.cpu(), draw(0, key_of(5)).cpu()));
  }
  expect_all(x, 4);
}

at::Tensor host_noise(const at::Tensor& x) { return x + at::rand({}).item<double>(); }

TORCH_LIBRARY(device_graph_test, m) {
  m.def("host_noise(Tensor x) -> Tensor", {at::Tag::nondeterministic_seeded});
  m.impl("host_noise", c10::DispatchKey::CompositeExplicitAutograd, TORCH_FN(host_noise));
}

TEST(DeviceGraph, NumbersOfTheHostsGeneratorCannotBeCaptured) {
  DeviceGraphCapture capture(fake_device());
  at::manual_seed(3);
  const at::Tensor expected = at::rand({4});
  at::manual_seed(3);
  const auto text = error_of<UsageError>(
      [&] { capture.capture({0}, [&] { draw(0, {}, "device_graph_test::host_noise"); }); });
  expect_has(text, {"device_graph_test::host_noise", "draws random numbers on the host"});
  EXPECT_TRUE(at::equal(at::rand({4}), expected)) << "its state is put back";
}

TEST(DeviceGraph, TheHostHasNoGraphs) {
  EXPECT_FALSE(graph::has_device_graphs(at::kCPU));
  const auto text = error_of<UsageError>([] { DeviceGraphCapture capture(at::kCPU); });
  expect_has(text, {"the work of device cpu cannot be captured: this build has no graphs for it",
                    "Use a GPU, and build for CUDA (docs/cuda.md)"});
}

}  // namespace
}  // namespace smp::testing
