// SPDX-License-Identifier: Apache-2.0
// Times of bringing a message from one rank to another of the same host: a channel through shared
// memory, Open MPI by itself, and the library's messages over it, in turn. Bandwidth is the ratio
// to that of memcpy on one core, measured in the same rounds. Where the receiver sleeps, a bare
// futex stands beside them: the time in which this machine wakes a process.
//
//     bazel build //bench:transfer
//     mpirun --allow-run-as-root --oversubscribe --bind-to none -np 2 bazel-bin/bench/transfer

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <fcntl.h>
#include <mpi.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "bench/measure.h"
#include "comm/mpi/mpi_communicator.h"
#include "comm/shm/futex.h"

namespace {

using bench::median;
using smp::comm::Channels;
using smp::comm::ChannelSpec;
using smp::comm::CommunicatorPtr;

constexpr int kRounds = 21;

// CLOCK_MONOTONIC is the same for all processes of a host.
int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

at::Tensor bytes_tensor(int64_t bytes) {
  const at::Tensor tensor = at::empty({bytes}, at::TensorOptions(at::kByte));
  std::memset(tensor.mutable_data_ptr(), 1, static_cast<size_t>(bytes));
  return tensor;
}

// A way to bring messages of one length from a tensor of one rank to a tensor of the other.
class Path {
 public:
  virtual ~Path() = default;
  virtual void send(const at::Tensor& from) = 0;
  virtual at::Tensor receive() = 0;
};

class ChannelPath final : public Path {
 public:
  ChannelPath(const CommunicatorPtr& world, int64_t bytes) {
    const ChannelSpec spec{1 - world->rank(), 1, bytes, 2, 2};
    channels_ = world->open_channels({spec}, {spec});
  }
  void send(const at::Tensor& from) override {
    std::memcpy(sender().prepare().mutable_data_ptr(), from.const_data_ptr(), from.nbytes());
    sender().send();
  }
  at::Tensor receive() override {
    channels_.receivers[0]->expect(1);
    return channels_.receivers[0]->receive();
  }

 private:
  smp::comm::Sender& sender() { return *channels_.senders[0]; }

  Channels channels_;
};

class OpenMpiPath final : public Path {
 public:
  OpenMpiPath(const CommunicatorPtr& world, int64_t bytes)
      : peer_(1 - world->rank()), buffer_(bytes_tensor(bytes)) {}
  void send(const at::Tensor& from) override {
    MPI_Send(from.const_data_ptr(), static_cast<int>(from.nbytes()), MPI_BYTE, peer_, 2,
             MPI_COMM_WORLD);
  }
  at::Tensor receive() override {
    MPI_Recv(buffer_.mutable_data_ptr(), static_cast<int>(buffer_.nbytes()), MPI_BYTE, peer_, 2,
             MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    return buffer_;
  }

 private:
  int peer_;
  at::Tensor buffer_;
};

class MessagePath final : public Path {
 public:
  MessagePath(const CommunicatorPtr& world, int64_t bytes)
      : world_(world), buffer_(bytes_tensor(bytes)) {}
  void send(const at::Tensor& from) override { world_->send(from, 1 - world_->rank(), 3); }
  at::Tensor receive() override {
    world_->recv(buffer_, 1 - world_->rank(), 3);
    return buffer_;
  }

 private:
  CommunicatorPtr world_;
  at::Tensor buffer_;
};

// The least that a wake-up takes: a number in memory that both ranks map, and a futex on it.
class FutexPath final : public Path {
 public:
  explicit FutexPath(const CommunicatorPtr& world) : rank_(world->rank()) {
    // Ranks of one mpirun have the same parent.
    const std::string name = "/smp_transfer_" + std::to_string(getppid());
    const int file = shm_open(name.c_str(), O_CREAT | O_RDWR, 0600);
    const bool sized = file >= 0 && ftruncate(file, sizeof(Box[2])) == 0;
    void* memory = sized
                       ? mmap(nullptr, sizeof(Box[2]), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0)
                       : MAP_FAILED;
    if (memory == MAP_FAILED) {
      std::perror("transfer: cannot map memory that both ranks see");
      std::abort();
    }
    close(file);
    world->barrier();
    if (rank_ == 0) shm_unlink(name.c_str());
    boxes_ = static_cast<Box*>(memory);
  }
  ~FutexPath() override { munmap(boxes_, sizeof(Box[2])); }

  void send(const at::Tensor& from) override {
    Box& box = boxes_[1 - rank_];
    std::memcpy(box.message, from.const_data_ptr(), sizeof(box.message));
    box.count.fetch_add(1, std::memory_order_release);
    smp::comm::futex_wake(box.count);
  }
  at::Tensor receive() override {
    Box& box = boxes_[rank_];
    while (box.count.load(std::memory_order_acquire) == received_) {
      smp::comm::futex_wait(box.count, received_, std::chrono::milliseconds(100));
    }
    ++received_;
    std::memcpy(buffer_.mutable_data_ptr(), box.message, sizeof(box.message));
    return buffer_;
  }

 private:
  struct alignas(64) Box {
    std::atomic<uint32_t> count;
    alignas(64) char message[64];
  };

  const int rank_;
  Box* boxes_ = nullptr;  // boxes that the receiving rank makes
  uint32_t received_ = 0;
  const at::Tensor buffer_ = bytes_tensor(64);
};

std::vector<std::unique_ptr<Path>> make_paths(const CommunicatorPtr& world, int64_t bytes) {
  std::vector<std::unique_ptr<Path>> paths;
  paths.push_back(std::make_unique<ChannelPath>(world, bytes));
  paths.push_back(std::make_unique<OpenMpiPath>(world, bytes));
  paths.push_back(std::make_unique<MessagePath>(world, bytes));
  return paths;
}

constexpr const char* kNames[] = {"channel", "Open MPI", "smp over MPI", "bare futex"};

// The work of a reader on a message: adds its words.
void read(const at::Tensor& tensor) {
  const auto* words = static_cast<const uint64_t*>(tensor.const_data_ptr());
  volatile uint64_t sum = std::accumulate(words, words + tensor.nbytes() / 8, uint64_t{0});
  static_cast<void>(sum);
}

// Nanoseconds for one way, half of there and back.
double one_way(Path& path, int rank, const at::Tensor& from, int repeats, bool reads) {
  const auto receive = [&] {
    const at::Tensor received = path.receive();
    if (reads) read(received);
  };
  const int64_t start = now_ns();
  for (int i = 0; i < repeats; ++i) {
    if (rank == 0) {
      path.send(from);
      receive();
    } else {
      receive();
      path.send(from);
    }
  }
  return static_cast<double>(now_ns() - start) / (2.0 * repeats);
}

double copy_ns(const at::Tensor& to, const at::Tensor& from, int repeats, bool reads) {
  const int64_t start = now_ns();
  for (int i = 0; i < repeats; ++i) {
    std::memcpy(to.mutable_data_ptr(), from.const_data_ptr(), from.nbytes());
    if (reads) read(to);
  }
  return static_cast<double>(now_ns() - start) / repeats;
}

void measure_bandwidth(const CommunicatorPtr& world, bool reads) {
  const bool prints = world->rank() == 0;
  if (prints) {
    std::printf("\n%s\n%10s %14s",
                reads ? "one copy, then the receiver reads the message" : "transfer", "bytes",
                "memcpy GB/s");
    for (const char* name : {kNames[0], kNames[1], kNames[2]}) std::printf(" %25s", name);
    std::printf("\n");
  }
  for (int64_t bytes = 4 << 10; bytes <= 64 << 20; bytes *= 4) {
    auto paths = make_paths(world, bytes);
    const at::Tensor from = bytes_tensor(bytes);
    const at::Tensor to = bytes_tensor(bytes);
    const int repeats = static_cast<int>(std::max<int64_t>(2, (16 << 20) / bytes));
    std::vector<double> copies;
    std::vector<std::vector<double>> times(paths.size()), ratios(paths.size());
    for (int round = 0; round < kRounds; ++round) {
      world->barrier();
      double copy = 0;
      if (prints) copy = copy_ns(to, from, repeats, reads);
      world->barrier();
      copies.push_back(copy);
      for (size_t p = 0; p < paths.size(); ++p) {
        times[p].push_back(one_way(*paths[p], world->rank(), from, repeats, reads));
        ratios[p].push_back(copy / times[p].back());
      }
    }
    if (!prints) continue;
    std::printf("%10ld %14.2f", bytes, static_cast<double>(bytes) / median(copies));
    for (size_t p = 0; p < paths.size(); ++p) {
      std::printf("   %8.1f us, ratio %5.2f", median(times[p]) / 1000, median(ratios[p]));
    }
    std::printf("\n");
  }
}

// The first messages on a new channel against memcpy into new memory: page faults and all.
void measure_cold(const CommunicatorPtr& world) {
  const bool prints = world->rank() == 0;
  if (prints) std::printf("\nfirst message of a channel, memcpy into new memory\n");
  for (int64_t bytes = 256 << 10; bytes <= 64 << 20; bytes *= 4) {
    const at::Tensor from = bytes_tensor(bytes);
    std::vector<double> ratios, times, opens;
    for (int round = 0; round < kRounds; ++round) {
      const int64_t begin = now_ns();
      ChannelPath path(world, bytes);
      opens.push_back(static_cast<double>(now_ns() - begin));
      world->barrier();
      times.push_back(one_way(path, world->rank(), from, 1, false));
      const at::Tensor fresh = at::empty({bytes}, at::TensorOptions(at::kByte));
      ratios.push_back(copy_ns(fresh, from, 1, false) / times.back());
    }
    if (prints) {
      std::printf("%10ld   %8.1f us, ratio %5.2f; opening two channels of 4 slots %8.1f us\n",
                  bytes, median(times) / 1000, median(ratios), median(opens) / 1000);
    }
  }
}

// Microseconds from before the send to after the receive; the sender waits `pause` before each.
void measure_latency(const CommunicatorPtr& world, std::chrono::microseconds pause,
                     const char* title) {
  auto paths = make_paths(world, 64);
  if (pause.count() > 0) paths.push_back(std::make_unique<FutexPath>(world));
  const bool prints = world->rank() == 0;
  const at::Tensor message = bytes_tensor(64);
  if (prints) std::printf("\n%s\n", title);
  for (size_t p = 0; p < paths.size(); ++p) {
    std::vector<double> times;
    const int messages = pause.count() > 0 ? 301 : 20'001;
    world->barrier();
    for (int i = 0; i < messages; ++i) {
      const bool sends = (i % 2 == 0) == (world->rank() == 0);
      if (sends) {
        if (pause.count() > 0) std::this_thread::sleep_for(pause);
        *static_cast<int64_t*>(message.mutable_data_ptr()) = now_ns();
        paths[p]->send(message);
      } else {
        const at::Tensor received = paths[p]->receive();
        const int64_t sent = *static_cast<const int64_t*>(received.const_data_ptr());
        times.push_back(static_cast<double>(now_ns() - sent) / 1000);
      }
    }
    std::sort(times.begin(), times.end());
    if (prints) {
      std::printf("%14s %8.2f us (quartiles %.2f to %.2f)\n", kNames[p], median(times),
                  times[times.size() / 4], times[times.size() * 3 / 4]);
    }
  }
}

}  // namespace

int main() {
  at::set_num_threads(1);
  const CommunicatorPtr world = smp::comm::make_mpi_world();
  if (world->size() != 2) {
    std::fprintf(stderr, "transfer needs 2 ranks, got %d\n", world->size());
    return 1;
  }
  measure_latency(world, std::chrono::microseconds(0), "latency of 64 bytes, both awake");
  measure_latency(world, std::chrono::milliseconds(2), "latency of 64 bytes, the receiver asleep");
  measure_bandwidth(world, false);
  measure_bandwidth(world, true);
  measure_cold(world);
  smp::comm::finalize_mpi();
  return 0;
}
