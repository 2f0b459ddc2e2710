// SPDX-License-Identifier: Apache-2.0
// Costs of a step of an optimizer on one rank: libtorch's plain classes, the fused ones, both under
// DistributedOptimizer, and clipping by the norm, in turn. A line gives the median of the times,
// the median of the ratios to the plain class in the same round with its quartiles, and the share
// of the bandwidth of memcpy in that round that the step reached, counting each tensor that the
// formula reads or writes once.
//
//     bazel run //bench:optimizer

#include <torch/torch.h>

#include <cstdio>
#include <cstring>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "bench/measure.h"
#include "smp/optim/fused.h"
#include "smp/optim/lamb.h"
#include "smp/optim/novograd.h"
#include "smp/smp.h"

namespace {

using Tensors = std::vector<torch::Tensor>;
using bench::quantile;
using bench::seconds;

constexpr int kRounds = 15;

/// Memory to copy, of twice the bytes of the parameters.
class Copy {
 public:
  explicit Copy(int64_t bytes) : from_(2 * bytes, 1), to_(2 * bytes, 2) {}
  void operator()() { std::memcpy(to_.data(), from_.data(), from_.size()); }
  double bytes_moved() const { return 2 * static_cast<double>(from_.size()); }

 private:
  std::vector<char> from_, to_;
};

struct Contender {
  std::string name;
  double tensors_moved;  // number of tensors of a parameter's size, read or written
  std::function<void()> step;
  std::vector<double> times{};
};

/// Runs all in turn; ratios are to the first.
void compare(std::vector<Contender> contenders, int64_t bytes) {
  Copy copy(bytes);
  std::vector<double> copies;
  for (int round = -2; round < kRounds; ++round) {
    const double of_copy = seconds([&] { copy(); });
    if (round >= 0) copies.push_back(of_copy);
    for (auto& contender : contenders) {
      const double time = seconds(contender.step);
      if (round >= 0) contender.times.push_back(time);
    }
  }
  for (const auto& contender : contenders) {
    std::vector<double> ratios, shares;
    for (int i = 0; i < kRounds; ++i) {
      ratios.push_back(contender.times[i] / contenders[0].times[i]);
      const double moved = contender.tensors_moved * static_cast<double>(bytes);
      shares.push_back((moved / contender.times[i]) / (copy.bytes_moved() / copies[i]));
    }
    std::printf("  %-34s %8.2f ms  ratio %.3f (%.3f to %.3f)  %5.1f%% of memcpy\n",
                contender.name.c_str(), 1e3 * quantile(contender.times, 0.5), quantile(ratios, 0.5),
                quantile(ratios, 0.25), quantile(ratios, 0.75), 100 * quantile(shares, 0.5));
  }
}

/// A plain class and its fused one on the same parameters, alone and under DistributedOptimizer.
template <class Base, class Fused, class Options>
void measure(const char* name, const Options& options, double tensors_moved,
             const Tensors& parameters, int64_t bytes) {
  Base plain(parameters, options);
  Fused fused(parameters, options);
  smp::DistributedOptimizer<Base> distributed(parameters, options);
  smp::DistributedOptimizer<Fused> both(parameters, options);
  const std::string base = name;
  compare({{base, tensors_moved, [&] { plain.step(); }},
           {"Fused" + base, tensors_moved, [&] { fused.step(); }},
           {"DistributedOptimizer<" + base + ">", tensors_moved, [&] { distributed.step(); }},
           {"DistributedOptimizer<Fused" + base + ">", tensors_moved, [&] { both.step(); }}},
          bytes);
}

void measure_model(const char* title, int64_t layers, int64_t width) {
  torch::nn::Sequential net;
  for (int64_t i = 0; i < layers; ++i) net->push_back(torch::nn::Linear(width, width));
  const smp::DistributedModel<torch::nn::Sequential> model(net, smp::ModelOptions().name(title));
  const auto parameters = model->parameters();
  int64_t bytes = 0;
  for (const auto& parameter : parameters) {
    parameter.mutable_grad() = torch::randn_like(parameter);
    bytes += static_cast<int64_t>(parameter.nbytes());
  }
  std::printf("%s: %zu parameters, %.1f MiB\n", title, parameters.size(),
              static_cast<double>(bytes) / (1 << 20));
  namespace to = torch::optim;
  namespace so = smp::optim;
  measure<to::AdamW, so::FusedAdamW>("AdamW", to::AdamWOptions(1e-4), 7, parameters, bytes);
  measure<to::Adam, so::FusedAdam>("Adam", to::AdamOptions(1e-4), 7, parameters, bytes);
  measure<to::SGD, so::FusedSGD>("SGD", to::SGDOptions(1e-4).momentum(0.9), 5, parameters, bytes);
  measure<to::Adagrad, so::FusedAdagrad>("Adagrad", to::AdagradOptions(1e-4), 5, parameters, bytes);
  so::Lamb lamb(parameters, so::LambOptions(1e-4));
  so::NovoGrad novograd(parameters, so::NovoGradOptions(1e-4));
  to::AdamW adamw(parameters, to::AdamWOptions(1e-4));
  compare({{"AdamW", 7, [&] { adamw.step(); }},
           {"Lamb", 9, [&] { lamb.step(); }},
           {"NovoGrad", 6, [&] { novograd.step(); }}},
          bytes);
  compare(
      {{"torch clip_grad_norm_", 3, [&] { torch::nn::utils::clip_grad_norm_(parameters, 1e9); }},
       {"smp::clip_grad_norm_", 3, [&] { smp::clip_grad_norm_(parameters, 1e9); }}},
      bytes);
}

}  // namespace

int main() {
  smp::init(smp::Config().microbatches(1));
  torch::set_num_threads(1);
  measure_model("small", 200, 64);
  measure_model("large", 12, 1280);
  smp::shutdown();
  return 0;
}
