// SPDX-License-Identifier: Apache-2.0
// What a step costs beyond the operators themselves, on one rank: a plain libtorch training step
// and the same step through smp, in turn, as a ratio of medians; and the guard alone, per operator.
//
//     bazel run //bench:step_overhead

#include <torch/torch.h>

#include <algorithm>
#include <cstdio>
#include <vector>

#include "bench/measure.h"
#include "examples/gpt/gpt_model.h"
#include "graph/tracer.h"
#include "smp/smp.h"

namespace {

using bench::median;
using bench::seconds;

constexpr int kRounds = 31;
constexpr int64_t kMicrobatches = 4;

void measure(int64_t layers, int64_t width, int64_t batch) {
  const auto options =
      gpt::GPTOptions().layers(layers).width(width).heads(4).sequence(64).dropout(0.0);
  gpt::GPT plain(options), net(options);
  torch::optim::SGD plain_optimizer(plain->parameters(), 0.01);
  smp::DistributedModel<gpt::GPT> model(net, smp::ModelOptions().name(c10::str("width", width)));
  smp::DistributedOptimizer<torch::optim::SGD> optimizer(model->parameters(), 0.01);
  const auto loss_of = [](gpt::GPT& model, torch::Tensor x, torch::Tensor y) {
    return torch::nn::functional::cross_entropy(model(x).flatten(0, 1), y.flatten());
  };
  auto train = smp::step([&](torch::Tensor x, torch::Tensor y) {
    auto loss = loss_of(net, x, y);
    model->backward(loss);
    return loss;
  });
  const auto x = torch::randint(256, {batch, 64}), y = torch::randint(256, {batch, 64});
  const auto plain_step = [&] {
    plain_optimizer.zero_grad();
    const int64_t size = batch / kMicrobatches;
    for (int64_t m = 0; m < kMicrobatches; ++m) {
      auto loss = loss_of(plain, x.narrow(0, m * size, size), y.narrow(0, m * size, size));
      (loss / kMicrobatches).backward();
    }
    plain_optimizer.step();
  };
  const auto smp_step = [&] {
    optimizer.zero_grad();
    train(x, y);
    optimizer.step();
  };
  for (int i = 0; i < 3; ++i) {
    plain_step();
    smp_step();
  }
  std::vector<double> plain_times, smp_times, ratios;
  for (int i = 0; i < kRounds; ++i) {
    plain_times.push_back(1e3 * seconds(plain_step));
    smp_times.push_back(1e3 * seconds(smp_step));
    ratios.push_back(smp_times.back() / plain_times.back());
  }
  std::sort(ratios.begin(), ratios.end());
  std::printf(
      "GPT %ld x %ld, %ld microbatches: plain %.2f ms, smp %.2f ms, ratio %.3f "
      "(quartiles %.3f to %.3f)\n",
      layers, width, kMicrobatches, median(plain_times), median(smp_times), median(ratios),
      ratios[kRounds / 4], ratios[3 * kRounds / 4]);
}

void measure_guard() {
  gpt::GPT net(gpt::GPTOptions().layers(8).width(32).heads(4).sequence(64).dropout(0.0));
  smp::graph::TensorTable table;
  for (const auto& item : net->named_parameters()) {
    table.add(smp::graph::ValueKind::kParameter, item.key(), item.value());
  }
  const std::vector<torch::Tensor> inputs{torch::randint(256, {2, 64})};
  const auto trace = [&](std::vector<const smp::graph::Graph*> candidates) {
    smp::graph::TraceOptions options;
    options.step_name = "bench";
    options.table = &table;
    options.candidates = std::move(candidates);
    smp::graph::Tracer tracer(std::move(options));
    return tracer.run(inputs, [&](const std::vector<torch::Tensor>& in) {
      return std::vector<torch::Tensor>{net(in[0])};
    });
  };
  const auto recorded = trace({});
  const double operators = static_cast<double>(recorded.recorded->operators.size());
  std::vector<double> times;
  for (int i = 0; i < 200; ++i) {
    times.push_back(1e3 * seconds([&] { trace({recorded.recorded.get()}); }));
  }
  std::printf("guard: %.2f us per operator (%.0f operators)\n", 1e3 * median(times) / operators,
              operators);
}

}  // namespace

int main() {
  smp::init(smp::Config().microbatches(kMicrobatches));
  torch::set_num_threads(1);
  measure(4, 64, 16);
  measure_guard();
  smp::shutdown();
  return 0;
}
