// SPDX-License-Identifier: Apache-2.0
// Collectives through memory that ranks share, on a device that does everything as late as it may
// and ends the program where a wait is missing. Most "processes" are threads, which it knows all.

#include "comm/device/ipc_collectives.h"

#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdlib>
#include <functional>
#include <future>
#include <limits>
#include <memory>
#include <optional>
#include <ostream>
#include <stdexcept>
#include <string>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <utility>
#include <vector>

#include "comm/device/device_communicator.h"
#include "comm/device/ipc_memory.h"
#include "comm/device/thread_memory.h"
#include "comm/device_streams.h"
#include "comm/reduce.h"
#include "comm/store/store_communicator.h"
#include "comm/threads/run_ranks.h"
#include "core/check.h"
#include "tests/device/fake_device.h"
#include "tests/device/two_processes.h"
#include "tests/error_of.h"

namespace smp::testing {
namespace {

using comm::Collective;
using comm::Communicator;
using comm::CommunicatorPtr;

/// Small ones, so that a few hundred bytes pass in several slices.
constexpr comm::SlotSizes kSlots = {1024, 2048};

/// The collectives of a group on its devices, in slots of these sizes.
class SharedGroup : public comm::CollectiveOperations<SharedGroup, void> {
 public:
  SharedGroup(const CommunicatorPtr& host, at::Device device, comm::DeviceIpc& ipc,
              const comm::SlotSizes& slots = kSlots)
      : host_(host), shared_(std::make_shared<comm::IpcCollectives>(*host, device, ipc, slots)) {}
  ~SharedGroup() {
    while (!shared_->is_idle() && host_->abort_text().empty()) {
    }
  }

  int rank() const { return host_->rank(); }
  int size() const { return host_->size(); }
  void issue(const Collective& call) { shared_->run(*host_, call); }
  template <class Call>
  WorkPtr start(const Call& call) {
    return shared_->start(*host_, call);
  }

 private:
  const CommunicatorPtr host_;
  const std::shared_ptr<comm::IpcCollectives> shared_;
};

using Check = std::function<void(const CommunicatorPtr& host, SharedGroup& group, at::Device)>;

/// The ranks of a test.
struct Ranks {
  int count;
  int devices;         ///< rank r is on device r modulo these
  bool are_processes;  ///< or know nothing of it that they are threads
};

void PrintTo(const Ranks& ranks, std::ostream* out) {
  *out << ranks.count << (ranks.are_processes ? " processes on " : " threads on ") << ranks.devices
       << " devices";
}

/// Runs `check` on ranks of which each is on a stream of its own.
void on_ranks(const Ranks& ranks, const Check& check) {
  const auto body = [&](const CommunicatorPtr& host) {
    const at::Device device = fake_device(host->rank() % ranks.devices);
    const c10::StreamGuard guard(comm::side_stream(device));
    host->barrier();
    auto& ipc = ranks.are_processes ? *comm::device_ipc(device.type()) : comm::thread_memory();
    {
      SharedGroup group(host, device, ipc);
      check(host, group, device);
    }
    host->barrier();
  };
  if (!ranks.are_processes) {
    comm::run_ranks(ranks.count, body);
    return;
  }
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::future<void>> results;
  for (int rank = 0; rank < ranks.count; ++rank) {
    results.push_back(std::async(std::launch::async, [&, rank] {
      const auto host = comm::make_store_world(store, rank, ranks.count, std::chrono::seconds(60));
      try {
        body(host);
      } catch (const std::exception& error) {
        host->abort(error.what());
        throw;
      }
    }));
  }
  for (auto& result : results) result.get();
}

at::Tensor values_of(int rank, int64_t numel, at::ScalarType type) {
  const auto values = (at::arange(numel).to(at::kDouble) + 1) * (rank + 1) / 7;
  return type == at::kBool ? values.to(at::kLong).remainder(2).to(type) : values.to(type);
}

/// A tensor that the device has yet to make. It has other values at first.
at::Tensor late(const at::Tensor& values, at::Device device) {
  const at::Tensor made = at::zeros_like(values, device);
  return made.copy_(values.to(device));
}

/// All collectives of a group, on tensors of `device` of so many elements.
template <class Group>
std::vector<at::Tensor> results_of(Group& group, at::Device device, int64_t numel,
                                   at::ScalarType type, ReduceOp op, int root) {
  const int rank = group.rank(), size = group.size();
  const auto given = [&](int64_t count) { return late(values_of(rank, count, type), device); };
  const auto room = [&](int64_t count) { return at::zeros({count}, given(1).options()); };
  std::vector<at::Tensor> results;
  // Inputs are overwritten as soon as they are given.
  const auto moves = [&](int64_t from, int64_t to, const auto& move) {
    const at::Tensor input = given(from);
    results.push_back(room(to));
    move(results.back(), input);
    input.zero_();
  };
  if (comm::can_reduce(type, op)) {
    results.push_back(given(numel));
    group.all_reduce(results.back(), op);
    results.push_back(given(numel));
    group.reduce(results.back(), root, op);
    moves(numel * size, numel,
          [&](const auto& out, const auto& in) { group.reduce_scatter(out, in, op); });
    const at::Tensor in_place = given(numel * size);
    results.push_back(in_place.narrow(0, rank * numel, numel));
    group.reduce_scatter(results.back(), in_place, op);
  }
  if (op != ReduceOp::kSum) return results;
  results.push_back(given(numel));
  group.broadcast(results.back(), root);
  moves(numel, numel * size, [&](const auto& out, const auto& in) { group.all_gather(out, in); });
  results.push_back(given(numel * size));
  group.all_gather(results.back(), results.back().narrow(0, rank * numel, numel));
  moves(numel * size, numel * size,
        [&](const auto& out, const auto& in) { group.all_to_all(out, {}, in, {}); });
  moves(numel, rank == root ? numel * size : 0,
        [&](const auto& out, const auto& in) { group.gather(out, in, root); });
  moves(rank == root ? numel * size : 0, numel,
        [&](const auto& out, const auto& in) { group.scatter(out, in, root); });
  // Rank r sends (r + 2 p) % 5 times `numel` / 4 elements to rank p.
  std::vector<int64_t> sent, expected;
  int64_t all_sent = 0, all_expected = 0;
  for (int peer = 0; peer < size; ++peer) {
    all_sent += sent.emplace_back((rank + 2 * peer) % 5 * (numel / 4));
    all_expected += expected.emplace_back((peer + 2 * rank) % 5 * (numel / 4));
  }
  moves(all_sent, all_expected,
        [&](const auto& out, const auto& in) { group.all_to_all(out, expected, in, sent); });
  return results;
}

void expect_bits(const std::vector<at::Tensor>& got, const std::vector<at::Tensor>& expected,
                 const std::string& what) {
  ASSERT_EQ(got.size(), expected.size());
  for (size_t i = 0; i < got.size(); ++i) {
    const at::Tensor bytes = got[i].cpu().contiguous().view(at::kByte);
    EXPECT_TRUE(at::equal(bytes, expected[i].contiguous().view(at::kByte)))
        << "result " << i << " of " << what << "\n"
        << got[i].cpu() << expected[i];
  }
}

class IpcCollectives : public ::testing::TestWithParam<Ranks> {};

/// Sizes around those at which a tensor takes another slice, another way or larger slots.
TEST_P(IpcCollectives, HaveTheHostsBits) {
  on_ranks(GetParam(), [](const CommunicatorPtr& host, SharedGroup& group, at::Device device) {
    int root = 0;
    for (const int64_t numel : {0, 1, 7, 64, 127, 128, 129, 255, 256, 257, 511, 513, 1100}) {
      root = (root + 1) % host->size();
      for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kAverage}) {
        expect_bits(results_of(group, device, numel, at::kFloat, op, root),
                    results_of(*host, at::kCPU, numel, at::kFloat, op, root),
                    c10::str(to_string(op), " of ", numel));
      }
    }
  });
}

TEST_P(IpcCollectives, TakeAllTypesAndOperations) {
  on_ranks(GetParam(), [](const CommunicatorPtr& host, SharedGroup& group, at::Device device) {
    for (const at::ScalarType type :
         {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kLong, at::kInt, at::kShort,
          at::kChar, at::kByte, at::kBool, at::kComplexFloat, at::kComplexDouble}) {
      for (const ReduceOp op :
           {ReduceOp::kSum, ReduceOp::kAverage, ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kProduct,
            ReduceOp::kBitAnd, ReduceOp::kBitOr, ReduceOp::kBitXor}) {
        // The fake device has views of complex numbers made by the host.
        for (const int64_t numel : {5, c10::isComplexType(type) ? 6 : 300}) {
          expect_bits(results_of(group, device, numel, type, op, 0),
                      results_of(*host, at::kCPU, numel, type, op, 0),
                      c10::str(to_string(op), " of ", type, " ", numel));
        }
      }
    }
  });
}

/// Numbers that are none, infinite ones and zeros of both signs, in each pair of ranks.
TEST_P(IpcCollectives, TakeAllNumbers) {
  on_ranks(GetParam(), [](const CommunicatorPtr& host, SharedGroup& group, at::Device device) {
    constexpr double kInf = std::numeric_limits<double>::infinity();
    const auto numbers = at::tensor({0.0, -0.0, 1.0, std::nan(""), kInf, -kInf});
    const auto mine = numbers.repeat_interleave(host->rank() % 2 == 0 ? 1 : 6);
    const auto values = host->rank() % 2 == 0 ? mine.repeat({6}) : mine;
    for (const ReduceOp op :
         {ReduceOp::kSum, ReduceOp::kAverage, ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kProduct}) {
      const at::Tensor got = late(values, device), expected = values.clone();
      group.all_reduce(got, op);
      host->all_reduce(expected, op);
      EXPECT_TRUE(at::allclose(got.cpu(), expected, 0, 0, /*equal_nan=*/true))
          << to_string(op) << "\n"
          << got.cpu() << expected;
    }
  });
}

/// Beside each other, between calls that are waited for, on tensors of the current stream and on
/// those that a task makes. Works are waited for in any order.
TEST_P(IpcCollectives, ManyAreUnderWay) {
  on_ranks(GetParam(), [](const CommunicatorPtr& host, SharedGroup& group, at::Device device) {
    const int rank = host->rank(), size = host->size();
    const auto sum_of = [&](int i, int64_t numel) {
      at::Tensor sum = values_of(0, numel, at::kFloat) * (i + 1);
      for (int r = 1; r < size; ++r) sum = sum + values_of(r, numel, at::kFloat) * (i + 1);
      return sum;
    };
    std::vector<std::pair<at::Tensor, WorkPtr>> started;
    for (int i = 0; i < 12; ++i) {
      const int64_t numel = 50 + 90 * i;
      const at::Tensor values = late(values_of(rank, numel, at::kFloat) * (i + 1), device);
      if (i % 3 == 0) {
        group.all_reduce(values);
        started.emplace_back(values, nullptr);
      } else if (i % 3 == 1) {
        Collective call;
        call.kind = Collective::Kind::kAllReduce;
        call.output = call.input = values;
        started.emplace_back(values, group.start(call));
      } else {
        const at::Tensor result = at::zeros_like(values);
        started.emplace_back(result,
                             group.start(comm::CollectiveTask([=](comm::TaskCollectives& ranks) {
                               const at::Tensor scaled = values * 2;
                               ranks.all_reduce(scaled);
                               result.copy_(scaled / 2);
                             })));
      }
    }
    for (int i = 11; i >= 0; --i) {
      if (started[i].second) started[i].second->wait();
      const at::Tensor& got = started[i].first;
      EXPECT_TRUE(at::equal(got.cpu(), sum_of(i, got.numel()))) << "number " << i;
    }
  });
}

TEST_P(IpcCollectives, NoHostWaitsForADevice) {
  const auto all_started = std::make_shared<std::promise<void>>();
  HostUses uses;
  on_ranks(GetParam(), [&](const CommunicatorPtr& host, SharedGroup& group, at::Device device) {
    const at::Tensor values = late(at::ones({700}), device), part = at::empty({700}, device);
    host->barrier();
    if (host->rank() == 0) {
      for (int index = 0; index < 4; ++index) uses.take(index);
    }
    host->barrier();
    for (int i = 0; i < 3; ++i) {
      group.all_reduce(values);
      group.broadcast(part, 0);
      Collective call;
      call.kind = Collective::Kind::kAllReduce;
      call.output = call.input = values;
      group.start(call)->wait();
      group.start(comm::CollectiveTask([&](auto& ranks) { ranks.all_reduce(part); }))->wait();
    }
    host->barrier();
    if (host->rank() == 0) {
      for (int index = 0; index < 4; ++index) {
        for (const HostUse& use : uses.take(index)) ADD_FAILURE() << use.what << use.stack;
      }
    }
    host->barrier();
  });
}

/// It, and the tensors that it has, are dropped while the devices still move them.
TEST_P(IpcCollectives, WorkThatNobodyWaitsForKeepsItsTensors) {
  on_ranks(GetParam(), [](const CommunicatorPtr& host, SharedGroup& group, at::Device device) {
    for (int i = 0; i < 3; ++i) {
      Collective call;
      call.kind = Collective::Kind::kAllReduce;
      call.output = call.input = at::full({96}, 5, device);
      group.start(call);
    }
    const at::Tensor values = at::full({96}, host->rank() + 1, device);
    group.all_reduce(values);
    const int n = host->size();
    EXPECT_TRUE(at::equal(values.cpu(), at::full({96}, n * (n + 1) / 2)));
  });
}

/// Devices may still read others' slots when there is no memory for the next.
TEST(IpcCollectivesOnOneDevice, MemoryMayRunOut) {
  for (const bool are_processes : {true, false}) {
    std::optional<FakeMemoryLimit> limit;
    on_ranks({2, 1, are_processes},
             [&](const CommunicatorPtr& host, SharedGroup& group, at::Device device) {
               const at::Tensor values = late(at::ones({500}, at::kHalf), device);
               group.all_reduce(values);
               EXPECT_TRUE(at::equal(values.cpu(), at::full({500}, 2, at::kHalf)));
               host->barrier();
               if (host->rank() == 0) {
                 const size_t used = limit.emplace(size_t{1} << 30).peak(0);
                 limit.emplace(used + 500 * sizeof(float));  // one part of two
               }
               host->barrier();
               expect_has(error_of<c10::OutOfMemoryError>([&] { group.all_reduce(values); }),
                          "fake out of memory. Tried to allocate 2000 bytes");
               host->barrier();
               if (host->rank() == 0) limit.reset();
               host->barrier();
             });
  }
}

TEST_P(IpcCollectives, GiveTheirMemoryBack) {
  const at::Device device = fake_device();
  comm::free_closed_memory();
  const size_t before = fake_ipc_bytes();
  const int64_t shared_before = comm::shared_bytes(device);
  on_ranks(GetParam(), [&](const CommunicatorPtr& host, SharedGroup& group, at::Device own) {
    group.all_reduce(at::ones({4}, own));
    host->barrier();
    const size_t small = fake_ipc_bytes();
    host->barrier();
    group.all_reduce(at::ones({4000}, own));
    host->barrier();
    if (GetParam().are_processes) {
      EXPECT_EQ(small - before, host->size() * 2 * kSlots.small);
      EXPECT_EQ(fake_ipc_bytes() - small, host->size() * 2 * kSlots.large);
      const int here = (host->size() + GetParam().devices - 1) / GetParam().devices;
      EXPECT_EQ(comm::shared_bytes(device) - shared_before,
                here * 2 * (kSlots.small + kSlots.large));
    } else {
      EXPECT_EQ(small, before) << "that of libtorch's allocator";
      EXPECT_EQ(comm::shared_bytes(device), shared_before);
    }
    host->barrier();
  });
  comm::free_closed_memory();
  EXPECT_EQ(fake_ipc_bytes(), before) << "when the last has closed it";
  EXPECT_EQ(comm::shared_bytes(device), shared_before);
}

TEST_P(IpcCollectives, CallsThatDifferAreNamedByAll) {
  on_ranks(GetParam(), [](const CommunicatorPtr& host, SharedGroup& group, at::Device device) {
    const auto text = error_of<CommError>([&] {
      if (host->rank() == 0) {
        group.all_reduce(at::ones({4}, device));
      } else {
        group.all_reduce(at::ones({1000}, device));
      }
    });
    expect_has(text, {"on group 'world'", "does not match the other ranks' calls: ",
                      "rank 0 called all_reduce (sum) of 4 x Float on a device, rank 1 called "
                      "all_reduce (sum) of 1000 x Float on a device",
                      "All ranks must call the same collectives"});
    expect_has(error_of<CommError>([&] { group.all_reduce(at::ones({4}, device)); }),
               c10::str("all_reduce on group 'world': an earlier collective of the group on "
                        "tensors of ",
                        device, " has failed, whose error says why."));
  });
}

TEST_P(IpcCollectives, TensorsOfTheCpuMatchNone) {
  on_ranks(GetParam(), [](const CommunicatorPtr& host, SharedGroup& group, at::Device device) {
    const auto text = error_of<CommError>([&] {
      if (host->rank() == 0) {
        host->all_reduce(at::ones({4}));
      } else {
        group.all_reduce(at::ones({4}, device));
      }
    });
    expect_has(text, {"rank 0 called all_reduce (sum) of 4 x Float, rank 1 called all_reduce (sum) "
                      "of 4 x Float on a device"});
  });
}

TEST_P(IpcCollectives, SplitsThatDifferAreRefused) {
  on_ranks(GetParam(), [](const CommunicatorPtr& host, SharedGroup& group, at::Device device) {
    const int size = host->size();
    std::vector<int64_t> splits(size, 2), expected(size, 2);
    if (host->rank() == 1) expected[0] = 3;
    const at::Tensor input = at::ones({2 * size}, device);
    const at::Tensor output = at::ones({2 * size + (host->rank() == 1)}, device);
    expect_has(error_of<CommError>([&] { group.all_to_all(output, expected, input, splits); }),
               "rank 0 sends 2 elements to rank 1, which expects 3");
  });
}

TEST_P(IpcCollectives, WrongTensorsAreRefused) {
  on_ranks(GetParam(), [](const CommunicatorPtr&, SharedGroup& group, at::Device device) {
    expect_has(error_of<UsageError>(
                   [&] { group.all_gather(at::ones({4 * group.size()}, device), at::ones({4})); }),
               c10::str("all_gather on group 'world': expected input to be on ", device,
                        ", got cpu. Copy it to ", device, " first."));
    expect_has(error_of<UsageError>([&] {
                 group.all_reduce(at::ones({4, 4}, device).t());
               }),
               "expected tensor to be contiguous");
    expect_has(error_of<UsageError>([&] { group.broadcast(at::ones({4}, device), 9); }),
               "expected root in 0 to");
    group.all_reduce(at::ones({4}, device));  // the others were told nothing
  });
}

TEST_P(IpcCollectives, ALateRankIsATimeout) {
  on_ranks(GetParam(), [](const CommunicatorPtr& host, SharedGroup& group, at::Device device) {
    group.all_reduce(at::ones({4}, device));
    if (host->rank() > 0) {
      host->set_timeout(std::chrono::milliseconds(50));
      expect_has(error_of<TimeoutError>([&] { group.all_reduce(at::ones({4}, device)); }),
                 {"all_reduce of 16 bytes on group 'world' (here rank ", "rank 0"});
      host->set_timeout(std::chrono::seconds(60));
    }
    for (int rank = 0; rank < host->size(); ++rank) {  // messages: the collectives are out of step
      const at::Tensor none = at::empty({0});
      if (rank > 0 && host->rank() == 0) host->recv(none, rank, 1);
      if (rank > 0 && host->rank() == rank) host->send(none, 0, 1);
    }
    if (host->rank() == 0) group.all_reduce(at::ones({4}, device));
  });
}

TEST_P(IpcCollectives, ARankMayFailMeanwhile) {
  const auto text = error_of<std::runtime_error>([] {
    on_ranks(GetParam(), [](const CommunicatorPtr& host, SharedGroup& group, at::Device device) {
      const at::Tensor values = late(at::ones({700}), device);
      group.all_reduce(values);
      if (host->rank() == 0) throw std::runtime_error("the cause");
      const auto task = [&](comm::TaskCollectives& ranks) { ranks.all_reduce(values); };
      const auto work = group.start(comm::CollectiveTask(task));
      expect_has(error_of<CommError>([&] { work->wait(); }), "rank 0 failed: the cause");
      throw std::runtime_error("the consequence");
    });
  });
  EXPECT_EQ(text, "the cause");
}

INSTANTIATE_TEST_SUITE_P(Ranks, IpcCollectives,
                         ::testing::Values(Ranks{2, 1, true}, Ranks{3, 3, true}, Ranks{4, 2, true},
                                           Ranks{2, 1, false}, Ranks{2, 2, false},
                                           Ranks{3, 1, false}, Ranks{4, 2, false}),
                         [](const auto& info) {
                           return c10::str(info.param.count,
                                           info.param.are_processes ? "Processes" : "Threads", "On",
                                           info.param.devices);
                         });

/// In slots of the sizes that are used, some of which are too small.
TEST_F(TwoProcesses, AddAndGather) {
  const auto pass = [](const CommunicatorPtr& group, at::Device device) {
    for (const int64_t numel : {3, 1 << 18, (1 << 21) + 5}) {
      const at::Tensor values = late(values_of(group->rank(), numel, at::kFloat), device);
      const at::Tensor all = at::zeros({2 * numel}, device);
      const auto first = values_of(0, numel, at::kFloat), second = values_of(1, numel, at::kFloat);
      group->all_gather(all, values);
      EXPECT_TRUE(at::equal(all.cpu(), at::cat({first, second})));
      group->async().all_reduce(values)->wait();
      EXPECT_TRUE(at::equal(values.cpu(), first + second));
    }
    group->barrier();
  };
  run(pass, pass);
  EXPECT_EQ(end_of_other(), 0);
}

TEST_F(TwoProcesses, OneMayDie) {
  run(
      [this](const CommunicatorPtr& group, at::Device device) {
        const at::Tensor values = at::ones({8}, device);
        group->all_reduce(values);
        kill_other();
        expect_has(error_of<CommError>([&] { group->all_reduce(values); }),
                   {"all_reduce of 32 bytes on group 'world'", "rank 1"});
        EXPECT_TRUE(at::equal(at::ones({8}, device).cpu(), at::ones({8})));
      },
      [](const CommunicatorPtr& group, at::Device device) {
        group->all_reduce(at::ones({8}, device));
        for (;;) pause();
      });
  EXPECT_EQ(end_of_other(), SIGKILL);
}

/// All ranks learn what is wrong with the value of one.
TEST(SmpDeviceIpc, IsZeroOrOne) {
  setenv("SMP_DEVICE_IPC", "yes", 1);
  const auto text = error_of<ConfigError>([] {
    comm::run_ranks(2, [](const CommunicatorPtr& world) {
      comm::make_device_communicator(world, fake_device());
    });
  });
  expect_has(text,
             "environment variable SMP_DEVICE_IPC on rank 0 of group 'world': expected 0 or 1, got "
             "\"yes\"");
  for (const char* value : {"0", "1"}) {
    setenv("SMP_DEVICE_IPC", value, 1);
    comm::run_ranks(2, [&](const CommunicatorPtr& world) {
      const auto group = comm::make_device_communicator(world, fake_device());
      EXPECT_EQ(device_route(*group),
                value[0] == '1' ? "on the device, since the ranks are threads of one process"
                                : "from stage to stage on the device, since the ranks are threads "
                                  "of one process, else through host memory: NCCL knows GPUs only; "
                                  "memory of the device cannot be shared (IPC): SMP_DEVICE_IPC=0");
      expect_bits(results_of(*group, fake_device(), 9, at::kFloat, ReduceOp::kSum, 1),
                  results_of(*world, at::kCPU, 9, at::kFloat, ReduceOp::kSum, 1), value);
      const at::Tensor values = at::ones({4}, fake_device());
      const auto work = group->start(fake_device(), [&](comm::TaskCollectives& ranks) {
        ranks.all_reduce(values);
        throw std::runtime_error("of the task");
      });
      EXPECT_EQ(error_of<std::runtime_error>([&] { work->wait(); }), "of the task");
      EXPECT_TRUE(at::equal(values.cpu(), at::full({4}, 2.0)));
    });
  }
  unsetenv("SMP_DEVICE_IPC");
}

}  // namespace
}  // namespace smp::testing
