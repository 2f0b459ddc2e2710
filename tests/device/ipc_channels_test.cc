// SPDX-License-Identifier: Apache-2.0
// Channels through memory that processes share, on a device that does everything as late as it may.
// Most of the processes are threads here, whose streams the device knows all.

#include "comm/device/ipc_channels.h"

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <functional>
#include <future>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <utility>
#include <vector>

#include "comm/channel_pool.h"
#include "comm/device/device_communicator.h"
#include "comm/device_streams.h"
#include "comm/store/store_communicator.h"
#include "comm/threads/run_ranks.h"
#include "core/check.h"
#include "tests/device/fake_device.h"
#include "tests/device/two_processes.h"
#include "tests/error_of.h"

namespace smp::testing {
namespace {

using comm::ChannelSpec;
using comm::CommunicatorPtr;

constexpr int64_t kHeader = 64;

c10::Stream another_stream(at::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device);
}

CommunicatorPtr join(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size) {
  return comm::make_store_world(store, rank, size, std::chrono::seconds(60));
}

using Body = std::function<void(const CommunicatorPtr& group, at::Device device)>;

/// Runs `body` on ranks that know nothing of it that they are threads of one process. Each is on a
/// stream of its own of a device of its number, modulo `devices`. `group` is for the device.
void as_processes(int ranks, int devices, const Body& body) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::future<void>> results;
  for (int rank = 0; rank < ranks; ++rank) {
    results.push_back(std::async(std::launch::async, [&, rank] {
      const CommunicatorPtr world = join(store, rank, ranks);
      const at::Device device = fake_device(rank % devices);
      const c10::StreamGuard guard(another_stream(device));
      try {
        body(comm::make_device_communicator(world, device), device);
      } catch (const std::exception& error) {
        world->abort(error.what());
        throw;
      }
    }));
  }
  for (auto& result : results) result.get();
}

at::Tensor numbers(int first, int64_t count) { return (at::arange(count) + first).to(at::kByte); }

/// Numbers that the device of the current stream has yet to make: the host waits for no others.
at::Tensor late_numbers(int first, int64_t count, at::Device device) {
  thread_local at::Tensor from_zero;
  if (!from_zero.defined()) from_zero = numbers(0, 5000).to(device);
  return from_zero.narrow(0, 0, count) + first;
}

ChannelSpec spec_to(int peer, at::Device device, int64_t elements = 128, int tag = 0) {
  return {peer, tag, kHeader + elements, /*held=*/1, /*ahead=*/2, device, kHeader};
}

/// Sends numbers that are overwritten as soon as they are sent.
void send(comm::Sender& sender, int first, at::Device device) {
  const at::Tensor message = sender.prepare();
  const at::Tensor elements = sender.device_part();
  EXPECT_TRUE(sender.device_part().is_same(elements)) << "the same until it is sent";
  message.fill_(first);
  const at::Tensor made = late_numbers(first, elements.numel(), device);
  elements.copy_(made);
  sender.send();
  made.zero_();
}

at::Tensor receive(comm::Receiver& receiver, int first, int64_t header = kHeader) {
  receiver.expect(1);
  const at::Tensor message = receiver.receive();
  EXPECT_TRUE(at::equal(message, at::full({header}, first, at::kByte)));
  return receiver.device_part();
}

void expect_numbers(const at::Tensor& got, int first) {
  EXPECT_TRUE(at::equal(got.cpu(), numbers(first, got.numel()))) << "from " << first;
}

TEST(IpcChannels, SayThatTensorsGoThisWay) {
  as_processes(2, 1, [](const CommunicatorPtr& group, at::Device) {
    EXPECT_EQ(device_route(*group), "through memory of the device that the processes share (IPC)");
  });
}

/// Twenty messages pass three slots. The receiver begins when as many wait for it as may, and looks
/// at what it got last of all.
TEST(IpcChannels, ALateReceiverGetsWhatWasSent) {
  std::promise<void> is_full;
  as_processes(2, 1, [&](const CommunicatorPtr& group, at::Device device) {
    constexpr int kMessages = 20;
    if (group->rank() == 0) {
      const comm::Channels ends = group->open_channels({spec_to(1, device)}, {});
      for (int i = 0; i < kMessages; ++i) {
        send(*ends.senders[0], i, device);
        if (i == 1) is_full.set_value();
      }
      return;
    }
    const comm::Channels ends = group->open_channels({}, {spec_to(0, device)});
    is_full.get_future().wait();
    std::vector<at::Tensor> got;
    for (int i = 0; i < kMessages; ++i) got.push_back(receive(*ends.receivers[0], i));
    for (int i = 0; i < kMessages; ++i) expect_numbers(got[i], i);
  });
}

TEST(IpcChannels, NoHostWaitsForADevice) {
  std::promise<void> is_sent;
  as_processes(2, 1, [&](const CommunicatorPtr& group, at::Device device) {
    if (group->rank() == 0) {
      const comm::Channels ends = group->open_channels({spec_to(1, device)}, {});
      const at::Tensor values = at::ones({128}, at::TensorOptions(at::kByte).device(device));
      {
        HostUses uses;
        for (int i = 0; i < 2; ++i) {
          ends.senders[0]->prepare();
          ends.senders[0]->device_part().copy_(values);
          ends.senders[0]->send();
        }
        EXPECT_TRUE(uses.take(0).empty());
      }
      is_sent.set_value();
      group->barrier();
      return;
    }
    const comm::Channels ends = group->open_channels({}, {spec_to(0, device)});
    is_sent.get_future().wait();
    {
      HostUses uses;
      for (int i = 0; i < 2; ++i) {
        ends.receivers[0]->expect(1);
        ends.receivers[0]->receive();
      }
      EXPECT_TRUE(uses.take(0).empty());
    }
    group->barrier();
  });
}

/// Ranks with a device each, with several channels to each other under the same tags, and with
/// messages of several lengths.
TEST(IpcChannels, LanesGoBothWaysBetweenDevices) {
  as_processes(3, 3, [](const CommunicatorPtr& group, at::Device device) {
    const int rank = group->rank();
    std::vector<ChannelSpec> outgoing, incoming;
    for (int peer = 0; peer < 3; ++peer) {
      for (int tag = 0; peer != rank && tag < 2; ++tag) {
        outgoing.push_back(spec_to(peer, device, 100 * (rank + 1) + tag, tag));
        incoming.push_back(spec_to(peer, device, 100 * (peer + 1) + tag, tag));
      }
    }
    const comm::Channels ends = group->open_channels(outgoing, incoming);
    for (int i = 0; i < 6; ++i) {
      for (size_t n = 0; n < outgoing.size(); ++n) {
        ends.senders[n]->set_size({outgoing[n].bytes - i, kHeader});
        send(*ends.senders[n], 10 * rank + outgoing[n].tag + i, device);
      }
      for (size_t n = 0; n < incoming.size(); ++n) {
        ends.receivers[n]->set_size({incoming[n].bytes - i, kHeader});
        const int first = 10 * incoming[n].peer + incoming[n].tag + i;
        const at::Tensor got = receive(*ends.receivers[n], first);
        EXPECT_EQ(got.numel(), incoming[n].bytes - i - kHeader);
        EXPECT_EQ(got.device(), device);
        expect_numbers(got, first);
      }
    }
  });
}

/// Over messages in place of memory that the hosts share.
TEST(IpcChannels, TheHostsChannelMayBeOfAnyKind) {
  for (const std::vector<int>& hosts : {std::vector<int>{0, 0}, std::vector<int>{0, 1}}) {
    const auto program = [](const CommunicatorPtr& world) {
      const at::Device device = fake_device();
      const c10::StreamGuard guard(another_stream(device));
      comm::DeviceIpc& ipc = *comm::device_ipc(device.type());
      const bool sends = world->rank() == 0;
      const ChannelSpec spec = spec_to(1 - world->rank(), device);
      const comm::Channels ends = sends ? open_ipc_channels(world, ipc, {spec}, {})
                                        : open_ipc_channels(world, ipc, {}, {spec});
      std::vector<at::Tensor> got;
      for (int i = 0; i < 10; ++i) {
        if (sends) {
          send(*ends.senders[0], i, device);
        } else {
          got.push_back(receive(*ends.receivers[0], i));
        }
      }
      for (size_t i = 0; i < got.size(); ++i) expect_numbers(got[i], static_cast<int>(i));
    };
    comm::run_ranks(2, program, hosts);
  }
}

/// A wider port takes the place of one whose last message is still under way, and gives back its
/// memory.
TEST(IpcChannels, LongerMessagesTakeWiderLanes) {
  as_processes(2, 1, [&](const CommunicatorPtr& group, at::Device device) {
    comm::ChannelPool pool(group);
    const bool sends = group->rank() == 0;
    std::vector<size_t> bytes;
    for (const int64_t elements : {128, 4000, 1000}) {
      const ChannelSpec spec = spec_to(1 - group->rank(), device, elements);
      const auto ports = sends ? pool.open({spec}, {}) : pool.open({}, {spec});
      bytes.push_back(fake_ipc_bytes());
      if (sends) {
        ports.outgoing[0]->sender->set_size({spec.bytes, kHeader});
        send(*ports.outgoing[0]->sender, 3, device);
      } else {
        ports.incoming[0]->receiver->set_size({spec.bytes, kHeader});
        expect_numbers(receive(*ports.incoming[0]->receiver, 3), 3);
      }
    }
    if (sends) {
      EXPECT_EQ(bytes[1] + 3 * 256, bytes[0] + 3 * 4096) << "three slots for 4000 bytes";
      EXPECT_EQ(bytes[2], bytes[1]);
    }
    group->barrier();
  });
}

/// A user with more in the first bytes and less behind them leaves the others room.
TEST(IpcChannels, UsersOfALaneDifferInTheirFirstBytes) {
  as_processes(2, 1, [&](const CommunicatorPtr& group, at::Device device) {
    comm::ChannelPool pool(group);
    const bool sends = group->rank() == 0;
    for (const auto& [header, elements] :
         std::vector<std::pair<int64_t, int64_t>>{{64, 4000}, {1024, 100}, {64, 4000}}) {
      ChannelSpec spec = spec_to(1 - group->rank(), device, elements);
      spec.host_bytes = header;
      spec.bytes = header + elements;
      const auto ports = sends ? pool.open({spec}, {}) : pool.open({}, {spec});
      if (sends) {
        ports.outgoing[0]->sender->set_size({spec.bytes, header});
        send(*ports.outgoing[0]->sender, 3, device);
      } else {
        ports.incoming[0]->receiver->set_size({spec.bytes, header});
        const at::Tensor got = receive(*ports.incoming[0]->receiver, 3, header);
        EXPECT_EQ(got.numel(), elements);
        expect_numbers(got, 3);
      }
    }
    group->barrier();
  });
}

TEST(IpcChannels, AMessageLongerThanTheChannelIsRefused) {
  as_processes(2, 1, [&](const CommunicatorPtr& group, at::Device device) {
    const ChannelSpec spec = spec_to(1 - group->rank(), device);
    const comm::Channels ends =
        group->rank() == 0 ? group->open_channels({spec}, {}) : group->open_channels({}, {spec});
    if (group->rank() == 1) return;
    expect_has(error_of<c10::Error>([&] {
                 ends.senders[0]->set_size({200, kHeader});
               }),
               "a message of 64 and 136 bytes on a channel for 64 and 128");
  });
}

TEST(IpcChannels, TheEndsAgreeOnTheirLength) {
  as_processes(2, 1, [&](const CommunicatorPtr& group, at::Device device) {
    const ChannelSpec spec = spec_to(1 - group->rank(), device, 100 + group->rank());
    if (group->rank() == 0) {
      group->open_channels({spec}, {});
    } else {
      expect_has(
          error_of<CommError>([&] { group->open_channels({}, {spec}); }),
          "the channel with tag 0 is one of 101 bytes on fake:0 for its receiver, and one of "
          "100 for its sender. Both must give the same numbers.");
    }
  });
}

/// Its process may end then.
TEST(IpcChannels, AnEndGoesWhenItsDeviceHasDoneItsPart) {
  as_processes(2, 1, [&](const CommunicatorPtr& group, at::Device device) {
    const ChannelSpec spec = spec_to(1 - group->rank(), device);
    comm::Channels ends =
        group->rank() == 0 ? group->open_channels({spec}, {}) : group->open_channels({}, {spec});
    if (group->rank() == 0) {
      ends.senders[0]->prepare();
      ends.senders[0]->device_part().copy_(late_numbers(1, 128, device));
      c10::Event written(device.type());
      written.record(comm::current_stream(device));
      ends.senders[0]->send();
      ends.senders.clear();
      EXPECT_TRUE(written.query());
    }
    group->barrier();
  });
}

/// Its process may be gone. Those that are alive neither wait for ever nor close what their devices
/// may yet read.
TEST(IpcChannels, ADeviceMayWaitForARankForEver) {
  for (const bool has_aborted : {false, true}) {
    const auto pass = [&](const CommunicatorPtr& group, at::Device device) {
      const bool sends = group->rank() == 0;
      const auto open = [&] {
        const ChannelSpec spec = spec_to(1 - group->rank(), device);
        return sends ? group->open_channels({spec}, {}) : group->open_channels({}, {spec});
      };
      comm::Channels ends = open();
      if (sends) {
        send(*ends.senders[0], 1, device);
      } else {
        expect_numbers(receive(*ends.receivers[0], 1), 1);
      }
      group->barrier();
      group->set_timeout(has_aborted ? std::chrono::hours(1) : std::chrono::milliseconds(50));
      if (has_aborted) group->abort("the cause");
      {
        const StuckFakeIpc stuck;
        ends = comm::Channels();
      }
      if (has_aborted) return;
      group->set_timeout(std::chrono::seconds(60));
      group->barrier();
      const size_t before = fake_ipc_bytes();
      group->barrier();
      ends = open();
      if (sends) {
        EXPECT_EQ(fake_ipc_bytes(), before + 3 * 256) << "that of the first is kept";
      }
      group->barrier();
    };
    as_processes(2, 1, pass);
  }
}

/// Messages that no rank takes any more are on their way, and are being copied.
TEST(IpcChannels, ARankMayFailMeanwhile) {
  for (const bool receiver_fails : {false, true}) {
    const auto text = error_of<std::runtime_error>([&] {
      as_processes(2, 1, [&](const CommunicatorPtr& group, at::Device device) {
        const ChannelSpec spec = spec_to(1 - group->rank(), device);
        const bool sends = group->rank() == 0;
        const comm::Channels ends =
            sends ? group->open_channels({spec}, {}) : group->open_channels({}, {spec});
        if (sends) {
          for (int i = 0; i < 2; ++i) send(*ends.senders[0], i, device);
          if (!receiver_fails) throw std::runtime_error("the cause");
          expect_has(error_of<CommError>([&] {
                       for (int i = 0; i < 4; ++i) send(*ends.senders[0], i, device);
                     }),
                     "the cause");
        } else {
          const at::Tensor got = receive(*ends.receivers[0], 0);
          got.add_(1);
          if (receiver_fails) throw std::runtime_error("the cause");
          receive(*ends.receivers[0], 1);
          expect_has(error_of<CommError>([&] { ends.receivers[0]->receive(); }), "the cause");
        }
      });
    });
    EXPECT_EQ(text, "the cause");
  }
}

/// A device fails once in each of its kernels after the first. The numbers of one that has failed
/// are none, which its own process finds.
TEST(IpcChannels, ADeviceMayFailMeanwhile) {
  const auto pass = [](const CommunicatorPtr& group, at::Device device, int failing,
                       int64_t kernels) {
    std::optional<FailingDevice> fails;
    if (group->rank() == failing) fails.emplace(failing, kernels);
    const ChannelSpec spec = spec_to(1 - group->rank(), device);
    const bool sends = group->rank() == 0;
    const comm::Channels ends =
        sends ? group->open_channels({spec}, {}) : group->open_channels({}, {spec});
    if (sends) {
      send(*ends.senders[0], 1, device);
      comm::current_stream(device).synchronize();
      group->barrier();
    } else {
      const at::Tensor got = receive(*ends.receivers[0], 1);
      group->barrier();
      expect_numbers(got, 1);
    }
  };
  for (const int failing : {0, 1}) {
    int64_t kernels = 1;
    for (std::string text = "failed"; !text.empty(); ++kernels) {
      text = error_or_none<c10::Error>([&] {
        as_processes(2, 2, [&](const CommunicatorPtr& group, at::Device device) {
          pass(group, device, failing, kernels);
        });
      });
      if (!text.empty()) expect_has(text, "device-side assert triggered");
    }
    EXPECT_GT(kernels, 2) << "fake:" << failing;
  }
}

TEST(IpcChannels, WithoutSharedMemoryMessagesGoThroughTheHost) {
  const NoFakeIpc none;
  as_processes(2, 1, [](const CommunicatorPtr& group, at::Device device) {
    EXPECT_EQ(device_route(*group),
              "through host memory: NCCL knows GPUs only; memory of the device cannot be shared "
              "(IPC): rank 0 of the group cannot open the memory of another: fake error: invalid "
              "resource handle");
    const ChannelSpec spec = spec_to(1 - group->rank(), device);
    const comm::Channels ends = group->open_channels({spec}, {spec});
    EXPECT_EQ(ends.senders[0]->prepare().numel(), spec.bytes);
    EXPECT_FALSE(ends.senders[0]->device_part().defined());
    group->barrier();
  });
}

TEST(IpcChannels, MemoryThatReadsOtherwiseIsNotUsed) {
  const RubbishFakeIpc rubbish;
  as_processes(3, 2, [](const CommunicatorPtr& group, at::Device) {
    EXPECT_EQ(device_route(*group),
              "through host memory: NCCL knows GPUs only; memory of the device cannot be shared "
              "(IPC): memory of rank 1 reads otherwise on rank 0");
  });
}

TEST(IpcChannels, AnEventThatDoesNotComeEndsTheTrial) {
  const StuckFakeIpc stuck;
  comm::run_ranks(2, [](const CommunicatorPtr& world) {
    world->barrier();  // the limit begins when both are there
    world->set_timeout(std::chrono::seconds(10));
    const at::Device device = fake_device();
    EXPECT_EQ(comm::why_not_ipc(*world, *comm::device_ipc(device.type()), device),
              "rank 0 of the group has not copied the memory of others within 5 s");
  });
}

/// A process cannot map the memory of hosts that another user has made, by which an opener tells
/// that it has closed the device's.
TEST_F(TwoProcesses, TryTheMemoryThatTellsOfClosingToo) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can be another user";
  const auto why_not = [](const CommunicatorPtr& group, at::Device device) {
    return comm::why_not_ipc(*group, *comm::device_ipc(device.type()), device);
  };
  run(
      [&](const CommunicatorPtr& group, at::Device device) {
        EXPECT_EQ(why_not(group, device), std::nullopt);
        ASSERT_EQ(seteuid(65534), 0);
        expect_has(why_not(group, device).value(),
                   {"rank 0 of the group cannot open the memory of another: memory of process ",
                    " that tells of closing cannot be mapped"});
        ASSERT_EQ(seteuid(0), 0);
        group->barrier();
      },
      [&](const CommunicatorPtr& group, at::Device device) {
        EXPECT_EQ(why_not(group, device), std::nullopt);
        expect_has(why_not(group, device).value(), "that tells of closing cannot be mapped");
        group->barrier();
      });
  EXPECT_EQ(end_of_other(), 0);
}

/// Messages there and back, on ports that grow.
TEST_F(TwoProcesses, SendsBackWhatItGot) {
  const auto pass = [](const CommunicatorPtr& group, at::Device device) {
    comm::ChannelPool pool(group);
    const bool is_first = group->rank() == 0;
    for (const int64_t elements : {200, 5000, 1000}) {
      const ChannelSpec spec = spec_to(1 - group->rank(), device, elements);
      const auto ports = pool.open({spec}, {spec});
      comm::Sender& sender = *ports.outgoing[0]->sender;
      comm::Receiver& receiver = *ports.incoming[0]->receiver;
      sender.set_size({spec.bytes, kHeader});
      receiver.set_size({spec.bytes, kHeader});
      for (int i = 0; i < 10; ++i) {
        if (is_first) send(sender, i, device);
        const at::Tensor got = receive(receiver, i);
        if (is_first) {
          expect_numbers(got, i);
          continue;
        }
        sender.prepare().fill_(i);
        sender.device_part().copy_(got);
        sender.send();
      }
    }
    return ::testing::Test::HasFailure();
  };
  run(pass, [&](const CommunicatorPtr& group, at::Device device) {
    if (pass(group, device)) _exit(1);
  });
  EXPECT_EQ(end_of_other(), 0);
}

TEST_F(TwoProcesses, MayWantNoMemoryShared) {
  const auto route_again = [](const CommunicatorPtr& group) {
    return device_route(*group->split({0, 1}, "again"));
  };
  const std::string expected =
      "through host memory: NCCL knows GPUs only; memory of the device cannot be shared (IPC): "
      "SMP_DEVICE_IPC=0";
  run(
      [&](const CommunicatorPtr& group, at::Device) {
        expect_has(device_route(*group), "through memory of the device that");
        EXPECT_EQ(route_again(group), expected);
        group->barrier();
      },
      [&](const CommunicatorPtr& group, at::Device) {
        setenv("SMP_DEVICE_IPC", "0", 1);
        if (route_again(group) != expected) _exit(1);
        group->barrier();
      });
  EXPECT_EQ(end_of_other(), 0);
}

TEST_F(TwoProcesses, MayDieBeforeItReceives) {
  run(
      [this](const CommunicatorPtr& group, at::Device device) {
        comm::Channels ends = group->open_channels({spec_to(1, device)}, {});
        send(*ends.senders[0], 0, device);
        kill_other();
        EXPECT_EQ(end_of_other(), SIGKILL);
        expect_has(error_of<CommError>([&] {
                     for (int i = 0; i < 4; ++i) send(*ends.senders[0], i, device);
                   }),
                   "rank 1");
        ends.senders.clear();
        expect_numbers(late_numbers(1, 4, device), 1);
      },
      [](const CommunicatorPtr& group, at::Device device) {
        const comm::Channels ends = group->open_channels({}, {spec_to(0, device)});
        for (;;) pause();
      });
}

TEST_F(TwoProcesses, MayDieWhenItHasSent) {
  run(
      [this](const CommunicatorPtr& group, at::Device device) {
        comm::Channels ends = group->open_channels({}, {spec_to(1, device)});
        const at::Tensor got = receive(*ends.receivers[0], 7);
        kill_other();
        EXPECT_EQ(end_of_other(), SIGKILL);
        ends.receivers[0]->expect(1);
        expect_has(error_of<CommError>([&] { ends.receivers[0]->receive(); }), "rank 1");
        ends.receivers.clear();
        expect_numbers(got, 7);
      },
      [](const CommunicatorPtr& group, at::Device device) {
        const comm::Channels ends = group->open_channels({spec_to(0, device)}, {});
        send(*ends.senders[0], 7, device);
        for (;;) pause();
      });
}

}  // namespace
}  // namespace smp::testing
