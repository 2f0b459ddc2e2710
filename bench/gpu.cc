// SPDX-License-Identifier: Apache-2.0
// Measurements that need a GPU: tokens per second of a GPT with bfloat16 autocast, in plain
// libtorch, on one rank and on a pipeline of two, with CUDA graphs and without, and the memory that
// each takes; and all-reduces, exact and fast. Ranks share the GPU where there is one only. A line
// "name<TAB>value<TAB>unit" for each, for tools/gpu_check.
//
//     bazel run --config=cuda //bench:gpu
//     bazel run //bench:gpu -- --small     # on the CPU, to see that it runs
//
// --count STEPS WAY runs so many steps of one way (plain; 1 or 2 ranks, with a "g" as graphs) and
// prints nothing: two such runs under tools/count_calls.c tell the calls of a step.
#include <ATen/DeviceAccelerator.h>
#include <torch/torch.h>

#include <cstdio>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "bench/measure.h"
#include "comm/device/device_communicator.h"
#include "comm/threads/run_ranks.h"
#include "examples/gpt/gpt_model.h"
#include "smp/smp.h"

namespace {

using bench::median;
using bench::seconds;

struct Size {
  gpt::GPTOptions model;
  int64_t batch;
  int steps;  // steps of a round
  int64_t reduced_bytes;
  int rounds = 3;  // that are timed
};

// 121 million parameters.
const Size kFull = {gpt::GPTOptions().layers(17).width(768).heads(12).sequence(1024).dropout(0), 8,
                    10, 64 << 20};
const Size kSmall = {gpt::GPTOptions().layers(2).width(32).heads(2).sequence(16).dropout(0), 4, 2,
                     1 << 16};
constexpr int kMicrobatches = 4;  // microbatches of the pipeline

void print(const std::string& name, double value, const char* unit) {
  std::printf(value < 100 ? "%s\t%.3g\t%s\n" : "%s\t%.0f\t%s\n", name.c_str(), value, unit);
  std::fflush(stdout);
}

int gpus() { return at::getAccelerator() ? static_cast<int>(at::accelerator::deviceCount()) : 0; }

at::Device device_of(int rank) {
  if (gpus() == 0) return at::kCPU;
  return {*at::getAccelerator(), static_cast<c10::DeviceIndex>(rank % gpus())};
}

/// The median over rounds of the seconds of a step; `step` returns a tensor whose value ends it.
double time_of_step(const Size& size, const std::function<torch::Tensor()>& step) {
  step().item<double>();  // captures
  std::vector<double> times;
  for (int round = 0; round <= size.rounds; ++round) {
    const double taken = seconds([&] {
      torch::Tensor last;
      for (int i = 0; i < size.steps; ++i) last = step();
      last.item<double>();
    });
    if (round > 0) times.push_back(taken / size.steps);  // the first warms
  }
  return times.empty() ? 0 : median(times);
}

/// Seconds of a step and, after all else is done, of its update alone.
struct Times {
  double step = 0;
  double update = 0;
};

void wait_for_gpus() {
  for (int i = 0; i < gpus(); ++i) {
    at::accelerator::synchronizeDevice(static_cast<c10::DeviceIndex>(i));
  }
}

Times times_of(const Size& size, const std::function<torch::Tensor()>& train,
               const std::function<void()>& update) {
  Times times;
  times.step = time_of_step(size, [&] {
    torch::Tensor loss = train();
    update();
    return loss;
  });
  std::vector<double> updates;
  for (int round = 0; round < size.rounds; ++round) {
    train().item<double>();
    updates.push_back(seconds([&] {
      update();
      wait_for_gpus();
    }));
  }
  if (!updates.empty()) times.update = median(updates);
  return times;
}

void forget_peak() {
  if (gpus() > 0) at::accelerator::resetPeakStats(0);
}

void print_peak(const std::string& name) {
  if (gpus() == 0) return;
  const auto stats = at::accelerator::getDeviceStats(0);
  print(name + ", peak memory of GPU 0", static_cast<double>(stats.allocated_bytes[0].peak) / 1e9,
        "GB");
}

torch::Tensor loss_of(gpt::GPT& net, const torch::Tensor& bytes, at::Device device) {
  const smp::amp::Autocast autocast(at::kBFloat16, device.type());
  const auto length = bytes.size(1) - 1;
  return gpt::next_byte_loss(net(bytes.narrow(1, 0, length)), bytes.narrow(1, 1, length));
}

torch::Tensor batch_of(const Size& size, at::Device device) {
  torch::manual_seed(2);
  return torch::randint(gpt::kVocabulary, {size.batch, size.model.sequence() + 1}).to(device);
}

double tokens(const Size& size) { return static_cast<double>(size.batch * size.model.sequence()); }

Times plain(const Size& size) {
  const at::Device device = device_of(0);
  gpt::GPT net(size.model);
  net->to(device);
  torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(1e-4));
  const auto bytes = batch_of(size, device);
  return times_of(
      size,
      [&] {
        optimizer.zero_grad();
        const auto loss = loss_of(net, bytes, device);
        loss.backward();
        return loss.detach();
      },
      [&] { optimizer.step(); });
}

struct Way {
  int ranks;
  bool graphs;
};

std::string name_of(const Way& way) {
  return c10::str("GPT, ", way.ranks, way.ranks == 1 ? " rank" : " stages",
                  way.graphs ? ", CUDA graphs" : "");
}

Times distributed(const Size& size, const Way& way) {
  const int ranks = way.ranks;
  std::vector<gpt::GPT> nets;  // rank threads share the default generator
  for (int i = 0; i < ranks; ++i) nets.emplace_back(size.model);
  const auto bytes = batch_of(size, at::kCPU);
  const auto config = smp::Config()
                          .partitions(ranks)
                          .microbatches(ranks > 1 ? kMicrobatches : 1)
                          .cuda_graphs(way.graphs ? "on" : "off");
  Times times;
  smp::run_as_threads(ranks, config, [&] {
    if (gpus() > 0) smp::set_device(device_of(smp::rank()).index());
    gpt::GPT net = nets[smp::rank()];
    smp::DistributedModel<gpt::GPT> model(net);
    smp::DistributedOptimizer<torch::optim::AdamW> optimizer(model->parameters(),
                                                             torch::optim::AdamWOptions(1e-4));
    auto train = smp::step([&](torch::Tensor x) {
      auto loss = loss_of(net, x, smp::device());
      model->backward(loss);
      return loss;
    });
    const auto given = bytes.to(smp::device());
    const Times taken = times_of(
        size,
        [&] {
          optimizer.zero_grad();
          return train(given).reduce_mean();
        },
        [&] { optimizer.step(); });
    if (smp::rank() == 0) times = taken;
  });
  return times;
}

void all_reduce(const Size& size, int ranks, bool fast) {
  double time = 0;
  smp::comm::run_ranks(ranks, [&](const smp::comm::CommunicatorPtr& world) {
    world->set_device_transport({/*only_nccl=*/false, fast});
    const at::Device device = device_of(world->rank());
    const auto group = smp::comm::make_device_communicator(world, device);
    const auto values = torch::ones({size.reduced_bytes / 4}, device);
    const double taken = time_of_step(size, [&] {
      group->all_reduce(values.fill_(1));
      return values[0];
    });
    if (world->rank() == 0) time = taken;
  });
  print(c10::str("all_reduce of ", size.reduced_bytes >> 10, " KiB, ", ranks, " ranks, ",
                 fast ? "fast" : "exact"),
        static_cast<double>(size.reduced_bytes) / time / 1e9, "GB/s");
}

void print_times(const Size& size, const std::string& name, const Times& times) {
  print(name, tokens(size) / times.step, "tokens/s");
  if (gpus() > 0) print(name + ", update", times.update * 1e3, "ms");
}

void run(const Size& size) {
  torch::manual_seed(1);
  forget_peak();
  const Times alone = plain(size);
  print_times(size, "GPT, plain libtorch", alone);
  print_peak("GPT, plain libtorch");
  for (const Way& way : std::vector<Way>{{1, false}, {1, true}, {2, false}, {2, true}}) {
    if (way.graphs && gpus() == 0) continue;  // the CPU has none
    const std::string name = name_of(way);
    forget_peak();
    const Times times = distributed(size, way);
    print_times(size, name, times);
    print(name + ", time of a step over plain libtorch's", times.step / alone.step, "x");
    print_peak(name);
  }
  std::vector<int> groups = {2};
  if (gpus() > 2) groups.push_back(gpus());
  for (const int ranks : groups) {
    for (const bool fast : {false, true}) all_reduce(size, ranks, fast);
  }
}

void count(Size size, int steps, const std::string& way) {
  size.steps = steps;
  size.rounds = 0;
  if (way == "plain") {
    plain(size);
  } else {
    distributed(size, {way[0] - '0', way.back() == 'g'});
  }
}

}  // namespace

int main(int argc, char** argv) {
  const bool small = argc > 1 && std::strcmp(argv[1], "--small") == 0;
  if (!small && gpus() == 0) {
    std::fprintf(stderr, "bench/gpu: there is no GPU; --small runs on the CPU\n");
    return 1;
  }
  at::set_num_threads(1);
  const Size& size = small ? kSmall : kFull;
  const int option = small ? 2 : 1;
  if (argc == option + 3 && std::strcmp(argv[option], "--count") == 0) {
    count(size, std::stoi(argv[option + 1]), argv[option + 2]);
  } else {
    run(size);
  }
}
