// SPDX-License-Identifier: Apache-2.0
// Tests that need a GPU: the parts below the numbers of parity_test. See docs/development.md.

#include <ATen/ATen.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/StringUtil.h>
#include <gtest/gtest.h>

#include "comm/device/device_communicator.h"
#include "comm/threads/run_ranks.h"
#include "graph/device_graph.h"
#include "graph/device_properties.h"
#include "graph/random.h"
#include "partitioner/cost_model.h"
#include "pipeline/message.h"
#include "tests/device/finding.h"

namespace smp::testing {
namespace {

const at::Device kGpu(at::kCUDA, 0);

int gpus() { return c10::impl::VirtualGuardImpl(at::kCUDA).deviceCount(); }

TEST(Cuda, RandomOperatorsAreKeyedAndLeaveTheGeneratorAsItWas) {
  const at::Tensor x = at::full({1000}, 0.5, kGpu);
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::bernoulli", "");
  const auto draw = [&](uint64_t seed) {
    torch::jit::Stack stack = {x, c10::IValue()};
    graph::call_seeded(op, stack, seed);
    return stack[0].toTensor();
  };
  at::manual_seed(5);
  const at::Tensor expected = at::rand({10}, kGpu);
  at::manual_seed(5);
  const at::Tensor first = draw(1), second = draw(2), again = draw(1);
  EXPECT_TRUE(at::equal(first, again));
  EXPECT_FALSE(at::equal(first, second));
  EXPECT_TRUE(at::equal(at::rand({10}, kGpu), expected));
}

at::Tensor draw(int ordinal, const graph::RandomKey& key) {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::bernoulli", "");
  torch::jit::Stack stack = {at::full({1000}, 0.5, kGpu), c10::IValue()};
  graph::call_keyed(op, stack, key, ordinal);
  return stack[0].toTensor();
}

TEST(Cuda, GraphsComputeAndDrawAsOperatorsDo) {
  const at::Tensor x = at::rand({64, 64}, kGpu);
  draw(0, {});
  x.mm(x);  // makes cuBLAS's handle
  at::Tensor product, first, second, again;
  graph::DeviceGraphCapture capture(kGpu);
  const graph::CapturedWork work = capture.capture({2, 5}, [&] {
    first = draw(5, {});
    product = x.mm(x);
    second = draw(2, {});
    again = draw(5, {});  // a recomputation
  });
  for (const uint64_t call : {0, 1, 0}) {
    const graph::RandomKey key = {7, 1, call, 0};
    x.add_(1);
    work.launch(key);
    EXPECT_TRUE(at::equal(product, x.mm(x)));
    EXPECT_TRUE(at::equal(first, draw(5, key)));
    EXPECT_TRUE(at::equal(second, draw(2, key)));
    EXPECT_TRUE(at::equal(again, first));
  }
}

/// Afterwards all goes on: random operators, freed memory, another capture.
TEST(Cuda, ACaptureThatFailsLeavesNothing) {
  const at::Tensor x = at::ones({1000}, kGpu);
  graph::DeviceGraphCapture capture(kGpu);
  EXPECT_THROW(capture.capture({0}, [&] { (x + draw(0, {})).cpu(); }), c10::Error);
  EXPECT_EQ((draw(0, {}) * 0 + x).sum().item<float>(), 1000);
  c10::getDeviceAllocator(at::kCUDA)->emptyCache();
  at::Tensor twice;
  const auto work = capture.capture({}, [&] { twice = x + x; });
  work.launch({});
  EXPECT_TRUE(at::equal(twice, x * 2));
}

TEST(Cuda, MessagesGoThroughHostMemoryWhileTheDeviceIsBusy) {
  const at::Tensor large = at::rand({2048, 2048}, kGpu);
  const at::Tensor expected = large.mm(large).cpu();
  const pipeline::MessageLayout layout({graph::TensorMeta::of(large)});
  for (int i = 0; i < 20; ++i) {
    // Packed while the product is being computed; the memory it arrives in is used again at once.
    const at::Tensor message = layout.pack({large.mm(large)});
    const at::Tensor arrived = layout.unpack(message)[0];
    EXPECT_TRUE(at::equal((arrived + 0).cpu(), expected));
  }
}

/// Messages of a channel from rank 0 to rank 1, each on a stream of its own, by whichever way these
/// ranks send: handed over between threads, through host memory, or over NCCL.
TEST(Cuda, ChannelsBringTensorsThatTheDeviceHasYetToMake) {
  constexpr int kMessages = 30;
  const at::Tensor numbers = at::arange(3001.0).to(at::kFloat);
  comm::run_ranks(2, [&](const comm::CommunicatorPtr& world) {
    const at::Device device(at::kCUDA, static_cast<c10::DeviceIndex>(world->rank() % gpus()));
    const c10::impl::VirtualGuardImpl gpu(at::kCUDA);
    const c10::StreamGuard stream(gpu.getStreamFromGlobalPool(device));
    const pipeline::MessageLayout layout({graph::TensorMeta::of(numbers.to(device))});
    const comm::ChannelSpec spec = {1 - world->rank(), 0,      layout.nbytes(),      /*held=*/1,
                                    /*ahead=*/4,       device, layout.header_bytes()};
    const auto group = comm::make_device_communicator(world, device);
    const bool sends = world->rank() == 0;
    const comm::Channels ends =
        sends ? group->open_channels({spec}, {}) : group->open_channels({}, {spec});
    const at::Tensor ones = at::ones({2048, 2048}, device);
    for (int i = 0; i < kMessages; ++i) {
      if (sends) {
        at::Tensor late = ones;
        for (int k = 0; k < 10; ++k) late = late.mm(ones) / 2048;
        const at::Tensor made = numbers.to(device) + i + (late[0][0] - 1);
        comm::Sender& sender = *ends.senders[0];
        const at::Tensor message = sender.prepare();
        const auto packed = layout.begin_pack({made}, message, sender.device_part());
        if (packed) packed->synchronize();
        sender.send();
        made.zero_();
      } else {
        comm::Receiver& receiver = *ends.receivers[0];
        receiver.expect(1);
        const at::Tensor message = receiver.receive();
        const at::Tensor got = layout.unpack(message, receiver.device_part())[0];
        got.mul_(2);
        EXPECT_TRUE(at::equal(got.cpu(), (numbers + i) * 2)) << "message " << i;
      }
    }
  });
}

// The part that the transports add in this order: ((rank 0 + rank 1) + rank 2) ...
at::Tensor part_of(int rank, at::ScalarType type) {
  return ((at::arange(1001).to(at::kDouble) + 1) * (rank + 1) / 7).to(type);
}

/// From a T4 on, GPUs have 0.3 TB/s and more; the table of a run shows the figures.
TEST(Cuda, CostsFollowFromTheDevice) {
  const auto properties = graph::device_properties(kGpu);
  ASSERT_TRUE(properties);
  const auto costs = partitioner::CostModel::of_gpu(*properties);
  ASSERT_TRUE(costs) << "a number is missing";
  EXPECT_EQ(partitioner::CostModel::of_device(kGpu), *costs);
  EXPECT_FALSE(graph::device_properties(at::Device(at::kCUDA, static_cast<int8_t>(gpus()))));
  for (const double fraction :
       {costs->compute.bytes_per_us / 3e5, 3e7 / costs->compute.bytes_per_us,
        costs->compute.half_flops_per_us / 6e7}) {
    EXPECT_GT(fraction, 0.5);
  }
  print_finding("costs: memory", c10::str(costs->compute.bytes_per_us / 1e6), "TB/s");
  print_finding("costs: products in half precision",
                c10::str(costs->compute.half_flops_per_us / 1e6), "TFLOP/s");
}

/// Ranks share GPUs where there are too few; with one for each they use NCCL.
void expect_collectives(int ranks, bool fast = false) {
  comm::run_ranks(ranks, [&](const comm::CommunicatorPtr& world) {
    world->set_device_transport({/*only_nccl=*/false, fast});
    const at::Device device(at::kCUDA, static_cast<c10::DeviceIndex>(world->rank() % gpus()));
    const auto group = comm::make_device_communicator(world, device);
    for (const at::ScalarType type : {at::kFloat, at::kHalf, at::kLong, at::kShort}) {
      const at::Tensor host = part_of(world->rank(), type), sum = host.to(device);
      world->all_reduce(host);
      group->all_reduce(sum);
      if (fast) {  // half precision is rounded at each addition
        EXPECT_TRUE(at::allclose(sum.cpu().to(at::kDouble), host.to(at::kDouble), 1e-2)) << type;
      } else {
        EXPECT_TRUE(at::equal(sum.cpu(), host)) << "other bits than on the host: " << type;
      }
      const at::Tensor all = at::empty({ranks, 1001}, sum.options());
      group->all_gather(all, part_of(world->rank(), type).to(device));
      for (int rank = 0; rank < ranks; ++rank) {
        EXPECT_TRUE(at::equal(all[rank].cpu(), part_of(rank, type)));
      }
      const at::Tensor given = part_of(world->rank(), type).to(device);
      group->broadcast(given, ranks - 1);
      EXPECT_TRUE(at::equal(given.cpu(), part_of(ranks - 1, type)));
    }
    const at::Tensor got = at::empty({1001}, device);
    const int next = (world->rank() + 1) % ranks, previous = (world->rank() + ranks - 1) % ranks;
    if (ranks > 1) {
      const auto sent = group->isend(part_of(world->rank(), at::kFloat).to(device), next, 3);
      group->recv(got, previous, 3);
      sent->wait();
      EXPECT_TRUE(at::equal(got.cpu(), part_of(previous, at::kFloat)));
    }
  });
}

TEST(Cuda, CollectivesOfOneRank) { expect_collectives(1); }
TEST(Cuda, CollectivesOfRanksThatMayShareAGpu) { expect_collectives(2); }
TEST(Cuda, FastCollectivesOfRanksThatMayShareAGpu) { expect_collectives(2, /*fast=*/true); }

}  // namespace
}  // namespace smp::testing
