// SPDX-License-Identifier: Apache-2.0
#include "comm/device/device_communicator.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <future>

#include "comm/threads/run_ranks.h"
#include "core/check.h"
#include "tests/device/fake_device.h"
#include "tests/error_of.h"

namespace smp::testing {
namespace {

using comm::CommunicatorPtr;

/// Runs `check` on ranks of which each has a device of its own number, modulo two.
void on_devices(int ranks, const std::function<void(comm::Communicator&, at::Device)>& check) {
  comm::run_ranks(ranks, [&](const CommunicatorPtr& world) {
    const at::Device device = fake_device(world->rank() % 2);
    const auto group = comm::make_device_communicator(world, device);
    check(*group, device);
  });
}

at::Tensor numbers(int rank) { return at::arange(5.0) + 10.0 * rank; }

TEST(DeviceCommunicator, IsThatOfTheHostForTheCpu) {
  comm::run_ranks(2, [](const CommunicatorPtr& world) {
    EXPECT_EQ(comm::make_device_communicator(world, at::kCPU), world);
  });
}

TEST(DeviceCommunicator, IsRefusedWhereNcclIsAskedForAndCannotBe) {
  const auto text = error_of<ConfigError>([] {
    comm::run_ranks(2, [](const CommunicatorPtr& world) {
      world->set_device_transport({/*only_nccl=*/true});
      make_device_communicator(world->split({0, 1}, "both"), fake_device(0));
    });
  });
  EXPECT_NE(text.find("\"nccl\" needs a GPU of its own on each rank, and of group '"),
            std::string::npos)
      << text;
  EXPECT_NE(text.find("rank 0 has its model on none"), std::string::npos) << text;
  comm::run_ranks(1, [](const CommunicatorPtr& world) {
    world->set_device_transport({/*only_nccl=*/true});
    EXPECT_EQ(make_device_communicator(world, at::kCPU), world);
  });
}

TEST(DeviceCommunicator, SaysWhichWayTensorsGo) {
  comm::run_ranks(2, [](const CommunicatorPtr& world) {
    const auto group = make_device_communicator(world, fake_device(0));
    EXPECT_EQ(device_route(*group), "on the device, since the ranks are threads of one process");
    const auto alone = group->split({world->rank()}, "alone");
    EXPECT_EQ(device_route(*alone), "") << "nothing travels";
    EXPECT_EQ(device_route(*world), "") << "of the CPU";
  });
}

TEST(DeviceCommunicator, SaysThatMessagesOfOtherHostsGoThroughTheHost) {
  const auto check = [](const CommunicatorPtr& world) {
    const auto group = make_device_communicator(world, fake_device(0));
    EXPECT_EQ(device_route(*group),
              "through host memory: NCCL knows GPUs only; memory of the device cannot be shared "
              "(IPC): the ranks of the group are on several hosts");
  };
  comm::run_ranks(2, check, /*hosts=*/{0, 1});
}

TEST(DeviceCommunicator, MovesTensorsOfTheDevice) {
  on_devices(3, [](comm::Communicator& group, at::Device device) {
    const int next = (group.rank() + 1) % 3, previous = (group.rank() + 2) % 3;
    const at::Tensor got = at::zeros({5}, device);
    const auto sent = group.isend(numbers(group.rank()).to(device), next, 7);
    group.recv(got, previous, 7);
    sent->wait();
    EXPECT_EQ(got.device(), device);
    EXPECT_TRUE(at::equal(got.cpu(), numbers(previous)));
  });
}

TEST(DeviceCommunicator, ReducesGathersAndBroadcastsOnTheDevice) {
  on_devices(3, [](comm::Communicator& group, at::Device device) {
    const at::Tensor sum = numbers(group.rank()).to(device);
    group.all_reduce(sum);
    EXPECT_TRUE(at::equal(sum.cpu(), numbers(0) + numbers(1) + numbers(2)));

    const at::Tensor all = at::zeros({3, 5}, device);
    group.all_gather(all, numbers(group.rank()).to(device));
    EXPECT_TRUE(at::equal(all.cpu(), at::stack({numbers(0), numbers(1), numbers(2)})));

    const at::Tensor given = numbers(group.rank()).to(device);
    group.broadcast(given, 1);
    EXPECT_TRUE(at::equal(given.cpu(), numbers(1)));
  });
}

/// Computations that the device begins after the call are not waited for, and those before it are.
TEST(DeviceCommunicator, TasksGoOnBesideWhatIsComputed) {
  on_devices(2, [](comm::Communicator& group, at::Device device) {
    const at::Tensor sum = at::zeros({5}, device), later = at::zeros({5});
    sum.add_(numbers(group.rank()).to(device));
    std::promise<void> given;
    const auto work = group.start(device, [&](comm::TaskCollectives& ranks) {
      given.get_future().wait();
      ranks.all_reduce(sum);
    });
    later.copy_(at::ones({5}, device), /*non_blocking=*/true);
    given.set_value();
    work->wait();
    EXPECT_TRUE(at::equal(later, at::zeros({5}))) << "the task waited for it";
    EXPECT_TRUE(at::equal(sum.cpu(), numbers(0) + numbers(1)));
    EXPECT_TRUE(at::equal(later, at::ones({5})));
  });
}

TEST(DeviceCommunicator, TakesTensorsOfTheCpuToo) {
  on_devices(2, [](comm::Communicator& group, at::Device) {
    const at::Tensor sum = numbers(group.rank());
    group.all_reduce(sum);
    EXPECT_TRUE(at::equal(sum, numbers(0) + numbers(1)));
  });
}

TEST(DeviceCommunicator, SplitsIntoGroupsForTheSameDevice) {
  on_devices(4, [](comm::Communicator& group, at::Device device) {
    const int first = group.rank() / 2 * 2;
    const auto pair = group.split({first, first + 1}, "pair");
    const at::Tensor sum = numbers(group.rank()).to(device);
    pair->all_reduce(sum);
    EXPECT_TRUE(at::equal(sum.cpu(), numbers(first) + numbers(first + 1)));
  });
}

TEST(DeviceCommunicator, MovesNothingInAGroupOfOne) {
  on_devices(1, [](comm::Communicator& group, at::Device device) {
    const at::Tensor sum = numbers(1).to(device), all = at::zeros({1, 5}, device);
    group.all_reduce(sum);
    group.broadcast(sum, 0);
    group.all_gather(all, sum);
    EXPECT_TRUE(at::equal(sum.cpu(), numbers(1)));
    EXPECT_TRUE(at::equal(all.cpu(), numbers(1).view({1, 5})));
  });
}

TEST(DeviceCommunicator, RefusesTensorsOfAnotherDevice) {
  on_devices(2, [](comm::Communicator& group, at::Device) {
    const at::Tensor other = at::zeros({5}, fake_device(1 - group.rank()));
    try {
      group.all_reduce(other);
      ADD_FAILURE() << "no error";
    } catch (const UsageError& error) {
      const std::string text = error.what();
      EXPECT_NE(text.find("this rank communicates tensors of fake:"), std::string::npos) << text;
      EXPECT_NE(text.find("Move it to the model's device first"), std::string::npos) << text;
    }
  });
}

}  // namespace
}  // namespace smp::testing
