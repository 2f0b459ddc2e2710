// SPDX-License-Identifier: Apache-2.0
// Gain from reducing gradients beside the backward: steps of two replicas, one stage each, on a
// network of a given bandwidth, with `overlapping_allreduce` and without it, in turn, as ratios of
// medians. The network is emulated: a reduction begins when its bytes would have come.
//
//     bazel run //bench:overlap [-- MB_PER_SECOND...]

#include <torch/torch.h>

#include <chrono>
#include <cstdio>
#include <string>
#include <thread>
#include <vector>

#include "bench/measure.h"
#include "examples/gpt/gpt_model.h"
#include "runtime/runtime.h"
#include "smp/smp.h"

namespace {

using bench::median;

constexpr int kReplicas = 2, kRounds = 5, kWarmSteps = 2, kSteps = 3;
constexpr int64_t kSequences = 4, kLength = 64;

struct Variant {
  bool overlapping = true;
  bool sharded = false;
  int gradient_shards = kReplicas;
};

/// Times of steps on the first rank, in ms.
std::vector<double> times_of(const Variant& variant, double bytes_per_second) {
  const auto options = gpt::GPTOptions().layers(2).width(256).heads(4).sequence(kLength).dropout(0);
  std::vector<gpt::GPT> nets;
  for (int i = 0; i < kReplicas; ++i) nets.emplace_back(options);
  const auto config = smp::Config()
                          .ddp(true)
                          .microbatches(2)
                          .bucket_cap_mb(1)
                          .shard_optimizer_state(variant.sharded)
                          .gradient_shards(variant.gradient_shards)
                          .seed(1);
  std::vector<double> times;
  smp::run_as_threads(kReplicas, config, [&] {
    smp::runtime::Runtime::get().execution.on_reduction = [&](const auto& event) {
      if (event.has_ended || bytes_per_second == 0) return;
      const std::chrono::duration<double> transfer(static_cast<double>(event.bytes) /
                                                   bytes_per_second);
      std::this_thread::sleep_for(transfer);
    };
    smp::DistributedModel<gpt::GPT> model(
        nets[smp::rank()], smp::ModelOptions().overlapping_allreduce(variant.overlapping));
    smp::DistributedOptimizer<torch::optim::SGD> optimizer(model->parameters(), 0.01);
    auto train = smp::step([&](torch::Tensor x, torch::Tensor y) {
      auto loss = torch::nn::functional::cross_entropy(model(x).flatten(0, 1), y.flatten());
      model->backward(loss);
      return loss;
    });
    const auto x = torch::randint(256, {kSequences, kLength});
    const auto y = torch::randint(256, {kSequences, kLength});
    for (int i = 0; i < kWarmSteps + kSteps; ++i) {
      optimizer.zero_grad();
      const double ms = 1e3 * bench::seconds([&] { train(x, y); });
      optimizer.step();
      if (smp::rank() == 0 && i >= kWarmSteps) times.push_back(ms);
    }
  });
  return times;
}

void measure(const char* name, Variant variant, double megabytes_per_second) {
  std::vector<double> alone, beside, after, ratios;
  const auto add = [](std::vector<double>& to, const std::vector<double>& times) {
    to.push_back(median(times));
  };
  for (int round = 0; round < kRounds; ++round) {
    variant.overlapping = true;
    add(alone, times_of(variant, 0));
    add(beside, times_of(variant, 1e6 * megabytes_per_second));
    variant.overlapping = false;
    add(after, times_of(variant, 1e6 * megabytes_per_second));
    ratios.push_back(after.back() / beside.back());
  }
  std::printf(
      "%s, %.0f MB/s: beside the backward %.1f ms, after it %.1f ms (without a network %.1f ms), "
      "ratio %.2f (quartiles %.2f to %.2f)\n",
      name, megabytes_per_second, median(beside), median(after), median(alone), median(ratios),
      bench::quantile(ratios, 0.25), bench::quantile(ratios, 0.75));
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  torch::set_num_threads(1);
  std::vector<double> bandwidths;
  for (int i = 1; i < argc; ++i) bandwidths.push_back(std::stod(argv[i]));
  if (bandwidths.empty()) bandwidths = {100, 400};
  for (const double bandwidth : bandwidths) {
    measure("all-reduce", {}, bandwidth);
    measure("two shards each", {true, false, 2 * kReplicas}, bandwidth);
    measure("sharded optimizer state", {true, true}, bandwidth);
  }
}
