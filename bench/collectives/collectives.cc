// SPDX-License-Identifier: Apache-2.0
// Collectives of float32 by the ranks of one host: ours, on ordinary tensors and on those of
// shared_tensor(), Open MPI's, those of libtorch's gloo, and for the all-reduce the floor
// (floor.h), all in one run and in turn. A line gives the medians in microseconds, and ratios of
// the times of the same round: the median, and the quartiles in brackets.
//
//     bazel build //bench/collectives
//     mpirun --allow-run-as-root --oversubscribe --bind-to none -np 2
//         bazel-bin/bench/collectives/collectives

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>
#include <mpi.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <ctime>
#include <functional>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <utility>
#include <vector>

#include "bench/collectives/floor.h"
#include "bench/measure.h"
#include "comm/mpi/mpi_communicator.h"

namespace {

using smp::comm::CommunicatorPtr;
using Clock = std::chrono::steady_clock;
using bench::median;
using bench::quantile;

constexpr int kRounds = 15;
constexpr double kMicrosecondsOfARound = 20'000;

struct Contender {
  // NOLINTNEXTLINE(google-explicit-constructor)
  Contender(std::string name, std::function<void()> call = {})
      : name(std::move(name)), call(std::move(call)) {}

  std::string name;
  std::function<void()> call;   // empty where this rank has nothing to do
  std::function<void()> begin;  // before a round, and after it
  std::function<void()> end;
  std::vector<double> microseconds;
  int repeats = 1;
  double cpu = 0;  // microseconds of this rank's processor in the last round, all threads
};

double cpu_microseconds() {
  timespec time{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) * 1e6 + static_cast<double>(time.tv_nsec) / 1e3;
}

// The time of one call, of the slowest rank.
double time_of(const CommunicatorPtr& world, Contender& contender) {
  if (contender.begin) {
    contender.begin();
  }
  world->barrier();
  const double cpu = cpu_microseconds();
  const Clock::time_point start = Clock::now();
  for (int i = 0; contender.call && i < contender.repeats; ++i) {
    contender.call();
  }
  const std::chrono::duration<double, std::micro> time = Clock::now() - start;
  contender.cpu = (cpu_microseconds() - cpu) / contender.repeats;
  if (contender.end) {
    contender.end();
  }
  const at::Tensor slowest = at::zeros({1}, at::kDouble);
  *slowest.mutable_data_ptr<double>() = time.count() / contender.repeats;
  world->all_reduce(slowest, smp::ReduceOp::kMax);
  return *slowest.const_data_ptr<double>();
}

void measure(const CommunicatorPtr& world, std::vector<Contender>& contenders) {
  for (Contender& contender : contenders) {
    // Warms up, and learns how many fit into a round: from more calls each time, since one by
    // itself mostly shows how long the other rank took to wake up.
    for (int i = 0; i < 4; ++i) {
      const double time = time_of(world, contender);
      contender.repeats =
          static_cast<int>(std::clamp(kMicrosecondsOfARound / std::max(time, 0.1), 1.0, 2000.0));
    }
  }
  for (int round = 0; round < kRounds; ++round) {
    for (Contender& contender : contenders) {
      contender.microseconds.push_back(time_of(world, contender));
    }
  }
}

std::string ratio(const Contender& a, const Contender& b) {
  std::vector<double> ratios;
  for (size_t i = 0; i < a.microseconds.size(); ++i) {
    ratios.push_back(a.microseconds[i] / b.microseconds[i]);
  }
  std::array<char, 64> text{};
  std::snprintf(text.data(), text.size(), "%.2f [%.2f, %.2f]", median(ratios),
                quantile(ratios, 0.25), quantile(ratios, 0.75));
  return text.data();
}

std::string size_text(int64_t bytes) {
  return bytes >= 1 << 20 ? std::to_string(bytes >> 20) + " MiB"
                          : std::to_string(bytes >> 10) + " KiB";
}

void report(const std::string& what, int64_t bytes, const std::vector<Contender>& contenders) {
  std::printf("| %s | %s |", what.c_str(), size_text(bytes).c_str());
  for (const Contender& contender : contenders) {
    std::printf(" %s %.1f (cpu %.1f) |", contender.name.c_str(), median(contender.microseconds),
                contender.cpu);
  }
  const Contender& ours = contenders[0];
  const Contender& staged = contenders[1];
  const Contender& last = contenders.back();
  if (last.name == "floor") {
    std::printf(" shared/floor %s | ordinary/floor %s |", ratio(ours, last).c_str(),
                ratio(staged, last).c_str());
  }
  for (size_t i = 2; i < 4; ++i) {
    std::printf(" %s/shared %s | %s/ordinary %s |", contenders[i].name.c_str(),
                ratio(contenders[i], ours).c_str(), contenders[i].name.c_str(),
                ratio(contenders[i], staged).c_str());
  }
  std::printf("\n");
  std::fflush(stdout);
}

class Bench {
 public:
  explicit Bench(CommunicatorPtr world) : world_(std::move(world)) {
    const std::string path = smp::comm::broadcast_bytes(
        *world_, "/tmp/collectives-gloo-" + std::to_string(getpid()), /*root=*/0);
    const auto store = c10::make_intrusive<c10d::FileStore>(path, world_->size());
    auto options = c10d::ProcessGroupGloo::Options::create();
    options->devices.push_back(c10d::ProcessGroupGloo::createDeviceForHostname("127.0.0.1"));
    gloo_ =
        c10::make_intrusive<c10d::ProcessGroupGloo>(store, world_->rank(), world_->size(), options);
  }

  void all_reduce(int64_t bytes) {
    const int64_t elements = bytes / 4;
    const at::Tensor shared = world_->shared_tensor(elements, at::kFloat);
    const at::Tensor ordinary = at::zeros({elements}), for_mpi = at::zeros({elements});
    std::vector<at::Tensor> for_gloo = {at::zeros({elements})};
    const auto floor =
        world_->rank() == 0 ? std::make_unique<Floor>(world_->size(), elements) : nullptr;
    std::vector<Contender> contenders = {
        {"shared", [&] { world_->all_reduce(shared); }},
        {"ordinary", [&] { world_->all_reduce(ordinary); }},
        {"mpi",
         [&] {
           MPI_Allreduce(MPI_IN_PLACE, for_mpi.mutable_data_ptr(), static_cast<int>(elements),
                         MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
         }},
        {"gloo", [&] { gloo_->allreduce(for_gloo)->wait(); }},
    };
    contenders.emplace_back("floor");
    if (world_->rank() == 0) {
      contenders.back().call = [&] { floor->run(); };
      contenders.back().begin = [&] { floor->begin(); };
      contenders.back().end = [&] { floor->end(); };
    }
    run("all_reduce", bytes, contenders);
  }

  void reduce_scatter(int64_t bytes) {
    const int64_t elements = bytes / 4 / world_->size();
    Tensors in(elements * world_->size(), world_), out(elements, world_);
    std::vector<Contender> contenders = {
        {"shared", [&] { world_->reduce_scatter(out.shared, in.shared); }},
        {"ordinary", [&] { world_->reduce_scatter(out.ordinary, in.ordinary); }},
        {"mpi",
         [&] {
           MPI_Reduce_scatter_block(in.ordinary.const_data_ptr(), out.ordinary.mutable_data_ptr(),
                                    static_cast<int>(elements), MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
         }},
        {"gloo", [&] { gloo_->_reduce_scatter_base(out.ordinary, in.ordinary)->wait(); }},
    };
    run("reduce_scatter", bytes, contenders);
  }

  void all_gather(int64_t bytes) {
    const int64_t elements = bytes / 4 / world_->size();
    Tensors in(elements, world_), out(elements * world_->size(), world_);
    std::vector<Contender> contenders = {
        {"shared", [&] { world_->all_gather(out.shared, in.shared); }},
        {"ordinary", [&] { world_->all_gather(out.ordinary, in.ordinary); }},
        {"mpi",
         [&] {
           MPI_Allgather(in.ordinary.const_data_ptr(), static_cast<int>(elements), MPI_FLOAT,
                         out.ordinary.mutable_data_ptr(), static_cast<int>(elements), MPI_FLOAT,
                         MPI_COMM_WORLD);
         }},
        {"gloo", [&] { gloo_->_allgather_base(out.ordinary, in.ordinary)->wait(); }},
    };
    run("all_gather", bytes, contenders);
  }

  void all_to_all(int64_t bytes) {
    const int64_t elements = bytes / 4 / world_->size();
    Tensors in(elements * world_->size(), world_), out(elements * world_->size(), world_);
    std::vector<int64_t> even;
    std::vector<Contender> contenders = {
        {"shared", [&] { world_->all_to_all(out.shared, {}, in.shared, {}); }},
        {"ordinary", [&] { world_->all_to_all(out.ordinary, {}, in.ordinary, {}); }},
        {"mpi",
         [&] {
           MPI_Alltoall(in.ordinary.const_data_ptr(), static_cast<int>(elements), MPI_FLOAT,
                        out.ordinary.mutable_data_ptr(), static_cast<int>(elements), MPI_FLOAT,
                        MPI_COMM_WORLD);
         }},
        {"gloo", [&] { gloo_->alltoall_base(out.ordinary, in.ordinary, even, even)->wait(); }},
    };
    run("all_to_all", bytes, contenders);
  }

 private:
  struct Tensors {
    Tensors(int64_t elements, const CommunicatorPtr& world)
        : shared(world->shared_tensor(elements, at::kFloat)), ordinary(at::zeros({elements})) {}
    at::Tensor shared;
    at::Tensor ordinary;
  };

  void run(const std::string& what, int64_t bytes, std::vector<Contender>& contenders) {
    measure(world_, contenders);
    if (world_->rank() == 0) {
      report(what, bytes, contenders);
    }
  }

  const CommunicatorPtr world_;
  c10::intrusive_ptr<c10d::ProcessGroupGloo> gloo_;
};

}  // namespace

int main() {
  at::set_num_threads(1);
  {
    const CommunicatorPtr world = smp::comm::make_mpi_world();
    Bench bench(world);
    if (world->rank() == 0) {
      std::printf("%d ranks, microseconds\n", world->size());
    }
    for (int64_t bytes = 4 << 10; bytes <= 64 << 20; bytes *= 4) {
      bench.all_reduce(bytes);
    }
    for (const int64_t bytes : {64 << 10, 1 << 20, 16 << 20}) {
      bench.reduce_scatter(bytes);
      bench.all_gather(bytes);
      bench.all_to_all(bytes);
    }
  }
  smp::comm::finalize_mpi();
}
