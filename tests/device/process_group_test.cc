// SPDX-License-Identifier: Apache-2.0
// One c10d process group for tensors of the CPU and of a device.

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "smp/smp.h"
#include "tests/device/fake_device.h"
#include "tests/smp/oracle.h"

// libtorch 2.15 has other names for some operations, which 2.11 does not know.
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"

namespace smp::testing {
namespace {

constexpr int kRanks = 2;

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

/// `body` gets each rank's group and device.
void on_every_rank(const std::function<void(const Group&, at::Device)>& body) {
  torch::set_num_threads(1);
  run_as_threads(kRanks, stages(kRanks),
                 [&] { body(group(CommGroup::kWorld).process_group(), fake_device(rank())); });
}

void expect_values(const torch::Tensor& tensor, const torch::Tensor& expected, at::Device device) {
  EXPECT_EQ(tensor.device(), device);
  EXPECT_TRUE(torch::equal(tensor.cpu(), expected)) << tensor.cpu() << expected;
}

TEST(DeviceProcessGroup, ReducesTensorsOfTheCpuAndOfTheDevice) {
  on_every_rank([](const Group& group, at::Device device) {
    for (const at::Device on : {at::Device(at::kCPU), device}) {
      Tensors tensors = {torch::full({3}, static_cast<float>(rank() + 1)).to(on)};
      group->allreduce(tensors)->wait();
      expect_values(tensors[0], torch::full({3}, 3.0F), on);
      const auto future = group->allreduce(tensors)->getFuture();
      future->waitAndThrow();
      expect_values(future->value().toTensorVector().at(0), torch::full({3}, 6.0F), on);
    }
  });
}

TEST(DeviceProcessGroup, HasTheOtherCollectives) {
  on_every_rank([](const Group& group, at::Device device) {
    const auto mine = [&] { return (torch::arange(4.0F) + 10.0F * rank()).to(device); };
    const torch::Tensor first = torch::arange(4.0F), both = torch::cat({first, first + 10});
    Tensors one = {mine()};
    group->broadcast(one)->wait();
    expect_values(one[0], first, device);
    one = {mine()};
    group->reduce(one)->wait();
    expect_values(one[0], rank() == 0 ? 2 * first + 10 : first + 10, device);

    torch::Tensor input = mine(), all = torch::zeros({8}, device), half = torch::zeros({2}, device);
    group->_allgather_base(all, input)->wait();
    expect_values(all, both, device);
    group->_reduce_scatter_base(half, input)->wait();
    expect_values(half, (2 * first + 10).narrow(0, 2 * rank(), 2), device);
    std::vector<int64_t> even;
    torch::Tensor swapped = torch::zeros({4}, device);
    group->alltoall_base(swapped, input, even, even)->wait();
    expect_values(swapped,
                  torch::cat({first, first + 10}).view({2, 2, 2}).select(1, rank()).flatten(),
                  device);

    std::vector<Tensors> lists = {{torch::zeros({4}, device), torch::zeros({4}, device)}};
    one = {mine()};
    group->allgather(lists, one)->wait();
    for (int r = 0; r < kRanks; ++r) expect_values(lists[0][r], first + 10.0F * r, device);
    Tensors got = {torch::zeros({4}, device)};
    group->reduce_scatter(got, lists)->wait();
    expect_values(got[0], 2 * (first + 10.0F * rank()), device);
    std::vector<Tensors> of_root;
    if (rank() == 0) of_root = lists;
    group->scatter(got, of_root)->wait();
    expect_values(got[0], first + 10.0F * rank(), device);
    group->gather(of_root, one)->wait();
    if (rank() == 0) expect_values(of_root[0][1], first + 10, device);
    Tensors sends = {torch::full({1}, 10.0F * rank()).to(device),
                     torch::full({1}, 10.0F * rank() + 1).to(device)};
    Tensors receives = {torch::zeros({1}, device), torch::zeros({1}, device)};
    group->alltoall(receives, sends)->wait();
    for (int r = 0; r < kRanks; ++r) {
      expect_values(receives[r], torch::full({1}, 10.0F * r + rank()), device);
    }
  });
}

TEST(DeviceProcessGroup, SendsAndReceives) {
  on_every_rank([](const Group& group, at::Device device) {
    const int other = 1 - rank();
    Tensors out = {torch::arange(6.0F).view({2, 3}).to(device) + rank()};
    Tensors in = {torch::zeros({3, 2}, device).t()};  // permuted
    for (const bool any : {false, true}) {
      const auto send = group->send(out, other, 1);
      const auto receive = any ? group->recvAnysource(in, 1) : group->recv(in, other, 1);
      receive->wait();
      send->wait();
      expect_values(in[0], torch::arange(6.0F).view({2, 3}) + other, device);
      EXPECT_EQ(receive->sourceRank(), other);
    }
  });
}

/// Work given to the current stream before is read, and comes before writes.
TEST(DeviceProcessGroup, KeepsTheOrderOfTheCallersStream) {
  on_every_rank([](const Group& group, at::Device device) {
    const c10::impl::VirtualGuardImpl guard(device.type());
    const c10::StreamGuard other(guard.getStreamFromGlobalPool(device));
    const torch::Tensor late = torch::full({64}, static_cast<float>(rank() + 1));
    Tensors tensors = {torch::zeros({64}, device)};
    torch::Tensor gathered = torch::zeros({128}, device);
    tensors[0].copy_(late, /*non_blocking=*/true);
    gathered.copy_(torch::full({128}, -1.0F), /*non_blocking=*/true);
    const auto gather = group->_allgather_base(gathered, tensors[0]);
    const auto future = group->allreduce(tensors)->getFuture();
    gather->getFuture()->waitAndThrow();
    future->waitAndThrow();
    expect_values(tensors[0], torch::full({64}, 3.0F), device);
    expect_values(gathered, torch::cat({torch::full({64}, 1.0F), torch::full({64}, 2.0F)}), device);
  });
}

}  // namespace
}  // namespace smp::testing
