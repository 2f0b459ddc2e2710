// SPDX-License-Identifier: Apache-2.0
// NCCL in a group of one rank, which one GPU is enough for: the parts below the communicators,
// which answer calls in such a group themselves.

#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <vector>

#include "comm/nccl/group_pool.h"
#include "comm/nccl/nccl_groups.h"
#include "comm/threads/run_ranks.h"

namespace smp::testing {
namespace {

using comm::DeviceGroup;
using Tensors = std::vector<at::Tensor>;

const at::Device kGpu(at::kCUDA, 0);
constexpr int64_t kNumel = 1001;

/// Calls `check` with the groups of a rank that is alone.
void with_groups(const std::function<void(comm::GroupPool& groups)>& check) {
  comm::run_ranks(1, [&](const comm::CommunicatorPtr& world) {
    ASSERT_TRUE(comm::has_nccl()) << "tests/cuda are built with --config=cuda";
    comm::GroupPool groups(world, kGpu, comm::nccl_groups(world));
    check(groups);
  });
}

at::Tensor numbers(at::ScalarType type) {
  return (at::arange(kNumel).to(at::kDouble) / 7).to(type);
}

/// `values` on the GPU, which the current stream makes some milliseconds from now.
at::Tensor late(const at::Tensor& values) {
  constexpr int64_t kSide = 2048;
  const at::Tensor given = values.to(kGpu);
  at::Tensor ones = at::ones({kSide, kSide}, kGpu);
  for (int i = 0; i < 40; ++i) ones = ones.mm(ones) / kSide;
  return given + (ones[0][0] * 0).to(values.scalar_type());
}

at::Tensor room(at::ScalarType type) {
  return at::full({kNumel}, -1, at::TensorOptions(type).device(kGpu));
}

void expect_moves(c10d::Backend& group, at::ScalarType type) {
  const at::Tensor expected = numbers(type);
  const int64_t bytes = expected.element_size() * kNumel;
  // Bytes: so the communicators move types that they do not add.
  at::Tensor from = late(expected).view(at::kByte);

  Tensors broadcast = {from};
  group.broadcast(broadcast)->wait();
  EXPECT_TRUE(at::equal(broadcast[0].view(type).cpu(), expected)) << "broadcast " << type;

  at::Tensor gathered = room(type).view(at::kByte);
  group._allgather_base(gathered, from)->wait();
  EXPECT_TRUE(at::equal(gathered.view(type).cpu(), expected)) << "_allgather_base " << type;

  for (const std::vector<int64_t>& splits : {std::vector<int64_t>{}, std::vector<int64_t>{bytes}}) {
    at::Tensor exchanged = room(type).view(at::kByte);
    from = late(expected).view(at::kByte);
    std::vector<int64_t> sent = splits, received = splits;
    group.alltoall_base(exchanged, from, received, sent)->wait();
    EXPECT_TRUE(at::equal(exchanged.view(type).cpu(), expected)) << "alltoall_base " << type;
  }
}

void expect_sums(c10d::Backend& group, at::ScalarType type) {
  const at::Tensor expected = numbers(type);
  for (const auto op : {c10d::ReduceOp::SUM, c10d::ReduceOp::AVG}) {
    c10d::AllreduceOptions reduce;
    reduce.reduceOp = op;
    Tensors reduced = {late(expected)};
    group.allreduce(reduced, reduce)->wait();
    EXPECT_TRUE(at::equal(reduced[0].cpu(), expected)) << "allreduce " << type;

    c10d::ReduceScatterOptions scatter;
    scatter.reduceOp = op;
    at::Tensor from = late(expected), scattered = room(type);
    group._reduce_scatter_base(scattered, from, scatter)->wait();
    EXPECT_TRUE(at::equal(scattered.cpu(), expected)) << "_reduce_scatter_base " << type;
  }
}

/// Calls begin behind the current stream's work, and it goes on behind them.
TEST(Nccl, CollectivesKeepTheOrderOfTheCurrentStream) {
  with_groups([](comm::GroupPool& groups) {
    const c10::impl::VirtualGuardImpl gpu(at::kCUDA);
    const c10::StreamGuard guard(gpu.getStreamFromGlobalPool(kGpu));
    const DeviceGroup group = groups.of_all();
    for (const at::ScalarType type : {at::kFloat, at::kHalf, at::kBFloat16, at::kLong}) {
      expect_moves(*group, type);
      if (at::isFloatingType(type)) expect_sums(*group, type);
    }
    groups.set_timeout(std::chrono::seconds(30));
    expect_sums(*group, at::kFloat);
  });
}

/// The GPU goes on, and another pool has groups as ever.
TEST(Nccl, AGroupThatWasEndedRefusesCalls) {
  with_groups([](comm::GroupPool& groups) {
    const DeviceGroup group = groups.of_all();
    Tensors first = {late(numbers(at::kFloat))}, second = {room(at::kFloat)};
    group->allreduce(first);
    group->abort();
    EXPECT_THROW(group->allreduce(second)->wait(), c10::Error);
    EXPECT_TRUE(at::equal((room(at::kFloat) + 2).cpu(), at::ones({kNumel})));
  });
  with_groups([](comm::GroupPool& groups) { expect_sums(*groups.of_all(), at::kFloat); });
}

}  // namespace
}  // namespace smp::testing
