// SPDX-License-Identifier: Apache-2.0
// Costs of a step beyond the operators themselves, on one rank: a plain libtorch training step and
// the same step through smp, in turn, as a ratio of medians; the latter with and without its
// status; and the guard alone, per operator.
//
//     bazel run //bench:step_overhead

#include <torch/torch.h>

#include <algorithm>
#include <cstdio>
#include <vector>

#include "bench/measure.h"
#include "core/status.h"
#include "examples/gpt/gpt_model.h"
#include "graph/tracer.h"
#include "smp/smp.h"

namespace {

using bench::median;
using bench::seconds;

constexpr int kRounds = 31;
constexpr int kStatusRounds = 301;
constexpr int64_t kMicrobatches = 4;

/// The times of `without` and `with`, in turn.
struct Pairs {
  std::vector<double> without, with, ratios;

  template <class Without, class With>
  Pairs(int rounds, const Without& without_it, const With& with_it) {
    for (int i = 0; i < rounds; ++i) {
      without.push_back(1e3 * seconds(without_it));
      with.push_back(1e3 * seconds(with_it));
      ratios.push_back(with.back() / without.back());
    }
    std::sort(ratios.begin(), ratios.end());
  }

  /// "plain 3.10 ms, smp 3.20 ms, ratio 1.032 (quartiles 1.020 to 1.041)".
  void print(const char* first, const char* second) const {
    const size_t rounds = ratios.size();
    std::printf("%s %.2f ms, %s %.2f ms, ratio %.3f (quartiles %.3f to %.3f)\n", first,
                median(without), second, median(with), median(ratios), ratios[rounds / 4],
                ratios[3 * rounds / 4]);
  }
};

/// Runs `step` on a rank without a status.
template <class Step>
void without_status(const Step& step) {
  const auto status = smp::core::share_this_status();
  smp::core::set_process_status(nullptr);
  step();
  smp::core::set_process_status(status);
}

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
  std::printf("GPT %ld x %ld, %ld microbatches: ", layers, width, kMicrobatches);
  Pairs(kRounds, plain_step, smp_step).print("plain", "smp");
  std::printf("status: ");
  Pairs(
      kStatusRounds, [&] { without_status(smp_step); }, smp_step)
      .print("without", "with");
}

/// Measures the time to say that a rank begins another action, of which a step has some for each
/// microbatch.
void measure_status() {
  constexpr int kActions = 1000000;
  smp::core::ActionScope status;
  const smp::core::Label action("1B0");
  const double taken = seconds([&] {
    for (int i = 0; i < kActions; ++i) status.set(action);
  });
  std::printf("status: %.0f ns per action\n", 1e9 * taken / kActions);
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
  measure_status();
  measure_guard();
  smp::shutdown();
  return 0;
}
